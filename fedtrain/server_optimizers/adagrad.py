"""Adagrad on the server."""

import numpy as np

from fedtrain.server_optimizers.moments import adaptive
from fedtrain.server_optimizers.optimizer import Optimizer
from fedtrain.types import Array


def adagrad(
    learning_rate: float = 0.1, beta1: float = 0.0, tau: float = 1e-3, initial_v: float | None = None
) -> Optimizer:
    """FedAdagrad's step: the second moment is the sum of all squared deltas, so steps only become shorter.

        v = v + delta**2

    Args:
        learning_rate: > 0 and finite (eta).
        beta1: Decay of the first moment, in [0, 1); 0, no momentum, in the paper's experiments.
        tau: Degree of adaptivity, > 0 and finite.
        initial_v: Second moment at first, >= 0; None: tau**2 as in the paper. Other implementations begin with 0.

    Raises:
        StrategyError: a number is out of its range.

    Source: Reddi et al., ICLR 2021, arXiv:2003.00295, Algorithm 2 (see `fedtrain.server_optimizers.moments`).
    """

    def second_moment(v: Array, square: Array) -> Array:
        return np.asarray(v + square)

    return adaptive("adagrad", second_moment, learning_rate=learning_rate, beta1=beta1, tau=tau, initial_v=initial_v)
