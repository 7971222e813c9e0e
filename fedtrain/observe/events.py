"""Events: what happens in a run, kept in a file and told to whoever listens.

run_started       run, rounds, seed, address, run_dir, clients_needed
waiting           connected, needed
client_connected  client, num_examples, tags
client_returned   client
client_lost       client, reason
client_refused    client, reason
selected          eligible, quorum, chosen: [{client, probability, work}]
outcome           client, outcome, reason, seconds, task, kind ("train" or "evaluate"), num_examples, metrics
retry             missing: [client], attempt
round_finished    counted, asked, skipped (why; empty if it counted), seconds, metrics
evaluated         where ("server" or "clients"), metrics, by_client: {client: metrics}
run_finished      status ("completed", "failed" or "stopped"), rounds_completed, reason, model, digest, metrics

and, where TLS or a list of clients is configured, certificate_renewed (expires), certificate_refused (reason),
allow_list_changed (clients), allow_list_refused (reason).
"""

import json
import math
import os
import sys
import threading
from collections.abc import Mapping, Sequence, Set
from datetime import UTC, datetime
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import numpy as np


class Report(Protocol):
    """Told what happens: ``report("outcome", 3, client="c1", outcome="ok")``."""

    def __call__(self, event: str, round: int = 0, **fields: object) -> None:
        """Take note of an event of a round (0: none)."""


def quiet(event: str, round: int = 0, **fields: object) -> None:
    """A `Report` that tells nobody."""


class Events:
    """A `Report` that appends each event to a file, one JSON object per line, and passes it on.

    Each line has ``time`` (UTC, ISO 8601 with microseconds), ``event`` and ``round``, then the event's own fields. It
    is written out at once, so who reads the file sees what has happened so far. Numbers that are not finite are written
    as the strings "NaN", "Infinity" and "-Infinity", since JSON has none. May be called from any thread; all listeners
    hear all events in the order of the file.

    A listener that raises, or a file that can't be written, never stops a run: it is told once on standard error.

    Args:
        path: The file, made with its folder if it is not there. Lines are added to one that is.
        listeners: Told each event after it is written.

    Raises:
        OSError: the file can't be opened.
    """

    def __init__(self, path: str | os.PathLike[str], listeners: Sequence[Report] = ()) -> None:
        self._listeners = tuple(listeners)
        self._lock = threading.Lock()
        self._complained: set[int] = set()
        self._torn = False
        self._file: FileIO | None = self._open(Path(path))

    def __call__(self, event: str, round: int = 0, **fields: object) -> None:
        """Write and pass on an event of a round (0: none)."""
        with self._lock:
            try:
                self._write(event, round, fields)
            except (OSError, ValueError) as error:
                self._complain(0, f"an event could not be written: {error}")
            for number, listener in enumerate(self._listeners, start=1):
                try:
                    listener(event, round, **fields)
                except Exception as error:
                    who = getattr(listener, "__qualname__", type(listener).__qualname__)
                    self._complain(number, f"listener {who} failed on event {event!r}: {type(error).__name__}: {error}")

    def close(self) -> None:
        """Close the file; what is reported later reaches the listeners only."""
        with self._lock:
            file, self._file = self._file, None
            if file is not None:
                file.close()

    def __enter__(self) -> "Events":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _open(self, path: Path) -> FileIO:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and path.stat().st_size:
            with open(path, "rb") as before:
                before.seek(-1, os.SEEK_END)
                self._torn = before.read(1) != b"\n"
        return open(path, "ab", buffering=0)

    def _write(self, event: str, round: int, fields: Mapping[str, object]) -> None:
        if self._file is not None:
            time = datetime.now(UTC).isoformat(timespec="microseconds")
            line = jsonable({"time": time, "event": event, "round": int(round), **fields})
            # What stands behind a torn line must stand by itself.
            text = ("\n" if self._torn else "") + json.dumps(line, allow_nan=False) + "\n"
            self._torn = True
            if self._file.write(text.encode()) < len(text):
                raise OSError("the disk is full")
            self._torn = False

    def _complain(self, who: int, text: str) -> None:
        if who not in self._complained:
            self._complained.add(who)
            print(f"fedtrain: {text} (told once)", file=sys.stderr)


def jsonable(value: Any) -> Any:
    """The same value in what strict JSON has: NumPy's scalars and arrays become Python's, unknown objects their text.

    >>> jsonable({"loss": float("nan"), "sizes": (1, 2)})
    {'loss': 'NaN', 'sizes': [1, 2]}
    """
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, (np.generic, np.ndarray)):
        return jsonable(value.tolist())
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        if math.isfinite(value):
            return float(value)
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Mapping):
        return {str(key): jsonable(item) for key, item in value.items()}
    if isinstance(value, (Sequence, Set)) and not isinstance(value, (bytes, bytearray, memoryview)):
        return [jsonable(item) for item in value]
    return str(value)
