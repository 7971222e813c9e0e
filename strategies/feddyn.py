"""FedDyn: a regulariser that follows each client, so that all agree where the global loss is stationary.

Acar et al., Federated Learning Based on Dynamic Regularization, ICLR 2021, arXiv:2111.04263, Algorithm 1.
Deviation: clients minimise their regularised loss by epochs or steps of SGD, not exactly.
"""

from fedtrain import Strategy
from fedtrain.aggregation import equally, weighted_mean
from fedtrain.local import feddyn
from fedtrain.selection import uniform
from fedtrain.server_optimizers import sgd
from fedtrain.transforms import identity


def build(
    fraction: float = 1.0,
    epochs: float = 1,
    steps: int | None = None,
    learning_rate: float | None = None,
    batch_size: int | None = None,
    alpha: float = 0.01,
    server_learning_rate: float = 1.0,
) -> Strategy:
    """FedDyn; `alpha` is the strength of the regulariser."""
    return Strategy(
        select=uniform(fraction=fraction),
        local=feddyn(alpha, epochs, steps=steps, learning_rate=learning_rate, batch_size=batch_size),
        on_client=identity(),
        aggregate=weighted_mean(equally),
        on_server=identity(),
        server_optimizer=sgd(server_learning_rate),
    )
