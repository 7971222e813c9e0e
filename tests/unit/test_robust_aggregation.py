"""Robust aggregators against known answers, numbers worked out by hand, and plain references."""

import tracemalloc
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest

from fedtrain.aggregation import (
    Aggregator,
    bucketing,
    bulyan,
    by_examples,
    centred_clipping,
    equally,
    geometric_median,
    krum,
    median,
    multi_krum,
    nearest_neighbour_mixing,
    norm_bounding,
    trimmed_mean,
    weighted_mean,
)
from fedtrain.aggregation import table as tables
from fedtrain.aggregation.distances import pairwise_squared
from fedtrain.aggregation.table import Table, weighted_sum
from fedtrain.errors import AggregationError, StrategyError, TooFew
from fedtrain.params import BFLOAT16, write_file
from fedtrain.stored import Stored
from fedtrain.testing import cohort_of, update_of
from fedtrain.types import Array, Update

Rows = Sequence[Sequence[float]]

FIVE: Rows = [(1, 2, 3), (1.1, 2.1, 3.1), (0.9, 1.9, 2.9), (1.2, 2.2, 3.2), (100, -100, 100)]
"""Four honest clients and one that is not."""


def updates_of(rows: "Rows | Array", dtype: "np.dtype | str" = "f8") -> list[Update]:
    """One update per row; its numbers lie in two arrays, so that distances must be summed over arrays."""
    table = np.asarray(rows, dtype)
    return [update_of({"w": row[:1], "b": row[1:]}, client=f"c{index}") for index, row in enumerate(table)]


def combined(rule: Aggregator, rows: "Rows | Array", dtype: "np.dtype | str" = "f8") -> list[float]:
    result = rule(updates_of(rows, dtype), cohort_of(len(rows)))
    return [*result["w"].tolist(), *result["b"].tolist()]


# Known answers


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        (weighted_mean(equally), (20.84, -18.36, 22.44)),
        (median(), (1.1, 2.0, 3.1)),
        (trimmed_mean(1), (1.1, 2.0, 3.1)),
        (multi_krum(1), (1.05, 2.05, 3.05)),
        (geometric_median(num_steps=1000, tolerance=1e-14), (1.09811085, 2.07962835, 3.09792695)),
        (centred_clipping(1.0), (0.33459632, 0.31339992, 0.75408373)),
        (norm_bounding(), (1.28106829, 1.1718425, 2.86513346)),
        (nearest_neighbour_mixing(1, trimmed_mean(1)), (1.05, 2.05, 3.05)),
    ],
    ids=[
        "mean", "median", "trimmed_mean", "multi_krum", "geometric_median", "centred_clipping", "norm_bounding", "nnm"
    ],
)  # fmt: skip
def test_the_known_answers_with_one_attacker_of_five(rule: Aggregator, expected: tuple[float, ...]) -> None:
    assert combined(rule, FIVE) == pytest.approx(expected, abs=6e-9)


def test_the_known_answers_of_three_vectors_on_a_line() -> None:
    rows = [(1, 2, 3), (4, 5, 6), (7, 8, 9)]
    for rule in (median(), weighted_mean(equally), geometric_median(), trimmed_mean(1)):
        assert combined(rule, rows) == [4, 5, 6]
    for rule in (krum(1), multi_krum(1)):  # Krum asks for 2f + 3
        with pytest.raises(TooFew, match=r"3 usable updates, expected at least 5 \(2f \+ 3 with f = 1\)"):
            combined(rule, rows)


# Order statistics


def test_the_median_of_an_even_number_is_the_mean_of_the_two_in_the_middle() -> None:
    assert combined(median(), [(1, 8), (9, 2), (3, 4), (2, 100)]) == [2.5, 6.0]


