"""Partitioners: which examples belong to which client, as arrays of indices.

Each is a pure function of its arguments and of the generator that is passed in. Every example is in exactly one part;
indices within a part ascend.
"""

import math

import numpy as np
from numpy.random import Generator

from fedtrain.errors import DataError
from fedtrain.types import Array


def iid(num_examples: int, num_partitions: int, random: Generator) -> list[Array]:
    """Deal the examples out at random; sizes differ by at most one.

    Raises:
        DataError: there are fewer examples than partitions.
    """
    _require_enough(num_examples, num_partitions, 1)
    return [np.sort(part) for part in np.array_split(random.permutation(num_examples), num_partitions)]


def dirichlet(
    targets: Array, num_partitions: int, alpha: float, random: Generator, *, min_size: int = 1
) -> list[Array]:
    """Give each partition its own mix of labels, and its own size.

    For each label k a vector of shares q_k ~ Dirichlet(alpha, ..., alpha) over the partitions is drawn, and the label's
    examples are cut in these proportions. Small alpha: few labels per partition; large alpha: nearly the same mix.

    Parts below `min_size` are then filled, one example at a time, from whichever part is the largest. (Drawing again
    until all are large enough, as is common, may never end for small alpha and many partitions.)

    Args:
        targets: The label of each example, of shape (n,).
        num_partitions: Number of parts, >= 1.
        alpha: Concentration, > 0.
        random: Source of all randomness.
        min_size: Fewest examples that a part may have, >= 0.

    Raises:
        DataError: alpha is not a positive number, or there are fewer than ``num_partitions * min_size`` examples.

    Source: Yurochkin et al., Bayesian Nonparametric Federated Learning of Neural Networks, ICML 2019, arXiv:1905.12022.
    """
    if not (alpha > 0 and math.isfinite(alpha)):
        raise DataError(f"alpha of a Dirichlet partition must be a finite number > 0, found {alpha}")
    if targets.ndim != 1:
        raise DataError(f"a Dirichlet partition needs one label per example, found targets of shape {targets.shape}")
    _require_enough(len(targets), num_partitions, min_size)
    parts: list[list[int]] = [[] for _ in range(num_partitions)]
    for label in np.unique(targets):
        members = random.permutation(np.flatnonzero(targets == label))
        shares = random.dirichlet(np.full(num_partitions, float(alpha)))
        cuts = np.floor(np.cumsum(shares)[:-1] * len(members)).astype(np.int64)
        for part, piece in zip(parts, np.split(members, cuts), strict=True):
            part.extend(piece.tolist())
    _fill(parts, min_size, random)
    return [np.sort(np.array(part, dtype=np.int64)) for part in parts]


def holdout(targets: Array, fraction: float, random: Generator) -> tuple[Array, Array]:
    """Split off a share of the examples of each label.

    Args:
        targets: The label of each example, of shape (n,).
        fraction: Share to hold out, in [0, 1); rounded to whole examples per label.
        random: Source of all randomness.

    Returns:
        (indices that stay, indices held out), both ascending.

    Raises:
        DataError: fraction out of its range.
    """
    if not 0 <= fraction < 1:
        raise DataError(f"the fraction of examples to hold out must be in [0, 1), found {fraction}")
    held_out = np.zeros(len(targets), np.bool_)
    for label in np.unique(targets):
        members = random.permutation(np.flatnonzero(targets == label))
        held_out[members[: round(fraction * len(members))]] = True
    return np.flatnonzero(~held_out), np.flatnonzero(held_out)


def _fill(parts: list[list[int]], min_size: int, random: Generator) -> None:
    for part in parts:
        while len(part) < min_size:
            largest = max(parts, key=len)
            part.append(largest.pop(int(random.integers(len(largest)))))


def _require_enough(num_examples: int, num_partitions: int, min_size: int) -> None:
    if num_partitions < 1:
        raise DataError(f"num_partitions must be >= 1, found {num_partitions}")
    if num_examples < num_partitions * min_size:
        raise DataError(
            f"{num_partitions} partitions of at least {min_size} examples need {num_partitions * min_size} examples, "
            f"found {num_examples}: use at most {num_examples // min_size} partitions"
        )
