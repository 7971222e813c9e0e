"""Named arrays: what they may be, how they differ, how they travel, and their digest.

Arrays are matched by name, never by position. A name's dtype and shape are those that the server declared.
The rules, applied everywhere:

- floating-point arrays (float16, bfloat16, float32, float64) travel as deltas, ``local - start``, in their own dtype;
- integers and bools travel as values;
- a value that is not finite may only stand where the model itself has the same value (an infinite mask): its delta
  is 0.
"""

import hashlib
import json
import math
import os
import struct
from collections.abc import Iterable, Iterator, Mapping
from operator import itemgetter
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from fedtrain.errors import ParamsError
from fedtrain.types import Array, Params

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)

DTYPES: Mapping[str, np.dtype] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": BFLOAT16,
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16),
    "I8": np.dtype(np.int8),
    "U64": np.dtype(np.uint64),
    "U32": np.dtype(np.uint32),
    "U16": np.dtype(np.uint16),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}
"""Every dtype that a model may have, by its name in the safetensors format."""

_MAX_HEADER_BYTES = 64 * 2**20
_MAX_DIMENSIONS = 64
_SMALL_BYTES = 64 * 1024
"""Smaller arrays are copied, so that they travel together."""


def is_float(array: Array) -> bool:
    """Whether an array is floating point, and so travels as a delta."""
    return array.dtype.kind == "f" or array.dtype == BFLOAT16


def wide(dtype: np.dtype) -> np.dtype:
    """The dtype in which sums of `dtype` are kept: float32, or float64 for float64."""
    return np.dtype(np.float64) if dtype == np.float64 else np.dtype(np.float32)


def all_finite(array: Array) -> bool:
    """Whether no element is NaN or infinite. Integers and bools always are finite."""
    return not is_float(array) or bool(np.isfinite(array).all())


def subtract(local: Params, start: Params) -> dict[str, Array]:
    """What a client sends: ``local - start`` for floats, the local value for integers and bools.

    Where both hold the same value the delta is exactly 0, also for infinities and NaN that the model itself has.

    Raises:
        ParamsError: names, shapes or dtypes of the two differ.
    """
    require_same_layout(local, start, what="the trained model")
    result = {}
    for name, before in start.items():
        after = local[name]
        if not is_float(before):
            result[name] = np.array(after)
        elif all_finite(before):
            with np.errstate(over="ignore"):  # whoever receives the delta refuses what is not finite
                result[name] = np.asarray(after - before)
        else:
            same = (after == before) | (np.isnan(after) & np.isnan(before))
            with np.errstate(invalid="ignore", over="ignore"):
                result[name] = np.asarray(np.where(same, np.zeros((), before.dtype), after - before))
    return result


def add(params: Params, move: Params) -> dict[str, Array]:
    """``params + move`` by name, computed in float32 or wider, in the dtype of `params`.

    Arrays without a move stay as they are; integers and bools in `move` replace the old values. A sum beyond the
    dtype's range is infinite: the caller looks for that.
    """
    result = dict(params)
    for name, step in move.items():
        old = params[name]
        if is_float(old):
            acc = wide(old.dtype)
            with np.errstate(over="ignore"):
                result[name] = np.asarray(old.astype(acc, copy=False) + step.astype(acc, copy=False))
                result[name] = result[name].astype(old.dtype, copy=False)
        else:
            result[name] = np.asarray(step, old.dtype)
    return result


def require_same_layout(found: Params, declared: Params, *, what: str) -> None:
    """Refuse arrays whose names, shapes or dtypes are not the declared ones.

    Raises:
        ParamsError: naming the first array that differs, what was expected and what was found.
    """
    if found.keys() != declared.keys():
        missing, additional = sorted(declared.keys() - found.keys()), sorted(found.keys() - declared.keys())
        parts = []
        if missing:
            parts.append(f"lacks {_some(missing)}")
        if additional:
            parts.append(f"has {_some(additional)}, which the server's model has not")
        raise ParamsError(f"{what} {' and '.join(parts)}: use the model definition of the server")
    for name, array in declared.items():
        other = found[name]
        if other.shape != array.shape:
            raise ParamsError(
                f"{what}: {name!r} has shape {other.shape}, the server's model has {array.shape}: "
                "use the model definition of the server"
            )
        if other.dtype != array.dtype:
            raise ParamsError(
                f"{what}: {name!r} is {other.dtype}, the server's model has {array.dtype}: keep the model's dtypes"
            )


