"""Multinomial logistic regression in NumPy alone, for clients without torch."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.random import Generator

from fedtrain.types import Array, Params


@dataclass(frozen=True)
class Softmax:
    """Linear logits and cross-entropy; the arrays are named and shaped as those of a `torch.nn.Linear`.

        p(k | x) = softmax(weight @ x + bias)_k

    A server whose model is `torch.nn.Linear(num_features, num_classes)` can evaluate what such clients train.
    """

    num_features: int
    """Numbers per example, after flattening; >= 1."""
    num_classes: int
    """Targets are integers in [0, num_classes)."""

    def initial(self, random: Generator) -> dict[str, Array]:
        """Zeros, whatever the generator: the loss is convex, so every start leads to the same optimum."""
        return {
            "weight": np.zeros((self.num_classes, self.num_features), np.float32),
            "bias": np.zeros(self.num_classes, np.float32),
        }

    def predict(self, params: Params, x: Array) -> Array:
        """Logits of shape (n, num_classes) for inputs of shape (n, ...)."""
        logits: Array = x.reshape(len(x), self.num_features) @ params["weight"].T + params["bias"]
        return logits

    def loss_and_gradient(self, params: Params, x: Array, y: Array) -> tuple[float, dict[str, Array]]:
        """Mean cross-entropy over the examples, in nats, and its gradient by name."""
        log_p = _log_softmax(self.predict(params, x))
        rows = np.arange(len(x))
        loss = -float(log_p[rows, y].mean())
        error = np.exp(log_p)
        error[rows, y] -= 1
        error /= len(x)
        return loss, {"weight": error.T @ x.reshape(len(x), self.num_features), "bias": error.sum(axis=0)}

    def metrics(self, params: Params, x: Array, y: Array) -> Mapping[str, float]:
        """Mean cross-entropy as ``loss``, and the share of right answers as ``accuracy``."""
        logits = self.predict(params, x)
        loss = -_log_softmax(logits)[np.arange(len(x)), y].mean(dtype=np.float64)
        return {"loss": float(loss), "accuracy": float((logits.argmax(axis=1) == y).mean())}


def softmax(num_features: int = 64, num_classes: int = 10) -> Softmax:
    """Multinomial logistic regression for `fedtrain.client.numpy_trainer.NumpyTrainer`."""
    return Softmax(num_features, num_classes)


def _log_softmax(logits: Array) -> Array:
    # Subtracting the largest logit keeps exp from overflowing and changes nothing else.
    shifted = logits - logits.max(axis=1, keepdims=True)
    result: Array = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return result
