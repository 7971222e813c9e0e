"""The point whose distances to all updates have the least sum."""

from collections.abc import Iterable

import numpy as np

from fedtrain.aggregation.aggregator import Aggregator, Weight, checked_weight, equally, weightless
from fedtrain.aggregation.distances import distances, distances_to_sum
from fedtrain.aggregation.median import middle
from fedtrain.aggregation.table import Table, require_count
from fedtrain.errors import AggregationError, StrategyError
from fedtrain.types import Array, Cohort, Params, Update


def geometric_median(
    weight: Weight = equally, *, smoothing: float = 1e-6, num_steps: int = 32, tolerance: float = 1e-6
) -> Aggregator:
    """Find the geometric median of the cohort's deltas with the smoothed Weiszfeld algorithm, as in RFA.

        delta = argmin_v sum_k a_k ||v - delta_k||,  a_k = w_k / sum_k w_k
        step: v <- sum_k b_k delta_k / sum_k b_k,    b_k = a_k / max(nu, ||v - delta_k||)

    Starts at the median of each element, not at the mean: there, steps from an outlier of 1e30 would be many. Each step
    reads all updates once; v itself is never held, it is a weighted mean of updates.

    Args:
        weight: Importance of one update, finite and >= 0. `by_examples` as in the paper believes the clients' counts;
            `equally` leaves f < n / 2 clients no way to take over.
        smoothing: nu > 0, in the units of the updates: nearer distances count as this.
        num_steps: At most so many, >= 1. The paper finds 3 enough for training.
        tolerance: >= 0. Ends when no update's share of the mean changes by more than this in a step.

    Raises:
        StrategyError: a number is out of its range.
        TooFew: (when it runs) there is no update, or the weights sum to zero.
        AggregationError: (when it runs) a weight is negative or not finite, or updates differ in names, shapes or
            dtypes.

    Source: Pillutla, Kakade, Harchaoui, Robust Aggregation for Federated Learning, IEEE Transactions on Signal
    Processing 2022, arXiv:1912.13445, Algorithm 2.

    >>> from fedtrain.testing import cohort_of, update_of
    >>> updates = [update_of({"w": np.array([number])}) for number in (1.0, 2.0, 1e30)]
    >>> geometric_median()(updates, cohort_of(3))["w"].round(3)
    array([2.])
    """
    if not 0 < smoothing < np.inf:
        raise StrategyError(f"aggregation geometric_median: smoothing must be finite and > 0, found {smoothing}")
    if not tolerance >= 0:
        raise StrategyError(f"aggregation geometric_median: tolerance must be >= 0, found {tolerance}")
    require_count("geometric_median", "num_steps", num_steps, 1)

    def combine(updates: Iterable[Update], cohort: Cohort) -> Params:
        table = Table(updates, "geometric_median")
        weights = weights_of(table, weight, cohort)
        counted = weights > 0

        def start(block: Array) -> Array:
            return middle(block[counted])

        far = distances(table, start)
        if not far[counted].any():
            return table.reduced(start)
        shares = np.zeros(len(table))
        for step in range(num_steps):
            before, pull = shares, weights * (smoothing / np.maximum(far, smoothing))
            if not pull.any():
                raise AggregationError(
                    "geometric_median: all updates are too far apart for their distances to be numbers"
                )
            shares = pull / pull.sum()
            if step + 1 == num_steps or np.abs(shares - before).max() <= tolerance:
                break
            far = distances_to_sum(table, shares)
        return table.combined(shares)

    return Aggregator(combine, weight)


def weights_of(table: Table, weight: Weight, cohort: Cohort) -> Array:
    """Each row's weight as a share of all, (rows,).

    Raises:
        TooFew: they sum to zero.
        AggregationError: one is negative or not finite.
    """
    weights = np.array([checked_weight(weight, update, cohort) for update in table.updates], np.float64)
    if not weights.any():
        raise weightless()
    return np.asarray(weights / weights.sum())
