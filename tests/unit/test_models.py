import math
import subprocess
import sys

import numpy as np
import torch

from fedtrain.models.cnn import cnn
from fedtrain.models.mlp import mlp
from fedtrain.models.softmax import softmax
from fedtrain.random import generator


def test_the_cnn_turns_digits_into_ten_logits():
    assert cnn()(torch.zeros(3, 1, 8, 8)).shape == (3, 10)
    assert cnn(num_classes=4, channels=(8, 8, 3), in_channels=3, side=16)(torch.zeros(2, 3, 16, 16)).shape == (2, 4)


def test_the_mlp_turns_numbers_into_logits():
    assert mlp()(torch.zeros(3, 1, 8, 8)).shape == (3, 10)
    assert [tuple(p.shape) for p in mlp(4, (), 2).parameters()] == [(2, 4), (2,)]
    assert [tuple(p.shape) for p in mlp(4, (5, 6), 2).parameters()] == [(5, 4), (5,), (6, 5), (6,), (2, 6), (2,)]


def test_softmax_of_zeros_gives_the_loss_of_guessing_and_the_gradient_worked_by_hand():
    model = softmax(num_features=2, num_classes=2)
    params = model.initial(generator(0))
    loss, gradient = model.loss_and_gradient(params, np.array([[1.0, 2.0]], np.float32), np.array([1]))
    assert math.isclose(loss, math.log(2), rel_tol=1e-6)
    # p - onehot = (0.5, -0.5), times x = (1, 2)
    assert gradient["weight"].tolist() == [[0.5, 1.0], [-0.5, -1.0]]
    assert gradient["bias"].tolist() == [0.5, -0.5]
    assert gradient["weight"].dtype == np.float32


def test_the_softmax_gradient_is_that_of_torch():
    random = generator(1)
    params = {
        "weight": random.normal(size=(3, 4)).astype(np.float32),
        "bias": random.normal(size=3).astype(np.float32),
    }
    x, y = random.normal(size=(5, 2, 2)).astype(np.float32), np.array([0, 1, 2, 1, 0])
    loss, gradient = softmax(4, 3).loss_and_gradient(params, x, y)
    linear = torch.nn.Linear(4, 3)
    linear.load_state_dict({name: torch.from_numpy(array) for name, array in params.items()})
    expected = torch.nn.functional.cross_entropy(linear(torch.from_numpy(x).flatten(1)), torch.from_numpy(y))
    expected.backward()
    assert math.isclose(loss, expected.item(), rel_tol=1e-6)
    for name, param in linear.named_parameters():
        np.testing.assert_allclose(gradient[name], param.grad.numpy(), rtol=1e-5, atol=1e-7)


def test_softmax_survives_large_logits():
    model = softmax(1, 2)
    params = {"weight": np.array([[1e4], [-1e4]], np.float32), "bias": np.zeros(2, np.float32)}
    assert model.metrics(params, np.array([[1.0], [1.0]], np.float32), np.array([0, 1])) == {
        "loss": 10000.0,
        "accuracy": 0.5,
    }


def test_the_numpy_model_does_not_import_torch():
    script = "import sys, fedtrain.models.softmax; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
