"""The shape of a server optimizer."""

from collections.abc import Callable
from typing import NamedTuple

from fedtrain.types import Params, State


class Optimizer(NamedTuple):
    """Pure functions of a state that `RunState.server_optimizer` holds; they see trainable float arrays only."""

    init: Callable[[Params], State]
    apply: Callable[[Params, State], tuple[Params, State]]
    """(delta, state) -> (what is added to the model, state). The delta points where the model should move."""
