"""FedProx: FedAvg whose clients are held near the global model.

Li et al., Federated Optimization in Heterogeneous Networks, MLSys 2020, arXiv:1812.06127, Algorithm 2, equation 2.
Deviations: clients are chosen uniformly and averaged by examples, as in the paper's experiments, in place of chosen by
examples and averaged equally; the inexactness of a client's solution is its number of epochs or steps.
"""

from fedtrain import Strategy
from fedtrain.aggregation import by_examples, weighted_mean
from fedtrain.local import proximal
from fedtrain.selection import uniform
from fedtrain.server_optimizers import sgd
from fedtrain.transforms import identity


def build(
    fraction: float = 1.0,
    epochs: float = 1,
    steps: int | None = None,
    learning_rate: float | None = None,
    batch_size: int | None = None,
    mu: float = 0.01,
    server_learning_rate: float = 1.0,
) -> Strategy:
    """FedAvg with a proximal term; `mu` 0 is FedAvg bit for bit."""
    return Strategy(
        select=uniform(fraction=fraction),
        local=proximal(mu, epochs, steps=steps, learning_rate=learning_rate, batch_size=batch_size),
        on_client=identity(),
        aggregate=weighted_mean(by_examples),
        on_server=identity(),
        server_optimizer=sgd(server_learning_rate),
    )
