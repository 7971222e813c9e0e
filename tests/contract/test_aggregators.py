"""What every aggregator keeps to: one table, the same checks."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

import fedtrain.aggregation
from fedtrain.aggregation import (
    Aggregator,
    bucketing,
    bulyan,
    by_examples,
    centred_clipping,
    geometric_median,
    krum,
    median,
    multi_krum,
    nearest_neighbour_mixing,
    norm_bounding,
    normalised_mean,
    trimmed_mean,
    weighted_mean,
)
from fedtrain.check import largest_value
from fedtrain.config import build_strategy, compose
from fedtrain.errors import AggregationError, TooFew
from fedtrain.params import BFLOAT16, digest
from fedtrain.random import generator
from fedtrain.testing import cohort_of, update_of
from fedtrain.types import Array, Params, Update


@dataclass(frozen=True)
class Row:
    """An aggregator that stands one attacker of seven, and what is true of it."""

    rule: Aggregator
    any_order: bool = True
    """The order of the updates changes nothing, not one bit (for updates in which no two distances are equal)."""
    robust: bool = True
    """Moves by less than the honest clients' diameter whatever one of them sends."""
    translates: bool = True
    scales: bool = True


SUM = {"any_order": False}
TABLE = {
    "weighted_mean": Row(weighted_mean(), **SUM, robust=False),
    "normalised_mean": Row(normalised_mean(), **SUM, robust=False),
    "median": Row(median()),
    "trimmed_mean": Row(trimmed_mean(1)),
    "krum": Row(krum(1)),
    "multi_krum": Row(multi_krum(1), **SUM),
    "bulyan": Row(bulyan(1)),
    "geometric_median": Row(geometric_median(smoothing=1e-9, num_steps=100), **SUM),
    "geometric_median_by_examples": Row(geometric_median(by_examples), **SUM, scales=False),
    "centred_clipping": Row(centred_clipping(1.0), **SUM, robust=False, translates=False, scales=False),
    "norm_bounding": Row(norm_bounding(), **SUM, robust=False, translates=False),
    "norm_bounding_by_a_number": Row(norm_bounding(1.0), **SUM, robust=False, translates=False, scales=False),
    "nearest_neighbour_mixing": Row(nearest_neighbour_mixing(1, trimmed_mean(1)), **SUM),
    "nearest_neighbour_mixing_krum": Row(nearest_neighbour_mixing(1, krum(1)), **SUM),
    "bucketing": Row(bucketing(2, median()), **SUM),
}

every_rule = pytest.mark.parametrize("name", sorted(TABLE))
FLOATS = [np.dtype(np.float16), BFLOAT16, np.dtype(np.float32), np.dtype(np.float64)]


