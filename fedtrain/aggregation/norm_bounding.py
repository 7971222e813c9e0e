"""The mean of deltas that are scaled down to a largest norm."""

from collections.abc import Iterable

import numpy as np

from fedtrain.aggregation.aggregator import Aggregator, Weight, equally
from fedtrain.aggregation.centred_clipping import clip_factors
from fedtrain.aggregation.distances import norms
from fedtrain.aggregation.geometric_median import weights_of
from fedtrain.aggregation.table import Table
from fedtrain.errors import StrategyError
from fedtrain.types import Cohort, Params, Update


def norm_bounding(max_norm: float | None = None, *, weight: Weight = equally) -> Aggregator:
    """Average the deltas, those with a larger norm scaled down to it.

        delta = sum_k a_k * delta_k * min(1, M / ||delta_k||),  a_k = w_k / sum_k w_k

    Stops attacks that are large, at almost no cost without an attacker; a client can still move the mean by M a_k.

    Args:
        max_norm: M, in the units of an update's L2 norm over all floating-point arrays, > 0. None: the median of the
            cohort's norms, which f < n / 2 clients can't raise above an honest one. (Not the paper's; it needs no
            tuning as updates become shorter.)
        weight: Importance of one update, finite and >= 0.

    Raises:
        StrategyError: `max_norm` is out of its range.
        TooFew: (when it runs) there is no update, or the weights sum to zero.
        AggregationError: (when it runs) a weight is negative or not finite, or updates differ in names, shapes or
            dtypes.

    Source: Sun et al., Can You Really Backdoor Federated Learning?, 2019, arXiv:1911.07963, norm thresholding.

    >>> from fedtrain.testing import cohort_of, update_of
    >>> updates = [update_of({"w": np.array([number])}) for number in (1.0, 2.0, 1e30)]
    >>> norm_bounding(3.0)(updates, cohort_of(3))
    {'w': array([2.])}
    """
    if max_norm is not None and not 0 < max_norm < np.inf:
        raise StrategyError(f"aggregation norm_bounding: max_norm must be finite and > 0 or null, found {max_norm}")

    def combine(updates: Iterable[Update], cohort: Cohort) -> Params:
        table = Table(updates, "norm_bounding")
        weights, lengths = weights_of(table, weight, cohort), norms(table)
        most = float(np.median(lengths)) if max_norm is None else max_norm
        return table.combined(weights * clip_factors(lengths, most))

    return Aggregator(combine, weight)
