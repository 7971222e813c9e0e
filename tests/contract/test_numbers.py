"""The rules for numbers, one test each, with values worked out by hand.

The rules themselves are in the docstrings of `fedtrain.params`, `fedtrain.aggregation` and `fedtrain.rounds.step`.
"""

import tracemalloc
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from random import Random

import numpy as np
import pytest

from fedtrain import RunState, Strategy
from fedtrain.aggregation import DiscreteMean, Weight, by_examples, equally, weighted_mean
from fedtrain.check import checked
from fedtrain.collect import collect
from fedtrain.errors import AggregationError, ParamsError, TooFew
from fedtrain.local import sgd_epochs
from fedtrain.params import BFLOAT16, Packed, pack, require_same_layout, subtract
from fedtrain.rounds import first_state, step
from fedtrain.selection import uniform
from fedtrain.server_optimizers import Optimizer, sgd
from fedtrain.testing import cohort_of, task_of, update_of
from fedtrain.types import Array, Cohort, Outcome, Params, Start, Task, Update

FLOATS = [np.dtype(np.float16), BFLOAT16, np.dtype(np.float32), np.dtype(np.float64)]


def fedavg(*, weight: Weight = by_examples, server_optimizer: Optimizer | None = None) -> Strategy:
    return Strategy(uniform(), sgd_epochs(1), weighted_mean(weight), server_optimizer=server_optimizer or sgd())


def state_of(params: Params, buffers: Params | None = None, strategy: Strategy | None = None) -> RunState:
    return first_state(strategy or fedavg(), Start(params, buffers or {}), seed=0)


def outcomes_of(*answers: tuple[Params, int]) -> tuple[Cohort, list[Outcome]]:
    """A cohort, and for each client an ok outcome with a delta and a number of examples."""
    cohort = cohort_of(len(answers))
    pairs = zip(cohort.tasks, answers, strict=True)
    return cohort, [Outcome(task, "ok", Update(task, delta, count)) for task, (delta, count) in pairs]


def stepped(state: RunState, *answers: tuple[Params, int], strategy: Strategy | None = None) -> RunState:
    cohort, outcomes = outcomes_of(*answers)
    return step(strategy or fedavg(), state, cohort, outcomes)


def mean(*answers: tuple[Params, int], weight: Weight = by_examples) -> Params:
    updates = [update_of(delta, count, client=f"c{i}") for i, (delta, count) in enumerate(answers)]
    return weighted_mean(weight)(updates, cohort_of(len(updates)))


def discrete(start: Array, *answers: tuple[object, float]) -> Array:
    rule = DiscreteMean({"n": start})
    for value, weight in answers:
        rule.add({"n": np.array(value, start.dtype)}, weight)
    return rule.result()["n"]


# Names, shapes, dtypes


def test_arrays_are_matched_by_name_and_not_by_position() -> None:
    start = {"a": np.array([10.0]), "b": np.array([20.0])}
    first = {"a": np.array([1.0]), "b": np.array([5.0])}
    other_order = {"b": np.array([7.0]), "a": np.array([3.0])}
    after = stepped(state_of(start), (first, 1), (other_order, 1))
    assert after.model == {"a": 12.0, "b": 26.0}


def test_a_delta_is_taken_by_name_and_not_by_position() -> None:
    local = {"b": np.array([21.0]), "a": np.array([13.0])}
    assert subtract(local, {"a": np.array([10.0]), "b": np.array([20.0])}) == {"a": 3.0, "b": 1.0}


def test_shapes_2_and_1_do_not_broadcast_and_the_array_is_named() -> None:
    with pytest.raises(ParamsError, match=r"'fc\.bias' has shape \(1,\), the server's model has \(2,\)"):
        require_same_layout({"fc.bias": np.zeros(1)}, {"fc.bias": np.zeros(2)}, what="the update")
    for first, second in ((2, 1), (1, 2)):
        with pytest.raises(AggregationError, match=rf"client c1, round 1: 'fc\.bias' is float64\({second},\)"):
            mean(({"fc.bias": np.ones(first)}, 1), ({"fc.bias": np.ones(second)}, 1))


