from collections.abc import Callable
from math import sqrt
from typing import Any

import numpy as np
import pytest
import torch

from fedtrain.errors import AggregationError, StrategyError
from fedtrain.params import BFLOAT16, add
from fedtrain.server_optimizers import Optimizer, adagrad, adam, sgd, yogi
from fedtrain.types import Params

ADAPTIVE: list[Callable[..., Optimizer]] = [adam, yogi, adagrad]

DELTAS = (1.0, -0.5, 0.25, 0.0, 2.0, -1.0, 0.5, 0.5, -0.125, 0.75)
"""Ten deltas of one element: both signs, a zero, large after small and small after large."""


def walk(optimizer: Optimizer, deltas: tuple[float, ...] = DELTAS, dtype: Any = np.float64) -> list[float]:
    """Where a model that begins at 0 is after each of the deltas."""
    params: Params = {"w": np.zeros(1, dtype)}
    state, places = optimizer.init(params), []
    for delta in deltas:
        move, state = optimizer.apply({"w": np.array([delta], dtype)}, state)
        params = add(params, move)
        places.append(float(params["w"][0]))
    return places


# SGD


def test_with_a_learning_rate_of_one_the_delta_itself_is_the_move() -> None:
    delta = {"w": np.array([0.1, -2.0], np.float16)}
    optimizer = sgd()
    move, state = optimizer.apply(delta, optimizer.init(delta))
    assert move is delta
    assert state == ()


def test_the_move_is_the_learning_rate_times_the_delta() -> None:
    delta = {"a": np.array([2.0, -4.0]), "b": np.array(1.0, np.float32)}
    move, _ = sgd(0.25).apply(delta, ())
    assert move["a"].tolist() == [0.5, -1.0]
    assert move["b"] == 0.25
    assert delta["a"].tolist() == [2.0, -4.0]


def test_the_product_is_not_rounded_to_half_precision_before_it_is_added() -> None:
    for dtype in (np.dtype(np.float16), BFLOAT16):
        move, _ = sgd(0.1).apply({"w": np.array([1.0], dtype)}, ())
        assert move["w"].dtype == np.float32
        assert move["w"] == np.float32(0.1)


@pytest.mark.parametrize(("momentum", "nesterov"), [(0.0, False), (0.9, False), (0.9, True), (0.5, True)])
@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_sgd_is_torch_sgd_along_the_negative_delta(momentum: float, nesterov: bool, dtype: Any) -> None:
    random = np.random.default_rng(0)
    params: Params = {"w": random.normal(size=20).astype(dtype)}
    weight = torch.tensor(params["w"])
    optimizer = sgd(0.3, momentum, nesterov=nesterov)
    reference = torch.optim.SGD([weight], lr=0.3, momentum=momentum, nesterov=nesterov)
    state = optimizer.init(params)
    for _ in range(10):
        delta = random.normal(size=20).astype(dtype)
        weight.grad = torch.tensor(-delta)
        reference.step()
        move, state = optimizer.apply({"w": delta}, state)
        params = add(params, move)
    np.testing.assert_allclose(params["w"], weight.numpy(), rtol=0, atol=1e-6 if dtype == np.float32 else 1e-14)


def test_momentum_moves_by_the_sum_of_decaying_deltas() -> None:
    # velocities 1, 1.5, 0.75; with a learning rate of 2
    assert walk(sgd(2.0, 0.5), (1.0, 1.0, 0.0)) == [2.0, 5.0, 6.5]
    # nesterov: 1 + 0.5, 1 + 0.75, 0 + 0.375
    assert walk(sgd(2.0, 0.5, nesterov=True), (1.0, 1.0, 0.0)) == [3.0, 6.5, 7.25]


def test_a_velocity_too_small_for_half_precision_is_kept() -> None:
    delta = {"w": np.array([2.0**-24], np.float16)}  # the smallest that float16 has
    optimizer = sgd(1.0, 0.5)
    _, state = optimizer.apply(delta, optimizer.init(delta))
    _, state = optimizer.apply({"w": np.zeros(1, np.float16)}, state)
    assert state["w"].dtype == np.float32
    assert state["w"] == 2.0**-25


