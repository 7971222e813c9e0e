"""Bulyan: Krum chooses updates, and each element is averaged around their median."""

from collections.abc import Iterable

import numpy as np

from fedtrain.aggregation.aggregator import Aggregator
from fedtrain.aggregation.distances import pairwise_squared
from fedtrain.aggregation.krum import ranked
from fedtrain.aggregation.median import middle_of
from fedtrain.aggregation.table import Table, ordered, require_count
from fedtrain.types import Array, Cohort, Params, Update


def bulyan(num_byzantine: int) -> Aggregator:
    """Choose n - 2f updates with Krum, then average each element's values that are closest to their median.

        S = theta = n - 2f updates: Krum's choice, removed, Krum's choice of the rest, and so on
        delta[e] = mean of the theta - 2f values {delta_k[e], k in S} closest to their median

    Krum looks at the r - f - 2 nearest of r updates that are left, at one where that is less (the paper leaves it
    open). Equal scores are decided as in `krum`; of two values as far from the median the lower goes first. Every
    update counts once.

    Args:
        num_byzantine: f, how many clients of a cohort may send anything, >= 0.

    Raises:
        StrategyError: `num_byzantine` is negative or not a whole number.
        TooFew: (when it runs) there are fewer than 4f + 3 updates.
        AggregationError: (when it runs) updates differ in names, shapes or dtypes.

    Source: El Mhamdi, Guerraoui, Rouault, The Hidden Vulnerability of Distributed Learning in Byzantium, ICML 2018,
    arXiv:1802.07927, the rule Bulyan(Krum).

    >>> from fedtrain.testing import cohort_of, update_of
    >>> updates = [update_of({"w": np.array([number])}) for number in (1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 1e30)]
    >>> bulyan(1)(updates, cohort_of(7))
    {'w': array([3.])}
    """
    f = num_byzantine
    require_count("bulyan", "num_byzantine", f)
    needed = 4 * f + 3

    def combine(updates: Iterable[Update], cohort: Cohort) -> Params:
        table = Table(updates, "bulyan", needed, f"4f + 3 with f = {f}")
        chosen = selected(pairwise_squared(table), f)

        def around_the_median(block: Array) -> Array:
            rows = ordered(block[chosen])
            far = np.abs(rows - middle_of(rows))
            closest = np.argsort(far, axis=0, kind="stable")[: len(rows) - 2 * f]
            kept = np.take_along_axis(rows, closest, axis=0)
            return np.asarray(kept.sum(axis=0, dtype=np.float64) / len(kept))

        return table.reduced(around_the_median)

    return Aggregator(combine, min_updates=needed)


def selected(squares: Array, f: int) -> list[int]:
    """The n - 2f rows that Krum chooses one after the other, from squared distances (rows, rows)."""
    left, chosen = list(range(len(squares))), list[int]()
    while len(chosen) < len(squares) - 2 * f:
        best = ranked(squares[np.ix_(left, left)], max(1, len(left) - f - 2))[0]
        chosen.append(left.pop(int(best)))
    return chosen
