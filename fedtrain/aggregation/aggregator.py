"""The shape of an aggregator, and the weights that an update may have in it."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

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