@pytest.mark.parametrize("rate", [0.0, -1.0, float("inf"), float("nan")])
def test_an_impossible_learning_rate_is_refused(rate: float) -> None:
    for optimizer in (sgd, *ADAPTIVE):
        with pytest.raises(StrategyError, match=f"learning_rate must be > 0 and finite, found {rate}"):
            optimizer(rate)


def test_impossible_momentum_is_refused() -> None:
    for momentum in (-0.1, 1.0, float("nan")):
        with pytest.raises(StrategyError, match=rf"momentum must be in \[0, 1\), found {momentum}"):
            sgd(1.0, momentum)
    with pytest.raises(StrategyError, match="nesterov=True needs momentum > 0"):
        sgd(1.0, nesterov=True)


# Adam, Yogi, Adagrad


def test_adam_takes_the_steps_worked_out_by_hand() -> None:
    # beta1 = beta2 = 0.5, tau = 0.5, so v begins at 0.25; learning rate 2.
    # delta 1: m = 0.5, v = 0.125 + 0.5 = 0.625; delta -1: m = -0.25, v = 0.3125 + 0.5 = 0.8125
    first = 2 * 0.5 / (sqrt(0.625) + 0.5)
    second = 2 * -0.25 / (sqrt(0.8125) + 0.5)
    assert walk(adam(2.0, 0.5, 0.5, 0.5), (1.0, -1.0)) == pytest.approx([first, first + second], rel=1e-15)


def test_yogi_takes_the_steps_worked_out_by_hand() -> None:
    # v begins at 0.25 < 1: v = 0.25 + 0.5; then 0.75 > 0.25: v = 0.75 - 0.125
    first = 2 * 0.5 / (sqrt(0.75) + 0.5)
    second = 2 * (0.25 + 0.25) / (sqrt(0.625) + 0.5)
    assert walk(yogi(2.0, 0.5, 0.5, 0.5), (1.0, 0.5)) == pytest.approx([first, first + second], rel=1e-15)


def test_adagrad_takes_the_steps_worked_out_by_hand() -> None:
    # no momentum; v = 0.25, 1.25, 1.5
    first, second = 2 * 1.0 / (sqrt(1.25) + 0.5), 2 * -0.5 / (sqrt(1.5) + 0.5)
    assert walk(adagrad(2.0, tau=0.5), (1.0, -0.5)) == pytest.approx([first, first + second], rel=1e-15)


TABLE = {
    # In decimal arithmetic of 40 digits: learning rate 0.1, beta1 0.9, beta2 0.99, tau 0.001, v from tau**2.
    "adam": (
        0.099005048883,
        0.134605005353,
        0.187839739654,
        0.235990251666,
        0.344219763040,
        0.393960334026,
        0.457754230441,
        0.533763193484,
        0.597562122505,
        0.681097398423,
    ),
    "yogi": (
        0.099004999875,
        0.134463518570,
        0.187245950231,
        0.234750138727,
        0.342490930484,
        0.391834657880,
        0.454835200624,
        0.529572884345,
        0.592137496292,
        0.673803881472,
    ),
    "adagrad": (
        0.009990005000,
        0.013564515195,
        0.018884386126,
        0.023672269964,
        0.034488501303,
        0.039440581270,
        0.045762808012,
        0.053262391655,
        0.059526110942,
        0.067702552933,
    ),
}


@pytest.mark.parametrize("name", list(TABLE))
@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_ten_steps_are_those_of_the_table(name: str, dtype: Any) -> None:
    optimizers = {"adam": adam(), "yogi": yogi(), "adagrad": adagrad(beta1=0.9)}
    assert walk(optimizers[name], dtype=dtype) == pytest.approx(TABLE[name], abs=1e-6 if dtype == np.float32 else 1e-12)


