"""Updates are averaged in random groups before a rule combines them."""

from collections.abc import Iterable

import numpy as np

from fedtrain.aggregation.aggregator import Aggregator
from fedtrain.aggregation.table import Table, require_count
from fedtrain.errors import TooFew
from fedtrain.random import generator
from fedtrain.types import Cohort, Params, Update


def bucketing(size: int, rule: Aggregator) -> Aggregator:
    """Put the updates into random buckets and apply a rule to the buckets' means.

        delta = rule(y_1 .. y_m),  m = ceil(n / s),  y_i = mean of the updates pi(s (i - 1) + 1) .. pi(min(s i, n))

    Bucket means differ less than clients do, but f attackers can spoil f of m buckets: the rule must stand f of m, so
    with s = 2 and a rule for f < m / 2, f < n / 4. The permutation comes from the cohort's entropy. A bucket counts
    as one update, with the sum of its updates' examples.

    Args:
        size: s >= 1, updates in a bucket (the last may have fewer); 1 only shuffles.
        rule: What combines the buckets: another aggregator, robust against f of m.

    Raises:
        StrategyError: `size` is less than 1 or not a whole number.
        TooFew: (when it runs) there are fewer buckets than the rule needs.
        AggregationError: (when it runs) updates differ in names, shapes or dtypes.

    Source: Karimireddy, He, Jaggi, Byzantine-Robust Learning on Heterogeneous Datasets via Bucketing, ICLR 2022,
    arXiv:2006.09365, Algorithm 1.

    >>> from fedtrain.aggregation.median import median
    >>> from fedtrain.testing import cohort_of, update_of
    >>> updates = [update_of({"w": np.array([1.0])}) for _ in range(5)]
    >>> bucketing(2, median())(updates, cohort_of(5))
    {'w': array([1.])}
    """
    require_count("bucketing", "size", size, 1)
    needed = size * (rule.min_updates - 1) + 1

    def combine(updates: Iterable[Update], cohort: Cohort) -> Params:
        table = Table(updates, "bucketing")
        if len(table) < needed:
            raise TooFew(
                f"bucketing: {len(table)} usable updates make {-(-len(table) // size)} buckets of {size}, expected at "
                f"least {rule.min_updates} buckets ({needed} updates) for the rule: ask more clients"
            )
        order = generator(cohort.entropy, "bucketing").permutation(len(table))
        return rule([_mean(table, order[begin : begin + size]) for begin in range(0, len(table), size)], cohort)

    return Aggregator(combine, rule.weight, needed, rule.uses_all)


def _mean(table: Table, rows: np.ndarray) -> Update:
    weights = np.zeros(len(table))
    weights[rows] = 1.0
    chosen = [table.updates[row] for row in rows]
    mean = table.mixed(chosen[0], weights, len(chosen))
    return Update(mean.task, mean.delta, sum(update.num_examples for update in chosen), chosen[0].num_steps)
