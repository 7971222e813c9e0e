"""FedNova: clients may do different amounts of work without pulling the model towards their own optimum.

Wang et al., Tackling the Objective Inconsistency Problem in Heterogeneous Federated Optimization, NeurIPS 2020,
arXiv:2007.07481, equations 5 to 7. `momentum` must be that of the clients' SGD.
"""

from fedtrain import Strategy
from fedtrain.aggregation import by_examples, normalised_mean
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
    momentum: float = 0.0,
    server_learning_rate: float = 1.0,
) -> Strategy:
    """FedAvg with deltas normalised by each client's number of steps."""
    return Strategy(
        select=uniform(fraction=fraction),
        local=sgd_epochs(epochs, steps=steps, learning_rate=learning_rate, batch_size=batch_size),
        on_client=identity(),
        aggregate=normalised_mean(by_examples, momentum=momentum),
        on_server=identity(),
        server_optimizer=sgd(server_learning_rate),
    )
