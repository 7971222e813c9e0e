"""The fleet protocol: who is there, give them tasks, take their outcomes as they come."""

from collections.abc import Sequence
from typing import Protocol

from fedtrain.types import ClientInfo, Outcome, Start, Task


class Fleet(Protocol):
    """All clients of a run, real or simulated. Called from one thread."""

    def clients(self) -> Sequence[ClientInfo]:
        """Clients that are connected now, in the order of their ids."""

    def wait(self, timeout_s: float) -> None:
        """Return when a client came or went, or after `timeout_s`."""

    def give(self, tasks: Sequence[Task], start: Start) -> None:
        """Send tasks to their clients; all of them begin at `start`.

        A task that is still being worked on is not sent twice. One whose client is away waits for it, and is sent
        again when the client comes back without having answered.
        """

    def receive(self, timeout_s: float) -> Outcome | None:
        """The next outcome in order of arrival; None if there is none within `timeout_s`.

        It may belong to a task of an earlier round; each answer is yielded once, however often it was sent.
        """

    def settle(self, task: Task, counted: bool) -> None:
        """The server is done with a task: its client is told whether the update was counted, and may stop working."""
