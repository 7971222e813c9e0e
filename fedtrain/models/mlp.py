"""A multilayer perceptron: linear layers with ReLU between them."""

from collections.abc import Sequence
from itertools import pairwise

from torch import nn


def mlp(num_features: int = 64, hidden: Sequence[int] = (32,), num_classes: int = 10) -> nn.Module:
    """Flatten, then linear layers of the given widths with ReLU between them.

    Args:
        num_features: Numbers per example, after flattening.
        hidden: Widths of the hidden layers; empty gives multinomial logistic regression.
        num_classes: Number of outputs (logits).

    Returns:
        Module from inputs of shape (n, ...) with `num_features` numbers each to logits of shape (n, num_classes).
    """
    widths = [num_features, *hidden]
    layers: list[nn.Module] = [nn.Flatten()]
    for before, after in pairwise(widths):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(widths[-1], num_classes))
