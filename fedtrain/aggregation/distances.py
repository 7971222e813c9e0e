"""Distances between the rows of a table, summed over all arrays in float64.

They come from differences, not from inner products: next to an outlier of 1e30, or far from the origin, products would
cancel. Each is the same, bit for bit, whatever the order of the rows. A square beyond float64 is infinite.
"""

import numpy as np

from fedtrain.aggregation.table import Reduce, Table, weighted_sum
from fedtrain.types import Array


def pairwise_squared(table: Table) -> Array:
    """``||row_i - row_j||**2``, (rows, rows); reads the table once."""
    squares = np.zeros((len(table), len(table)))
    for _, _, block in table.blocks():
        rows = block.astype(np.float64, copy=False)
        for i in range(len(table) - 1):
            squares[i, i + 1 :] += _row_squares(rows[i + 1 :], rows[i])
    return squares + squares.T


def norms(table: Table) -> Array:
    """``||row_i||``, (rows,)."""
    return distances(table, lambda block: np.zeros(block.shape[1]))


def distances_to_sum(table: Table, weights: Array) -> Array:
    """``||row_i - sum_j weights[j] * row_j||``, (rows,)."""
    return distances(table, lambda block: weighted_sum(block, weights))


def distances(table: Table, point: Reduce) -> Array:
    """``||row_i - point(block)||``, (rows,); reads the table once."""
    squares = np.zeros(len(table))
    for _, _, block in table.blocks():
        squares += _row_squares(block, np.asarray(point(block), np.float64))
    return np.sqrt(squares)


def _row_squares(rows: Array, point: Array) -> Array:
    with np.errstate(over="ignore"):
        differences = rows - point
        np.square(differences, out=differences)
        # np.sum adds the elements of a row in an order that depends on their number alone.
        return np.asarray(differences.sum(axis=1))
