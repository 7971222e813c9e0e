"""The delta times a learning rate."""

import numpy as np

from fedtrain.errors import StrategyError
from fedtrain.params import wide
from fedtrain.server_optimizers.optimizer import Optimizer
from fedtrain.types import Params, State


def sgd(learning_rate: float = 1.0) -> Optimizer:
    """Move the model by ``learning_rate * delta``; with 1 this is FedAvg's averaging of models.

    Args:
        learning_rate: > 0 and finite (eta in Reddi et al., 2021, arXiv:2003.00295, Algorithm 1).

    Raises:
        StrategyError: the learning rate is out of its range.
    """
    if not 0 < learning_rate < np.inf:
        raise StrategyError(f"server optimizer sgd: learning_rate must be > 0 and finite, found {learning_rate}")

    def apply(delta: Params, state: State) -> tuple[Params, State]:
        if learning_rate == 1.0:
            return delta, state
        factor = {name: wide(array.dtype).type(learning_rate) for name, array in delta.items()}
        return {name: factor[name] * array.astype(wide(array.dtype)) for name, array in delta.items()}, state

    return Optimizer(init=lambda params: (), apply=apply)
