"""The shapes of a local algorithm's two halves."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from fedtrain.types import ClientInfo, Cohort, Params, Spec, State, Update

Tensors = Mapping[str, Any]
"""Named arrays of whatever library trains: only ``+``, ``-`` and ``*`` are used on them."""


class Local(NamedTuple):
    """The server's half: pure functions of a state that `RunState.local` holds."""

    init: Callable[[Params], State]
    task: Callable[[State, ClientInfo, int], Spec]
    """(state, client, round) -> what this client shall do: the work of each client is decided here."""
    payload: Callable[[State], Params]
    """Arrays that travel beside the model, the same for every client."""
    fold: Callable[[Any, Update], Any]
    """(accumulator or None, counted update) -> accumulator; called in cohort order."""
    finish: Callable[[State, Any, Cohort], State]
    """(state, accumulator or None, cohort) -> state after the round; not called for a skipped round."""


class ClientHalf(NamedTuple):
    """The client's half, the same for NumPy, torch and vectorised engines.

    `numbers` are those of the task, with what is in force on this client: ``learning_rate``, ``batch_size`` and
    ``num_steps``.
    """

    correct: Callable[[Tensors, Tensors, Tensors, Tensors, State, Mapping[str, float]], Tensors]
    """(gradient, params, start, payload, client_state, numbers) -> the gradient to step along."""
    finish: Callable[[Tensors, Tensors, Tensors, State, Mapping[str, float]], tuple[Tensors, State]]
    """(start, params, payload, client_state, numbers) -> (second payload, new client state)."""