def with_(property: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("name", sorted(name for name, row in TABLE.items() if getattr(row, property)))


def honest(count: int = 7, seed: int = 0, dtype: "np.dtype | type" = np.float32) -> list[dict[str, Array]]:
    """Deltas around (1, 1, …), of two arrays."""
    random = np.random.default_rng(seed)
    return [
        {
            "w": (1 + 0.1 * random.normal(size=(4, 5))).astype(dtype),
            "b": (1 + 0.1 * random.normal(size=3)).astype(dtype),
        }
        for _ in range(count)
    ]


def updates_of(deltas: Sequence[Params], counts: Sequence[int] | None = None) -> list[Update]:
    counts = counts or [1] * len(deltas)
    pairs = zip(deltas, counts, strict=True)
    return [replace(update_of(delta, n, client=f"c{i}"), num_steps=2) for i, (delta, n) in enumerate(pairs)]


def combined(name: str, deltas: Sequence[Params], counts: Sequence[int] | None = None) -> Params:
    return TABLE[name].rule(updates_of(deltas, counts), cohort_of(len(deltas)))


def flat(delta: Params) -> Array:
    return np.concatenate([np.asarray(delta[name], np.float64).reshape(-1) for name in sorted(delta)])


def mapped(change: Callable[[Array], Array], deltas: Sequence[Params]) -> list[Params]:
    return [{name: np.asarray(change(array), array.dtype) for name, array in delta.items()} for delta in deltas]


# The folders


def test_every_aggregator_is_in_the_table_and_has_a_configuration_that_builds() -> None:
    parts = set(fedtrain.aggregation.__all__) - {"Aggregator", "DiscreteMean", "Weight", "by_examples", "equally"}
    assert parts == parts & TABLE.keys()
    folder = Path(__file__).parents[2] / "conf" / "aggregation"
    assert {path.stem for path in folder.glob("*.yaml")} == parts
    for part in sorted(parts):
        chosen = build_strategy(compose([f"aggregation={part}"])).aggregate
        updates, cohort = updates_of(honest()), cohort_of(7)
        assert (
            digest(chosen(updates, cohort)) == digest(TABLE[part].rule(updates, cohort)) or part == "geometric_median"
        )
        assert chosen.min_updates == TABLE[part].rule.min_updates


# Layout


@every_rule
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_names_shapes_and_dtypes_are_kept_also_of_empty_arrays_and_those_without_dimensions(
    name: str, dtype: np.dtype
) -> None:
    random = np.random.default_rng(0)
    shapes = {"w": (2, 3), "scalar": (), "empty": (0, 3), "one": (1,)}
    deltas = [{key: np.asarray(random.normal(size=shape), dtype) for key, shape in shapes.items()} for _ in range(7)]
    for delta in deltas:
        delta["other"] = np.ones(2, np.float32)
        delta["count"] = np.array(3)
        delta["mask"] = np.array([True])
    result = combined(name, deltas)
    assert {key: (array.shape, array.dtype) for key, array in result.items()} == {
        **{key: (shape, dtype) for key, shape in shapes.items()},
        "other": ((2,), np.dtype(np.float32)),
    }


@every_rule
def test_updates_are_left_as_they_are_and_do_not_share_memory_with_the_result(name: str) -> None:
    deltas = honest()
    for array in (array for delta in deltas for array in delta.values()):
        array.flags.writeable = False
    before = [digest(delta) for delta in deltas]
    result = combined(name, deltas)
    assert [digest(delta) for delta in deltas] == before
    assert not any(np.shares_memory(result[key], delta[key]) for key in result for delta in deltas)


@every_rule
def test_updates_may_come_one_by_one(name: str) -> None:
    updates, cohort = updates_of(honest()), cohort_of(7)
    assert digest(TABLE[name].rule(iter(updates), cohort)) == digest(TABLE[name].rule(updates, cohort))


# How many


@every_rule
def test_with_one_client_its_delta_is_the_result_or_too_few(name: str) -> None:
    rule = TABLE[name].rule
    (delta,) = mapped(lambda array: array * 0.125, honest(1))  # shorter than any bound
    if rule.min_updates > 1:
        with pytest.raises(TooFew, match=f"1 usable updates.* at least {rule.min_updates}"):
            combined(name, [delta])
    else:
        assert digest(combined(name, [delta])) == digest(delta)


@every_rule
def test_no_update_is_too_few_and_the_least_number_is_enough(name: str) -> None:
    with pytest.raises(TooFew):
        combined(name, [])
    for count in range(1, 8):
        if count >= TABLE[name].rule.min_updates:
            combined(name, honest(count))
        else:
            with pytest.raises(TooFew):
                combined(name, honest(count))


# Fixed points


@every_rule
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_identical_clients_are_a_fixed_point(name: str, dtype: np.dtype) -> None:
    deltas = mapped(lambda array: array * np.asarray(0.125, array.dtype), honest(1, dtype=dtype)) * 7
    result = combined(name, deltas)
    for key, array in result.items():
        # Sums are kept in float64, those of the two means in float32: where that is the dtype, the last bit is rounded.
        kept = np.dtype(np.float32 if name.endswith("ed_mean") and name != "trimmed_mean" else np.float64)
        room = 2 * float(np.finfo(dtype).eps) if dtype in (kept, np.float64) else 0.0
        np.testing.assert_allclose(np.asarray(array, np.float64), np.asarray(deltas[0][key], np.float64), room)


@every_rule
def test_deltas_of_zero_are_no_delta(name: str) -> None:
    result = combined(name, mapped(np.zeros_like, honest()))
    assert not any(array.any() for array in result.values())


# Order


@with_("any_order")
@pytest.mark.parametrize("dtype", FLOATS[2:], ids=str)
def test_the_order_of_the_updates_does_not_change_a_bit(name: str, dtype: np.dtype) -> None:
    for seed in range(5):
        deltas, random = honest(8, seed, dtype), generator(seed, "order")
        results = {digest(combined(name, [deltas[i] for i in random.permutation(8)])) for _ in range(10)}
        assert len(results) == 1


@every_rule
def test_the_order_of_the_updates_changes_at_most_how_sums_are_rounded(name: str) -> None:
    deltas, counts = honest(8), [1, 2, 3, 4, 5, 6, 7, 8]
    expected = flat(combined(name, deltas, counts))
    random = np.random.default_rng(0)
    for _ in range(10):
        order = random.permutation(8).tolist()
        result = flat(combined(name, [deltas[i] for i in order], [counts[i] for i in order]))
        if name == "bucketing":  # another order, other buckets
            assert np.abs(result - expected).max() < 0.3
        else:
            np.testing.assert_allclose(result, expected, rtol=1e-5)


@every_rule
def test_a_rerun_gives_the_same_bits(name: str) -> None:
    assert digest(combined(name, honest())) == digest(combined(name, honest()))


# Equivariance


@with_("translates")
def test_a_shift_of_all_updates_shifts_the_result(name: str) -> None:
    deltas = honest(dtype=np.float64)
    expected = flat(combined(name, deltas)) + 8
    np.testing.assert_allclose(flat(combined(name, mapped(lambda array: array + 8, deltas))), expected, rtol=1e-6)


@with_("scales")
@pytest.mark.parametrize("factor", [2.0**-10, 0.3, 2.0**10])
def test_updates_of_another_scale_give_a_result_of_that_scale(name: str, factor: float) -> None:
    deltas = honest(dtype=np.float64)
    expected = flat(combined(name, deltas)) * factor
    np.testing.assert_allclose(flat(combined(name, mapped(lambda array: array * factor, deltas))), expected, rtol=1e-6)


# Numbers of any size


@every_rule
@pytest.mark.parametrize("size", [1e-42, 1e-30, 1e15])
def test_tiny_and_huge_updates_give_a_result_between_the_smallest_and_the_largest(name: str, size: float) -> None:
    factors = [1.0, 2.0, 1.5, 3.0, 1.25, 2.5, 1.75]
    result = combined(name, [{"w": np.full(3, size * factor, np.float32)} for factor in factors])["w"]
    least = 0 if name.startswith(("centred_clipping", "norm_bounding")) else size
    assert (result >= np.float32(least)).all()
    assert (result <= np.float32(3 * size)).all()


@every_rule
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_the_largest_values_that_an_update_may_have_give_no_warning(name: str, dtype: np.dtype) -> None:
    most = 0.99 * largest_value(dtype)
    try:
        result = combined(
            name, [{"w": np.array([sign * most, 1.0]).astype(dtype)} for sign in (1, -1, 1, -1, 1, -1, 1)]
        )
    except AggregationError as error:
        assert "normalised mean" in str(error)  # noqa: PT017 - or there is a result
    else:
        assert np.isfinite(np.asarray(result["w"], np.float64)).all()


@every_rule
def test_a_value_that_is_not_finite_gives_an_error_or_a_finite_result(name: str) -> None:
    for bad in (np.nan, np.inf, -np.inf):
        deltas = honest()
        deltas[2]["w"][1, 1] = bad
        with np.errstate(invalid="ignore"):
            try:
                result = combined(name, deltas)
            except AggregationError as error:
                assert "not finite" in str(error)  # noqa: PT017 - or there is a result
            else:
                assert np.isfinite(flat(result)).all()


# One attacker


@with_("robust")
@pytest.mark.parametrize("value", [1e30, -1e30, 1e15, 3.0, -10.0])
def test_one_attacker_moves_the_result_by_less_than_the_honest_diameter(name: str, value: float) -> None:
    for place in (0, 3, 6):
        deltas = honest()
        without = [*deltas[:place], *deltas[place + 1 :]]
        points = np.stack([flat(delta) for delta in without])
        diameter = max(float(np.linalg.norm(points - point, axis=1).max()) for point in points)
        expected = flat(combined(name, deltas))
        deltas[place] = {key: np.full_like(array, value) for key, array in deltas[place].items()}
        assert np.linalg.norm(flat(combined(name, deltas)) - expected) < diameter


@pytest.mark.parametrize("name", ["centred_clipping", "norm_bounding_by_a_number"])
@pytest.mark.parametrize("value", [1e30, -1e30, 3.0, -0.1])
def test_one_attacker_moves_a_clipped_mean_by_at_most_its_share_of_two_bounds(name: str, value: float) -> None:
    deltas = honest()
    expected = flat(combined(name, deltas))
    deltas[3] = {key: np.full_like(array, value) for key, array in deltas[3].items()}
    assert np.linalg.norm(flat(combined(name, deltas)) - expected) < 2 / 7 + 1e-6


def test_one_attacker_does_not_make_the_result_longer_than_honest_updates_where_norms_are_bounded_by_their_median() -> (
    None
):
    deltas = honest()
    longest = max(float(np.linalg.norm(flat(delta))) for delta in deltas)
    deltas[3] = {key: np.full_like(array, 1e30) for key, array in deltas[3].items()}
    assert np.linalg.norm(flat(combined("norm_bounding", deltas))) <= longest


@pytest.mark.parametrize("name", ["weighted_mean", "normalised_mean"])
def test_a_mean_goes_where_one_attacker_wants(name: str) -> None:
    deltas = honest()
    deltas[3] = {key: np.full_like(array, 1e30) for key, array in deltas[3].items()}
    assert np.linalg.norm(flat(combined(name, deltas))) > 1e29
