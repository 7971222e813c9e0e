"""The mean of deltas that were made with different numbers of steps, as in FedNova."""

from collections.abc import Iterable, Iterator

import numpy as np

from fedtrain.aggregation.aggregator import Aggregator, Weight, by_examples
from fedtrain.aggregation.weighted_mean import weighted_mean
from fedtrain.errors import AggregationError, StrategyError
from fedtrain.params import all_finite, wide
from fedtrain.types import Cohort, Params, Update


def normalised_mean(weight: Weight = by_examples, *, momentum: float = 0.0) -> Aggregator:
    """Average the deltas per unit of local work, then take as much of that as the cohort did on average.

        delta = (sum_k p_k a_k) * (sum_k p_k delta_k / a_k),   p_k = w_k / sum_k w_k

    where a_k is client k's number of steps, or with momentum rho, the sum of all the parts that its gradients have in
    its delta: ``(s - rho (1 - rho**s) / (1 - rho)) / (1 - rho)`` for s steps. A plain mean favours the optima of
    clients that take more steps; this one minimises the loss that the weights say. With equal numbers of steps it is
    that mean.

    The number of steps is what the client says, within what it was asked for (see `fedtrain.check`): with ``epochs`` it
    can still name fewer than it took, which makes its delta count for more; with ``steps`` it can't. An update without
    steps has weight zero. Holds one running sum, like `weighted_mean`.

    Args:
        weight: Importance of one update, finite and >= 0.
        momentum: Of the clients' SGD, in [0, 1). The paper's other local solvers have other a_k.

    Raises:
        StrategyError: `momentum` is out of its range.
        TooFew: (when it runs) there is no update, or the weights sum to zero.
        AggregationError: (when it runs) as `weighted_mean`.

    Source: Wang et al., Tackling the Objective Inconsistency Problem in Heterogeneous Federated Optimization, NeurIPS
    2020, arXiv:2007.07481, equations 5 to 7, with tau_eff of the usual mean.

    >>> from dataclasses import replace
    >>> from fedtrain.testing import cohort_of, update_of
    >>> one, four = (replace(update_of({"w": np.array([s * d])}), num_steps=s) for s, d in ((1, 1.0), (4, 2.0)))
    >>> normalised_mean()([one, four], cohort_of(2))
    {'w': array([3.75])}
    """
    if not 0 <= momentum < 1:
        raise StrategyError(f"aggregation normalised_mean: momentum must be in [0, 1), found {momentum}")

    def effort(update: Update) -> float:
        steps = update.num_steps
        return (steps - momentum * (1 - momentum**steps) / (1 - momentum)) / (1 - momentum)

    def per_effort(update: Update, cohort: Cohort) -> float:
        return weight(update, cohort) / effort(update) if update.num_steps else 0.0

    mean = weighted_mean(per_effort)

    def combine(updates: Iterable[Update], cohort: Cohort) -> Params:
        weights = efforts = rates = 0.0

        def counted() -> Iterator[Update]:
            nonlocal weights, efforts, rates
            for update in updates:
                if update.num_steps:
                    w = weight(update, cohort)
                    weights, efforts, rates = weights + w, efforts + w * effort(update), rates + w / effort(update)
                yield update

        per_unit = mean(counted(), cohort)  # sum_k (w_k / a_k) delta_k / sum_k (w_k / a_k)
        factor = (efforts / weights) * (rates / weights)
        result = {}
        for name, array in per_unit.items():
            acc = wide(array.dtype)
            with np.errstate(over="ignore"):
                result[name] = np.asarray(array.astype(acc) * acc.type(factor)).astype(array.dtype)
            if not all_finite(result[name]):
                raise AggregationError(
                    f"the normalised mean of {name!r} is not finite in {array.dtype} (times {factor:g}): "
                    "a delta or a number of steps is too large, limit the clients' work"
                )
        return result

    return Aggregator(combine, weight, uses_all=True)
