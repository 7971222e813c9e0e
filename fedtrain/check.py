"""What a client sent, checked before any arithmetic."""

from fedtrain.errors import ParamsError
from fedtrain.params import all_finite, require_same_layout
from fedtrain.types import Outcome, Params, Start, Update

MAX_EXAMPLES = 2**53
"""The largest number of examples: up to here a float64 weight is exact."""


def checked(outcome: Outcome, start: Start) -> Outcome:
    """The outcome itself, or one of kind ``invalid`` with the reason, if its numbers or its update can't be used."""
    if outcome.kind != "ok":
        return outcome
    problem = _problem_of_count(outcome.num_examples)
    if not problem and outcome.task.kind == "train":
        problem = "an answer without an update" if outcome.update is None else problem_of(outcome.update, start)
    if not problem:
        return outcome
    return Outcome(outcome.task, "invalid", reason=problem, seconds=outcome.seconds)


def problem_of(update: Update, start: Start) -> str:
    """What is wrong with an update, in words; empty if nothing is."""
    if problem := _problem_of_count(update.num_examples):
        return problem
    try:
        require_same_layout(update.delta, {**start.params, **start.buffers}, what="the update")
    except ParamsError as error:
        return str(error)
    return _not_finite(update.delta) or _not_finite(update.extra)


def _problem_of_count(num_examples: int) -> str:
    return "" if 0 <= num_examples <= MAX_EXAMPLES else f"{num_examples} examples, expected 0 to 2**53"


def _not_finite(arrays: Params) -> str:
    for name in arrays:
        if not all_finite(arrays[name]):
            return f"{name!r} holds NaN or infinity: training diverged on this client"
    return ""