@pytest.mark.parametrize(
    ("delta", "found"),
    [
        ({}, "lacks 'w'"),
        ({"w": np.zeros(1, np.float32), "x": np.zeros(1)}, "has 'x', which the server's model has not"),
        ({"w": np.zeros((1, 1), np.float32)}, r"'w' has shape \(1, 1\), the server's model has \(1,\)"),
        ({"w": np.zeros(1)}, "'w' is float64, the server's model has float32"),
    ],
)
def test_an_update_with_another_layout_than_the_servers_is_invalid_whoever_sent_it(delta: Params, found: str) -> None:
    start = Start({"w": np.zeros(1, np.float32)}, {})
    _, (outcome,) = outcomes_of((delta, 1))
    answer = checked(outcome, start)
    assert answer.kind == "invalid"
    assert answer.update is None
    with pytest.raises(ParamsError, match=found):
        raise ParamsError(answer.reason)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_the_dtype_that_comes_out_is_the_one_that_went_in(dtype: np.dtype) -> None:
    start = {"w": np.array([1.0, 2.0], dtype)}
    for rate in (1.0, 0.5):
        strategy = fedavg(server_optimizer=sgd(rate))
        delta = {"w": np.array([0.5, 1.0], dtype)}
        after = stepped(state_of(start), (delta, 1), (delta, 3), strategy=strategy).params["w"]
        assert after.dtype == dtype
        assert after.astype(float).tolist() == [1 + 0.5 * rate, 2 + rate]


@pytest.mark.parametrize("dtype", ["i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "?"])
def test_integers_and_bools_keep_their_dtype_and_travel_as_values(dtype: str) -> None:
    start, value = np.array([0, 1], dtype), np.array([1, 1], dtype)
    assert subtract({"n": value}, {"n": start})["n"].dtype == start.dtype
    assert subtract({"n": value}, {"n": start})["n"].tolist() == value.tolist()
    after = stepped(state_of({"w": np.zeros(1)}, {"n": start}), ({"w": np.zeros(1), "n": value}, 2)).buffers["n"]
    assert after.dtype == start.dtype
    assert after.tolist() == value.tolist()


def test_arrays_without_dimensions_or_without_elements_are_arrays_like_any_other() -> None:
    params = {"scale": np.array(2.0, np.float32), "none": np.zeros((0, 3), np.float16)}
    buffers = {"steps": np.array(5), "no_steps": np.zeros(0, np.int64), "off": np.array(False)}
    delta = {
        "scale": np.array(0.5, np.float32),
        "none": params["none"],
        "steps": np.array(8),
        "no_steps": buffers["no_steps"],
        "off": np.array(True),
    }
    after = stepped(state_of(params, buffers), (delta, 1), (delta, 2)).model
    assert {name: (array.shape, array.dtype.name) for name, array in after.items()} == {
        "scale": ((), "float32"),
        "none": ((0, 3), "float16"),
        "steps": ((), "int64"),
        "no_steps": ((0,), "int64"),
        "off": ((), "bool"),
    }
    assert (after["scale"], after["steps"], after["off"]) == (2.5, 8, True)


# Sums


def test_a_thousand_float16_clients_at_a_tenth_average_to_a_tenth() -> None:
    tenth = np.array([0.1], np.float16)
    # A running sum in float16 stops being exact at 256 and ends at 0.1058.
    (result,) = mean(*[({"w": tenth}, 1)] * 1000)["w"]
    assert result == np.float16(0.1)


def test_sums_of_half_precision_are_kept_in_float32_and_not_wider() -> None:
    # 2048 + 1 is 2048 in float16, 256 + 1 is 256 in bfloat16: each 1 would be lost.
    for dtype, large in ((np.dtype(np.float16), 2048.0), (BFLOAT16, 256.0)):
        ones = [({"w": np.array([1.0], dtype)}, 1)] * 100
        result = mean(({"w": np.array([large], dtype)}, 1), *ones)["w"]
        assert result == np.float32((large + 100) / 101).astype(dtype)
    # 2**24 + 1 is 2**24 in float32: the rule says float32 for float32, so the ones are lost, and float64 keeps them.
    for name, expected in (("f4", 2.0**24 / 3), ("f8", (2.0**24 + 2) / 3)):
        one = ({"w": np.array([1.0], name)}, 1)
        assert mean(({"w": np.array([2.0**24], name)}, 1), one, one)["w"] == np.array([expected], name)


def test_the_mean_counts_each_update_as_often_as_its_weight_says() -> None:
    one, five = {"w": np.array([1.0])}, {"w": np.array([5.0])}
    assert mean((one, 1), (five, 3))["w"] == 4.0  # (1 * 1 + 3 * 5) / 4
    assert mean((one, 1), (five, 3), weight=equally)["w"] == 3.0


def test_the_mean_keeps_one_running_sum_however_large_the_cohort_is() -> None:
    size = 200_000

    def updates(count: int) -> Iterator[Update]:
        for index in range(count):
            yield update_of({"w": np.full(size, index, np.float32)}, 1)

    def peak(count: int) -> int:
        tracemalloc.start()
        try:
            weighted_mean()(updates(count), cohort_of(1))
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    peak(1)
    few, many = peak(4), peak(64)
    assert few >= 2 * 4 * size  # the sum and one update: the measurement sees arrays at all
    assert many <= 1.1 * few


# Integers and bools


def test_an_integer_counter_that_is_equal_everywhere_stays_what_it_is() -> None:
    assert discrete(np.array(0), (7, 0.1), (7, 0.2), (7, 0.3)) == 7
    assert discrete(np.array(7), (7, 1), (7, 1), (7, 1)) == 7
    assert discrete(np.array(0, np.int32), (7, 0.1), (7, 0.2), (7, 0.3)) == 7


@pytest.mark.parametrize("dtype", ["i2", "i8"])
@pytest.mark.parametrize("start", [0, 1, -3])
@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ((10, 20), 15),
        ((1, 2), 2),  # 1.5
        ((2, 3), 2),  # 2.5
        ((3, 4), 4),  # 3.5
        ((-1, -2), -2),  # -1.5
        ((-2, -3), -2),  # -2.5
        ((0, 1), 0),  # 0.5
        ((-1, 0), 0),  # -0.5
        ((1, 1, 2), 1),  # 4 / 3
        ((1, 2, 2), 2),  # 5 / 3
        ((-1, -2, -2), -2),
    ],
)
def test_integers_become_the_mean_rounded_with_ties_to_even(
    dtype: str, start: int, values: Sequence[int], expected: int
) -> None:
    assert discrete(np.array(start, dtype), *((value, 1.0) for value in values)) == expected


