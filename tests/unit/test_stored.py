"""Arrays in a file: mapped only while they are looked at, and gone with the last reference."""

import struct
from pathlib import Path

import numpy as np
import psutil
import pytest

from fedtrain.errors import ParamsError
from fedtrain.params import BFLOAT16, Packed, pack
from fedtrain.stored import Stored, rest

ARRAYS = {"w": np.arange(6, dtype=np.float32).reshape(2, 3), "h": np.array([1.5], BFLOAT16), "n": np.array(7)}


def stored(folder: Path, blob: bytes, *, max_header_bytes: int = 1 << 20) -> Stored:
    path = folder / "answer"
    path.write_bytes(blob)
    return Stored(path, max_header_bytes=max_header_bytes)


def is_mapped(path: Path) -> bool:
    return any(region.path == str(path) for region in psutil.Process().memory_maps())


def test_arrays_are_read_back_as_they_were_also_after_a_rest(tmp_path: Path) -> None:
    found = stored(tmp_path, pack(ARRAYS, {"head": "x"}))
    for _ in range(2):
        assert found.metadata == {"head": "x"}
        assert set(found) == set(ARRAYS)
        for name, array in ARRAYS.items():
            assert (found[name].dtype, found[name].shape) == (array.dtype, array.shape)
            np.testing.assert_array_equal(found[name], array)
        rest(found)


@pytest.mark.skipif(not hasattr(psutil.Process, "memory_maps"), reason="the system does not say what is mapped")
def test_resting_arrays_take_no_memory(tmp_path: Path) -> None:
    found = stored(tmp_path, pack(ARRAYS))
    assert is_mapped(tmp_path / "answer")
    found.rest()
    assert not is_mapped(tmp_path / "answer")
    array = found["w"]
    assert is_mapped(tmp_path / "answer")
    found.rest()
    np.testing.assert_array_equal(array, ARRAYS["w"])  # whoever still uses an array keeps it
    del array
    assert not is_mapped(tmp_path / "answer")


def test_the_file_goes_with_the_last_reference(tmp_path: Path) -> None:
    found = stored(tmp_path, pack(ARRAYS))
    array = found["w"]
    assert (tmp_path / "answer").exists()
    del found
    assert not (tmp_path / "answer").exists()
    np.testing.assert_array_equal(array, ARRAYS["w"])


@pytest.mark.parametrize("blob", [b"", b"\xff" * 64, pack(ARRAYS)[:-1]])
def test_a_file_that_is_none_is_refused_and_deleted(tmp_path: Path, blob: bytes) -> None:
    with pytest.raises(ParamsError, match="is not a valid safetensors file"):
        stored(tmp_path, blob)
    assert list(tmp_path.iterdir()) == []


def test_a_header_beyond_its_limit_is_refused(tmp_path: Path) -> None:
    blob = pack(ARRAYS)
    (size,) = struct.unpack("<Q", blob[:8])
    assert set(stored(tmp_path, blob, max_header_bytes=size)) == set(ARRAYS)
    with pytest.raises(ParamsError, match=f"header claims {size} bytes .*expected at most {size - 1}"):
        stored(tmp_path, blob, max_header_bytes=size - 1)


def test_arrays_in_memory_have_no_rest(tmp_path: Path) -> None:
    packed = Packed(pack(ARRAYS))
    rest(packed, ARRAYS)
    np.testing.assert_array_equal(packed["w"], ARRAYS["w"])
