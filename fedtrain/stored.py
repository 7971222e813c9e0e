"""Arrays that wait in a file, so that a server's memory does not grow with the number of answers that came early."""

import os
import weakref
from pathlib import Path
from typing import Protocol, runtime_checkable

from fedtrain.params import Packed, map_file
from fedtrain.types import Array, Params


@runtime_checkable
class Resting(Protocol):
    """Arrays that take memory only while they are looked at."""

    def rest(self) -> None:
        """Let go of the memory until an array is asked for again."""


class Stored(Packed):
    """Named arrays in a safetensors file, which is deleted when this object is not referred to any more.

    The file is mapped when an array is asked for, and stays so until `rest`. An aggregator that folds one update after
    the other so never has more than one mapped; one that needs all of them keeps the files for as long as it keeps the
    updates.

    Args:
        path: The file; it belongs to this object from now on.
        max_header_bytes: A longer header is refused before it is parsed.

    Raises:
        ParamsError: it is missing or not a valid safetensors file. It is deleted then too.
    """

    def __init__(self, path: Path, *, max_header_bytes: int) -> None:
        weakref.finalize(self, path.unlink, missing_ok=True)
        mapped = map_file(path)
        super().__init__(mapped, where=os.fspath(path), max_header_bytes=max_header_bytes)
        self._path, self._begin, self._awake = path, mapped.nbytes - self._data.nbytes, True

    def __getitem__(self, name: str) -> Array:
        if not self._awake:
            self._data, self._awake = map_file(self._path).data[self._begin :], True
        return super().__getitem__(name)

    def rest(self) -> None:
        """Unmap the file, as soon as the arrays that were taken from it are gone too."""
        self._data, self._awake = memoryview(b""), False


def rest(*groups: Params) -> None:
    """Let arrays that lie in files rest; nothing happens to those in memory."""
    for arrays in groups:
        if isinstance(arrays, Resting):
            arrays.rest()
