"""RFA: FedAvg with the geometric median of the deltas in place of their mean.

Pillutla, Kakade, Harchaoui, Robust Aggregation for Federated Learning, IEEE Transactions on Signal Processing 2022,
arXiv:1912.13445, Algorithms 1 and 2. The paper believes the clients' numbers of examples, and so does this: limit them
with cohort.max_examples. Weiszfeld's steps begin at the median of each element.
"""

from fedtrain import Strategy
from fedtrain.aggregation import by_examples, geometric_median
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
    smoothing: float = 1e-6,
    num_steps: int = 3,
    server_learning_rate: float = 1.0,
) -> Strategy:
    """FedAvg whose model moves by geometric medians, of `num_steps` steps each."""
    return Strategy(
        select=uniform(fraction=fraction),
        local=sgd_epochs(epochs, steps=steps, learning_rate=learning_rate, batch_size=batch_size),
        on_client=identity(),
        aggregate=geometric_median(by_examples, smoothing=smoothing, num_steps=num_steps),
        on_server=identity(),
        server_optimizer=sgd(server_learning_rate),
    )
