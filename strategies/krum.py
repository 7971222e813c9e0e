"""Krum: the model moves by the one delta that is nearest to most of the others.

Blanchard et al., Machine Learning with Adversaries: Byzantine Tolerant Gradient Descent, NeurIPS 2017,
arXiv:1703.02757, the Krum function. A round needs 2f + 3 answers. The paper's clients send one gradient; here they
send the delta of `epochs` of training.
"""

from fedtrain import Strategy
from fedtrain.aggregation import krum
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
    num_byzantine: int = 1,
    server_learning_rate: float = 1.0,
) -> Strategy:
    """FedAvg whose model moves by Krum's choice, with f = `num_byzantine`."""
    return Strategy(
        select=uniform(fraction=fraction),
        local=sgd_epochs(epochs, steps=steps, learning_rate=learning_rate, batch_size=batch_size),
        on_client=identity(),
        aggregate=krum(num_byzantine),
        on_server=identity(),
        server_optimizer=sgd(server_learning_rate),
    )
