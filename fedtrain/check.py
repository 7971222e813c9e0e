"""What a client sent, checked before any arithmetic."""

import math

import numpy as np

from fedtrain.errors import ParamsError
from fedtrain.params import is_float, require_same_layout, wide
from fedtrain.types import Array, Cohort, Outcome, Params, Start, Update

MAX_EXAMPLES = 2**53
"""The largest number of examples: up to here a float64 weight is exact."""

_PIECE = 65_536
"""Elements that are looked at together: they stay in the cache, and no copy of a model is made."""


def checked(outcome: Outcome, start: Start, cohort: Cohort | None = None, extra: Params | None = None) -> Outcome:
    """The outcome itself, or one of kind ``invalid`` with the reason, if its numbers or its update can't be used.

    The cohort says how large an update and its number of examples may be; without one there is no such limit. For
    `extra`, see `problem_of`.
    """
    if outcome.kind != "ok":
        return outcome
    max_examples, max_norm = (cohort.max_examples, cohort.max_update_norm) if cohort else (None, None)
    problem = _problem_of_count(outcome.num_examples, max_examples)
    if not problem and outcome.task.kind == "train":
        problem = "an answer without an update"
        if outcome.update is not None:
            problem = problem_of(outcome.update, start, extra, max_examples=max_examples, max_norm=max_norm)
    if not problem:
        return outcome
    return Outcome(outcome.task, "invalid", reason=problem, seconds=outcome.seconds)


def problem_of(
    update: Update,
    start: Start,
    extra: Params | None = None,
    *,
    max_examples: int | None = None,
    max_norm: float | None = None,
) -> str:
    """What is wrong with an update, in words; empty if nothing is.

    Args:
        update: To be checked; its arrays are looked at one after the other.
        start: What it starts from: the same names, shapes and dtypes are expected.
        extra: The same for the second payload, which may be missing where there are no examples; None: any.
        max_examples: Its number of examples at most; None: 2**53.
        max_norm: The L2 norm at most, over all floating-point arrays of the delta together, and over those of the
            second payload; None: any.
    """
    if problem := _problem_of_count(update.num_examples, max_examples) or _problem_of_steps(update):
        return problem
    model = {**start.params, **start.buffers}
    try:
        require_same_layout(update.delta, model, what="the update")
        if extra is not None and (update.extra or update.num_examples):
            require_same_layout(update.extra, extra, what="the update's second payload")
    except ParamsError as error:
        return str(error)
    return (
        _problem_of_values(update.delta)
        or _problem_of_values(update.extra)
        or _problem_of_half(update.delta, model)
        or _problem_of_norm("the update", update.delta, max_norm)
        or _problem_of_norm("the second payload", update.extra, max_norm)
    )


def largest_value(dtype: np.dtype) -> float:
    """How far from zero an element of an update may be: no sum over a cohort, of whatever weights, overflows then.

    Sums are kept in float32 or float64. The square root of that dtype's largest number (1.8e19, 1.3e154) times any
    number of examples leaves room for thousands of clients; what float16 can hold is never too much for float32.
    """
    if dtype == np.float16:
        return float(np.finfo(np.float16).max)
    return math.sqrt(float(np.finfo(wide(dtype)).max))


def _problem_of_count(num_examples: int, most: int | None) -> str:
    limit, words = (MAX_EXAMPLES, "2**53") if most is None else (most, f"{most} (cohort.max_examples)")
    return "" if 0 <= num_examples <= limit else f"{num_examples} examples, expected 0 to {words}"


def _problem_of_steps(update: Update) -> str:
    """More steps than were asked for, or fewer: by their number a mean may weigh an update (`normalised_mean`).

    A task that names ``steps`` is done in as many, or not at all. With ``epochs`` the server knows the most, that of
    batches of one example, and no less than zero.
    """
    found, asked = update.num_steps, update.task.local[1]
    if "steps" in asked:
        steps = math.ceil(asked["steps"])
        return "" if found in (0, steps) else f"{found} steps, expected {steps} as the task says, or 0"
    if "epochs" in asked:
        epochs, most = asked["epochs"], math.ceil(asked["epochs"] * update.num_examples)
        if not 0 <= found <= most:
            return f"{found} steps, expected 0 to {most} in {epochs:g} epochs of {update.num_examples} examples"
    return ""


def _problem_of_values(arrays: Params) -> str:
    for name in arrays:
        array = arrays[name]
        if not is_float(array):
            continue
        largest, allowed = _largest(array), largest_value(array.dtype)
        if not math.isfinite(largest):
            return f"{name!r} holds NaN or infinity: training diverged on this client"
        if largest > allowed:
            return (
                f"{name!r} holds a value of magnitude {largest:.3g}, expected at most {allowed:.3g}, beyond which sums "
                "overflow: training diverged on this client"
            )
    return ""


def _largest(array: Array) -> float:
    """The largest magnitude in an array; NaN if it holds one."""
    found, flat = 0.0, array.reshape(-1)
    for begin in range(0, flat.size, _PIECE):
        piece = _at_least_float32(flat[begin : begin + _PIECE])
        found = max(-float(piece.min()), float(piece.max()), found)
        if math.isnan(found):
            break
    return found


def _problem_of_half(delta: Params, model: Params) -> str:
    """A float16 model that would overflow with this delta alone: the client can't have had it."""
    for name, start in model.items():
        if start.dtype != np.float16:
            continue
        flat, moves = start.reshape(-1), delta[name].reshape(-1)
        for begin in range(0, flat.size, _PIECE):
            before = flat[begin : begin + _PIECE]
            with np.errstate(over="ignore", invalid="ignore"):
                after = before + moves[begin : begin + _PIECE]
            if bool((np.isfinite(before) & ~np.isfinite(after)).any()):
                return f"{name!r} would be beyond float16's range with this update: training diverged on this client"
    return ""


def _problem_of_norm(what: str, arrays: Params, most: float | None) -> str:
    if most is None:
        return ""
    squares = 0.0
    for name in arrays:
        array = arrays[name]
        flat = array.reshape(-1) if is_float(array) else np.empty(0)
        for begin in range(0, flat.size, _PIECE):
            with np.errstate(over="ignore"):  # an infinite norm is too large as well
                squares += float(np.square(flat[begin : begin + _PIECE].astype(np.float64)).sum())
    norm = math.sqrt(squares)
    if norm <= most:
        return ""
    return f"{what}'s L2 norm is {norm:.6g}, expected at most {most:g} (cohort.max_update_norm)"


def _at_least_float32(array: Array) -> Array:
    return array.astype(np.float32) if array.dtype.itemsize < 4 else array