def test_integers_are_weighted_like_floats() -> None:
    assert discrete(np.array(0), (0, 1), (10, 3)) == 8  # 7.5
    assert discrete(np.array(0), (1, 1), (10, 3)) == 8  # 7.75
    assert discrete(np.array(0), (0, 0.5), (10, 0.25)) == 3  # 10 / 3


def test_long_integers_are_exact_beyond_what_a_float_holds() -> None:
    assert np.float64(2**53 + 1) == 2**53
    for large in (2**53 + 1, 2**62 + 3, -(2**62) - 1):
        assert discrete(np.array(0), (large, 1), (large, 1), (large, 1)) == large
        assert discrete(np.array(large), (large, 0.1), (large, 0.7)) == large
        assert discrete(np.array(0), (large, 0.1), (large, 0.7)) == large
    assert discrete(np.array(2**53), (2**53 + 1, 1), (2**53 + 5, 1)) == 2**53 + 3
    assert discrete(np.array(-(2**63)), (2**63 - 1, 1), (2**63 - 1, 2)) == 2**63 - 1
    assert discrete(np.array(0, np.uint64), (2**64 - 1, 3), (2**64 - 1, 1)) == 2**64 - 1
    assert discrete(np.array(0), (2**63 - 1, 1), (-(2**63), 1)) == 0  # -0.5


def test_small_integers_reach_their_extremes_and_do_not_wrap() -> None:
    for dtype, low, high in (("u1", 0, 255), ("i1", -128, 127), ("u4", 0, 2**32 - 1), ("i4", -(2**31), 2**31 - 1)):
        for start in (low, high):
            assert discrete(np.array(start, dtype), (high, 1), (high, 2)) == high
            assert discrete(np.array(start, dtype), (low, 1), (low, 2)) == low
    assert discrete(np.array(0, np.uint8), (255, 1), (0, 1)) == 128  # 127.5
    assert discrete(np.array(0, np.uint8), (255, 1), (254, 1)) == 254  # 254.5


@pytest.mark.parametrize("start", [False, True])
def test_bools_follow_the_weighted_majority_and_a_tie_keeps_the_servers_value(start: bool) -> None:
    old = np.array(start)
    assert discrete(old, (True, 1), (True, 1), (False, 1)) == np.True_
    assert discrete(old, (True, 1), (True, 1), (False, 3)) == np.False_
    assert discrete(old, (True, 2), (False, 2)) == old
    assert discrete(np.array([start, start]), ([True, False], 1)).tolist() == [True, False]


# Buffers


def test_float_buffers_go_through_the_aggregator_and_not_the_server_optimizer() -> None:
    strategy = fedavg(server_optimizer=sgd(10.0))
    state = state_of({"w": np.array([1.0])}, {"running_var": np.array([4.0])})
    low = {"w": np.array([0.25]), "running_var": np.array([-1.0])}
    high = {"w": np.array([0.25]), "running_var": np.array([2.0])}
    after = stepped(state, (low, 2), (high, 1), strategy=strategy)
    assert after.params == {"w": 3.5}  # 1 + 10 * 0.25
    assert after.buffers == {"running_var": 4.0}  # 4 + (2 * -1 + 1 * 2) / 3


