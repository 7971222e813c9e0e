from math import exp, log, log1p

import numpy as np
import pytest
import torch

from fedtrain.models.logistic import Logistic, logistic
from fedtrain.random import generator

PARAMS = {"weight": np.array([[2.0, -1.0]]), "bias": np.array([0.5])}


def test_the_logit_is_linear_and_its_sign_the_class() -> None:
    model, x, y = logistic(2), np.array([[1.0, 1.0], [0.0, 3.0], [-1.0, 0.0]]), np.array([1, 1, 0])
    assert model.predict(PARAMS, x).tolist() == [1.5, -2.5, -1.5]
    metrics = model.metrics(PARAMS, x, y)
    assert metrics["accuracy"] == 2 / 3
    assert metrics["loss"] == pytest.approx((log1p(exp(-1.5)) + log1p(exp(2.5)) + log1p(exp(-1.5))) / 3)


def test_loss_and_gradient_are_those_of_torch() -> None:
    random = np.random.default_rng(0)
    x, y = random.normal(size=(6, 2)) * 5, np.array([0, 1, 0, 1, 1, 0])
    loss, gradient = logistic(2).loss_and_gradient(PARAMS, x, y)
    layer = torch.nn.Linear(2, 1, dtype=torch.float64)
    layer.load_state_dict({name: torch.tensor(array) for name, array in PARAMS.items()})
    expected = torch.nn.functional.binary_cross_entropy_with_logits(
        layer(torch.tensor(x))[:, 0], torch.tensor(y, dtype=torch.float64)
    )
    expected.backward()  # type: ignore[no-untyped-call]
    assert loss == pytest.approx(expected.item(), rel=1e-14)
    for name, parameter in layer.named_parameters():
        assert parameter.grad is not None
        np.testing.assert_allclose(gradient[name], parameter.grad.numpy(), rtol=1e-12)


def test_large_logits_overflow_nothing() -> None:
    params = {"weight": np.array([[1e4]], np.float32), "bias": np.zeros(1, np.float32)}
    loss, gradient = logistic(1).loss_and_gradient(params, np.array([[1.0], [-1.0]], np.float32), np.array([0, 1]))
    assert loss == 1e4
    assert gradient["weight"].tolist() == [[1.0]]
    assert gradient["weight"].dtype == gradient["bias"].dtype == np.float32


def test_it_begins_as_torch_does_or_as_it_is_told() -> None:
    first = logistic(16).initial(generator(1))
    assert (first["weight"].shape, first["bias"].shape) == ((1, 16), (1,))
    assert abs(first["weight"]).max() <= 0.25
    assert abs(first["weight"]).max() > 0.2
    assert Logistic(2, PARAMS).initial(generator(1)) == PARAMS
    assert log(2) == pytest.approx(
        logistic(1).metrics({"weight": np.zeros((1, 1)), "bias": np.zeros(1)}, np.ones((1, 1)), np.ones(1))["loss"]
    )
