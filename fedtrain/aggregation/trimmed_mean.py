"""The mean of each element without the largest and smallest values."""

from collections.abc import Iterable

import numpy as np

from fedtrain.aggregation.aggregator import Aggregator
from fedtrain.aggregation.table import Table, ordered, require_count
from fedtrain.types import Array, Cohort, Params, Update


def trimmed_mean(num_byzantine: int) -> Aggregator:
    """Average each element over the cohort, without its f largest and f smallest values.

        delta[e] = (1 / (n - 2f)) * sum of the n - 2f values in the middle of {delta_k[e]}

    Every update counts once. The paper trims a share beta of the updates; this is beta = f / n.

    Args:
        num_byzantine: f, how many clients of a cohort may send anything, >= 0; 0 is the mean.

    Raises:
        StrategyError: `num_byzantine` is negative or not a whole number.
        TooFew: (when it runs) there are fewer than 2f + 1 updates.
        AggregationError: (when it runs) updates differ in names, shapes or dtypes.

    Source: Yin et al., Byzantine-Robust Distributed Learning: Towards Optimal Statistical Rates, ICML 2018,
    arXiv:1803.01498, Definition 2.

    >>> from fedtrain.testing import cohort_of, update_of
    >>> updates = [update_of({"w": np.array([number])}) for number in (1.0, 2.0, 4.0, -1e30)]
    >>> trimmed_mean(1)(updates, cohort_of(4))
    {'w': array([1.5])}
    """
    f = num_byzantine
    require_count("trimmed_mean", "num_byzantine", f)
    needed = 2 * f + 1

    def combine(updates: Iterable[Update], cohort: Cohort) -> Params:
        table = Table(updates, "trimmed_mean", needed, f"2f + 1 with f = {f}")

        def trimmed(block: Array) -> Array:
            kept = ordered(block)[f : len(block) - f]
            return np.asarray(kept.sum(axis=0, dtype=np.float64) / len(kept))

        return table.reduced(trimmed)

    return Aggregator(combine, min_updates=needed)
