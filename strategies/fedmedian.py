"""FedMedian: FedAvg with the median of each element in place of the mean.

Yin et al., Byzantine-Robust Distributed Learning: Towards Optimal Statistical Rates, ICML 2018, arXiv:1803.01498,
Algorithm 1, option I. The paper's clients send one gradient; here they send the delta of `epochs` of training.
"""

from fedtrain import Strategy
from fedtrain.aggregation import median
from fedtrain.local import sgd_epochs
from fedtrain.selection import uniform
from fedtrain.server_optimizers import sgd
from fedtrain.transforms import identity


def build(
    fraction: float = 1.0,
    epochs: float = 1,
    steps: int | None = None,
    learning_rate: float | None = None,
    batch_size: int | None = None,
    server_learning_rate: float = 1.0,
) -> Strategy:
    """FedAvg whose model moves by medians; every client counts once."""
    return Strategy(
        select=uniform(fraction=fraction),
        local=sgd_epochs(epochs, steps=steps, learning_rate=learning_rate, batch_size=batch_size),
        on_client=identity(),
        aggregate=median(),
        on_server=identity(),
        server_optimizer=sgd(server_learning_rate),
    )
