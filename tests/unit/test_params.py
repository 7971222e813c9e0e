import hashlib
import json
import os
import struct
from pathlib import Path
from random import Random

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given
from hypothesis import strategies as st

from fedtrain.errors import ParamsError
from fedtrain.params import (
    BFLOAT16,
    DTYPES,
    Packed,
    add,
    all_finite,
    digest,
    is_float,
    num_bytes,
    pack,
    pack_pieces,
    read_file,
    require_same_layout,
    subtract,
    wide,
    write_file,
)
from fedtrain.types import Array, Params

names = st.text(max_size=8)
shapes = st.lists(st.integers(0, 4), max_size=3).map(tuple)


@st.composite
def arrays(draw: st.DrawFn) -> Array:
    """Any bit pattern, in any dtype, of up to three dimensions, also none and also empty."""
    dtype, shape = draw(st.sampled_from(list(DTYPES.values()))), draw(shapes)
    count = int(np.prod(shape, dtype=int)) * dtype.itemsize
    raw = draw(st.binary(min_size=count, max_size=count))
    if dtype == np.bool_:
        raw = bytes(byte & 1 for byte in raw)
    return np.frombuffer(raw, dtype).reshape(shape)


# "__metadata__" is the one name that the format keeps for itself.
named_arrays = st.dictionaries(names.filter(lambda name: name != "__metadata__"), arrays(), max_size=4)


def same(first: Params, second: Params) -> bool:
    """Equal names, dtypes, shapes and bytes."""
    return first.keys() == second.keys() and all(
        (array.dtype, array.shape, array.tobytes()) == (second[name].dtype, second[name].shape, second[name].tobytes())
        for name, array in first.items()
    )


