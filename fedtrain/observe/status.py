"""Status: where a run is right now, for whoever asks."""

import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from fedtrain.observe.events import jsonable


class Status:
    """A `Report` that keeps what `snapshot` gives; may be called and asked from any thread.

    Args:
        clock: Seconds, monotonic.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._began: float | None = None
        self._ended: float | None = None
        self._asked: list[str] = []
        self._answered: dict[str, str] = {}
        self._clients: dict[str, dict[str, Any]] = {}
        self._trained: dict[str, Any] = {}
        self._evaluated: dict[str, Any] = {}
        self._facts: dict[str, Any] = {
            "run": "",
            "status": "waiting",
            "reason": "",
            "round": 0,
            "rounds": 0,
            "rounds_completed": 0,
            "needed": 0,
            "started": None,
        }

    def __call__(self, event: str, round: int = 0, **fields: Any) -> None:
        """Take note of an event of a round (0: none)."""
        note = getattr(self, f"_on_{event}", None)
        with self._lock:
            if round:
                self._facts["round"] = round
            if note is not None:
                note(**jsonable(fields))

    def snapshot(self) -> dict[str, Any]:
        """Where the run is, in what JSON has.

        - ``run``: its id; ``status``: waiting, training, evaluating, completed, failed or stopped
        - ``reason``: why it did not complete
        - ``round`` (from 1; 0 before the first), ``rounds``, ``rounds_completed``
        - ``asked``: clients of this round; ``answered``: their outcomes so far; ``missing``: those without one
        - ``connected``: how many clients are; ``needed``: how many a round waits for
        - ``clients``: by id, whether ``connected``, ``num_examples``, ``tags``, ``last_outcome`` (null: none yet)
        - ``metrics``: the last of each name, of training or, where there is an evaluation, of that
        - ``started`` (UTC, ISO 8601) and ``elapsed_s``
        """
        with self._lock:
            now = self._clock() if self._ended is None else self._ended
            elapsed = 0.0 if self._began is None else now - self._began
            return {
                **self._facts,
                "metrics": {**self._trained, **self._evaluated},
                "asked": list(self._asked),
                "answered": dict(self._answered),
                "missing": [client for client in self._asked if client not in self._answered],
                "connected": sum(client["connected"] for client in self._clients.values()),
                "clients": {name: dict(client) for name, client in self._clients.items()},
                "elapsed_s": round(elapsed, 3),
            }

    def _client(self, name: str) -> dict[str, Any]:
        unknown = {"connected": True, "num_examples": 0, "tags": {}, "last_outcome": None}
        return self._clients.setdefault(name, unknown)

    def _on_run_started(self, run: str = "", rounds: int = 0, clients_needed: int = 0, **rest: Any) -> None:
        self._began, self._ended = self._clock(), None
        started = datetime.now(UTC).isoformat(timespec="microseconds")
        self._facts.update(run=run, rounds=rounds, needed=clients_needed, started=started, status="waiting", reason="")

    def _on_waiting(self, needed: int = 0, **rest: Any) -> None:
        self._facts.update(status="waiting", needed=needed)

    def _on_client_connected(self, client: str, num_examples: int = 0, tags: Any = None, **rest: Any) -> None:
        self._client(client).update(connected=True, num_examples=num_examples, tags=tags or {})

    def _on_client_returned(self, client: str, **rest: Any) -> None:
        self._client(client)["connected"] = True

    def _on_client_lost(self, client: str, **rest: Any) -> None:
        self._client(client)["connected"] = False

    def _on_selected(self, chosen: list[dict[str, Any]], **rest: Any) -> None:
        self._asked, self._answered = [each["client"] for each in chosen], {}
        self._facts["status"] = "training"

    def _on_outcome(self, client: str, outcome: str, kind: str = "train", **rest: Any) -> None:
        if kind == "evaluate":
            self._facts["status"] = "evaluating"
            return
        self._answered[client] = outcome
        self._client(client)["last_outcome"] = outcome

    def _on_retry(self, missing: list[str], **rest: Any) -> None:
        for client in missing:
            self._answered.pop(client, None)

    def _on_round_finished(self, metrics: Any = None, **rest: Any) -> None:
        self._facts.update(status="evaluating", rounds_completed=self._facts["round"])
        self._trained.update(metrics or {})

    def _on_evaluated(self, metrics: Any = None, **rest: Any) -> None:
        self._evaluated.update(metrics or {})

    def _on_run_finished(self, status: str, reason: str = "", **rest: Any) -> None:
        self._ended = self._clock()
        self._facts.update(status=status, reason=reason, rounds_completed=rest.get("rounds_completed", 0))
        self._evaluated.update(rest.get("metrics") or {})
