import numpy as np
import pytest
import torch

from fedtrain.errors import StrategyError
from fedtrain.params import BFLOAT16, add
from fedtrain.server_optimizers import sgd


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


def test_sgd_is_torch_sgd_along_the_negative_delta() -> None:
    random = np.random.default_rng(0)
    model = random.normal(size=20)
    weight = torch.tensor(model)
    optimizer, reference = sgd(0.3), torch.optim.SGD([weight], lr=0.3)
    params = {"w": model}
    for _ in range(3):
        delta = random.normal(size=20)
        weight.grad = torch.tensor(-delta)
        reference.step()
        move, _ = optimizer.apply({"w": delta}, ())
        params = add(params, move)
    np.testing.assert_allclose(params["w"], weight.numpy(), rtol=1e-15)


@pytest.mark.parametrize("rate", [0.0, -1.0, float("inf"), float("nan")])
def test_an_impossible_learning_rate_is_refused(rate: float) -> None:
    with pytest.raises(StrategyError, match=f"learning_rate must be > 0 and finite, found {rate}"):
        sgd(rate)
