"""The order of batches: a function of a task's seed, the same in every engine that trains."""

import math
from collections.abc import Iterator, Mapping

import numpy as np

from fedtrain.errors import Declined
from fedtrain.random import generator
from fedtrain.types import Array


def batches(num_examples: int, batch_size: int, seed: int, *, keep_single: bool = True) -> Iterator[Array]:
    """Batches of example indices without end: one random order after another, each cut into batches.

    The last batch of an epoch may be short; no example is left out.

    Args:
        num_examples: Examples in the training data, >= 1.
        batch_size: Examples per batch, >= 1.
        seed: The task's seed; decides all orders.
        keep_single: False joins a last batch of one example to the one before: batch normalisation can't be computed
            over a single example. It changes nothing where `batch_size` is 1 or there is only one example.
    """
    random = generator(seed, "batches")
    starts = [*range(0, num_examples, batch_size)]
    if not keep_single and len(starts) == num_batches(num_examples, batch_size, keep_single=False) + 1:
        starts.pop()
    ends = [*starts[1:], num_examples]
    while True:
        order = random.permutation(num_examples)
        for start, end in zip(starts, ends, strict=True):
            yield order[start:end]


def prescribed(order: Array, first: int) -> Iterator[Array]:
    """The batches of `Split.order` without end, from update `first` on.

    >>> import numpy as np
    >>> batches = prescribed(np.array([[0, 2], [1, -1]]), first=3)
    >>> next(batches), next(batches)
    (array([1]), array([0, 2]))
    """
    position = first % len(order)
    while True:
        row = order[position].astype(np.int64)
        yield row[row >= 0]
        position = (position + 1) % len(order)


def num_batches(num_examples: int, batch_size: int, *, keep_single: bool = True) -> int:
    """Batches of one epoch, as `batches` cuts them."""
    whole, left = divmod(num_examples, batch_size)
    joined = not keep_single and left == 1 and whole > 0
    return whole + (left > 0 and not joined)


def num_steps(numbers: Mapping[str, float], batches_per_epoch: int) -> int:
    """Optimizer steps that a task asks for: its ``steps``, else its ``epochs`` (1 if it says neither).

    A part of an epoch is rounded up to whole batches.

    Raises:
        Declined: the number asked for is not > 0.
    """
    if "steps" in numbers:
        return math.ceil(positive(numbers, "steps", 1))
    # 0.07 epochs of 100 batches are 7, though the product is a little more in floating point.
    return math.ceil(round(positive(numbers, "epochs", 1) * batches_per_epoch, 6)) or 1


def positive(numbers: Mapping[str, float], name: str, default: float) -> float:
    """A number of the task, or the trainer's own `default` where the task leaves it open.

    Raises:
        Declined: it is not a finite number > 0.
    """
    value = numbers.get(name, default)
    if not (value > 0 and math.isfinite(value)):
        raise Declined(
            f"the task's {name} must be a finite number > 0, found {value}: change the strategy's local part"
        )
    return value