def test_the_trimmed_mean_drops_f_values_on_each_side_of_each_element() -> None:
    rows = [(1, 50), (2, 40), (4, 30), (90, 20), (-90, 10), (9, -1), (0, 999)]
    assert combined(trimmed_mean(2), rows) == [pytest.approx(7 / 3), 30.0]  # (1 + 2 + 4) / 3, (20 + 30 + 40) / 3
    assert combined(trimmed_mean(0), rows[:4]) == [24.25, 35.0]


# Krum


def test_krum_takes_the_update_whose_nearest_two_are_nearest() -> None:
    # Squares to the nearest two: 0: 1 + 6.25, 1: 1 + 2.25, 2.5: 0.25 + 2.25, 3: 0.25 + 4.
    assert combined(krum(1), [(0, 0), (1, 0), (2.5, 0), (3, 0), (50, 0)]) == [2.5, 0]


def test_equal_scores_are_decided_by_the_distance_to_all_others() -> None:
    # One neighbour each: 0 and 1 are nearest to one another, and 1 is nearer to 3.
    assert combined(krum(0), [(0, 0), (1, 0), (3, 0)]) == [1, 0]
    assert combined(krum(0), [(3, 0), (1, 0), (0, 0)]) == [1, 0]


def reference_scores(rows: Array, f: int) -> list[float]:
    """Krum's scores, from its definition: the sum over the best choice of n - f - 2 others, tried one by one."""
    scores = []
    for i in range(len(rows)):
        others = [j for j in range(len(rows)) if j != i]
        count = max(1, len(rows) - f - 2)
        sums = (sum(float(((rows[i] - rows[j]) ** 2).sum()) for j in group) for group in combinations(others, count))
        scores.append(min(sums))
    return scores


def reference_bulyan(rows: Array, f: int) -> Array:
    """Bulyan by trying, for each element, every group of theta - 2f values."""
    theta, left, chosen = len(rows) - 2 * f, list(range(len(rows))), list[int]()
    while len(chosen) < theta:
        if len(left) == 1:
            chosen += left
            break
        scores = reference_scores(rows[left], f)
        totals = [float(((rows[left] - rows[i]) ** 2).sum()) for i in left]
        best = min(range(len(left)), key=lambda k: (round(scores[k], 9), totals[k]))
        chosen.append(left.pop(best))
    result = []
    for column in rows[chosen].T:
        groups = combinations(column.tolist(), theta - 2 * f)
        group = min(groups, key=lambda values: sum(abs(value - float(np.median(column))) for value in values))
        result.append(sum(group) / len(group))
    return np.array(result)


@pytest.mark.parametrize("seed", range(20))
def test_krum_and_bulyan_are_what_their_definitions_say(seed: int) -> None:
    random = np.random.default_rng(seed)
    f = seed % 3
    n = int(random.integers(4 * f + 3, 4 * f + 5))
    rows = random.normal(size=(n, 3))
    rows[:f] += 5
    scores = reference_scores(rows, f)
    totals = [float(((rows - row) ** 2).sum()) for row in rows]
    order = sorted(range(n), key=lambda k: (round(scores[k], 9), totals[k]))
    assert combined(krum(f), rows) == rows[order[0]].tolist()
    for m in (1, 2, n - f):
        assert combined(multi_krum(f, m), rows) == pytest.approx(rows[order[:m]].mean(0), abs=1e-12)
    assert combined(multi_krum(f), rows) == combined(multi_krum(f, n - f), rows)
    assert combined(bulyan(f), rows) == pytest.approx(reference_bulyan(rows, f), abs=1e-12)


def test_distances_far_from_the_origin_and_next_to_an_outlier_are_exact() -> None:
    rows = np.array([[1e8, 0.0], [1e8 + 1, 0.0], [1e8 + 3, 2.0], [1e30, 0.0]])
    squares = pairwise_squared(Table(updates_of(rows), "test"))
    assert squares[:3, :3].tolist() == [[0, 1, 13], [1, 0, 8], [13, 8, 0]]
    assert squares[3, :3].tolist() == [1e30**2] * 3
    halves = pairwise_squared(Table(updates_of([[0, 0], [1e30, 0], [0, 1 + 2**-20]], "f4"), "test"))
    assert halves[0].tolist() == [0, float(np.float32(1e30)) ** 2, (1 + 2**-20) ** 2]  # beyond what float32 holds


