"""FedAvg: clients train for some epochs, the server averages by the number of examples.

McMahan et al., Communication-Efficient Learning of Deep Networks from Decentralized Data, AISTATS 2017,
arXiv:1602.05629, Algorithm 1. Written with deltas: with a server learning rate of 1 it is the paper's mean of models.
"""

from fedtrain import Strategy
from fedtrain.aggregation import by_examples, weighted_mean
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
    """FedAvg with C = `fraction`, E = `epochs` (or `steps`), B = `batch_size`; None leaves a number to the client."""
    return Strategy(
        select=uniform(fraction=fraction),
        local=sgd_epochs(epochs, steps=steps, learning_rate=learning_rate, batch_size=batch_size),
        on_client=identity(),
        aggregate=weighted_mean(by_examples),
        on_server=identity(),
        server_optimizer=sgd(server_learning_rate),
    )
