"""Events: what happens in a run, told to whoever listens."""

from typing import Protocol


class Report(Protocol):
    """Told what happens: ``report("outcome", 3, client="c1", outcome="ok")``."""

    def __call__(self, event: str, round: int = 0, **fields: object) -> None:
        """Take note of an event of a round (0: none)."""


def quiet(event: str, round: int = 0, **fields: object) -> None:
    """A `Report` that tells nobody."""
