"""The shapes of a local algorithm's two halves."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from fedtrain.types import ClientInfo, Cohort, Params, Spec, Start, State, Update

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
    extra: Callable[[Start], Params] = lambda start: {}
    """Arrays with the names, shapes and dtypes that an update's second payload must have; their values mean nothing.

    An update with another is invalid, so that `fold` can rely on it. A client without examples sends none.
    """
    adjust: Callable[[State, Params], Params] = lambda state, move: move
    """(state after the round, what the server optimizer adds to the model) -> what is added instead."""
    folds_updates: bool = False
    """Whether `fold` keeps what clients sent: every counted update then moves the server's memory, unbounded."""


class ClientHalf(NamedTuple):
    """The client's half, the same for NumPy, torch and vectorised engines.

    `numbers` are those of the task, with what is in force on this client: ``learning_rate``, ``batch_size`` and
    ``num_steps``.
    """

    correct: Callable[[Tensors, Tensors, Tensors, Tensors, State, Mapping[str, float]], Tensors]
    """(gradient, params, start, payload, client_state, numbers) -> the gradient to step along."""
    finish: Callable[[Tensors, Tensors, Tensors, State, Mapping[str, float]], tuple[Tensors, State]]
    """(start, params, payload, client_state, numbers) -> (second payload, new client state)."""
    begin: Callable[[Callable[[], Tensors], State, Mapping[str, float]], State] | None = None
    """(gradient_at_start, client_state, numbers) -> the client state that `correct` and `finish` are given.

    ``gradient_at_start()`` is the gradient of the loss over all of the client's examples at the model that it starts
    from: a whole pass over the data. None: the client state is given as it is.
    """