# The geometric median


def gradient(rows: Array, point: Array, weights: Array) -> Array:
    """Of the weighted sum of distances."""
    away = point - rows
    return np.asarray((weights[:, None] * away / np.linalg.norm(away, axis=1)[:, None]).sum(0))


def test_at_the_geometric_median_the_pulls_of_all_clients_balance() -> None:
    random = np.random.default_rng(0)
    rows, counts = random.normal(size=(7, 3)), np.array([1, 2, 3, 1, 2, 3, 1])
    updates = [replace(update, num_examples=int(n)) for update, n in zip(updates_of(rows), counts, strict=True)]
    for weight, weights in ((equally, np.ones(7)), (by_examples, counts)):
        result = geometric_median(weight, num_steps=2000, tolerance=0.0)(updates, cohort_of(7))
        point = np.concatenate([result["w"], result["b"]])
        assert np.abs(gradient(rows, point, weights)).max() < 1e-9


def test_clients_that_agree_have_their_own_delta_as_geometric_median_to_the_last_bit() -> None:
    for value in np.random.default_rng(0).normal(size=50):
        assert combined(geometric_median(), [(value, -value)] * 7) == [value, -value]


def test_one_step_of_weiszfeld_by_hand() -> None:
    # From the median 1: distances 1, 0 (counts as 0.5) and 3, so pulls 1, 2 and 1/3.
    rule = geometric_median(smoothing=0.5, num_steps=1)
    assert combined(rule, [(0, 0), (1, 0), (4, 0)]) == [pytest.approx((2 + 4 / 3) / (1 + 2 + 1 / 3)), 0]


def test_an_update_without_weight_has_no_part_in_the_geometric_median_not_even_at_its_start() -> None:
    rows = [(1, 0), (2, 0), (4, 1), (9, 9), (9, 9), (9, 9)]
    updates = [replace(update, num_examples=int(index < 3)) for index, update in enumerate(updates_of(rows))]
    rule = geometric_median(by_examples, num_steps=1)
    expected = rule(updates[:3], cohort_of(3))
    assert {name: array.tolist() for name, array in rule(updates, cohort_of(6)).items()} == {
        name: array.tolist() for name, array in expected.items()
    }
    with pytest.raises(TooFew, match="sum to zero"):
        rule(updates[3:], cohort_of(3))


def test_weights_that_are_negative_or_not_finite_are_refused() -> None:
    for bad in (-1.0, float("nan"), float("inf")):
        for rule in (geometric_median(lambda update, cohort, w=bad: w), norm_bounding(weight=lambda u, c, w=bad: w)):  # type: ignore[misc]
            with pytest.raises(AggregationError, match=r"client c0: weight .*, expected a finite number >= 0"):
                combined(rule, FIVE)


# Clipping


def test_centred_clipping_moves_its_centre_step_by_step() -> None:
    rows = [(3, 4), (0, 0), (0, 0), (0, 1)]
    # 5 is clipped to 2.5: (1.5, 2) and (0, 1), over 4.
    assert combined(centred_clipping(2.5), rows) == [0.375, 0.75]
    expected = np.zeros(2)
    for _ in range(4):
        away = np.array(rows) - expected
        lengths = np.linalg.norm(away, axis=1, keepdims=True)
        expected = expected + (away * np.minimum(1, 2.5 / lengths.clip(1e-300))).mean(0)
    assert combined(centred_clipping(2.5, num_steps=4), rows) == pytest.approx(expected, abs=1e-12)


