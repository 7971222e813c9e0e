"""Data sets, and how they are divided among clients.

A data set is any callable

    load(partition: int | None, num_partitions: int, seed: int, **options) -> Split

- With a partition number, 0 <= partition < num_partitions, it gives one client's own data: `train`, and in `test` the
  examples that this client holds out itself, or None. Another number is a `DataError` that says what is allowed.
- With ``partition=None`` it gives the server's view: `train` is None and `test` is the held-out set, or None where
  there is none.
- `seed` is the run's seed. What a partition holds depends on the arguments alone, so that every process computes its
  own part without talking to another. The server's held-out set must not depend on `partition`, and no client may train
  on it.
- `options` are the data set's own: fractions, paths, switches.

`fedtrain.data.digits.load` and `fedtrain.data.npz.load` are two; bring your own by its import path.
"""

from fedtrain.data.split import Examples, Split

__all__ = ["Examples", "Split"]
