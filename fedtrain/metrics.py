"""Averages of whatever numbers clients return."""

import math
from collections.abc import Iterable, Mapping

from fedtrain.types import Outcome


def mean_metrics(outcomes: Iterable[Outcome]) -> dict[str, float]:
    """The mean of each metric over the ok outcomes that have it, weighted by their numbers of examples.

    A client with an additional or missing metric, or one that is not finite, changes nothing for the others. Where
    the weights sum to zero, or the sum is beyond a float's range, the metric is left out.
    """
    sums: dict[str, float] = {}
    weights: dict[str, float] = {}
    for outcome in outcomes:
        if outcome.kind != "ok":
            continue
        for name, value in outcome.metrics.items():
            if math.isfinite(value):
                sums[name] = sums.get(name, 0.0) + outcome.num_examples * value
                weights[name] = weights.get(name, 0.0) + outcome.num_examples
    return {
        name: sums[name] / weights[name] for name in sorted(sums) if weights[name] > 0 and math.isfinite(sums[name])
    }


def metrics_by_client(outcomes: Iterable[Outcome]) -> dict[str, Mapping[str, float]]:
    """Each ok outcome's metrics by client id."""
    return {outcome.task.client: dict(outcome.metrics) for outcome in outcomes if outcome.kind == "ok"}
