"""The shape of a selector."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from numpy.random import Generator

from fedtrain.types import ClientInfo, Outcome, State


class Chosen(NamedTuple):
    """A client that takes part, and how likely it was to be included."""

    client: ClientInfo
    probability: float
    """Inclusion probability, in (0, 1]: an aggregator may weight by its inverse."""


class Selector(NamedTuple):
    """Pure functions of a state that `RunState.selection` holds."""

    init: Callable[[], State]
    choose: Callable[[Sequence[ClientInfo], State, Generator, int | None], Sequence[Chosen]]
    """(eligible clients in the order of their ids, state, random, size or None for the selector's own) -> cohort."""
    observe: Callable[[State, Sequence[Outcome]], State]
    """(state, the round's outcomes in cohort order, without arrays) -> state."""
