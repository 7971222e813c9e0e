"""Local training with a dynamic regulariser, as in FedDyn.

Acar et al., Federated Learning Based on Dynamic Regularization, ICLR 2021, arXiv:2111.04263, Algorithm 1.
"""

from collections.abc import Mapping

import numpy as np

from fedtrain.aggregation.aggregator import Weight, equally
from fedtrain.errors import StrategyError
from fedtrain.local import client_mean
from fedtrain.local.algorithm import ClientHalf, Local, Tensors
from fedtrain.local.work import work
from fedtrain.types import ClientInfo, Cohort, Params, Spec, State, Update

NAME = "feddyn"


def feddyn(
    alpha: float,
    epochs: float = 1,
    *,
    steps: int | None = None,
    learning_rate: float | None = None,
    batch_size: int | None = None,
    weight: Weight = equally,
) -> Local:
    """Minimise the client's loss, tilted by what it remembers, plus a pull towards the round's start x.

        F_k(w) - <h_k, w> + alpha / 2 * ||w - x||**2,   so   gradient = dF_k(w) - h_k + alpha * (w - x)
        h_k = h_k - alpha * (y_k - x)                   once the round has ended at y_k and the update was counted

    The server keeps h, the mean of all clients' h_k (see `fedtrain.local.client_mean`), and puts the model at

        mean of the y_k - h / alpha

    Where the rounds settle, h_k is the gradient of F_k at the model, and the model a stationary point of the sum of all
    losses, however many steps a client takes. The server learns h_k from the deltas; so with a transform on the client
    that changes deltas (`on_client`), h is not exactly their mean any more.

    Args:
        alpha: Strength of the pull, > 0 and finite.
        epochs: Passes over the data, > 0; the paper solves the local problem exactly.
        steps: Optimizer steps in place of epochs, >= 1.
        learning_rate: Replaces the client's own, > 0; None leaves it to the client.
        batch_size: Replaces the client's own, >= 1; None leaves it to the client.
        weight: `equally` as in the paper, or `by_examples`: that of the aggregator.

    Raises:
        StrategyError: a number is out of its range.
    """
    if not 0 < alpha < float("inf"):
        raise StrategyError(f"local {NAME}: alpha must be > 0 and finite, found {alpha}")
    client_mean.require_known(NAME, weight)
    amount = work(NAME, epochs=epochs, steps=steps, learning_rate=learning_rate, batch_size=batch_size)

    def task(state: State, client: ClientInfo, round: int) -> Spec:
        return NAME, {"alpha": alpha, **amount, "weight": client_mean.weight_of(state, client, weight)}

    def fold(acc: object, update: Update) -> object:
        return client_mean.folded(acc, update.delta, update.task.local[1]["weight"])

    def finish(state: State, acc: object, cohort: Cohort) -> State:
        return client_mean.finished(state, acc, cohort, weight, factor=-alpha)

    def adjust(state: State, move: Params) -> Params:
        h = client_mean.mean(state)
        return {name: np.asarray(array - h[name] / alpha) for name, array in move.items()}

    return Local(client_mean.init, task, lambda state: {}, fold, finish, adjust=adjust, folds_updates=True)


def _correct(
    gradient: Tensors,
    params: Tensors,
    start: Tensors,
    payload: Tensors,
    client_state: State,
    numbers: Mapping[str, float],
) -> Tensors:
    alpha = numbers["alpha"]
    pulled = {name: g + alpha * (params[name] - start[name]) for name, g in gradient.items()}
    return {name: g - client_state["h"][name] for name, g in pulled.items()} if client_state else pulled


def _finish(
    start: Tensors, params: Tensors, payload: Tensors, client_state: State, numbers: Mapping[str, float]
) -> tuple[Tensors, State]:
    change = {name: numbers["alpha"] * (start[name] - params[name]) for name in params}
    if client_state:
        change = {name: client_state["h"][name] + array for name, array in change.items()}
    return {}, {"h": change}


client_half = ClientHalf(correct=_correct, finish=_finish)