def test_norms_are_bounded_and_then_weighted() -> None:
    rows = [(3, 4), (0, 2), (0, 0)]
    assert combined(norm_bounding(2.5), rows) == pytest.approx([0.5, 4 / 3])  # (1.5, 2), (0, 2), (0, 0)
    updates = [replace(update, num_examples=n) for update, n in zip(updates_of(rows), (1, 3, 0), strict=True)]
    result = norm_bounding(2.5, weight=by_examples)(updates, cohort_of(3))
    assert [result["w"].tolist(), result["b"].tolist()] == [[0.375], [2.0]]
    assert combined(norm_bounding(), rows) == pytest.approx([0.4, 1.2])  # median norm 2: (1.2, 1.6), (0, 2)


# Before a rule


def test_mixing_gives_the_rule_means_over_nearest_neighbours() -> None:
    seen: list[Update] = []

    def note(updates: Iterator[Update], cohort: object) -> Mapping[str, Array]:
        seen.extend(updates)
        return {}

    rows = [(0, 0), (1, 0), (3, 0), (10, 0)]
    nearest_neighbour_mixing(1, Aggregator(note))(updates_of(rows), cohort_of(4))  # type: ignore[arg-type]
    assert [update.delta["w"].item() for update in seen] == pytest.approx([4 / 3, 4 / 3, 4 / 3, 14 / 3])
    assert [update.task.client for update in seen] == ["c0", "c1", "c2", "c3"]
    assert [list(update.delta) for update in seen] == [["w", "b"]] * 4


def test_buckets_are_random_means_that_the_cohorts_entropy_decides() -> None:
    seen: list[Update] = []

    def note(updates: Sequence[Update], cohort: object) -> Mapping[str, Array]:
        seen[:] = updates
        return {}

    rows = [(float(2**index), 0) for index in range(5)]
    orders = set()
    for entropy in range(20):
        bucketing(2, Aggregator(note))(updates_of(rows), cohort_of(5, entropy=entropy))  # type: ignore[arg-type]
        found = [update.delta["w"].item() for update in seen]
        again = bucketing(2, median())
        assert again(updates_of(rows), cohort_of(5, entropy=entropy))["w"] == np.median(found)
        assert [update.num_examples for update in seen] == [2, 2, 1]
        assert 2 * found[0] + 2 * found[1] + found[2] == 31  # each update is in one bucket
        orders.add(tuple(found))
    assert len(orders) > 10


def test_a_mean_of_halves_is_not_rounded_before_the_rule_sees_it() -> None:
    # 1 + 3 e / 4 rounds up to 1 + e; each bucket's mean rounded to halves before, it would end at 1.
    e = 2.0**-10
    rows = [(1, 1), (1 + e, 1), (1 + e, 1), (1 + e, 1)]
    assert combined(bucketing(2, trimmed_mean(0)), rows, "f2") == [1 + e, 1]


def test_mixing_and_bucketing_can_be_nested() -> None:
    rule = bucketing(1, nearest_neighbour_mixing(1, trimmed_mean(1)))
    assert combined(rule, FIVE) == pytest.approx((1.05, 2.05, 3.05))


# Too few


