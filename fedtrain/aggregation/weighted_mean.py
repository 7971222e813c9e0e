"""The weighted mean of a cohort's deltas, in one pass and one running sum."""

from collections.abc import Iterable

import numpy as np

from fedtrain.aggregation.aggregator import Aggregator, Weight, by_examples
from fedtrain.errors import AggregationError, TooFew
from fedtrain.params import is_float, wide
from fedtrain.types import Array, Cohort, Params, Update

_CHUNK = 65_536
"""Elements folded at a time: small enough that the product stays in the cache."""


def weighted_mean(weight: Weight = by_examples) -> Aggregator:
    """Average the cohort's deltas, counting each `weight(update, cohort)` times.

        delta = sum_k w_k * delta_k / sum_k w_k

    Sums are kept in float32 (float64 for float64 arrays) and folded in cohort order, so the result does not depend on
    which client answered first, and memory does not grow with the cohort. The result has the deltas' dtypes.

    Args:
        weight: Importance of one update, finite and >= 0. `by_examples` as in the paper; `equally` counts clients.

    Raises:
        TooFew: (when it runs) there is no update, or the weights sum to zero.
        AggregationError: (when it runs) a weight is negative or not finite.

    Source: McMahan et al., AISTATS 2017, arXiv:1602.05629, Algorithm 1.

    >>> import numpy as np
    >>> from fedtrain.testing import cohort_of, update_of
    >>> updates = [update_of({"w": np.array([1.0])}, 1), update_of({"w": np.array([5.0])}, 3)]
    >>> weighted_mean(by_examples)(updates, cohort_of(2))
    {'w': array([4.])}
    """

    def combine(updates: Iterable[Update], cohort: Cohort) -> Params:
        sums: dict[str, Array] = {}
        dtypes: dict[str, np.dtype] = {}
        total = 0.0
        for update in updates:
            w = weight(update, cohort)
            if not (0 <= w < np.inf):
                raise AggregationError(f"client {update.task.client}: weight {w}, expected a finite number >= 0")
            total += w
            for name in update.delta:
                array = update.delta[name]
                if not is_float(array):
                    continue
                if name not in sums:
                    dtypes[name] = array.dtype
                    sums[name] = np.zeros(array.shape, wide(array.dtype))
                if w > 0:
                    fold(sums[name], array, w)
        if not sums:
            raise TooFew("no update with a floating-point array to average")
        if total == 0:
            raise TooFew("the weights of all updates sum to zero (no client trained on any example)")
        result = {}
        for name, acc in sums.items():
            np.divide(acc, acc.dtype.type(total), out=acc)
            result[name] = acc.astype(dtypes[name], copy=False)
        return result

    return Aggregator(combine, weight)


def fold(acc: Array, array: Array, weight: float) -> None:
    """``acc += weight * array`` in the dtype of `acc`, in place, without a temporary of the array's size."""
    target, source = acc.reshape(-1), array.reshape(-1)
    factor = acc.dtype.type(weight)
    scratch = np.empty(min(_CHUNK, target.size), acc.dtype)
    for begin in range(0, target.size, _CHUNK):
        piece = target[begin : begin + _CHUNK]
        product = scratch[: piece.size]
        np.multiply(source[begin : begin + _CHUNK], factor, out=product, casting="same_kind", dtype=acc.dtype)
        np.add(piece, product, out=piece)
