"""Logistic regression in NumPy alone: two classes, one logit."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.random import Generator

from fedtrain.types import Array, Params


@dataclass(frozen=True)
class Logistic:
    """A linear logit and binary cross-entropy; the arrays are named and shaped as those of ``torch.nn.Linear(n, 1)``.

    p(1 | x) = 1 / (1 + exp(-(weight @ x + bias)))
    """

    num_features: int
    """Numbers per example, after flattening; >= 1."""
    start: Params | None = None
    """Arrays to begin with; None: drawn from U(-1/sqrt(n), 1/sqrt(n)), as `torch.nn.Linear` does."""

    def initial(self, random: Generator) -> dict[str, Array]:
        """`start`, or new arrays drawn from `random`."""
        if self.start is not None:
            return dict(self.start)
        bound = self.num_features**-0.5
        return {
            "weight": random.uniform(-bound, bound, (1, self.num_features)).astype(np.float32),
            "bias": random.uniform(-bound, bound, 1).astype(np.float32),
        }

    def predict(self, params: Params, x: Array) -> Array:
        """Logits of shape (n,) for inputs of shape (n, ...)."""
        logits: Array = x.reshape(len(x), self.num_features) @ params["weight"][0] + params["bias"][0]
        return logits

    def loss_and_gradient(self, params: Params, x: Array, y: Array) -> tuple[float, dict[str, Array]]:
        """Mean cross-entropy over the examples, in nats, and its gradient by name; targets are 0 or 1."""
        logits = self.predict(params, x)
        error = ((_sigmoid(logits) - y) / len(x)).astype(logits.dtype)
        weight = error @ x.reshape(len(x), self.num_features)
        return _mean_loss(logits, y), {"weight": weight[np.newaxis], "bias": error.sum(keepdims=True)}

    def metrics(self, params: Params, x: Array, y: Array) -> Mapping[str, float]:
        """Mean cross-entropy as ``loss``, and as ``accuracy`` the share of examples whose class has p > 0.5."""
        logits = self.predict(params, x)
        return {"loss": _mean_loss(logits, y), "accuracy": float(((logits > 0) == y).mean())}


def logistic(num_features: int) -> Logistic:
    """Logistic regression for `fedtrain.client.numpy_trainer.NumpyTrainer`."""
    return Logistic(num_features)


def _sigmoid(logits: Array) -> Array:
    # exp of a number <= 0 can't overflow; which of the two forms holds depends on the sign.
    small = np.exp(-np.abs(logits))
    result: Array = np.where(logits >= 0, 1 / (1 + small), small / (1 + small))
    return result


def _mean_loss(logits: Array, y: Array) -> float:
    # log(1 + exp(z)) - y z, without overflow for large z
    losses = np.maximum(logits, 0) - y * logits + np.log1p(np.exp(-np.abs(logits)))
    return float(losses.mean(dtype=np.float64))