def with_header(header: object, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


# Kinds of dtypes


def test_every_dtype_is_a_float_or_a_value() -> None:
    floats = [name for name, dtype in DTYPES.items() if is_float(np.zeros(1, dtype))]
    assert floats == ["F64", "F32", "F16", "BF16"]


def test_sums_are_kept_in_float32_and_float64_only_for_float64() -> None:
    assert [wide(DTYPES[name]).name for name in ("F16", "BF16", "F32", "F64")] == ["float32"] * 3 + ["float64"]


def test_integers_are_finite_and_nan_is_not_in_any_float() -> None:
    assert all_finite(np.array([2**63 - 1]))
    for name in ("F64", "F32", "F16", "BF16"):
        assert all_finite(np.array([1.0, 0.0], DTYPES[name]))
        assert not all_finite(np.array([1.0, np.nan], DTYPES[name]))
        assert not all_finite(np.array([-np.inf], DTYPES[name]))


# Differences and sums


def test_a_delta_is_local_minus_start_for_floats_and_the_value_for_others() -> None:
    start = {"w": np.array([1.0, 2.0], np.float32), "n": np.array([5]), "on": np.array(True)}
    local = {"w": np.array([1.5, 1.0], np.float32), "n": np.array([9]), "on": np.array(False)}
    expected = {"w": np.array([0.5, -1.0], np.float32), "n": np.array([9]), "on": np.array(False)}
    assert same(subtract(local, start), expected)


def test_a_delta_does_not_share_memory_with_the_local_model() -> None:
    local = {"n": np.array([9])}
    delta = subtract(local, {"n": np.array([5])})
    local["n"][0] = 0
    assert delta["n"] == 9


def test_a_delta_is_zero_where_both_hold_the_same_infinity_and_not_finite_where_one_does() -> None:
    start = {"mask": np.array([-np.inf, np.inf, np.nan, 0.0, -np.inf])}
    local = {"mask": np.array([-np.inf, np.inf, np.nan, 1.0, 0.0])}
    assert subtract(local, start)["mask"].tolist() == [0.0, 0.0, 0.0, 1.0, np.inf]


def test_a_delta_beyond_the_dtypes_range_is_infinite_without_a_warning() -> None:
    delta = subtract({"w": np.array([60000], np.float16)}, {"w": np.array([-60000], np.float16)})
    assert delta["w"] == np.inf


def test_adding_moves_floats_replaces_values_and_leaves_the_rest() -> None:
    params = {"w": np.array([1.0], np.float16), "n": np.array([5], np.int32), "still": np.array([3.0])}
    after = add(params, {"w": np.array([0.25], np.float32), "n": np.array([7], np.int64)})
    expected = {"w": np.array([1.25], np.float16), "n": np.array([7], np.int32), "still": np.array([3.0])}
    assert same(after, expected)
    assert params["w"] == 1.0


def test_adding_computes_in_float32_before_it_rounds() -> None:
    # 256 + (1 + 2**-8) lies above 257, the middle of 256 and 258. Rounded to bfloat16 first, the step is 1: a tie.
    step = np.array([1 + 2**-8], np.float32)
    assert add({"w": np.array([256], BFLOAT16)}, {"w": step})["w"] == 258
    assert np.array([256], BFLOAT16) + step.astype(BFLOAT16) == 256


def test_a_difference_in_layout_is_told_with_what_was_expected_and_found() -> None:
    declared = {"a": np.zeros(2), "b": np.zeros(1, np.int64)}
    require_same_layout({"b": np.ones(1, np.int64), "a": np.ones(2)}, declared, what="the update")
    for found, message in (
        ({"a": declared["a"]}, "the update lacks 'b': use the model definition of the server"),
        ({**declared, "c": np.zeros(1)}, "the update has 'c', which the server's model has not: use"),
        ({**declared, "a": np.zeros((2, 1))}, "'a' has shape (2, 1), the server's model has (2,)"),
        ({**declared, "b": np.zeros(1)}, "'b' is float64, the server's model has int64: keep the model's dtypes"),
        ({}, "lacks 'a', 'b'"),
        ({f"x{i}": np.zeros(1) for i in range(5)}, "lacks 'a', 'b' and has 'x0', 'x1', 'x2' and 2 more"),
    ):
        with pytest.raises(ParamsError) as caught:
            require_same_layout(found, declared, what="the update")
        assert message in str(caught.value)


# Digest


def documented_digest(named: Params) -> str:
    """The layout as the docstring of `digest` gives it, written a second time."""
    codes = {dtype: code for code, dtype in DTYPES.items()}
    content = b""
    for name, array in sorted(named.items()):
        content += name.encode() + b"\0" + codes[array.dtype].encode() + b"\0"
        content += b"".join(number.to_bytes(8, "little") for number in (array.ndim, *array.shape))
        content += array.tobytes(order="C")
    return hashlib.sha256(content).hexdigest()


@given(named_arrays)
def test_the_digest_is_the_one_that_is_documented(named: Params) -> None:
    assert digest(named) == documented_digest(named)


def test_the_digest_of_a_known_model_never_changes() -> None:
    # printf 'w\0F32\0\1\0\0\0\0\0\0\0\2\0\0\0\0\0\0\0\0\0\200\077\0\0\0\300' | sha256sum
    model = {"w": np.array([1.0, -2.0], np.float32)}
    assert digest(model) == "01129c36cea110203f8c712f5943b6cac731d6a09e8e8c79fa22e6771fe6132d"
    assert digest({}) == hashlib.sha256().hexdigest()


@given(named_arrays, st.randoms(use_true_random=False))
def test_the_digest_does_not_depend_on_insertion_order_or_memory_layout(named: Params, random: Random) -> None:
    order = list(named)
    random.shuffle(order)
    assert digest({name: np.array(named[name], order="F") for name in order}) == digest(named)


def test_the_digest_changes_with_each_of_name_dtype_shape_and_bytes() -> None:
    base = {"w": np.array([[1, 2]], np.int32)}
    others: list[Params] = [
        {"v": base["w"]},
        {"w": base["w"].view(np.uint32)},
        {"w": base["w"].reshape(2, 1)},
        {"w": base["w"].reshape(2)},
        {"w": np.array([[1, 3]], np.int32)},
        {"w": np.array([[2, 1]], np.int32)},
        {**base, "empty": np.zeros(0)},
        {},
    ]
    assert len({digest(named) for named in [base, *others]}) == 1 + len(others)
    assert digest({"w": np.array([0.0])}) != digest({"w": np.array([-0.0])})


def test_a_dtype_that_no_model_may_have_is_refused_by_name() -> None:
    for array in (np.zeros(1, np.complex64), np.zeros(1, ">f4"), np.array(["text"]), np.array([None])):
        with pytest.raises(ParamsError, match=r"array 'w' has dtype .*, expected one of F64, F32"):
            digest({"w": array})
        with pytest.raises(ParamsError, match="array 'w' has dtype"):
            pack({"w": array})


def test_the_name_that_the_format_keeps_for_itself_is_refused() -> None:
    with pytest.raises(ParamsError, match="'__metadata__'"):
        pack({"__metadata__": np.zeros(1, np.uint8)})


# Packing


@given(named_arrays, st.dictionaries(names, names, max_size=2))
def test_packing_and_reading_gives_the_same_arrays(named: Params, metadata: dict[str, str]) -> None:
    packed = Packed(pack(named, metadata))
    assert same(packed, named)
    assert packed.metadata == metadata
    assert len(packed) == len(named)
    assert digest(packed) == digest(named)


def test_arrays_in_any_memory_layout_are_packed_in_c_order() -> None:
    table = np.arange(6).reshape(2, 3)
    packed = Packed(pack({"t": table.T, "every_other": np.arange(6)[::2]}))
    assert packed["t"].tolist() == [[0, 3], [1, 4], [2, 5]]
    assert packed["every_other"].tolist() == [0, 2, 4]


def test_what_is_packed_is_a_safetensors_file_for_other_programs_too() -> None:
    named = {"a": np.arange(6, dtype=np.int16).reshape(2, 3), "b": np.array(0.5)}
    assert same(safetensors.numpy.load(pack(named)), named)
    assert same(Packed(safetensors.numpy.save(named)), named)
    half = np.array([1.5], ml_dtypes.bfloat16)
    raw = with_header({"h": {"dtype": "BF16", "shape": [1], "data_offsets": [0, 2]}}, half.tobytes())
    assert Packed(raw)["h"] == half


def test_large_arrays_are_packed_without_copying_and_small_ones_together() -> None:
    large, small = np.zeros(16384, np.float32), {f"b{index}": np.full(3, index, np.float64) for index in range(4)}
    pieces = pack_pieces({"large": large, **small})
    assert [piece.nbytes == large.nbytes for piece in pieces] == [False, True, False]
    assert num_bytes(pieces) == len(b"".join(pieces)) == 8 + struct.unpack_from("<Q", pieces[0])[0] + 65536 + 4 * 24
    large[5] = 7
    assert Packed(b"".join(pieces))["large"][5] == 7


def test_packed_arrays_are_aligned_to_their_elements() -> None:
    named: Params = {
        "a": np.zeros(3, np.uint8),
        "b": np.zeros(1, np.float16),
        "c": np.zeros(1),
        "x" * 3: np.zeros(1, np.int32),
    }
    blob = pack(named)
    offsets = {name: array.__array_interface__["data"][0] for name, array in Packed(blob).items()}
    begin = np.frombuffer(blob, np.uint8).__array_interface__["data"][0]
    assert [(offsets[name] - begin) % array.itemsize for name, array in named.items()] == [0, 0, 0, 0]


def test_arrays_that_were_read_cannot_be_written() -> None:
    array = Packed(bytearray(pack({"w": np.zeros(2)})))["w"]
    with pytest.raises(ValueError, match="read-only"):
        array[0] = 1


def test_reading_copies_nothing() -> None:
    buffer = bytearray(pack({"w": np.zeros(2, np.uint8)}))
    packed = Packed(buffer)
    buffer[-1] = 7
    assert packed["w"].tolist() == [0, 7]


SAMPLE: Params = {
    "fc.weight": np.arange(6, dtype=np.float32).reshape(2, 3),
    "steps": np.array(3),
    "half": np.array([1.5], BFLOAT16),
    "on": np.array([True, False]),
    "none": np.zeros((0, 2), np.float16),
}
PACKED = pack(SAMPLE, {"round": "3"})
HEADER_ENDS = 8 + struct.unpack("<Q", PACKED[:8])[0]


def read_or_refused(buffer: bytes) -> None:
    """Reading raises ParamsError, or gives arrays of exactly the layout in the header."""
    try:
        packed = Packed(buffer)
    except ParamsError:
        return
    (size,) = struct.unpack("<Q", buffer[:8])
    header = json.loads(buffer[8 : 8 + size])
    header.pop("__metadata__", None)
    assert set(packed) == set(header)
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        array = packed[name]
        assert array.dtype == DTYPES[entry["dtype"]]
        assert list(array.shape) == entry["shape"]
        assert array.tobytes() == buffer[8 + size + begin : 8 + size + end]
    digest(packed)


def test_every_truncation_is_refused() -> None:
    # The last bytes belong to an array, so a buffer that lacks one of them lacks a part of it.
    for length in range(len(PACKED)):
        with pytest.raises(ParamsError, match="is not a valid safetensors file"):
            Packed(PACKED[:length])


def test_every_single_flipped_bit_in_the_header_is_refused_or_read_as_it_is_declared() -> None:
    for position in range(HEADER_ENDS):
        for bit in range(8):
            changed = bytearray(PACKED)
            changed[position] ^= 1 << bit
            read_or_refused(bytes(changed))


@given(st.lists(st.tuples(st.integers(0, HEADER_ENDS - 1), st.integers(0, 255)), max_size=6))
def test_random_bytes_in_the_header_are_refused_or_read_as_they_declare(changes: list[tuple[int, int]]) -> None:
    changed = bytearray(PACKED)
    for position, byte in changes:
        changed[position] = byte
    read_or_refused(bytes(changed))


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)
sizes = st.integers(-1, 8) | st.sampled_from([2**31, 2**62, 2**63, 2**64, 2**80])
entries = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from([*DTYPES, "F8_E4M3"]) | json_values,
        "shape": st.lists(sizes, max_size=70) | json_values,
        "data_offsets": st.lists(sizes, min_size=2, max_size=2) | json_values,
    }
)


