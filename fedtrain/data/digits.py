"""Handwritten digits: 1,797 real 8x8 grey images that scikit-learn ships, so nothing is downloaded.

Alpaydin and Kaynak, Optical Recognition of Handwritten Digits, UCI Machine Learning Repository, 1998 (its test set).
"""

import numpy as np

from fedtrain.data.partition import dirichlet, holdout
from fedtrain.data.split import Examples, Split, require_partition
from fedtrain.random import generator
from fedtrain.types import Array

MIN_SIZE = 8
"""Examples that each partition has at least, as long as there are enough for all."""


def load(
    partition: int | None,
    num_partitions: int,
    seed: int,
    *,
    alpha: float = 0.5,
    test_fraction: float = 0.2,
    client_test_fraction: float = 0.1,
    flat: bool = False,
) -> Split:
    """The digits of one client, or the server's held-out ones; label-skewed among clients.

    The server's held-out set is the same for every seed and number of partitions. The rest is divided by `dirichlet`,
    as a function of (seed, num_partitions, alpha, test_fraction).

    Args:
        partition: The client's part, 0 <= partition < num_partitions; None for the server's view.
        num_partitions: Among how many clients the images are divided, >= 1.
        seed: The run's seed; decides who has which images.
        alpha: Skew of the labels, > 0: 0.1 leaves most clients one to three digits, 100 gives all nearly the same mix.
        test_fraction: Share of the images that only the server holds, in [0, 1); 0 gives the server None.
        client_test_fraction: Share of its own images that a client holds out, in [0, 1).
        flat: Give images of shape (n, 64) in place of (n, 1, 8, 8).

    Returns:
        Split of images, float32 in [0, 1], and digits, int64 in 0 .. 9.

    Raises:
        DataError: a number is out of its range, or there are more partitions than images.
    """
    require_partition(partition, num_partitions)
    images, digits = _read()
    images = images.reshape(-1, 64) if flat else images.reshape(-1, 1, 8, 8)
    everything = Examples(images, digits)
    # A fixed seed: the server and all clients must agree on what is held out, whatever run they take part in.
    rest, held_out = holdout(digits, test_fraction, generator("digits", "test"))
    if partition is None:
        return Split(None, everything.take(held_out) if len(held_out) else None)
    parts = dirichlet(
        digits[rest],
        num_partitions,
        alpha,
        generator(seed, "partition"),
        min_size=max(1, min(MIN_SIZE, len(rest) // num_partitions)),
    )
    mine = everything.take(rest[parts[partition]])
    train, test = holdout(mine.targets, client_test_fraction, generator(seed, "client test", partition))
    return Split(mine.take(train), mine.take(test) if len(test) else None)


def _read() -> tuple[Array, Array]:
    # scikit-learn takes a second to import; only who uses these images waits for it.
    from sklearn.datasets import load_digits  # type: ignore[import-untyped]

    bunch = load_digits()
    return (bunch.data / 16.0).astype(np.float32), bunch.target.astype(np.int64)