def test_the_server_optimizer_sees_trainable_arrays_only() -> None:
    seen: list[Mapping[str, Array]] = []

    def apply(delta: Params, state: object) -> tuple[Params, object]:
        seen.append(delta)
        return delta, state

    strategy = fedavg(server_optimizer=Optimizer(init=lambda params: seen.append(params), apply=apply))
    buffers = {"running_var": np.zeros(1), "count": np.array(0)}
    delta = {"w": np.ones(1), "running_var": np.ones(1), "count": np.array(3)}
    after = stepped(state_of({"w": np.zeros(1)}, buffers, strategy), (delta, 1), strategy=strategy)
    assert [list(arrays) for arrays in seen] == [["w"], ["w"]]
    assert after.buffers == {"running_var": 1.0, "count": 3}


# Nothing that is not finite gets in


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", ["w", "running_var"])
def test_an_update_with_a_value_that_is_not_finite_is_invalid(name: str, value: float, dtype: np.dtype) -> None:
    start = Start({"w": np.zeros(2, dtype)}, {"running_var": np.ones(2, dtype)})
    delta = {"w": np.zeros(2, dtype), "running_var": np.zeros(2, dtype)}
    delta[name][1] = value
    _, (outcome,) = outcomes_of((delta, 1))
    answer = checked(outcome, start)
    assert (answer.kind, answer.update) == ("invalid", None)
    assert repr(name) in answer.reason


def test_a_second_payload_that_is_not_finite_is_invalid_too() -> None:
    _, (outcome,) = outcomes_of(({"w": np.zeros(1)}, 1))
    assert outcome.update is not None
    poisoned = replace(outcome, update=replace(outcome.update, extra={"control": np.array([np.nan])}))
    assert checked(poisoned, Start({"w": np.zeros(1)}, {})).kind == "invalid"


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_an_infinite_mask_that_the_model_itself_has_stays(dtype: np.dtype) -> None:
    mask = np.array([0.0, -np.inf, np.inf, np.nan], dtype)
    start = Start({"w": np.array([1.0], dtype)}, {"mask": mask})
    delta = subtract({"w": np.array([2.0], dtype), "mask": mask.copy()}, {**start.params, **start.buffers})
    assert delta["mask"].tolist() == [0, 0, 0, 0]
    _, (outcome,) = outcomes_of((delta, 1))
    assert checked(outcome, start).kind == "ok"
    after = stepped(state_of(start.params, start.buffers), (delta, 1))
    assert after.params == {"w": 2.0}
    assert after.history[-1].skipped == ""
    assert after.buffers["mask"].tobytes() == mask.tobytes()


def test_a_client_cannot_turn_a_mask_of_the_model_into_a_number() -> None:
    start = {"mask": np.array([-np.inf])}
    delta = subtract({"mask": np.array([1.0])}, start)
    _, (outcome,) = outcomes_of((delta, 1))
    assert checked(outcome, Start({}, start)).kind == "invalid"


@pytest.mark.parametrize(
    ("params", "delta", "examples"),
    [
        (np.array([60000], np.float16), np.array([60000], np.float16), 1),  # the model leaves float16's range
        (np.array([0], np.float32), np.array([3e38], np.float32), 100),  # the sum leaves float32's range
        (np.array([0], np.float64), np.array([1e308], np.float64), 100),
    ],
)
def test_a_combination_beyond_the_dtypes_range_leaves_the_model_as_it_is(
    params: Array, delta: Array, examples: int
) -> None:
    state = state_of({"w": params})
    after = stepped(state, ({"w": delta}, examples), ({"w": delta}, examples))
    assert after.model_digest == state.model_digest
    assert "'w'" in after.history[-1].skipped
    assert after.round == 1


# Weights


def test_a_total_weight_of_zero_leaves_the_model_as_it_is() -> None:
    state = state_of({"w": np.array([1.0])}, {"count": np.array(3), "on": np.array(True)})
    answer = {"w": np.array([5.0]), "count": np.array(9), "on": np.array(False)}
    after = stepped(state, (answer, 0), (answer, 0))
    assert after.model_digest == state.model_digest
    assert after.round == 1
    assert "sum to zero" in after.history[-1].skipped
    with pytest.raises(TooFew, match="sum to zero"):
        mean((answer, 0))
    assert discrete(np.array(3), (9, 0.0)) == 3


