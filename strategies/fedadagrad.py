"""FedAdagrad: Adagrad on the server, applied to the cohort's mean delta.

Reddi et al., Adaptive Federated Optimization, ICLR 2021, arXiv:2003.00295, Algorithm 2 (FedOpt).
As there, no bias correction, v begins at tau**2, and the mean is weighted by examples.
Without momentum (beta1 = 0) as in its experiments.
"""

from fedtrain import Strategy
from fedtrain.aggregation import by_examples, weighted_mean
from fedtrain.local import sgd_epochs
from fedtrain.selection import uniform
from fedtrain.server_optimizers import adagrad
from fedtrain.transforms import identity


def build(
    fraction: float = 1.0,
    epochs: float = 1,
    steps: int | None = None,
    learning_rate: float | None = None,
    batch_size: int | None = None,
    server_learning_rate: float = 0.1,
    beta1: float = 0.0,
    tau: float = 1e-3,
    initial_v: float | None = None,
) -> Strategy:
    """FedAvg's mean delta, moved along by Adagrad."""
    return Strategy(
        select=uniform(fraction=fraction),
        local=sgd_epochs(epochs, steps=steps, learning_rate=learning_rate, batch_size=batch_size),
        on_client=identity(),
        aggregate=weighted_mean(by_examples),
        on_server=identity(),
        server_optimizer=adagrad(server_learning_rate, beta1, tau, initial_v),
    )
