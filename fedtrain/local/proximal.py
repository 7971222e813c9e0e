"""Local training that is held near the global model, as in FedProx."""

from collections.abc import Mapping

from fedtrain.errors import StrategyError
from fedtrain.local.algorithm import ClientHalf, Local, Tensors
from fedtrain.local.work import work
from fedtrain.types import State

NAME = "proximal"


def proximal(
    mu: float,
    epochs: float = 1,
    *,
    steps: int | None = None,
    learning_rate: float | None = None,
    batch_size: int | None = None,
) -> Local:
    """Minimise the client's loss plus a pull towards the model w_t that the round starts from.

        h(w) = F_k(w) + mu / 2 * ||w - w_t||**2,   so   gradient = dF_k(w) + mu * (w - w_t)

    Only trainable arrays are pulled.

    Args:
        mu: Strength of the pull, >= 0 and finite; 0 is plain training, bit for bit.
        epochs: Passes over the data, > 0.
        steps: Optimizer steps in place of epochs, >= 1.
        learning_rate: Replaces the client's own, > 0; None leaves it to the client.
        batch_size: Replaces the client's own, >= 1; None leaves it to the client.

    Raises:
        StrategyError: a number is out of its range.

    Source: Li et al., Federated Optimization in Heterogeneous Networks, MLSys 2020, arXiv:1812.06127, equation 2.
    """
    if not 0 <= mu < float("inf"):
        raise StrategyError(f"local {NAME}: mu must be >= 0 and finite, found {mu}")
    amount = work(NAME, epochs=epochs, steps=steps, learning_rate=learning_rate, batch_size=batch_size)
    numbers = {"mu": mu, **amount}
    return Local(
        init=lambda params: (),
        task=lambda state, client, round: (NAME, numbers),
        payload=lambda state: {},
        fold=lambda acc, update: acc,
        finish=lambda state, acc, cohort: state,
    )


def _correct(
    gradient: Tensors,
    params: Tensors,
    start: Tensors,
    payload: Tensors,
    client_state: State,
    numbers: Mapping[str, float],
) -> Tensors:
    mu = numbers["mu"]
    if mu == 0:  # adding zero is not nothing: it makes 0.0 of -0.0
        return gradient
    return {name: g + mu * (params[name] - start[name]) for name, g in gradient.items()}


client_half = ClientHalf(
    correct=_correct, finish=lambda start, params, payload, client_state, numbers: ({}, client_state)
)
