"""Updates are averaged with their nearest neighbours before a rule combines them."""

from collections.abc import Iterable

import numpy as np

from fedtrain.aggregation.aggregator import Aggregator
from fedtrain.aggregation.distances import pairwise_squared
from fedtrain.aggregation.table import Table, require_count
from fedtrain.types import Cohort, Params, Update


def nearest_neighbour_mixing(num_byzantine: int, rule: Aggregator) -> Aggregator:
    """Replace each update by the mean of the n - f that are nearest to it, itself among them, then apply a rule.

        delta = rule(y_1 .. y_n),  y_k = (1 / (n - f)) * sum of the n - f updates nearest to delta_k

    Robust rules fail where honest clients differ much; mixed updates differ less. Of equally near updates the first of
    the cohort are taken. The rule sees as many updates as there were, with their numbers of examples; mixed arrays are
    computed as it reads them, which costs n - f reads of each update, and never held.

    Args:
        num_byzantine: f, how many clients of a cohort may send anything, >= 0.
        rule: What combines the mixed updates: another aggregator, robust against the same f.

    Raises:
        StrategyError: `num_byzantine` is negative or not a whole number.
        TooFew: (when it runs) there are fewer than 2f + 1 updates, or fewer than the rule needs.
        AggregationError: (when it runs) updates differ in names, shapes or dtypes.

    Source: Allouah et al., Fixing by Mixing: A Recipe for Optimal Byzantine ML under Heterogeneity, AISTATS 2023,
    arXiv:2302.01772, the procedure NNM.

    >>> from fedtrain.aggregation.trimmed_mean import trimmed_mean
    >>> from fedtrain.testing import cohort_of, update_of
    >>> updates = [update_of({"w": np.array([number])}) for number in (1.0, 2.0, 3.0, 1e30)]
    >>> nearest_neighbour_mixing(1, trimmed_mean(1))(updates, cohort_of(4))
    {'w': array([2.])}
    """
    f = num_byzantine
    require_count("nearest_neighbour_mixing", "num_byzantine", f)
    needed = max(2 * f + 1, rule.min_updates)
    because = f"2f + 1 with f = {f}" if needed > rule.min_updates else f"as many as its rule, with f = {f}"

    def combine(updates: Iterable[Update], cohort: Cohort) -> Params:
        table = Table(updates, "nearest_neighbour_mixing", needed, because)
        count = len(table) - f
        nearest = np.argsort(pairwise_squared(table), axis=1, kind="stable")[:, :count]
        weights = np.zeros((len(table), len(table)))
        np.put_along_axis(weights, nearest, 1.0, axis=1)
        rows = zip(table.updates, weights, strict=True)
        return rule([table.mixed(update, row, count) for update, row in rows], cohort)

    return Aggregator(combine, rule.weight, needed, rule.uses_all)
