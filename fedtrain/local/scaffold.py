"""Local training that is corrected for each client's drift, as in SCAFFOLD.

Karimireddy et al., SCAFFOLD: Stochastic Controlled Averaging for Federated Learning, ICML 2020, arXiv:1910.06378,
Algorithm 1.
"""

from collections.abc import Callable, Mapping

import numpy as np

from fedtrain.aggregation.aggregator import Weight, equally
from fedtrain.errors import StrategyError
from fedtrain.local import client_mean
from fedtrain.local.algorithm import ClientHalf, Local, Tensors
from fedtrain.local.work import work
from fedtrain.types import ClientInfo, Cohort, Params, Spec, State, Update

NAME = "scaffold"


def scaffold(
    epochs: float = 1,
    *,
    steps: int | None = None,
    learning_rate: float | None = None,
    batch_size: int | None = None,
    option: int = 2,
    weight: Weight = equally,
) -> Local:
    """Step along ``gradient - c_k + c``: without client k's own direction c_k, with that of all clients, c.

    After its last step, a client's control variate becomes

        c_k = gradient of its loss over all its examples at x      option 1: one more pass over the data
        c_k = c_k - c + (x - y_k) / (num_steps * learning_rate)    option 2: the mean gradient of its own steps

    for a round that starts from the model x and ends at y_k. Option 2 assumes plain SGD, without momentum, on the
    client; with another optimizer use option 1. The client sends the change of c_k beside its delta, which doubles what
    it uploads, and keeps the new one only when the server has counted its update.

    The server's c is the mean of all clients' controls (see `fedtrain.local.client_mean`), those that are away
    included; it moves by the share of the clients that were counted, as in the paper.

    Args:
        epochs: Passes over the data, > 0.
        steps: Optimizer steps in place of epochs, >= 1.
        learning_rate: Replaces the client's own, > 0; None leaves it to the client.
        batch_size: Replaces the client's own, >= 1; None leaves it to the client.
        option: 1 or 2: how a client's control is renewed.
        weight: `equally` as in the paper, or `by_examples`: that of the aggregator, so that all corrections together
            leave the aggregate as it is.

    Raises:
        StrategyError: a number is out of its range.
    """
    if option not in (1, 2):
        raise StrategyError(f"local {NAME}: option must be 1 or 2, found {option}")
    client_mean.require_known(NAME, weight)
    amount = work(NAME, epochs=epochs, steps=steps, learning_rate=learning_rate, batch_size=batch_size)
    numbers = {"option": option, **amount}

    def init(params: Params) -> State:
        # What travels has the model's dtypes; the sum that is kept is wider.
        return {**client_mean.init(params), "dtypes": {name: array.dtype.name for name, array in params.items()}}

    def task(state: State, client: ClientInfo, round: int) -> Spec:
        return NAME, {**numbers, "weight": client_mean.weight_of(state, client, weight)}

    def payload(state: State) -> Params:
        return {name: array.astype(np.dtype(state["dtypes"][name])) for name, array in client_mean.mean(state).items()}

    def fold(acc: object, update: Update) -> object:
        return client_mean.folded(acc, update.extra, update.task.local[1]["weight"])

    def finish(state: State, acc: object, cohort: Cohort) -> State:
        return {**state, **client_mean.finished(state, acc, cohort, weight)}

    return Local(init, task, payload, fold, finish, extra=lambda start: start.params, folds_updates=True)


def _begin(gradient_at_start: Callable[[], Tensors], client_state: State, numbers: Mapping[str, float]) -> State:
    own = client_state["control"] if client_state else None
    return {"control": own, "next": gradient_at_start() if numbers["option"] == 1 else None}


def _correct(
    gradient: Tensors,
    params: Tensors,
    start: Tensors,
    payload: Tensors,
    client_state: State,
    numbers: Mapping[str, float],
) -> Tensors:
    own = client_state["control"]
    if own is None:
        return {name: g + payload[name] for name, g in gradient.items()}
    return {name: g - own[name] + payload[name] for name, g in gradient.items()}


def _finish(
    start: Tensors, params: Tensors, payload: Tensors, client_state: State, numbers: Mapping[str, float]
) -> tuple[Tensors, State]:
    own, new = client_state["control"], client_state["next"]
    if new is None:
        per_step = 1.0 / (numbers["num_steps"] * numbers["learning_rate"])
        change = {name: (start[name] - params[name]) * per_step - payload[name] for name in params}
        new = change if own is None else {name: own[name] + change[name] for name in params}
    else:
        change = new if own is None else {name: new[name] - own[name] for name in params}
    return change, {"control": new}


client_half = ClientHalf(correct=_correct, finish=_finish, begin=_begin)
