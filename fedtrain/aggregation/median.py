"""The median of each element."""

from collections.abc import Iterable

import numpy as np

from fedtrain.aggregation.aggregator import Aggregator
from fedtrain.aggregation.table import Table, ordered
from fedtrain.types import Array, Cohort, Params, Update


def median() -> Aggregator:
    """Take the median over the cohort, element by element.

        delta[e] = median_k delta_k[e]

    For an even number of updates: the mean of the two in the middle. Every update counts once, whatever its number of
    examples. With f Byzantine clients of n > 2f each element lies between two honest clients' values. Where clients'
    data differ much, the median is far from their mean even without an attacker.

    Raises:
        TooFew: (when it runs) there is no update.
        AggregationError: (when it runs) updates differ in names, shapes or dtypes.

    Source: Yin et al., Byzantine-Robust Distributed Learning: Towards Optimal Statistical Rates, ICML 2018,
    arXiv:1803.01498, Definition 1.

    >>> from fedtrain.testing import cohort_of, update_of
    >>> updates = [update_of({"w": np.array([number])}) for number in (1.0, 2.0, 1e30)]
    >>> median()(updates, cohort_of(3))
    {'w': array([2.])}
    """

    def combine(updates: Iterable[Update], cohort: Cohort) -> Params:
        return Table(updates, "median").reduced(middle)

    return Aggregator(combine)


def middle(block: Array) -> Array:
    """The median of each column, (rows, columns) -> (columns,), in float64."""
    return middle_of(ordered(block))


def middle_of(values: Array) -> Array:
    """The median of columns that are in order already."""
    low, high = (len(values) - 1) // 2, len(values) // 2
    return np.asarray((values[low].astype(np.float64) + values[high]) / 2)
