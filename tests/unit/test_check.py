from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from fakes import ok

from fedtrain.check import MAX_EXAMPLES, checked, problem_of
from fedtrain.params import BFLOAT16
from fedtrain.testing import cohort_of, task_of, update_of
from fedtrain.types import Outcome, Params, Start

START = Start({"w": np.zeros(2, np.float32)}, {"n": np.array(0)})
GOOD: Params = {"w": np.ones(2, np.float32), "n": np.array(3)}


def test_a_good_answer_passes_as_it_is() -> None:
    outcome = ok(task_of(), GOOD, 5)
    assert checked(outcome, START) is outcome
    assert problem_of(update_of(GOOD, MAX_EXAMPLES), START) == ""
    assert problem_of(update_of(GOOD, 0), START) == ""


@pytest.mark.parametrize("kind", ["declined", "failed", "late", "invalid", "lost"])
def test_what_is_not_ok_is_not_looked_at(kind: str) -> None:
    outcome = Outcome(task_of(), kind, reason="as it is", num_examples=-1)  # type: ignore[arg-type]
    assert checked(outcome, START) is outcome


def test_an_ok_answer_without_an_update_is_invalid() -> None:
    outcome = checked(Outcome(task_of(), "ok", seconds=2.0), START)
    assert (outcome.kind, outcome.reason, outcome.seconds) == ("invalid", "an answer without an update", 2.0)


@pytest.mark.parametrize(
    ("delta", "reason"),
    [
        ({"w": GOOD["w"]}, "the update lacks 'n'"),
        ({**GOOD, "x": np.zeros(1)}, "has 'x', which the server's model has not"),
        ({**GOOD, "w": np.ones(3, np.float32)}, "'w' has shape (3,)"),
        ({**GOOD, "w": np.ones((2, 1), np.float32)}, "'w' has shape (2, 1)"),
        ({**GOOD, "w": np.ones(2)}, "'w' is float64"),
        ({**GOOD, "n": np.array(3.0)}, "'n' is float64"),
        ({**GOOD, "w": np.array([0, np.inf], np.float32)}, "'w' holds NaN or infinity"),
    ],
)
def test_an_update_that_cannot_be_used_is_invalid_and_names_the_array(delta: Params, reason: str) -> None:
    outcome = checked(ok(task_of(), delta), START)
    assert (outcome.kind, outcome.update) == ("invalid", None)
    assert reason in outcome.reason


@pytest.mark.parametrize("num_examples", [-1, MAX_EXAMPLES + 1])
def test_an_impossible_number_of_examples_is_invalid_wherever_it_stands(num_examples: int) -> None:
    good = ok(task_of(), GOOD)
    assert good.update is not None
    measured = Outcome(task_of(kind="evaluate"), "ok", metrics={"loss": 1.0}, num_examples=num_examples)
    for outcome in (
        replace(good, update=replace(good.update, num_examples=num_examples)),
        replace(good, num_examples=num_examples),
        measured,
    ):
        found = checked(outcome, START)
        assert (found.kind, found.metrics) == ("invalid", {})
        assert found.reason == f"{num_examples} examples, expected 0 to 2**53"


def test_a_second_payload_that_is_not_finite_is_invalid() -> None:
    good = ok(task_of(), GOOD)
    assert good.update is not None
    found = checked(replace(good, update=replace(good.update, extra={"c": np.array([np.nan])})), START)
    assert (found.kind, found.reason.split()[0]) == ("invalid", "'c'")


def test_an_answer_to_an_evaluation_needs_no_update() -> None:
    measured = Outcome(task_of(kind="evaluate"), "ok", metrics={"loss": 1.0}, num_examples=3)
    assert checked(measured, START) is measured


# Sizes.

ROOT = {np.float32: 1.8446743e19, np.float64: 1.3407807929942596e154}
"""Square roots of the largest float32 (3.4028235e38) and float64 (1.7976931348623157e308)."""


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_values_from_which_sums_overflow_are_invalid(dtype: type) -> None:
    start = Start({"w": np.zeros(70_000, dtype)}, {})
    for sign in (1, -1):
        delta = {"w": np.zeros(70_000, dtype)}
        delta["w"][-1] = sign * ROOT[dtype] * 0.99
        assert checked(ok(task_of(), delta), start).kind == "ok"
        delta["w"][-1] = sign * ROOT[dtype] * 1.01
        found = checked(ok(task_of(), delta), start)
        assert found.kind == "invalid"
        assert "expected at most 1." in found.reason


def test_bfloat16_is_held_to_the_float32_in_which_it_is_summed() -> None:
    start = Start({"w": np.zeros(2, BFLOAT16)}, {})
    assert checked(ok(task_of(), {"w": np.array([1e19, 0], BFLOAT16)}), start).kind == "ok"
    assert checked(ok(task_of(), {"w": np.array([2e19, 0], BFLOAT16)}), start).kind == "invalid"
    assert checked(ok(task_of(), {"w": np.array([np.nan, 0], BFLOAT16)}), start).kind == "invalid"