@pytest.mark.parametrize(
    ("rule", "needed", "words"),
    [
        (median(), 1, "median"),
        (trimmed_mean(2), 5, r"trimmed_mean: 4 usable updates, expected at least 5 \(2f \+ 1 with f = 2\)"),
        (krum(2), 7, r"krum: 6 usable updates, expected at least 7 \(2f \+ 3 with f = 2\)"),
        (multi_krum(1), 5, r"multi_krum: 4 usable updates, expected at least 5"),
        (multi_krum(1, 7), 8, r"multi_krum: 7 usable updates, expected at least 8 \(num_selected = 7 and f = 1\)"),
        (bulyan(1), 7, r"bulyan: 6 usable updates, expected at least 7 \(4f \+ 3 with f = 1\)"),
        (geometric_median(), 1, "geometric_median"),
        (centred_clipping(1.0), 1, "centred_clipping"),
        (norm_bounding(), 1, "norm_bounding"),
        (nearest_neighbour_mixing(2, median()), 5, r"mixing: 4 usable updates, expected at least 5 \(2f \+ 1"),
        (
            nearest_neighbour_mixing(1, krum(1)),
            5,
            r"mixing: 4 usable updates, expected at least 5 \(as many as its rule",
        ),
        (bucketing(2, krum(1)), 9, r"8 usable updates make 4 buckets of 2, expected at least 5 buckets \(9 updates\)"),
    ],
)
def test_a_rule_refuses_fewer_updates_than_it_needs_and_says_so_before(
    rule: Aggregator, needed: int, words: str
) -> None:
    assert rule.min_updates == needed
    rows = np.random.default_rng(0).normal(size=(needed, 2))
    combined(rule, rows)
    with pytest.raises(TooFew, match=words):
        rule(updates_of(rows[:-1]), cohort_of(needed))


def test_without_floating_point_arrays_there_is_nothing_to_combine() -> None:
    with pytest.raises(TooFew, match="no update with a floating-point array"):
        median()([update_of({"n": np.array([3])})], cohort_of(1))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: trimmed_mean(-1), "trimmed_mean: num_byzantine must be a whole number >= 0, found -1"),
        (lambda: krum(1.5), "krum: num_byzantine must be a whole number >= 0, found 1.5"),  # type: ignore[arg-type]
        (lambda: multi_krum(-1), "multi_krum: num_byzantine"),
        (lambda: multi_krum(1, 0), "multi_krum: num_selected must be a whole number >= 1, found 0"),
        (lambda: bulyan(True), "bulyan: num_byzantine"),
        (lambda: nearest_neighbour_mixing(-1, median()), "nearest_neighbour_mixing: num_byzantine"),
        (lambda: bucketing(0, median()), "bucketing: size must be a whole number >= 1, found 0"),
        (lambda: geometric_median(smoothing=0.0), "smoothing must be finite and > 0, found 0.0"),
        (lambda: geometric_median(tolerance=float("nan")), "tolerance must be >= 0, found nan"),
        (lambda: geometric_median(num_steps=0), "num_steps must be a whole number >= 1"),
        (lambda: centred_clipping(0.0), "radius must be finite and > 0, found 0.0"),
        (lambda: centred_clipping(1.0, num_steps=0), "num_steps"),
        (lambda: norm_bounding(float("inf")), "max_norm must be finite and > 0 or null, found inf"),
    ],
)
def test_numbers_out_of_range_are_refused_when_the_rule_is_built(make: "object", words: str) -> None:
    with pytest.raises(StrategyError, match=words):
        make()  # type: ignore[operator]


# The table


def test_updates_that_differ_in_layout_are_refused() -> None:
    first = {"a": np.zeros(2), "b": np.zeros(1)}
    for second, found in (
        ({"a": np.zeros(2)}, "'b' is missing, in the updates before it float64(1,)"),
        ({**first, "c": np.zeros(1)}, "'c' is float64(1,), in the updates before it missing"),
        ({"a": np.zeros((2, 1)), "b": np.zeros(1)}, "'a' is float64(2, 1), in the updates before it float64(2,)"),
        ({"a": np.zeros(2, "f4"), "b": np.zeros(1)}, "'a' is float32(2,), in the updates before it float64(2,)"),
    ):
        for rule in (median(), nearest_neighbour_mixing(0, median())):
            with pytest.raises(AggregationError) as caught:
                rule([update_of(first), update_of(second, client="c7")], cohort_of(2))
            assert str(caught.value).startswith("client c7, round 1: ")
            assert found in str(caught.value)


