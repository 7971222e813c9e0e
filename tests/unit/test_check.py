from dataclasses import replace

import numpy as np
import pytest
from fakes import ok

from fedtrain.check import MAX_EXAMPLES, checked, problem_of
from fedtrain.testing import task_of, update_of
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