@given(st.dictionaries(st.text(max_size=4), entries | json_values, max_size=3) | json_values, st.binary(max_size=16))
def test_any_json_as_a_header_is_refused_or_read_as_it_declares(header: object, data: bytes) -> None:
    read_or_refused(with_header(header, data))


@pytest.mark.parametrize(
    ("buffer", "found"),
    [
        (b"", "0 bytes, a header needs at least 8"),
        (struct.pack("<Q", 2**63) + b"{}", f"its header claims {2**63} bytes of 10"),
        (struct.pack("<Q", 100) + b"{}", "its header claims 100 bytes of 10"),
        (with_header(b"{"), "its header is not JSON"),
        (with_header(b"[" * 100_000), "its header is not JSON"),
        (with_header(b"\xff\xfe{}"), "its header is not JSON"),
        (with_header([]), "its header is not a JSON object"),
        (with_header({"__metadata__": {"a": 1}}), "its metadata is not text"),
        (with_header({"w": {"dtype": "F32"}}), "the entry of 'w' lacks dtype, shape or offsets"),
        (with_header({"w": {"dtype": "F99", "shape": [], "data_offsets": [0, 0]}}), "the entry of 'w' lacks dtype"),
        (with_header({"w": {"dtype": "U8", "shape": [True], "data_offsets": [0, 1]}}, b"1"), "not a whole number"),
        (with_header({"w": {"dtype": "U8", "shape": {}, "data_offsets": [0, 1]}}, b"1"), "not a whole number"),
        (with_header({"w": {"dtype": "U8", "shape": [-1], "data_offsets": [1, 0]}}, b"1"), "not a whole number"),
        (with_header({"w": {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]}}, b"1"), "has shape [2] and bytes"),
        (with_header({"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 2]}}, b"12"), "has shape [1] and bytes"),
        (
            with_header(
                {
                    "v": {"dtype": "U8", "shape": [2], "data_offsets": [1, 3]},
                    "w": {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]},
                },
                b"123",
            ),
            "two of its arrays share the bytes from 1 on",
        ),
        (with_header({"w": {"dtype": "U8", "shape": [0, 2**70], "data_offsets": [0, 0]}}), "that no array can have"),
        (with_header({"w": {"dtype": "U8", "shape": [1] * 65, "data_offsets": [0, 1]}}, b"1"), "no array can have"),
        (with_header({"\ud800": {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}}), "is not text"),
    ],
)
def test_a_buffer_that_is_not_well_formed_is_refused_with_what_was_found(buffer: bytes, found: str) -> None:
    with pytest.raises(ParamsError) as caught:
        Packed(buffer, where="the update of c07")
    assert str(caught.value).startswith("the update of c07 is not a valid safetensors file: ")
    assert found in str(caught.value)


# Files


def test_a_file_that_was_written_is_read_back(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    write_file(path, SAMPLE, {"round": "3"})
    read = read_file(path)
    assert same(read, SAMPLE)
    assert read.metadata == {"round": "3"}
    assert os.listdir(tmp_path) == ["model.safetensors"]


def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "model.safetensors"
    write_file(path, {"w": np.array([1.0])})

    def full(descriptor: int) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="disk full"):
        write_file(path, {"w": np.array([2.0])})
    assert read_file(path)["w"] == 1.0


def test_a_file_that_is_missing_empty_or_a_folder_is_refused_with_its_path(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.touch()
    for path in (tmp_path / "missing", empty, tmp_path):
        with pytest.raises(ParamsError, match=str(path)):
            read_file(path)
