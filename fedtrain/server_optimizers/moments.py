"""The adaptive optimizers of Reddi et al.: one shape, three ways to keep a second moment."""

from collections.abc import Callable

import numpy as np

from fedtrain.errors import AggregationError, StrategyError
from fedtrain.params import all_finite, wide
from fedtrain.server_optimizers.optimizer import Optimizer
from fedtrain.types import Array, Params, State

SecondMoment = Callable[[Array, Array], Array]
"""(v, delta**2) -> the next v, of the same shape and dtype, >= 0."""


def adaptive(
    name: str,
    second_moment: SecondMoment,
    *,
    learning_rate: float,
    beta1: float,
    tau: float,
    initial_v: float | None,
) -> Optimizer:
    """Move each element along a running mean of its deltas, divided by a running root mean square of them.

        m = beta1 * m + (1 - beta1) * delta
        v = second_moment(v, delta**2)
        move = learning_rate * m / (sqrt(v) + tau)

    As in the paper, and unlike `torch.optim.Adam`, there is no bias correction: m is zero at first, so early moves are
    short. Both moments are kept in float32, or float64 for float64 arrays, whatever the dtype of the model.

    Args:
        name: For error messages.
        second_moment: The rule for v.
        learning_rate: > 0 and finite (eta).
        beta1: In [0, 1); 0 is no momentum.
        tau: > 0 and finite: the degree of adaptivity; the smaller, the more an element's own history counts.
        initial_v: v at first, >= 0 and finite; None: tau**2, the smallest that the paper's Algorithm 2 allows.

    Raises:
        StrategyError: a number is out of its range.
        AggregationError: (when it runs) a second moment leaves the range of its dtype; the round is skipped.

    Source: Reddi et al., Adaptive Federated Optimization, ICLR 2021, arXiv:2003.00295, Algorithm 2.
    """
    require_rate(name, learning_rate)
    require_beta(name, "beta1", beta1)
    if not 0 < tau < np.inf:
        raise StrategyError(f"server optimizer {name}: tau must be > 0 and finite, found {tau}")
    v0 = tau**2 if initial_v is None else initial_v
    if not 0 <= v0 < np.inf:
        raise StrategyError(f"server optimizer {name}: initial_v must be >= 0 and finite, found {initial_v}")

    def init(params: Params) -> State:
        v = {name: np.full(array.shape, v0, wide(array.dtype)) for name, array in params.items()}
        return {"m": zeros_like(params), "v": v}

    def apply(delta: Params, state: State) -> tuple[Params, State]:
        move, m, v = {}, {}, {}
        for key, d in in_wide(delta).items():
            m[key] = np.asarray(beta1 * state["m"][key] + (1 - beta1) * d)
            with np.errstate(over="ignore", invalid="ignore", under="ignore"):
                v[key] = np.asarray(second_moment(state["v"][key], d * d))
            if not all_finite(v[key]):
                raise AggregationError(
                    f"server optimizer {name}: the second moment of {key!r} is beyond {v[key].dtype}: "
                    "lower the clients' learning rate, or clip their updates"
                )
            move[key] = np.asarray(learning_rate * m[key] / (np.sqrt(v[key]) + tau))
        return move, {"m": m, "v": v}

    return Optimizer(init, apply)


def require_rate(name: str, learning_rate: float) -> None:
    """Refuse a learning rate that is not > 0 and finite.

    Raises:
        StrategyError: it is not.
    """
    if not 0 < learning_rate < np.inf:
        raise StrategyError(f"server optimizer {name}: learning_rate must be > 0 and finite, found {learning_rate}")


def require_beta(name: str, which: str, value: float) -> None:
    """Refuse a decay outside of [0, 1).

    Raises:
        StrategyError: it is outside.
    """
    if not 0 <= value < 1:
        raise StrategyError(f"server optimizer {name}: {which} must be in [0, 1), found {value}")


def zeros_like(params: Params) -> dict[str, Array]:
    """Zeros by name, in float32 or wider."""
    return {name: np.zeros(array.shape, wide(array.dtype)) for name, array in params.items()}


def in_wide(delta: Params) -> dict[str, Array]:
    """The same numbers in float32 or wider."""
    return {name: array.astype(wide(array.dtype), copy=False) for name, array in delta.items()}
