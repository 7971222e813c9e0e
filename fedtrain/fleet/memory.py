"""A fleet of trainers in this process, one after the other: the simplest simulation."""

import time
from collections import deque
from collections.abc import Mapping, Sequence

from fedtrain.client.trainer import Trainer
from fedtrain.client.worker import Worker
from fedtrain.types import Array, ClientInfo, Outcome, Params, Start, Task


class MemoryFleet:
    """Runs each task in `receive`, in the order in which tasks were given.

    Training takes as long as it takes: no client is ever late, so a simulation does not depend on the machine's speed.

    Args:
        trainers: One trainer per client id. Every client is always connected.
    """

    def __init__(self, trainers: Mapping[str, Trainer]) -> None:
        self._workers = {client: Worker(trainers[client]) for client in sorted(trainers)}
        self._given: deque[tuple[Task, Start]] = deque()

    def clients(self) -> Sequence[ClientInfo]:
        """All clients, in the order of their ids."""
        return [
            ClientInfo(id=client, num_examples=worker.num_examples, local_algorithms=worker.local_algorithms)
            for client, worker in self._workers.items()
        ]

    def wait(self, timeout_s: float) -> None:
        """Return after `timeout_s`: nobody comes or goes here."""
        time.sleep(timeout_s)

    def give(self, tasks: Sequence[Task], start: Start) -> None:
        """Queue tasks; a task that is queued already is not queued again."""
        start = _read_only(start)
        queued = {task.number for task, _ in self._given}
        self._given.extend((task, start) for task in tasks if task.number not in queued)

    def receive(self, timeout_s: float) -> Outcome | None:
        """Do the next task and return its outcome; None after `timeout_s` if all are done."""
        if not self._given:
            time.sleep(timeout_s)
            return None
        task, start = self._given.popleft()
        return self._workers[task.client].perform(task, start)

    def settle(self, task: Task, counted: bool) -> None:
        """Keep or drop what the client's local algorithm remembered of the task; forget it if it still waits."""
        self._given = deque((waiting, start) for waiting, start in self._given if waiting.number != task.number)
        self._workers[task.client].settle(task.number, counted)


def _read_only(start: Start) -> Start:
    """The same arrays, which a trainer cannot write into: as if they had arrived over a network."""
    return Start(_views(start.params), _views(start.buffers), _views(start.payload))


def _views(arrays: Params) -> dict[str, Array]:
    views = {name: array.view() for name, array in arrays.items()}
    for view in views.values():
        view.flags.writeable = False
    return views
