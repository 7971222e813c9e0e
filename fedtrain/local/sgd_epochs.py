"""Plain local training: minibatch SGD, as in FedAvg.

McMahan et al., Communication-Efficient Learning of Deep Networks from Decentralized Data, AISTATS 2017,
arXiv:1602.05629, Algorithm 1, ClientUpdate.
"""

from fedtrain.local.algorithm import ClientHalf, Local
from fedtrain.local.work import work

NAME = "sgd_epochs"


def sgd_epochs(
    epochs: float = 1,
    *,
    steps: int | None = None,
    learning_rate: float | None = None,
    batch_size: int | None = None,
) -> Local:
    """Train on the client's own examples, with the optimizer that the client configured.

    Args:
        epochs: Passes over the data, > 0 (E in the paper).
        steps: Optimizer steps in place of epochs, >= 1: the same work for clients with little and with much data.
        learning_rate: Replaces the client's own, > 0; None leaves it to the client.
        batch_size: Replaces the client's own, >= 1 (B in the paper); None leaves it to the client.

    Raises:
        StrategyError: a number is out of its range.
    """
    numbers = work(NAME, epochs=epochs, steps=steps, learning_rate=learning_rate, batch_size=batch_size)
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
