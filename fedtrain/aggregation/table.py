"""A cohort's updates as a table, one row per client and one column per element, read a few columns at a time.

Rules that look at all clients at once (order statistics, distances) cannot fold one update after the other. They work
on blocks of columns instead, so that they hold some megabytes of a cohort whose updates may lie on disk.

Robust rules are built on it, and guard what it holds: floating-point arrays. The integers and bools of a rejected or
bounded update still count in their mean and majority (`DiscreteMean`), and so would what a local algorithm folds into
the server's memory, for which reason a `Strategy` refuses such a pair.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from fedtrain.aggregation.aggregator import Layout, differs
from fedtrain.errors import AggregationError, StrategyError, TooFew
from fedtrain.params import all_finite, is_float, wide
from fedtrain.stored import rest
from fedtrain.types import Array, Params, Update

Read = Callable[[int, int], Array]
"""Elements (begin, end) of one row's array, flat."""
Reduce = Callable[[Array], Array]
"""One row of float numbers from a block, (rows, columns) -> (columns,)."""

_BLOCK_ELEMENTS = 2**20
_MIN_COLUMNS = 2**14
"""Fewer columns than this would be spent on overhead, also in a cohort of thousands."""


class Table:
    """The floating-point arrays of a cohort's updates; rows are in cohort order.

    Holds the updates themselves, and of their arrays those of one name, which take memory only if an update's mapping
    makes them when it is asked (as it does for halves that travelled instead of float32).

    Args:
        updates: Read once.
        rule: Whose table it is, for errors.
        at_least: Rows that the rule needs, >= 1.
        because: How `at_least` comes about, such as ``2f + 3 with f = 1``.

    Raises:
        TooFew: there are fewer updates, or no array.
        AggregationError: updates differ in names (shapes and dtypes: when they are read).
    """

    def __init__(self, updates: Iterable[Update], rule: str, at_least: int = 1, because: str = "") -> None:
        self.updates, self.rule = list(updates), rule
        if len(self.updates) < at_least:
            raise TooFew(
                f"{rule}: {len(self.updates)} usable updates, expected at least {at_least}"
                + (f" ({because}): ask more clients or set a smaller f (num_byzantine)" if because else "")
            )
        first = self.updates[0].delta
        self.layout = _layout(first)
        if not self.layout:
            raise TooFew(f"{rule}: no update with a floating-point array to combine")
        for update in self.updates[1:]:
            for name in sorted(self.layout.keys() - set(update.delta)):
                raise differs(update, name, None, self.layout[name])
            for name in sorted(set(update.delta) - set(first)):
                raise differs(update, name, (update.delta[name].shape, update.delta[name].dtype), None)
        self._open = "", list[Read]()

    def __len__(self) -> int:
        """The number of rows."""
        return len(self.updates)

    def readers(self, name: str) -> Sequence[Read]:
        """One per row; arrays of another name are let go."""
        if self._open[0] != name or not self._open[1]:
            self.close()
            self._open = name, [self._reader(update, name) for update in self.updates]
        return self._open[1]

    def close(self) -> None:
        """Let all arrays go; those in files are unmapped."""
        if self._open[1]:
            self._open = "", []
            rest(*(update.delta for update in self.updates))

    def _reader(self, update: Update, name: str) -> Read:
        if isinstance(update.delta, Rows):
            return update.delta.reader(name)
        array = update.delta[name]
        if (array.shape, array.dtype) != self.layout[name]:
            raise differs(update, name, (array.shape, array.dtype), self.layout[name])
        flat = array.reshape(-1)
        return lambda begin, end: flat[begin:end]

    def blocks(self) -> Iterator[tuple[str, slice, Array]]:
        """Name, columns and values, (rows, columns) in float32 or float64; the caller may change the values."""
        columns = max(_MIN_COLUMNS, _BLOCK_ELEMENTS // len(self))
        for name, (shape, dtype) in self.layout.items():
            size = _size(shape)
            for begin in range(0, size, columns):
                end = min(begin + columns, size)
                block = np.empty((len(self), end - begin), wide(dtype))
                for row, read in zip(block, self.readers(name), strict=True):
                    row[:] = read(begin, end)
                yield name, slice(begin, end), block
        self.close()

    def reduced(self, reduce: Reduce) -> Params:
        """One delta from all rows, block by block, in the updates' dtypes.

        Raises:
            AggregationError: it does not fit into a dtype.
        """
        result = {name: np.zeros(shape, dtype) for name, (shape, dtype) in self.layout.items()}
        for name, columns, block in self.blocks():
            with np.errstate(over="ignore", invalid="ignore"):
                result[name].reshape(-1)[columns] = reduce(block).astype(result[name].dtype)
        for name, array in result.items():
            if not all_finite(array):
                raise AggregationError(
                    f"{self.rule}: the combined {name!r} is not finite in {array.dtype}: a delta is too large, "
                    "lower the learning rate or bound the updates' norm (cohort.max_update_norm)"
                )
        return result

    def combined(self, weights: Array, total: float = 1.0) -> Params:
        """``sum_i weights[i] * row_i / total``, in cohort order."""
        return self.reduced(lambda block: weighted_sum(block, weights) / total)

    def mixed(self, update: Update, weights: Array, total: float) -> Update:
        """`update`, with ``sum_i weights[i] * row_i / total`` as its delta, computed as it is read."""
        return replace(update, delta=Rows(self, weights, total))


class Rows(Mapping[str, Array]):
    """A weighted mean of a table's rows, as named arrays that are computed when they are read."""

    def __init__(self, table: Table, weights: Array, total: float) -> None:
        self._table, self._weights, self._total = table, np.asarray(weights, np.float64), total

    def reader(self, name: str) -> Read:
        """Elements of an array in float32 or wider: a mean of halves is not rounded to halves."""
        dtype, used = wide(self._table.layout[name][1]), np.flatnonzero(self._weights).tolist()

        def read(begin: int, end: int) -> Array:
            readers = self._table.readers(name)
            rows = (readers[row](begin, end) for row in used)
            return np.asarray(weighted_sum(rows, self._weights[used], end - begin) / self._total, dtype)

        return read

    def rest(self) -> None:
        """Let the table's arrays go."""
        self._table.close()

    def __getitem__(self, name: str) -> Array:
        shape, dtype = self._table.layout[name]
        return np.asarray(self.reader(name)(0, _size(shape)), dtype).reshape(shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self._table.layout)

    def __len__(self) -> int:
        return len(self._table.layout)


def weighted_sum(rows: Iterable[Array], weights: Array, columns: int | None = None) -> Array:
    """``sum_i weights[i] * rows[i]`` in float64, row after row: the same bits on every machine.

    A row of weight 0 is not looked at, so that what is infinite there can't spoil the sum.
    """
    total: Array | None = None if columns is None else np.zeros(columns)
    for row, weight in zip(rows, weights, strict=True):
        total = np.zeros(row.size) if total is None else total
        if weight:
            total += np.multiply(row, weight, dtype=np.float64)
    assert total is not None
    return total


def ordered(block: Array) -> Array:
    """Each column's values from the smallest to the largest, (rows, columns); the order of the rows is forgotten.

    NumPy sorts numbers that lie side by side several times as fast as it partitions them.
    """
    columns = np.array(block.T, order="C")
    columns.sort(axis=1)
    return columns.T


def require_count(rule: str, name: str, value: int, least: int = 0) -> None:
    """Refuse a parameter of an aggregator that is not a whole number of at least `least`.

    Raises:
        StrategyError: naming the rule and its parameter.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise StrategyError(f"aggregation {rule}: {name} must be a whole number >= {least}, found {value!r}")


def _size(shape: tuple[int, ...]) -> int:
    return int(np.prod(shape, dtype=np.int64))


def _layout(delta: Params) -> dict[str, Layout]:
    if isinstance(delta, Rows):
        return dict(delta._table.layout)
    arrays = ((name, delta[name]) for name in delta)
    return {name: (array.shape, array.dtype) for name, array in arrays if is_float(array)}
