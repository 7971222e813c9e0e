"""SCAFFOLD: clients correct their steps by what sets them apart from all clients.

Karimireddy et al., SCAFFOLD: Stochastic Controlled Averaging for Federated Learning, ICML 2020, arXiv:1910.06378,
Algorithm 1. `weighted` counts examples where the paper counts clients, in the mean of the deltas and of the controls.
"""

from fedtrain import Strategy
from fedtrain.aggregation import by_examples, equally, weighted_mean
from fedtrain.local import scaffold
from fedtrain.selection import uniform
from fedtrain.server_optimizers import sgd
from fedtrain.transforms import identity


def build(
    fraction: float = 1.0,
    epochs: float = 1,
    steps: int | None = None,
    learning_rate: float | None = None,
    batch_size: int | None = None,
    option: int = 2,
    weighted: bool = False,
    server_learning_rate: float = 1.0,
) -> Strategy:
    """SCAFFOLD; `option` says how controls are renewed, `server_learning_rate` is the paper's eta_g."""
    weight = by_examples if weighted else equally
    return Strategy(
        select=uniform(fraction=fraction),
        local=scaffold(
            epochs, steps=steps, learning_rate=learning_rate, batch_size=batch_size, option=option, weight=weight
        ),
        on_client=identity(),
        aggregate=weighted_mean(weight),
        on_server=identity(),
        server_optimizer=sgd(server_learning_rate),
    )