def _some(names: list[str]) -> str:
    shown = ", ".join(repr(name) for name in names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"


def digest(arrays: Params) -> str:
    """SHA-256 in hex over names, dtypes, shapes and bytes of the arrays, in the order of their names.

    For each array: its name in UTF-8, a zero byte, the safetensors name of its dtype, a zero byte, the number of
    dimensions and each dimension as unsigned 64-bit little-endian, then its elements in C order, little-endian.
    """
    sha = hashlib.sha256()
    for name in sorted(arrays):
        array = np.asarray(arrays[name])
        sha.update(f"{name}\0{_dtype_name(name, array)}\0".encode())
        sha.update(struct.pack(f"<{array.ndim + 1}Q", array.ndim, *array.shape))
        if array.size:
            sha.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return sha.hexdigest()


def _dtype_name(name: str, array: Array) -> str:
    for key, dtype in DTYPES.items():
        if array.dtype == dtype:
            return key
    raise ParamsError(f"array {name!r} has dtype {array.dtype}, expected one of {', '.join(DTYPES)}")


def pack(arrays: Params, metadata: Mapping[str, str] | None = None) -> bytes:
    """Serialise named arrays and text metadata in the safetensors format.

    Raises:
        ParamsError: an array has a dtype that no model may have, or the one name that the format keeps for itself.
    """
    return b"".join(pack_pieces(arrays, metadata))


def pack_pieces(arrays: Params, metadata: Mapping[str, str] | None = None) -> list[memoryview]:
    """What `pack` gives, as pieces that follow one another.

    Large arrays are not copied: a piece is a view of the array's memory, which must stay unchanged until it is sent.

    Raises:
        ParamsError: as `pack`.
    """
    if "__metadata__" in arrays:
        raise ParamsError("an array is called '__metadata__', a name that safetensors keeps for itself: rename it")
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    views, end = list[memoryview](), 0
    # The widest elements first: then all of them are aligned.
    for name in sorted(arrays, key=lambda name: (-arrays[name].dtype.itemsize, name)):
        array = arrays[name]
        begin, end = end, end + array.nbytes
        header[name] = {
            "dtype": _dtype_name(name, array),
            "shape": array.shape,
            "data_offsets": (begin, end),
        }
        views.append(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    pieces, small = list[memoryview](), bytearray(struct.pack("<Q", len(text)) + text)
    for view in views:  # a thousand small arrays are not to become a thousand messages
        if len(view) < _SMALL_BYTES:
            small += view
            continue
        pieces += [memoryview(small), view]
        small = bytearray()
    return [*pieces, memoryview(small)]


def num_bytes(pieces: Iterable[memoryview]) -> int:
    """The length of what `pieces` are parts of."""
    return sum(piece.nbytes for piece in pieces)


class Packed(Mapping[str, Array]):
    """Named arrays read from safetensors bytes or a memory map, without copying; each array is read-only.

    The library's own NumPy reader knows no bfloat16 and copies, so the (short) header is read here. Nothing in it is
    believed: every size is checked before an array is made.

    Args:
        buffer: Header and arrays.
        where: Names the buffer in errors.
        max_header_bytes: A longer header is refused before it is parsed: parsed, it takes many times its size.

    Raises:
        ParamsError: it is not a well-formed safetensors buffer.
    """

    def __init__(
        self,
        buffer: "bytes | bytearray | memoryview | Array",
        *,
        where: str = "safetensors data",
        max_header_bytes: int = _MAX_HEADER_BYTES,
    ) -> None:
        view = memoryview(buffer.data if isinstance(buffer, np.ndarray) else buffer)
        view = view.cast("B") if view.nbytes else memoryview(b"")
        self._data, self._entries, self.metadata = _read_header(view, where, max_header_bytes)

    def __getitem__(self, name: str) -> Array:
        dtype, shape, begin, end = self._entries[name]
        array = np.frombuffer(self._data[begin:end], dtype=dtype).reshape(shape)
        array.flags.writeable = False
        return array

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)


_Entry = tuple[np.dtype, tuple[int, ...], int, int]


def _read_header(view: memoryview, where: str, max_bytes: int) -> tuple[memoryview, dict[str, _Entry], dict[str, str]]:
    def bad(found: str) -> ParamsError:
        return ParamsError(f"{where} is not a valid safetensors file: {found}")

    if len(view) < 8:
        raise bad(f"{len(view)} bytes, a header needs at least 8")
    (size,) = struct.unpack("<Q", view[:8])
    if size > min(len(view) - 8, max_bytes):
        raise bad(f"its header claims {size} bytes of {len(view)}, expected at most {max_bytes}")
    try:
        header = json.loads(bytes(view[8 : 8 + size]))
    except (ValueError, RecursionError):
        raise bad("its header is not JSON") from None
    if not isinstance(header, dict):
        raise bad("its header is not a JSON object")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise bad("its metadata is not text")
    data = view[8 + size :]
    entries: dict[str, _Entry] = {}
    for name, entry in header.items():
        try:
            dtype, shape, (begin, end) = DTYPES[entry["dtype"]], entry["shape"], entry["data_offsets"]
            numbers = [*shape, begin, end]
            name.encode()
        except UnicodeEncodeError:
            raise bad(f"the name {name!r} is not text") from None
        except (KeyError, TypeError, ValueError):
            raise bad(f"the entry of {name!r} lacks dtype, shape or offsets that are known") from None
        if not isinstance(shape, list) or not all(type(number) is int and number >= 0 for number in numbers):
            raise bad(f"{name!r} has a size or offset that is not a whole number >= 0")
        # NumPy's own limits, which also hold where a dimension of 0 makes the array empty.
        if len(shape) > _MAX_DIMENSIONS or math.prod(dim or 1 for dim in shape) * dtype.itemsize >= 2**63:
            raise bad(f"{name!r} has a shape that no array can have")
        count = math.prod(shape)
        if end > len(data) or end - begin != count * dtype.itemsize:
            raise bad(f"{name!r} has shape {shape} and bytes {begin} to {end} of {len(data)}")
        entries[name] = (dtype, tuple(shape), begin, end)
    used = 0
    for _, _, begin, end in sorted((entry for entry in entries.values() if entry[2] < entry[3]), key=itemgetter(2)):
        if begin < used:
            raise bad(f"two of its arrays share the bytes from {begin} on")
        used = end
    return data, entries, metadata


def read_file(path: str | os.PathLike[str]) -> Packed:
    """Open a safetensors file without reading its arrays: they are mapped and loaded as they are used.

    Raises:
        ParamsError: the file is missing or not a valid safetensors file.
    """
    return Packed(map_file(path), where=str(path))


def map_file(path: str | os.PathLike[str]) -> Array:
    """The bytes of a file, mapped.

    Raises:
        ParamsError: the file can't be read.
    """
    try:
        return np.memmap(path, dtype=np.uint8, mode="r") if os.stat(path).st_size else np.empty(0, np.uint8)
    except OSError as error:
        raise ParamsError(f"cannot read the arrays in {path}: {error.strerror}") from None


def write_file(path: Path, arrays: Params, metadata: Mapping[str, str] | None = None) -> None:
    """Write a safetensors file so that `path` holds the old content or all of the new one, also after a power cut."""
    temporary = path.with_name(f".{path.name}.tmp")
    with open(temporary, "wb") as file:
        for piece in pack_pieces(arrays, metadata):
            file.write(piece)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    """Make renames in a folder durable. Does nothing where folders can't be synced (Windows)."""
    if os.name == "posix":
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
