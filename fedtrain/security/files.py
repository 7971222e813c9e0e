"""Files that people and programs change while a server reads them: written whole, and taken only when whole."""

import contextlib
import os
import secrets
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from fedtrain.params import sync_folder

_Stamp = tuple[int, int, int] | None
"""Inode, size and time of change of a file; None where there is none."""


def write_file(path: Path, content: bytes, *, mode: int = 0o644) -> None:
    """Write a file so that a reader sees the old content or the new, also after a crash.

    Args:
        path: A link is followed.
        content: All of it.
        mode: Permissions, from the first byte on.

    Raises:
        OSError: the folder can't be written.
    """
    path = Path(os.path.realpath(path))
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            temporary.unlink()
        raise
    sync_folder(path.parent)


class Watch:
    """Notices that files have changed, once they are whole.

    A single file that took another one's place is whole at once. A file that is written in place, and several files
    that belong together, are given time: they count as changed when they have stayed the same for a while.

    Args:
        paths: The files; one that is not there is one that may come.
        settle_s: Seconds, >= 0, for which they must have stayed the same.
        clock: Seconds, monotonic.
    """

    def __init__(self, paths: Sequence[Path], *, settle_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._paths, self._settle_s, self._clock = tuple(paths), settle_s, clock
        self._taken = self._candidate = self._stamps()
        self._since = clock()

    def changed(self) -> bool:
        """Whether the files are others than when this last said so, or than at first. Read them after asking."""
        found, now = self._stamps(), self._clock()
        if found != self._candidate:
            self._candidate, self._since = found, now
        if found == self._taken:
            return False
        if not self._replaced(found) and now - self._since < self._settle_s:
            return False
        self._taken = found
        return True

    def _replaced(self, found: tuple[_Stamp, ...]) -> bool:
        if len(found) != 1 or found[0] is None or self._taken[0] is None:
            return False
        return found[0][0] != self._taken[0][0]

    def _stamps(self) -> tuple[_Stamp, ...]:
        return tuple(map(_stamp, self._paths))


def _stamp(path: Path) -> _Stamp:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns
