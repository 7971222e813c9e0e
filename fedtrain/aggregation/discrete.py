"""Integers and bools: values, not deltas, with a written rule."""

import math
from fractions import Fraction

import numpy as np

from fedtrain.errors import AggregationError
from fedtrain.params import is_float
from fedtrain.types import Array, Params


class DiscreteMean:
    """Folds the integer and bool arrays of a round's updates, one update at a time.

    - Integers: the weighted mean of the clients' values, rounded to the nearest whole number, ties to even. 64-bit
      integers are summed exactly, also beyond 2**53.
    - Bools: the weighted majority; a tie keeps the server's value.

    No array is ever truncated or changes its dtype. An update of weight 0 changes nothing.

    Robust rules do not reach these arrays: an update that the rule rejects or bounds counts here as any other, so that
    one client can move an integer's mean as far as its dtype goes. A robust run's model should hold none that matters.
    """

    def __init__(self, model: Params) -> None:
        self._start = {name: array for name, array in model.items() if not is_float(array)}
        self._sums = {name: np.zeros(array.shape, _sum_dtype(array)) for name, array in self._start.items()}
        self._total = Fraction(0)

    def add(self, values: Params, weight: float) -> None:
        """Count one update's values `weight` times.

        Raises:
            AggregationError: `weight` is negative or not finite.
        """
        if not 0 <= weight < math.inf:
            raise AggregationError(f"weight {weight} of an update, expected a finite number >= 0")
        self._total += Fraction(weight)
        for name, start in self._start.items():
            if _is_long(start):
                _add_exactly(self._sums[name], values[name], start, weight)
            else:
                self._sums[name] += weight * values[name].astype(np.float64)

    def result(self) -> dict[str, Array]:
        """The combined values by name, in the model's dtypes; the model's own where the total weight is zero."""
        if self._total == 0:
            return dict(self._start)
        return {name: self._combined(start, self._sums[name]) for name, start in self._start.items()}

    def _combined(self, start: Array, sums: Array) -> Array:
        if _is_long(start):
            moves = (Fraction(total) / self._total for total in sums.reshape(-1))
            old = (int(value) for value in start.reshape(-1))
            # Python rounds a fraction to the nearest whole number, ties to even.
            values = [round(value + move) for value, move in zip(old, moves, strict=True)]
            return np.array(values, start.dtype).reshape(start.shape)
        mean = sums / float(self._total)
        if start.dtype == np.bool_:
            return np.where(mean == 0.5, start, mean > 0.5)
        return np.asarray(np.rint(mean), start.dtype)


def _is_long(array: Array) -> bool:
    """Whether float64 does not hold every value of this dtype."""
    return array.dtype.kind in "iu" and array.dtype.itemsize == 8


def _sum_dtype(array: Array) -> np.dtype:
    return np.dtype(object) if _is_long(array) else np.dtype(np.float64)


def _add_exactly(sums: Array, values: Array, start: Array, weight: float) -> None:
    """``sums += weight * (values - start)`` in whole numbers or fractions, for the elements that moved."""
    moved = np.nonzero(np.atleast_1d(values != start))
    factor = int(weight) if float(weight).is_integer() else Fraction(weight)
    if moved[0].size:
        difference = np.atleast_1d(values)[moved].astype(object) - np.atleast_1d(start)[moved].astype(object)
        np.atleast_1d(sums)[moved] += factor * difference
