from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedtrain.aggregation import Aggregator, DiscreteMean, by_examples, equally, normalised_mean, weighted_mean
from fedtrain.aggregation.weighted_mean import _CHUNK, fold
from fedtrain.errors import AggregationError, StrategyError, TooFew
from fedtrain.params import BFLOAT16
from fedtrain.testing import cohort_of, update_of
from fedtrain.types import Cohort, Params, Update


def test_an_update_counts_by_its_examples_or_once() -> None:
    update, cohort = update_of({}, 7), cohort_of(1)
    assert (by_examples(update, cohort), equally(update, cohort)) == (7.0, 1.0)


def test_an_aggregator_is_called_like_its_rule_and_carries_its_weight() -> None:
    updates, cohort = [update_of({"w": np.array([3.0])}, 2)], cohort_of(1)
    aggregator = weighted_mean(equally)
    assert isinstance(aggregator, Aggregator)
    assert aggregator(updates, cohort) == aggregator.combine(updates, cohort) == {"w": 3.0}
    assert aggregator.weight is equally
    assert weighted_mean().weight is by_examples
    assert aggregator.min_updates == 1


def test_the_mean_of_two_layers_in_two_dtypes() -> None:
    first = {"a": np.array([[1.0, 2.0]], np.float32), "b": np.array(4.0, np.float16)}
    second = {"a": np.array([[5.0, 0.0]], np.float32), "b": np.array(0.0, np.float16)}
    result = weighted_mean()([update_of(first, 1), update_of(second, 3)], cohort_of(2))
    assert result["a"].tolist() == [[4.0, 0.5]]  # (1 + 15) / 4, (2 + 0) / 4
    assert result["b"] == 1.0  # 4 / 4
    assert {name: (array.dtype.name, array.shape) for name, array in result.items()} == {
        "a": ("float32", (1, 2)),
        "b": ("float16", ()),
    }


def test_a_weight_may_be_any_function_of_update_and_cohort() -> None:
    def inverse_probability(update: Update, cohort: Cohort) -> float:
        return 1 / update.task.probability / cohort.num_eligible

    one = update_of({"w": np.array([8.0])})
    assert weighted_mean(inverse_probability)([one], cohort_of(4)) == {"w": 8.0}


def test_integers_and_bools_are_not_the_means_business() -> None:
    update = update_of({"w": np.array([1.0]), "n": np.array([3]), "on": np.array([True])})
    assert list(weighted_mean()([update], cohort_of(1))) == ["w"]


def test_nothing_to_average_is_too_few() -> None:
    for updates in ([], [update_of({"n": np.array([3])})]):
        with pytest.raises(TooFew, match="no update with a floating-point array"):
            weighted_mean()(updates, cohort_of(1))
    with pytest.raises(TooFew, match="sum to zero"):
        weighted_mean()([update_of({"w": np.array([3.0])}, 0)], cohort_of(1))


FIRST: Params = {"a": np.zeros(2), "b": np.zeros(1)}


@pytest.mark.parametrize(
    ("second", "found"),
    [
        ({"a": np.zeros(2)}, "'b' is missing, in the updates before it float64(1,)"),
        ({**FIRST, "c": np.zeros(1)}, "'c' is float64(1,), in the updates before it missing"),
        ({"a": np.zeros((2, 1)), "b": np.zeros(1)}, "'a' is float64(2, 1), in the updates before it float64(2,)"),
        ({"a": np.zeros(2, "f4"), "b": np.zeros(1)}, "'a' is float32(2,), in the updates before it float64(2,)"),
    ],
)
@pytest.mark.parametrize("examples", [0, 1])
def test_updates_that_differ_in_layout_are_refused_also_without_weight(
    second: Params, found: str, examples: int
) -> None:
    with pytest.raises(AggregationError) as caught:
        weighted_mean()([update_of(FIRST), update_of(second, examples, client="c7")], cohort_of(2))
    assert str(caught.value).startswith("client c7, round 1: ")
    assert found in str(caught.value)


def test_a_mean_beyond_the_dtypes_range_is_refused_without_a_warning() -> None:
    huge = update_of({"w": np.array([3e38], np.float32)}, 2)
    with pytest.raises(AggregationError, match="the weighted mean of 'w' is not finite in float32"):
        weighted_mean()([huge], cohort_of(1))


def test_updates_are_read_once_and_left_as_they_are() -> None:
    array = np.array([1.0, 2.0])
    array.flags.writeable = False
    once = iter([update_of({"w": array}, 3), update_of({"w": array}, 1)])
    assert weighted_mean()(once, cohort_of(2))["w"].tolist() == [1.0, 2.0]
    assert array.tolist() == [1.0, 2.0]


def test_the_mean_does_not_share_memory_with_an_update() -> None:
    array = np.array([1.0])
    result = weighted_mean()([update_of({"w": array})], cohort_of(1))
    array[0] = 9.0
    assert result["w"] == 1.0


@pytest.mark.parametrize("dtype", [np.dtype(np.float16), BFLOAT16, np.dtype(np.float32)])
@pytest.mark.parametrize("size", [0, 1, _CHUNK - 1, _CHUNK, _CHUNK + 1])
def test_folding_in_pieces_gives_what_folding_at_once_gives(dtype: np.dtype, size: int) -> None:
    acc = np.arange(size, dtype=np.float32)
    array = np.linspace(-1, 1, size).astype(dtype)
    expected = acc + np.float32(0.3) * array.astype(np.float32)
    fold(acc, array, 0.3)
    assert acc.tobytes() == expected.tobytes()