@pytest.mark.parametrize("bad", [-1.0, float("nan"), float("inf"), float("-inf")])
def test_a_weight_that_is_negative_or_not_finite_is_refused(bad: float) -> None:
    def weight(update: Update, cohort: Cohort) -> float:
        return bad

    answer = {"w": np.array([1.0]), "n": np.array(1)}
    with pytest.raises(AggregationError, match=r"client c0: weight .*expected a finite number >= 0"):
        mean((answer, 1), weight=weight)
    with pytest.raises(AggregationError, match="expected a finite number >= 0"):
        DiscreteMean({"n": np.array(0)}).add(answer, bad)
    state = state_of({"w": np.array([1.0])}, {"n": np.array(0)})
    after = stepped(state, (answer, 1), strategy=fedavg(weight=weight))
    assert after.model_digest == state.model_digest
    assert "expected a finite number >= 0" in after.history[-1].skipped


@pytest.mark.parametrize("examples", [-1, 2**53 + 1])
def test_an_impossible_number_of_examples_makes_an_update_invalid(examples: int) -> None:
    _, (outcome,) = outcomes_of(({"w": np.zeros(1)}, examples))
    assert checked(outcome, Start({"w": np.zeros(1)}, {})).kind == "invalid"


def test_an_update_of_weight_zero_changes_nothing_bit_for_bit() -> None:
    random = np.random.default_rng(0)
    state = state_of({"w": random.normal(size=50).astype(np.float32)}, {"n": np.array(2), "on": np.array(False)})

    def answer(examples: int) -> tuple[Params, int]:
        delta = random.normal(size=50).astype(np.float32)
        return {"w": delta, "n": np.array(int(random.integers(100))), "on": np.array(True)}, examples

    first, second, huge = answer(3), answer(5), ({**answer(0)[0], "w": np.full(50, 3e38, np.float32)}, 0)
    without = stepped(state, first, second).model_digest
    assert without != state.model_digest
    for place in range(3):
        answers = [first, second]
        answers.insert(place, huge)
        assert stepped(state, *answers).model_digest == without


# Order


class ScriptedFleet:
    """Gives prepared outcomes, in the order of arrival that it is told."""

    def __init__(self, arrivals: Sequence[Outcome]) -> None:
        self._arrivals = list(arrivals)

    def clients(self) -> Sequence[object]:
        return ()

    def wait(self, timeout_s: float) -> None:
        return None

    def give(self, tasks: Sequence[Task], start: Start) -> None:
        return None

    def receive(self, timeout_s: float) -> Outcome | None:
        return self._arrivals.pop(0) if self._arrivals else None

    def settle(self, task: Task, counted: bool) -> None:
        return None


def test_the_cohorts_order_decides_and_not_the_order_of_arrival() -> None:
    random, shuffler = np.random.default_rng(1), Random(1)
    state = state_of({"w": random.normal(size=1000).astype(np.float32)})
    start = Start(state.params, state.buffers)
    # Sizes from 1e-3 to 1e4: sums of them depend on the order in which they are added.
    deltas = [(random.normal(size=1000) * 10.0 ** (index - 3)).astype(np.float32) for index in range(8)]
    cohort, outcomes = outcomes_of(*(({"w": delta}, index + 1) for index, delta in enumerate(deltas)))
    by_collector, by_arrival = set(), set()
    for _ in range(50):
        arrivals = shuffler.sample(outcomes, len(outcomes))
        fleet = ScriptedFleet(arrivals)
        by_collector.add(step(fedavg(), state, cohort, collect(cohort, fleet, start)).model_digest)  # type: ignore[arg-type]
        by_arrival.add(step(fedavg(), state, cohort, arrivals).model_digest)
    assert len(by_collector) == 1
    assert len(by_arrival) > 40  # without the collector's order these deltas would tell


def test_the_order_of_names_does_not_change_the_digest_of_the_model() -> None:
    one, two = np.array([1.0]), np.array([2])
    assert state_of({"a": one}, {"b": two}).model_digest == state_of({"b": two}, {"a": one}).model_digest


def test_an_update_that_was_sent_is_the_update_that_was_made() -> None:
    delta = {name: np.array([0.1, -0.0, 3.0]).astype(name) for name in ("float16", "float32", "float64")}
    delta["bfloat16"] = np.array([0.1, -0.0, 3.0]).astype(BFLOAT16)
    sent = Update(task_of(), Packed(pack(delta)), 3)
    made = Update(task_of(), delta, 3)
    first, second = (weighted_mean()([update], cohort_of(1)) for update in (sent, made))
    assert pack(first) == pack(second)