def test_adam_has_no_bias_correction_and_so_is_not_the_adam_of_torch() -> None:
    weight = torch.zeros(1, dtype=torch.float64)
    reference = torch.optim.Adam([weight], lr=0.1, betas=(0.9, 0.99), eps=1e-3)
    weight.grad = torch.tensor([-1.0], dtype=torch.float64)
    reference.step()
    assert weight.item() == pytest.approx(0.1, abs=1e-4)  # corrected: a whole step at once
    assert walk(adam(), (1.0,))[0] == pytest.approx(0.1 * 0.1 / (sqrt(0.99e-6 + 0.01) + 1e-3), rel=1e-12)


def test_the_second_moment_begins_where_it_is_told() -> None:
    params = {"w": np.zeros(2)}
    for optimizer in ADAPTIVE:
        assert optimizer(tau=0.1).init(params)["v"]["w"] == pytest.approx([0.01, 0.01])
        assert optimizer(initial_v=0.0).init(params)["v"]["w"].tolist() == [0.0, 0.0]
        assert optimizer(initial_v=0.0).init(params)["m"]["w"].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("optimizer", ADAPTIVE)
def test_moments_are_kept_in_float32_or_wider(optimizer: Callable[..., Optimizer]) -> None:
    for dtype, wide in ((np.float16, np.float32), (BFLOAT16, np.float32), (np.float32, np.float32), (np.float64,) * 2):
        params = {"w": np.zeros((), dtype), "empty": np.zeros((0, 3), dtype)}
        made = optimizer(tau=1e-6)  # tau**2 is 0 in float16
        move, state = made.apply({"w": np.ones((), dtype), "empty": params["empty"]}, made.init(params))
        for array in (move["w"], state["m"]["w"], state["v"]["w"]):
            assert (array.dtype, array.shape) == (wide, ())
        assert move["empty"].shape == (0, 3)


@pytest.mark.parametrize("optimizer", ADAPTIVE)
def test_neither_the_delta_nor_the_old_state_is_changed(optimizer: Callable[..., Optimizer]) -> None:
    delta = {"w": np.array([1.0, -2.0])}
    made = optimizer(beta1=0.5)
    state = made.init(delta)
    delta["w"].flags.writeable = state["m"]["w"].flags.writeable = state["v"]["w"].flags.writeable = False
    move, after = made.apply(delta, state)
    assert (after["m"]["w"] != 0).all()
    assert (move["w"] != 0).all()


@pytest.mark.parametrize("optimizer", ADAPTIVE)
def test_a_second_moment_that_overflows_ends_the_round_and_not_the_run(optimizer: Callable[..., Optimizer]) -> None:
    made = optimizer(initial_v=0.0)
    state = made.init({"w": np.zeros(1, np.float32)})
    with pytest.raises(AggregationError, match="second moment of 'w' is beyond float32"):
        made.apply({"w": np.array([2e19], np.float32)}, {"m": state["m"], "v": {"w": np.array([3e38], np.float32)}})


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ({"beta1": 1.0}, r"beta1 must be in \[0, 1\), found 1.0"),
        ({"beta1": -0.5}, r"beta1 must be in \[0, 1\), found -0.5"),
        ({"tau": 0.0}, "tau must be > 0 and finite, found 0.0"),
        ({"tau": float("nan")}, "tau must be > 0 and finite, found nan"),
        ({"initial_v": -1.0}, "initial_v must be >= 0 and finite, found -1.0"),
    ],
)
def test_impossible_numbers_are_refused(numbers: dict[str, float], message: str) -> None:
    for optimizer in ADAPTIVE:
        with pytest.raises(StrategyError, match=message):
            optimizer(**numbers)


def test_an_impossible_decay_of_the_second_moment_is_refused() -> None:
    for optimizer in (adam, yogi):
        with pytest.raises(StrategyError, match=r"beta2 must be in \[0, 1\), found 1.0"):
            optimizer(beta2=1.0)
