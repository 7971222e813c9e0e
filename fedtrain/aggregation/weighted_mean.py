"""The weighted mean of a cohort's deltas, in one pass and one running sum."""

from collections.abc import Iterable

import numpy as np

from fedtrain.aggregation.aggregator import Aggregator, Layout, Weight, by_examples, checked_weight, differs, weightless
from fedtrain.errors import AggregationError, TooFew
from fedtrain.params import all_finite, is_float, wide
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
        AggregationError: (when it runs) a weight is negative or not finite, updates differ in names, shapes or
            dtypes, or the mean does not fit into the dtype.

    Source: McMahan et al., AISTATS 2017, arXiv:1602.05629, Algorithm 1.

    >>> import numpy as np
    >>> from fedtrain.testing import cohort_of, update_of
    >>> updates = [update_of({"w": np.array([1.0])}, 1), update_of({"w": np.array([5.0])}, 3)]
    >>> weighted_mean(by_examples)(updates, cohort_of(2))
    {'w': array([4.])}
    """

    def combine(updates: Iterable[Update], cohort: Cohort) -> Params:
        sums: dict[str, Array] = {}
        layout: dict[str, Layout] = {}
        total = 0.0
        for update in updates:
            w = checked_weight(weight, update, cohort)
            total += w
            first, names = not sums, set()
            # One array at a time: a delta may be a lazy mapping, larger than memory should hold at once.
            for name in update.delta:
                array = update.delta[name]
                if not is_float(array):
                    continue
                names.add(name)
                if first:
                    layout[name] = array.shape, array.dtype
                    sums[name] = np.zeros(array.shape, wide(array.dtype))
                elif layout.get(name) != (array.shape, array.dtype):
                    raise differs(update, name, (array.shape, array.dtype), layout.get(name))
                if w > 0:
                    fold(sums[name], array, w)
            for name in sorted(layout.keys() - names):
                raise differs(update, name, None, layout[name])
        if not sums:
            raise TooFew("no update with a floating-point array to average")
        if total == 0:
            raise weightless()
        result = {}
        for name, acc in sums.items():
            with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
                np.divide(acc, acc.dtype.type(total), out=acc)
                result[name] = acc.astype(layout[name][1], copy=False)
            if not all_finite(result[name]):
                raise AggregationError(
                    f"the weighted mean of {name!r} is not finite in {layout[name][1]} (total weight {total:g}): "
                    "a delta or a weight is too large or too small, lower the learning rate or scale the weights"
                )
        return result

    return Aggregator(combine, weight, uses_all=True)


def fold(acc: Array, array: Array, weight: float) -> None:
    """``acc += weight * array`` in the dtype of `acc`, in place, without a temporary of the array's size."""
    target, source = acc.reshape(-1), array.reshape(-1)
    factor = acc.dtype.type(weight)
    scratch = np.empty(min(_CHUNK, target.size), acc.dtype)
    for begin in range(0, target.size, _CHUNK):
        piece = target[begin : begin + _CHUNK]
        product = scratch[: piece.size]
        # A sum may grow past the dtype's range: the caller looks at the result once instead of at every step.
        with np.errstate(over="ignore", invalid="ignore"):
            np.multiply(source[begin : begin + _CHUNK], factor, out=product, casting="same_kind", dtype=acc.dtype)
            np.add(piece, product, out=piece)
