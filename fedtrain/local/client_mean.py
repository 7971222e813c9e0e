"""The mean, over all clients, of arrays that each client keeps: what the server knows of them from their changes.

A client's arrays begin at zero, and change only with an update that is counted. So the sum over all clients is that of
the changes that were counted, whoever takes part in which round:

    mean = sum_k w_k * a_k / sum_k w_k       over all clients of the run, also those that were never asked

`w_k` is fixed when client k is asked first, and travels in its task as ``weight``. All clients of the run are those
that were ever asked; if more were connected at once, as many as that.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from fedtrain.aggregation.aggregator import Weight, by_examples, equally
from fedtrain.aggregation.weighted_mean import fold
from fedtrain.errors import AggregationError, StrategyError
from fedtrain.params import all_finite, is_float, wide
from fedtrain.types import Array, ClientInfo, Cohort, Params, State


def require_known(algorithm: str, weight: Weight) -> None:
    """Refuse a weight that clients don't have before they have trained.

    Raises:
        StrategyError: it is neither `equally` nor `by_examples`.
    """
    if weight not in (equally, by_examples):
        raise StrategyError(f"local {algorithm}: weight must be equally or by_examples, found {weight}")


def init(params: Params) -> State:
    """All clients' arrays are zero; the sum is kept in float32 or wider."""
    sums = {name: np.zeros(array.shape, wide(array.dtype)) for name, array in params.items()}
    return {"sum": sums, "total": 0.0, "weights": {}}


def weight_of(state: State, client: ClientInfo, weight: Weight) -> float:
    """A client's weight: the one that it had when it was asked first."""
    now = 1.0 if weight is equally else float(client.num_examples)
    return float(state["weights"].get(client.id, now))


def folded(acc: Any, changes: Params, weight: float) -> dict[str, Array]:
    """``acc + weight * changes`` for the floating-point arrays; `acc` is None at first."""
    sums: dict[str, Array] = {} if acc is None else acc
    for name in changes:
        array = changes[name]
        if not is_float(array):
            continue
        if name not in sums:
            sums[name] = np.zeros(array.shape, wide(array.dtype))
        fold(sums[name], array, weight)
    return sums


def finished(state: State, acc: Any, cohort: Cohort, weight: Weight, factor: float = 1.0) -> State:
    """The state with the changes that were folded, each `factor` times, and with the clients that were asked.

    Raises:
        AggregationError: the sum would not be finite; the round is skipped.
    """
    sums = state["sum"]
    if acc is not None:
        with np.errstate(over="ignore", invalid="ignore"):
            sums = {name: np.asarray(old + factor * acc[name]) if name in acc else old for name, old in sums.items()}
        for name, array in sums.items():
            if not all_finite(array):
                raise AggregationError(f"the sum of what clients keep for {name!r} is beyond {array.dtype}")
    asked: Mapping[str, float] = {task.client: task.local[1]["weight"] for task in cohort.tasks}
    weights = {**asked, **state["weights"]}
    connected = cohort.num_eligible if weight is equally else cohort.eligible_examples
    total = max(float(state["total"]), float(connected), sum(weights.values()))
    return {"sum": sums, "total": total, "weights": weights}


def mean(state: State) -> dict[str, Array]:
    """The mean over all clients, in float32 or wider; zeros as long as there are none."""
    total = state["total"]
    return {name: np.asarray(array / total) if total else array for name, array in state["sum"].items()}
