"""The shape of an aggregator, and the weights that an update may have in it."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from fedtrain.errors import AggregationError, TooFew
from fedtrain.types import Cohort, Params, Update

Weight = Callable[[Update, Cohort], float]
"""Importance of one update within its cohort, finite and >= 0."""


def by_examples(update: Update, cohort: Cohort) -> float:
    """An update counts as many times as it has examples, as in FedAvg."""
    return float(update.num_examples)


def equally(update: Update, cohort: Cohort) -> float:
    """Every update counts once."""
    return 1.0


@dataclass(frozen=True)
class Aggregator:
    """Combines the floating-point arrays of a cohort's updates.

    `combine` reads the updates once, in cohort order, and returns one delta with the same names, shapes and dtypes;
    it raises `AggregationError` where there is nothing to combine. Integers and bools are not its business: `step`
    applies the written rule to them (`DiscreteMean`), with this aggregator's `weight`.
    """

    combine: Callable[[Iterable[Update], Cohort], Params]
    weight: Weight = equally
    min_updates: int = 1
    """Fewer usable updates than this can't be combined."""
    uses_all: bool = False
    """Whether every update counts in full, by its weight: none is rejected or bounded, as a robust rule does."""

    def __call__(self, updates: Iterable[Update], cohort: Cohort) -> Params:
        """Short for `combine`."""
        return self.combine(updates, cohort)


Layout = tuple[tuple[int, ...], np.dtype]
"""Shape and dtype of an array."""


def differs(update: Update, name: str, found: Layout | None, expected: Layout | None) -> AggregationError:
    """The error that an update's array is not as in the updates before it; None stands for no such array."""
    has, others = (f"{layout[1]}{layout[0]}" if layout else "missing" for layout in (found, expected))
    return AggregationError(
        f"client {update.task.client}, round {update.task.round}: {name!r} is {has}, in the updates before it "
        f"{others}: use the model definition of the server"
    )


def checked_weight(weight: Weight, update: Update, cohort: Cohort) -> float:
    """An update's weight.

    Raises:
        AggregationError: it is negative or not finite.
    """
    found = weight(update, cohort)
    if not 0 <= found < np.inf:
        raise AggregationError(f"client {update.task.client}: weight {found}, expected a finite number >= 0")
    return found


def weightless() -> TooFew:
    """The error that the weights of all updates sum to zero."""
    return TooFew("the weights of all updates sum to zero (no client trained on any example)")
