"""Adam on the server."""

import numpy as np

from fedtrain.server_optimizers.moments import adaptive, require_beta
from fedtrain.server_optimizers.optimizer import Optimizer
from fedtrain.types import Array


def adam(
    learning_rate: float = 0.1,
    beta1: float = 0.9,
    beta2: float = 0.99,
    tau: float = 1e-3,
    initial_v: float | None = None,
) -> Optimizer:
    """FedAdam's step: the second moment is an exponential mean of the squared deltas.

        v = beta2 * v + (1 - beta2) * delta**2

    Args:
        learning_rate: > 0 and finite (eta).
        beta1: Decay of the first moment, in [0, 1).
        beta2: Decay of the second moment, in [0, 1).
        tau: Degree of adaptivity, > 0 and finite.
        initial_v: Second moment at first, >= 0; None: tau**2 as in the paper. Other implementations begin with 0.

    Raises:
        StrategyError: a number is out of its range.

    Source: Reddi et al., ICLR 2021, arXiv:2003.00295, Algorithm 2 (see `fedtrain.server_optimizers.moments`).
    """
    require_beta("adam", "beta2", beta2)

    def second_moment(v: Array, square: Array) -> Array:
        return np.asarray(beta2 * v + (1 - beta2) * square)

    return adaptive("adam", second_moment, learning_rate=learning_rate, beta1=beta1, tau=tau, initial_v=initial_v)
