"""Integers and bools: values, not deltas, with a written rule."""

import numpy as np

from fedtrain.params import is_float
from fedtrain.types import Array, Params


class DiscreteMean:
    """Folds the integer and bool arrays of a round's updates, one update at a time.

    - Integers: the weighted mean of the clients' values, rounded to the nearest whole number, ties to even. Computed
      on differences from the server's value, exactly also beyond 2**53.
    - Bools: the weighted majority; a tie keeps the server's value.

    Nothing is ever turned into a float array or truncated. An update of weight 0 changes nothing.
    """

    def __init__(self, model: Params) -> None:
        self._start = {name: array for name, array in model.items() if not is_float(array)}
        self._sums = {name: np.zeros(array.shape, np.float64) for name, array in self._start.items()}
        self._total = 0.0

    def add(self, values: Params, weight: float) -> None:
        """Count one update's values `weight` times; `weight` is finite and >= 0."""
        self._total += weight
        for name, start in self._start.items():
            self._sums[name] += weight * _difference(values[name], start)

    def result(self) -> dict[str, Array]:
        """The combined values by name, in the model's dtypes; the model's own where the total weight is zero."""
        if self._total == 0:
            return dict(self._start)
        return {name: _moved(start, self._sums[name] / self._total) for name, start in self._start.items()}


def _difference(value: Array, start: Array) -> Array:
    if start.dtype == np.bool_:
        return np.asarray(value, np.float64)
    if start.dtype.itemsize < 8:
        return np.asarray(value, np.float64) - np.asarray(start, np.float64)
    return np.asarray(value.astype(object) - start.astype(object), np.float64)


def _moved(start: Array, mean: Array) -> Array:
    if start.dtype == np.bool_:
        return np.where(mean == 0.5, start, mean > 0.5)
    whole = np.rint(mean)
    # rint's ties go to even differences; the value itself has to be even, so an odd start rounds the other way.
    tie = np.abs(mean - np.trunc(mean)) == 0.5
    odd = np.asarray(start) % 2 == 1
    whole = np.where(tie & odd, np.trunc(mean) + (np.trunc(mean) % 2 == 0) * np.sign(mean), whole)
    if start.dtype.itemsize < 8:
        return np.asarray(np.asarray(start, np.float64) + whole, start.dtype)
    exact = np.asarray(start).astype(object) + np.vectorize(int, otypes=[object])(whole) if whole.size else start
    return np.asarray(exact, dtype=start.dtype)
