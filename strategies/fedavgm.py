"""FedAvgM: FedAvg with momentum on the server.

Hsu, Qi, Brown, Measuring the Effects of Non-Identical Data Distribution for Federated Visual Classification, 2019,
arXiv:1909.06335, section 4.3: v = beta * v + delta, w = w + v. A server learning rate multiplies v, as in Reddi et al.,
ICLR 2021, arXiv:2003.00295. The paper's own experiments use Nesterov's form: `nesterov=True`.
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
    momentum: float = 0.9,
    nesterov: bool = False,
) -> Strategy:
    """FedAvg whose mean delta passes through a velocity; `momentum` is the paper's beta."""
    return Strategy(
        select=uniform(fraction=fraction),
        local=sgd_epochs(epochs, steps=steps, learning_rate=learning_rate, batch_size=batch_size),
        on_client=identity(),
        aggregate=weighted_mean(by_examples),
        on_server=identity(),
        server_optimizer=sgd(server_learning_rate, momentum, nesterov=nesterov),
    )