def test_float16_is_only_held_to_what_it_can_hold_itself() -> None:
    start = Start({"w": np.array([60_000, np.inf, 0], np.float16)}, {})
    fits = {"w": np.array([5_000, 0, -65_504], np.float16)}
    assert checked(ok(task_of(), fits), start).kind == "ok"
    beyond = {"w": np.array([6_000, 0, 0], np.float16)}
    found = checked(ok(task_of(), beyond), start)
    assert (found.kind, "beyond float16's range" in found.reason) == ("invalid", True)


def test_the_norm_is_taken_over_all_floating_point_arrays_together() -> None:
    start = Start({"a": np.zeros(1, np.float32)}, {"b": np.zeros((1, 1)), "n": np.array(0)})
    delta = {"a": np.array([3], np.float32), "b": np.array([[-4.0]]), "n": np.array(1000)}
    at_most = partial(replace, cohort_of(1))
    assert checked(ok(task_of(), delta), start, at_most(max_update_norm=5.0)).kind == "ok"
    found = checked(ok(task_of(), delta), start, at_most(max_update_norm=4.9))
    assert (found.kind, found.update) == ("invalid", None)
    assert found.reason == "the update's L2 norm is 5, expected at most 4.9 (cohort.max_update_norm)"


def test_a_norm_that_overflows_is_too_large() -> None:
    start, cohort = Start({"w": np.zeros(2)}, {}), replace(cohort_of(1), max_update_norm=1e300)
    assert checked(ok(task_of(), {"w": np.array([1.3e154, 0])}), start, cohort).kind == "ok"
    found = checked(ok(task_of(), {"w": np.array([1.3e154, 1.3e154])}), start, cohort)
    assert found.reason.startswith("the update's L2 norm is inf")


def test_the_norm_of_the_second_payload_is_held_to_the_same_limit_on_its_own() -> None:
    good = ok(task_of(), {**GOOD, "w": np.array([3, 0], np.float32)})
    assert good.update is not None
    outcome = replace(good, update=replace(good.update, extra={"c": np.array([3.0]), "d": np.array([4.0])}))
    assert checked(outcome, START).kind == "ok"
    assert checked(outcome, START, replace(cohort_of(1), max_update_norm=5.0)).kind == "ok"
    found = checked(outcome, START, replace(cohort_of(1), max_update_norm=4.9))
    assert (found.kind, found.update) == ("invalid", None)
    assert found.reason == "the second payload's L2 norm is 5, expected at most 4.9 (cohort.max_update_norm)"


def test_a_number_of_examples_beyond_the_cohorts_own_limit_is_invalid() -> None:
    cohort = replace(cohort_of(1), max_examples=100)
    assert checked(ok(task_of(), GOOD, 100), START, cohort).kind == "ok"
    assert checked(ok(task_of(), GOOD, 101), START, cohort).reason == (
        "101 examples, expected 0 to 100 (cohort.max_examples)"
    )
    measured = Outcome(task_of(kind="evaluate"), "ok", metrics={"loss": 1.0}, num_examples=101)
    assert checked(measured, START, cohort).kind == "invalid"


# Steps.


@pytest.mark.parametrize(
    ("numbers", "num_examples", "num_steps", "reason"),
    [
        ({"steps": 100}, 5, 100, ""),
        ({"steps": 100}, 0, 0, ""),
        ({"steps": 100}, 5, 101, "101 steps, expected 100 as the task says, or 0"),
        ({"steps": 100}, 5, 1, "1 steps, expected 100 as the task says, or 0"),
        ({"epochs": 2}, 5, 10, ""),
        ({"epochs": 2}, 5, 1, ""),
        ({"epochs": 2}, 5, 11, "11 steps, expected 0 to 10 in 2 epochs of 5 examples"),
        ({"epochs": 0.5}, 5, 3, ""),
        ({"epochs": 0.5}, 5, 4, "4 steps, expected 0 to 3 in 0.5 epochs of 5 examples"),
        ({"epochs": 1}, 0, 1, "1 steps, expected 0 to 0 in 1 epochs of 0 examples"),
        ({"epochs": 1}, 5, -1, "-1 steps, expected 0 to 5 in 1 epochs of 5 examples"),
        ({}, 5, 2**53, ""),
    ],
)
def test_steps_are_those_that_the_task_asked_for(
    numbers: dict[str, float], num_examples: int, num_steps: int, reason: str
) -> None:
    good = ok(task_of(local=("sgd_epochs", numbers)), GOOD, num_examples)
    assert good.update is not None
    found = checked(replace(good, update=replace(good.update, num_steps=num_steps)), START)
    assert (found.kind, found.reason) == ("invalid" if reason else "ok", reason)