def test_a_block_of_columns_at_a_time_gives_what_all_at_once_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = np.random.default_rng(0).normal(size=(7, 101)).astype(np.float32)
    rules = [median(), trimmed_mean(2), krum(2), bulyan(1), centred_clipping(1.0), bucketing(2, median())]
    rules += (nearest_neighbour_mixing(2, trimmed_mean(2)), geometric_median(num_steps=3), norm_bounding())
    whole = [combined(rule, rows, "f4") for rule in rules]
    monkeypatch.setattr(tables, "_MIN_COLUMNS", 7)
    monkeypatch.setattr(tables, "_BLOCK_ELEMENTS", 1)
    for rule, expected in zip(rules, whole, strict=True):
        assert combined(rule, rows, "f4") == pytest.approx(expected, rel=1e-6), rule


@pytest.mark.parametrize("dtype", [np.dtype("f2"), BFLOAT16, np.dtype("f4"), np.dtype("f8")], ids=str)
def test_a_weighted_sum_is_made_in_float64_and_skips_rows_without_weight(dtype: np.dtype) -> None:
    rows = np.array([[1.0, 2.0], [np.inf, np.nan], [0.5, -1.0]], dtype)
    result = weighted_sum(rows, np.array([0.1, 0.0, 2.0]))
    assert result.tolist() == [1.1, 0.2 - 2.0]
    assert result.dtype == np.float64


def test_memory_does_not_grow_with_the_number_of_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "_MIN_COLUMNS", 2**10)
    monkeypatch.setattr(tables, "_BLOCK_ELEMENTS", 2**13)

    class Layers(Mapping[str, Array]):
        """Each layer is made when it is asked for."""

        def __init__(self, count: int, value: float) -> None:
            self.count, self.value = count, value

        def __getitem__(self, name: str) -> Array:
            return np.full(2**12, self.value, np.float16)

        def __iter__(self) -> Iterator[str]:
            return (f"w{number}" for number in range(self.count))

        def __len__(self) -> int:
            return self.count

    def peak(rule: Aggregator, count: int) -> int:
        updates = [update_of(Layers(count, value)) for value in range(7)]
        tracemalloc.start()
        try:
            rule(updates, cohort_of(7))
            return tracemalloc.get_traced_memory()[1] - count * 2**13  # without the result
        finally:
            tracemalloc.stop()

    for rule in (median(), krum(1), bulyan(1), geometric_median(), nearest_neighbour_mixing(1, trimmed_mean(1))):
        peak(rule, 1)
        few, many = peak(rule, 2), peak(rule, 32)
        assert few > 7 * 2**13  # one layer of the cohort: the measurement sees arrays at all
        assert many < 1.3 * few


def test_updates_in_files_are_combined_and_rest_afterwards(tmp_path: Path) -> None:
    rows = np.random.default_rng(0).normal(size=(5, 4)).astype(np.float32)
    plain, stored = updates_of(rows), list[Update]()
    for index, update in enumerate(plain):
        write_file(tmp_path / str(index), update.delta)
        stored.append(replace(update, delta=Stored(tmp_path / str(index), max_header_bytes=10_000)))
    for rule in (median(), krum(1), nearest_neighbour_mixing(1, trimmed_mean(1)), bucketing(2, median())):
        for update in stored:
            update.delta.rest()  # type: ignore[attr-defined]
        one, two = (rule(updates, cohort_of(5)) for updates in (plain, stored))
        assert {name: array.tolist() for name, array in one.items()} == {
            name: array.tolist() for name, array in two.items()
        }
        assert not any(update.delta._awake for update in stored)  # type: ignore[attr-defined]


def test_a_result_beyond_its_dtype_is_refused_without_a_warning() -> None:
    for rule in (median(), trimmed_mean(0), bulyan(0)):
        with pytest.raises(AggregationError, match="the combined 'w' is not finite in float64"):
            combined(rule, [(1.7e308, 0)] * 4)
    with pytest.raises(AggregationError, match="too far apart"):
        combined(geometric_median(), [(1e200, 0), (-1e200, 0)])
