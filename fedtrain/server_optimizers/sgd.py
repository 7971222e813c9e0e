"""The delta times a learning rate, with or without momentum."""

import numpy as np

from fedtrain.errors import StrategyError
from fedtrain.params import wide
from fedtrain.server_optimizers.moments import in_wide, require_rate, zeros_like
from fedtrain.server_optimizers.optimizer import Optimizer
from fedtrain.types import Params, State


def sgd(learning_rate: float = 1.0, momentum: float = 0.0, *, nesterov: bool = False) -> Optimizer:
    """Move the model by ``learning_rate * delta``; with 1 and no momentum this is FedAvg's averaging of models.

    With momentum, a velocity u (zero at first) is kept in float32, or float64 for float64 arrays:

        u = momentum * u + delta
        move = learning_rate * u                       plain
        move = learning_rate * (delta + momentum * u)  nesterov

    which is `torch.optim.SGD` along the gradient -delta.

    Args:
        learning_rate: > 0 and finite (eta in Reddi et al., 2021, arXiv:2003.00295, Algorithm 1).
        momentum: In [0, 1): FedAvgM's beta.
        nesterov: Look ahead by one step; needs momentum > 0.

    Raises:
        StrategyError: a number is out of its range, or `nesterov` without momentum.

    Source of the momentum: Hsu et al., 2019, arXiv:1909.06335, section 4.3 (FedAvgM).
    """
    require_rate("sgd", learning_rate)
    if not 0 <= momentum < 1:
        raise StrategyError(f"server optimizer sgd: momentum must be in [0, 1), found {momentum}")
    if nesterov and momentum == 0:
        raise StrategyError("server optimizer sgd: nesterov=True needs momentum > 0, found momentum=0: set a momentum")

    def plain(delta: Params, state: State) -> tuple[Params, State]:
        if learning_rate == 1.0:
            return delta, state
        factor = {name: wide(array.dtype).type(learning_rate) for name, array in delta.items()}
        return {name: factor[name] * array.astype(wide(array.dtype)) for name, array in delta.items()}, state

    def with_momentum(delta: Params, state: State) -> tuple[Params, State]:
        move, velocity = {}, {}
        for name, d in in_wide(delta).items():
            u = velocity[name] = np.asarray(momentum * state[name] + d)
            move[name] = np.asarray(learning_rate * (d + momentum * u if nesterov else u))
        return move, velocity

    return Optimizer(zeros_like, with_momentum) if momentum else Optimizer(lambda params: (), plain)
