"""The run directory: nothing of an earlier run in it is ever overwritten."""

from pathlib import Path

from fedtrain.errors import ConfigError

EVENTS, RESULT, MODEL = "events.jsonl", "result.json", "model.safetensors"
"""What a run writes, under names that others rely on."""


def prepare_run_folder(folder: Path) -> Path:
    """Make the folder; files of an earlier run in it move to ``previous-1/``, ``previous-2/`` and so on.

    Raises:
        ConfigError: the folder can't be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        earlier = [folder / name for name in (EVENTS, RESULT, MODEL) if (folder / name).exists()]
        if earlier:
            number = 1
            while (folder / f"previous-{number}").exists():
                number += 1
            (folder / f"previous-{number}").mkdir()
            for path in earlier:
                path.rename(folder / f"previous-{number}" / path.name)
    except OSError as error:
        raise ConfigError(f"run_dir={folder}: cannot write there ({error.strerror}): choose another folder") from None
    return folder
