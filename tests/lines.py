"""A line ``y = weight * x + bias`` with mean squared error: two parameters, in NumPy and in torch."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.random import Generator
from torch import nn

from fedtrain.client.numpy_trainer import NumpyTrainer
from fedtrain.client.torch_trainer import TorchTrainer
from fedtrain.client.trainer import Trainer
from fedtrain.data import Examples, Split
from fedtrain.types import Array, Params


class Line:
    """For `NumpyTrainer`; names and shapes are those of ``torch.nn.Linear(1, 1)``. Begins at zero."""

    def __init__(self, dtype: Any = np.float32) -> None:
        self.dtype = dtype

    def initial(self, random: Generator) -> Params:
        return pair(0, 0, self.dtype)

    def loss_and_gradient(self, params: Params, x: Array, y: Array) -> tuple[float, Params]:
        error = x @ params["weight"].T + params["bias"] - y
        return float((error**2).mean()), {"weight": 2 * error.T @ x / len(x), "bias": 2 * error.mean(axis=0)}

    def metrics(self, params: Params, x: Array, y: Array) -> Mapping[str, float]:
        return {"loss": self.loss_and_gradient(params, x, y)[0]}


def pair(weight: float, bias: float, dtype: Any = np.float32) -> dict[str, Array]:
    """A line's two parameters, or anything with their layout."""
    return {"weight": np.array([[weight]], dtype), "bias": np.array([bias], dtype)}


def numbers(params: Params) -> tuple[float, float]:
    """The inverse of `pair`."""
    return params["weight"].item(), params["bias"].item()


def points(*xy: tuple[float, float], dtype: Any = np.float32) -> Split:
    """Training examples."""
    x, y = np.array(xy, dtype).T
    return Split(Examples(x[:, np.newaxis], y[:, np.newaxis]), None)


def numpy_line(*xy: tuple[float, float], dtype: Any = np.float32) -> NumpyTrainer:
    """Trains a line through these points in NumPy."""
    return NumpyTrainer(Line(dtype), points(*xy, dtype=dtype))


def torch_line(*xy: tuple[float, float]) -> TorchTrainer:
    """Trains it in torch; a whole pass over the data takes it one point at a time."""
    return TorchTrainer(partial(nn.Linear, 1, 1), points(*xy), loss="mse", device="cpu", eval_batch_size=1, threads=1)


def both(*xy: tuple[float, float]) -> Sequence[Trainer]:
    """The two of them."""
    return numpy_line(*xy), torch_line(*xy)
