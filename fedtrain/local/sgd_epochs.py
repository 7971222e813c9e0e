"""Plain local training: epochs of minibatch SGD, as in FedAvg.

McMahan et al., Communication-Efficient Learning of Deep Networks from Decentralized Data, AISTATS 2017,
arXiv:1602.05629, Algorithm 1, ClientUpdate.
"""

from fedtrain.errors import StrategyError
from fedtrain.local.algorithm import ClientHalf, Local

NAME = "sgd_epochs"


def sgd_epochs(epochs: int = 1, *, learning_rate: float | None = None, batch_size: int | None = None) -> Local:
    """Train for whole passes over the client's own examples, with the optimizer that the client configured.

    Args:
        epochs: Passes over the data, >= 1 (E in the paper).
        learning_rate: Replaces the client's own, > 0; None leaves it to the client.
        batch_size: Replaces the client's own, >= 1 (B in the paper); None leaves it to the client.

    Raises:
        StrategyError: a number is out of its range.
    """
    numbers: dict[str, float] = {"epochs": epochs}
    if learning_rate is not None:
        numbers["learning_rate"] = learning_rate
    if batch_size is not None:
        numbers["batch_size"] = batch_size
    for key, value in numbers.items():
        if not value > 0:
            raise StrategyError(f"local {NAME}: {key} must be > 0, found {value}")
    return Local(
        init=lambda params: (),
        task=lambda state, client, round: (NAME, numbers),
        payload=lambda state: {},
        fold=lambda acc, update: acc,
        finish=lambda state, acc, cohort: state,
    )


client_half = ClientHalf(
    correct=lambda gradient, params, start, payload, client_state, numbers: gradient,
    finish=lambda start, params, payload, client_state, numbers: ({}, client_state),
)