def test_folding_reads_arrays_in_any_memory_layout() -> None:
    acc = np.zeros((2, 3))
    fold(acc, np.arange(6.0).reshape(3, 2).T, 2.0)
    assert acc.tolist() == [[0, 4, 8], [2, 6, 10]]


@given(st.lists(st.tuples(st.floats(-1e6, 1e6, width=32), st.integers(0, 1000)), min_size=1, max_size=8))
def test_the_mean_lies_between_the_smallest_and_the_largest(answers: list[tuple[float, int]]) -> None:
    counted = [value for value, examples in answers if examples]
    updates = [update_of({"w": np.array([value], np.float32)}, examples) for value, examples in answers]
    if not counted:
        with pytest.raises(TooFew):
            weighted_mean()(updates, cohort_of(1))
        return
    (mean,) = weighted_mean()(updates, cohort_of(1))["w"].tolist()
    room = 1e-5 * max(abs(value) for value in counted)
    assert min(counted) - room <= mean <= max(counted) + room


# DiscreteMean: its rules are in tests/contract/test_numbers.py


def test_discrete_arrays_are_combined_by_name_and_floats_are_left_out() -> None:
    rule = DiscreteMean({"w": np.array([1.5]), "n": np.array([[1, 2]]), "on": np.array([True])})
    rule.add({"w": np.array([9.0]), "n": np.array([[3, 2]]), "on": np.array([False])}, 2)
    rule.add({"w": np.array([9.0]), "n": np.array([[6, 1]]), "on": np.array([True])}, 1)
    result = rule.result()
    assert result["n"].tolist() == [[4, 2]]  # 12 / 3, 5 / 3
    assert result["on"].tolist() == [False]
    assert list(result) == ["n", "on"]


def test_without_an_update_discrete_arrays_stay_as_they_are() -> None:
    start = {"n": np.array([4]), "on": np.array([True])}
    assert DiscreteMean(start).result() == start


def test_discrete_arrays_of_the_model_and_of_updates_are_left_as_they_are() -> None:
    start, value = np.array([4, 4]), np.array([6, 4])
    start.flags.writeable = value.flags.writeable = False
    rule = DiscreteMean({"n": start})
    rule.add({"n": value}, 1)
    rule.add({"n": value}, 1)
    assert rule.result()["n"].tolist() == rule.result()["n"].tolist() == [6, 4]
    assert start.tolist() == [4, 4]


@given(
    st.integers(-(2**63), 2**63 - 1),
    st.lists(st.tuples(st.integers(-(2**63), 2**63 - 1), st.integers(0, 1000)), min_size=1, max_size=5),
)
def test_long_integers_are_within_a_half_of_the_exact_mean(start: int, answers: list[tuple[int, int]]) -> None:
    rule = DiscreteMean({"n": np.array(start)})
    for value, weight in answers:
        rule.add({"n": np.array(value)}, weight)
    result = int(rule.result()["n"])
    total, weighted = sum(weight for _, weight in answers), sum(value * weight for value, weight in answers)
    if not total:
        assert result == start
        return
    twice_the_error = 2 * abs(result * total - weighted)
    assert twice_the_error < total or (twice_the_error == total and result % 2 == 0)


# The normalised mean


def stepped(delta: float, num_steps: int, num_examples: int = 1) -> Update:
    return replace(update_of({"w": np.array([delta])}, num_examples), num_steps=num_steps)


def test_the_normalised_mean_averages_deltas_per_step_and_takes_the_mean_number_of_steps() -> None:
    # weights 1/4, 3/4: per step 2 / 4 + 3 * 3 / 4 = 2.75; steps 2/4 + 3/4 = 1.25
    updates = [stepped(4.0, 2, 1), stepped(3.0, 1, 3)]
    assert normalised_mean()(updates, cohort_of(2))["w"].tolist() == [2.75 * 1.25]
    # equally: (2 + 3) / 2 * (2 + 1) / 2
    assert normalised_mean(equally)(updates, cohort_of(2))["w"].tolist() == [2.5 * 1.5]


def test_with_equal_steps_the_normalised_mean_is_the_mean() -> None:
    updates = [stepped(4.0, 5, 1), stepped(2.0, 5, 3)]
    for momentum in (0.0, 0.9):
        got = normalised_mean(momentum=momentum)(updates, cohort_of(2))
        assert got["w"] == pytest.approx([2.5], rel=1e-14)


def test_momentum_counts_all_that_a_gradient_moves() -> None:
    # momentum 0.5, two steps: velocities g and 1.5 g, so 2.5 gradients; one step: 1
    got = normalised_mean(equally, momentum=0.5)([stepped(5.0, 2), stepped(3.0, 1)], cohort_of(2))
    assert got["w"] == pytest.approx([(5 / 2.5 + 3 / 1) / 2 * (2.5 + 1) / 2], rel=1e-14)


def test_an_update_without_steps_has_no_weight() -> None:
    updates = [stepped(4.0, 2), stepped(9.0, 0)]
    assert normalised_mean()(updates, cohort_of(2))["w"].tolist() == [4.0]
    with pytest.raises(TooFew):
        normalised_mean()([stepped(9.0, 0)], cohort_of(1))


def test_a_normalised_mean_that_overflows_is_refused() -> None:
    updates = [stepped(1e300, 1), stepped(0.0, 10**15)]
    with pytest.raises(AggregationError, match="normalised mean of 'w' is not finite in float64"):
        normalised_mean()(updates, cohort_of(2))
    for momentum in (1.0, -0.1):
        with pytest.raises(StrategyError, match="momentum must be in"):
            normalised_mean(momentum=momentum)
