"""Differences from a centre are clipped before they are averaged."""

from collections.abc import Iterable

import numpy as np

from fedtrain.aggregation.aggregator import Aggregator
from fedtrain.aggregation.distances import distances_to_sum
from fedtrain.aggregation.table import Table, require_count
from fedtrain.errors import StrategyError
from fedtrain.types import Cohort, Params, Update


def centred_clipping(radius: float, *, num_steps: int = 1) -> Aggregator:
    """Move a centre by the mean of the differences to it, each clipped to a radius.

        v_0 = 0;  v_{l+1} = v_l + (1 / n) * sum_k (delta_k - v_l) * min(1, tau / ||delta_k - v_l||)

    A client moves the result by at most tau / n in a step, whatever it sends. The paper centres at the last round's
    aggregate, of clients' momenta; aggregators have no memory, and here the centre is a delta of zero. For the paper's
    guarantee clients must send momenta; with plain deltas many small moves in one direction go through, round after
    round.

    Args:
        radius: tau > 0, in the units of an update's L2 norm. Too small slows training, too large lets attackers in: a
            typical honest norm is a start.
        num_steps: L >= 1; with more, updates with norms beyond the radius are reached.

    Raises:
        StrategyError: a number is out of its range.
        TooFew: (when it runs) there is no update.
        AggregationError: (when it runs) updates differ in names, shapes or dtypes.

    Source: Karimireddy, He, Jaggi, Learning from History for Byzantine Robust Optimization, ICML 2021,
    arXiv:2012.10333, the rule CC (centered clipping).

    >>> from fedtrain.testing import cohort_of, update_of
    >>> updates = [update_of({"w": np.array([number])}) for number in (0.5, 1.0, 1e30, -0.5)]
    >>> centred_clipping(1.0)(updates, cohort_of(4))
    {'w': array([0.5])}
    """
    if not 0 < radius < np.inf:
        raise StrategyError(f"aggregation centred_clipping: radius must be finite and > 0, found {radius}")
    require_count("centred_clipping", "num_steps", num_steps, 1)

    def combine(updates: Iterable[Update], cohort: Cohort) -> Params:
        table = Table(updates, "centred_clipping")
        # The centre is always a weighted sum of the updates, and never held.
        shares = np.zeros(len(table))
        for _ in range(num_steps):
            kept = clip_factors(distances_to_sum(table, shares), radius)
            shares = shares * (1 - kept.mean()) + kept / len(table)
        return table.combined(shares)

    return Aggregator(combine)


def clip_factors(lengths: np.ndarray, most: float) -> np.ndarray:
    """By how much to multiply vectors of these lengths, so that none is longer than `most`."""
    return most / np.maximum(lengths, most) if most > 0 else np.where(lengths > 0, 0.0, 1.0)
