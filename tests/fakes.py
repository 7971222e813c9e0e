"""Fleets, trainers and listeners for tests: no network, no sleeping, time that only a test moves."""

import heapq
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from fedtrain.client.trainer import Evaluated, Fitted, Work
from fedtrain.types import Array, ClientInfo, Outcome, Params, Start, Task, Update

Answers = Callable[[Task, int], Iterable[tuple[float, Outcome]]]
"""(task, how often it was given before) -> outcomes, each with the seconds after which it arrives."""


class Given(NamedTuple):
    """One call of `Fleet.give`."""

    time_s: float
    numbers: tuple[int, ...]


class ScriptedFleet:
    """A fleet that plays back outcomes on its own clock, and records what it was told.

    Args:
        script: Outcomes and the times at which they arrive.
        answers: What a task that is given leads to, beside the script.
        clients: Who is connected, from which time on; the last entry that has begun holds.
    """

    def __init__(
        self,
        script: Iterable[tuple[float, Outcome]] = (),
        *,
        answers: Answers = lambda task, attempt: (),
        clients: Sequence[tuple[float, Sequence[ClientInfo]]] = (),
    ) -> None:
        self.now = 0.0
        self.given: list[Given] = []
        self.tasks: list[Task] = []
        self.starts: list[Start] = []
        self.settled: list[tuple[int, bool]] = []
        self.log: list[str] = []
        """``give``, ``receive`` and ``settle`` in the order of the calls, with task numbers."""
        self._answers, self._clients = answers, clients
        self._arriving: list[tuple[float, int, Outcome]] = []
        self._count = 0
        for time_s, outcome in script:
            self._schedule(time_s, outcome)

    def clock(self) -> float:
        """The time in seconds, which passes only in `receive`, `wait` and tests."""
        return self.now

    def clients(self) -> Sequence[ClientInfo]:
        begun = [clients for time_s, clients in self._clients if time_s <= self.now]
        return begun[-1] if begun else ()

    def wait(self, timeout_s: float) -> None:
        later = [time_s for time_s, _ in self._clients if time_s > self.now]
        self.now = min([self.now + timeout_s, *later])

    def give(self, tasks: Sequence[Task], start: Start) -> None:
        self.given.append(Given(self.now, tuple(task.number for task in tasks)))
        self.log += [f"give {task.number}" for task in tasks]
        self.starts.append(start)
        for task in tasks:
            attempt = self.tasks.count(task)
            self.tasks.append(task)
            for after_s, outcome in self._answers(task, attempt):
                self._schedule(self.now + after_s, outcome)

    def receive(self, timeout_s: float) -> Outcome | None:
        assert timeout_s >= 0
        if self._arriving and self._arriving[0][0] <= self.now + timeout_s:
            time_s, _, outcome = heapq.heappop(self._arriving)
            self.now = max(self.now, time_s)
            self.log.append(f"receive {outcome.task.number}")
            return outcome
        assert self._arriving or timeout_s < 3600, "the round waits without end for answers that will never come"
        self.now += timeout_s
        return None

    def settle(self, task: Task, counted: bool) -> None:
        self.log.append(f"settle {task.number}")
        self.settled.append((task.number, counted))

    def _schedule(self, time_s: float, outcome: Outcome) -> None:
        heapq.heappush(self._arriving, (time_s, self._count, outcome))
        self._count += 1


class Events:
    """A `Report` that remembers what it was told."""

    def __init__(self) -> None:
        self.all: list[tuple[str, int, Mapping[str, object]]] = []

    def __call__(self, event: str, round: int = 0, **fields: object) -> None:
        self.all.append((event, round, fields))

    def of(self, event: str) -> list[Mapping[str, object]]:
        """The fields of all events of a kind."""
        return [fields for kind, _, fields in self.all if kind == event]

    def outcomes(self) -> list[tuple[object, object]]:
        """(client, kind) of each outcome, in the order of the events."""
        return [(fields["client"], fields["outcome"]) for fields in self.of("outcome")]


class Adder:
    """A trainer whose training adds a number to every floating-point array, and 1 to every whole number.

    Args:
        amount: What it adds.
        num_examples: Of its data.
        metrics: What `fit` and `evaluate` report.
        fit: Called before training: raise in it, or look at the work.
    """

    def __init__(
        self,
        amount: float = 1.0,
        num_examples: int = 1,
        *,
        metrics: Mapping[str, float] | None = None,
        fit: Callable[[Start, Work], None] = lambda start, work: None,
    ) -> None:
        self.amount, self.num_examples, self.metrics, self._fit = amount, num_examples, metrics or {}, fit
        self.local_algorithms: tuple[str, ...] = ("sgd_epochs",)
        self.works: list[Work] = []
        self.evaluated: list[Params] = []

    def initial(self, seed: int) -> Start:
        return Start({"w": np.full(2, seed, np.float32)}, {"steps": np.array(0)})

    def fit(self, start: Start, work: Work) -> Fitted:
        self.works.append(work)
        self._fit(start, work)
        model = {name: self._add(array) for name, array in {**start.params, **start.buffers}.items()}
        return Fitted(model, self.num_examples, num_steps=1, metrics=self.metrics)

    def evaluate(self, model: Params) -> Evaluated | None:
        self.evaluated.append(model)
        return Evaluated(self.num_examples, self.metrics) if self.metrics else None

    def _add(self, array: Array) -> Array:
        return np.asarray(array + np.asarray(self.amount if array.dtype.kind == "f" else 1, array.dtype))


def ok(task: Task, delta: Params, num_examples: int = 1, metrics: Mapping[str, float] | None = None) -> Outcome:
    """An ok outcome of a training task with this delta."""
    update = Update(task, delta, num_examples, metrics=metrics or {})
    return Outcome(task, "ok", update, metrics or {}, num_examples)


def people(*ids: str, num_examples: int = 1) -> list[ClientInfo]:
    """Clients with these ids."""
    return [ClientInfo(client, num_examples) for client in ids]
