"""Krum: the update that is closest to most of the others, or the mean of several such."""

from collections.abc import Iterable

import numpy as np

from fedtrain.aggregation.aggregator import Aggregator
from fedtrain.aggregation.distances import pairwise_squared
from fedtrain.aggregation.table import Table, require_count
from fedtrain.errors import TooFew
from fedtrain.types import Array, Cohort, Params, Update


def krum(num_byzantine: int) -> Aggregator:
    """Take the one update whose nearest neighbours are nearest.

        delta = delta_k with the least s(k) = sum of ||delta_k - delta_j||**2 over the n - f - 2 nearest j

    Equal scores are decided by the sum over all other updates, then by the cohort's order. Distances are over all
    floating-point arrays, buffers too. Every update counts once. Where clients' data differ much the result is one
    client's optimum: prefer `multi_krum`, or mix before (`nearest_neighbour_mixing`).

    Args:
        num_byzantine: f, how many clients of a cohort may send anything, >= 0.

    Raises:
        StrategyError: `num_byzantine` is negative or not a whole number.
        TooFew: (when it runs) there are fewer than 2f + 3 updates.
        AggregationError: (when it runs) updates differ in names, shapes or dtypes.

    Source: Blanchard et al., Machine Learning with Adversaries: Byzantine Tolerant Gradient Descent, NeurIPS 2017,
    arXiv:1703.02757, the Krum function.

    >>> from fedtrain.testing import cohort_of, update_of
    >>> updates = [update_of({"w": np.array([number])}) for number in (1.0, 2.0, 2.5, 5.0, 1e30)]
    >>> krum(1)(updates, cohort_of(5))
    {'w': array([2.])}
    """
    return _krum("krum", num_byzantine, 1)


def multi_krum(num_byzantine: int, num_selected: int | None = None) -> Aggregator:
    """Average the updates with the least scores, those of `krum`.

        delta = (1 / m) * sum of the m updates with the least s(k)

    Args:
        num_byzantine: f, how many clients of a cohort may send anything, >= 0.
        num_selected: m, in [1, n - f]; None: n - f, as most studies have it. The paper proves its bound for 1, and
            suggests at most n - f - 2.

    Raises:
        StrategyError: a number is out of its range.
        TooFew: (when it runs) there are fewer than 2f + 3 or m + f updates.
        AggregationError: (when it runs) updates differ in names, shapes or dtypes.

    Source: Blanchard et al., Machine Learning with Adversaries: Byzantine Tolerant Gradient Descent, NeurIPS 2017,
    arXiv:1703.02757, the variant Multi-Krum.

    >>> from fedtrain.testing import cohort_of, update_of
    >>> updates = [update_of({"w": np.array([number])}) for number in (1.0, 2.0, 2.5, 4.5, 1e30)]
    >>> multi_krum(1)(updates, cohort_of(5))
    {'w': array([2.5])}
    """
    if num_selected is not None:
        require_count("multi_krum", "num_selected", num_selected, 1)
    return _krum("multi_krum", num_byzantine, num_selected)


def _krum(rule: str, f: int, num_selected: int | None) -> Aggregator:
    require_count(rule, "num_byzantine", f)
    needed = max(2 * f + 3, f + (num_selected or 0))

    def combine(updates: Iterable[Update], cohort: Cohort) -> Params:
        table = Table(updates, rule, 2 * f + 3, f"2f + 3 with f = {f}")
        if len(table) < needed:
            raise TooFew(
                f"{rule}: {len(table)} usable updates, expected at least {needed} (num_selected = {num_selected} and "
                f"f = {f}): ask more clients or select fewer"
            )
        count = num_selected or len(table) - f
        best = ranked(pairwise_squared(table), len(table) - f - 2)[:count]
        weights = np.zeros(len(table))
        weights[best] = 1.0
        return table.combined(weights, count)

    return Aggregator(combine, min_updates=needed)


def ranked(squares: Array, num_neighbours: int) -> Array:
    """Rows by their score, the best first: the sum over so many nearest others.

    Args:
        squares: Squared distances, (rows, rows).
        num_neighbours: How many others, >= 1.
    """
    # Sorted before they are summed, so that a score does not depend on the order of the rows.
    nearest = np.sort(squares + np.diag(np.full(len(squares), -1.0)), axis=1)[:, 1:]  # without the row itself
    with np.errstate(over="ignore"):
        scores, totals = nearest[:, :num_neighbours].sum(axis=1), nearest.sum(axis=1)
    return np.lexsort((totals, scores))
