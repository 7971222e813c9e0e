"""result.json: how a run ended."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from fedtrain.observe.events import jsonable
from fedtrain.params import sync_folder

RunStatus = Literal["completed", "failed", "stopped"]


def write_result(
    path: str | os.PathLike[str],
    *,
    status: RunStatus,
    rounds_completed: int,
    model_digest: str,
    final_metrics: Mapping[str, object],
    reason: str = "",
    run: str = "",
    seed: int = 0,
    seconds: float = 0.0,
    **more: object,
) -> None:
    """Write how a run ended as JSON: `path` holds the old content or all of the new one, also after a power cut.

    Args:
        path: The file, in a folder that exists.
        status: ``completed`` (all rounds are done), ``failed`` (no round succeeded) or ``stopped`` (before its end).
        rounds_completed: Rounds done, skipped ones included.
        model_digest: `fedtrain.params.digest` of the final model.
        final_metrics: ``accuracy`` and others on held-out data; ``accuracy_by_client`` where clients evaluate.
        reason: Why it did not complete; empty if it did.
        run: Id of the run.
        seed: Its seed.
        seconds: From its first event to its last.
        **more: Written beside these.

    Raises:
        OSError: the file can't be written.
    """
    content = {
        "status": status,
        "rounds_completed": rounds_completed,
        "model_digest": model_digest,
        "final_metrics": final_metrics,
        "reason": reason,
        "run": run,
        "seed": seed,
        "seconds": round(seconds, 3),
        **more,
    }
    target = Path(path)
    temporary = target.with_name(f".{target.name}.tmp")
    with open(temporary, "w", encoding="utf-8") as file:
        json.dump(jsonable(content), file, indent=2, allow_nan=False)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, target)
    sync_folder(target.parent)
