"""The run directory: nothing of an earlier run in it is ever overwritten, and one run at a time uses it."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from fedtrain.errors import ConfigError

EVENTS, RESULT, MODEL = "events.jsonl", "result.json", "model.safetensors"
"""What a run writes, under names that others rely on."""


@contextmanager
def run_folder(folder: Path) -> Iterator[Path]:
    """The folder, made if it is not there, for this run alone while the context lasts.

    An earlier run's files stay until `move_aside`, so that a run that can't start changes nothing.

    Raises:
        ConfigError: the folder can't be written, or another run is using it.
    """
    lock = FileLock(folder / "lock")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire(blocking=False)
    except Timeout:
        raise ConfigError(
            f"run_dir={folder}: a server or simulation that is running writes there: stop it, or choose another folder"
        ) from None
    except OSError as error:
        raise _unwritable(folder, error) from None
    try:
        yield folder
    finally:
        lock.release()


def move_aside(folder: Path) -> None:
    """Move an earlier run's files to ``previous-1/``, ``previous-2/`` and so on.

    Raises:
        ConfigError: the folder can't be written.
    """
    try:
        _move_aside(folder)
    except OSError as error:
        raise _unwritable(folder, error) from None


def _move_aside(folder: Path) -> None:
    earlier = [folder / name for name in (EVENTS, RESULT, MODEL) if (folder / name).exists()]
    if not earlier:
        return
    number = 1
    while (folder / f"previous-{number}").exists():
        number += 1
    (folder / f"previous-{number}").mkdir()
    for path in earlier:
        path.rename(folder / f"previous-{number}" / path.name)


def _unwritable(folder: Path, error: OSError) -> ConfigError:
    return ConfigError(f"run_dir={folder}: cannot write there ({error.strerror}): choose another folder")
