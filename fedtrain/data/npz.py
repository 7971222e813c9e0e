"""Your own arrays: an .npz file with inputs ``x`` and targets ``y``, from ``numpy.savez(path, x=..., y=...)``."""

import os
import zipfile

import numpy as np

from fedtrain.data.partition import dirichlet, iid
from fedtrain.data.split import Examples, Split, require_partition
from fedtrain.errors import DataError
from fedtrain.random import generator
from fedtrain.types import Array


def load(
    partition: int | None,
    num_partitions: int,
    seed: int,
    *,
    path: str | os.PathLike[str],
    alpha: float | None = None,
    client_test_fraction: float = 0.0,
    scale: float | None = None,
) -> Split:
    """One client's examples from a file, or the server's held-out ones.

    A client that owns its file uses it as partition 0 of 1. The file may hold ``x_test`` and ``y_test`` too: they are
    the server's held-out set, and, with one partition, that client's.

    Args:
        partition: The client's part, 0 <= partition < num_partitions; None for the server's view.
        num_partitions: Into how many parts this file is divided, >= 1.
        seed: The run's seed; decides the division.
        path: The file. Nothing in it is unpickled.
        alpha: Divide by a Dirichlet over labels with this concentration, > 0; None deals out at random.
        client_test_fraction: Share of its own examples that a client holds out, in [0, 1), where there is no ``x_test``
            of its own.
        scale: Multiplies the inputs, such as 1/255 for bytes; they become float32.

    Returns:
        Split of inputs (floats as float32, all else as in the file) and targets (floats as float32, integers as int64).

    Raises:
        DataError: the file is missing, damaged, lacks ``x`` or ``y``, or has fewer examples than partitions.
    """
    require_partition(partition, num_partitions)
    if not 0 <= client_test_fraction < 1:
        raise DataError(f"client_test_fraction must be in [0, 1), found {client_test_fraction}")
    arrays = _read(path)
    held_out = None
    if "x_test" in arrays:
        held_out = _examples(arrays, "x_test", "y_test", scale, path)
    if partition is None:
        return Split(None, held_out)
    examples = _examples(arrays, "x", "y", scale, path)
    random = generator(seed, "partition")
    if alpha is None:
        parts = iid(len(examples), num_partitions, random)
    else:
        parts = dirichlet(examples.targets, num_partitions, alpha, random)
    mine = examples.take(parts[partition])
    if num_partitions == 1 and held_out is not None:
        return Split(mine, held_out)
    order = generator(seed, "client test", partition).permutation(len(mine))
    num_test = round(client_test_fraction * len(mine))
    test = mine.take(np.sort(order[:num_test])) if num_test else None
    return Split(mine.take(np.sort(order[num_test:])), test)


def _read(path: str | os.PathLike[str]) -> dict[str, Array]:
    try:
        # NumPy leaves a damaged file open when it is given the path.
        with open(path, "rb") as opened:
            file = np.load(opened, allow_pickle=False)
            if not isinstance(file, np.lib.npyio.NpzFile):
                raise ValueError("it holds a single array")
            return {name: file[name] for name in file.files if name in ("x", "y", "x_test", "y_test")}
    except OSError as error:
        raise DataError(f"cannot read the data file {path}: {error.strerror or error}: check data.path") from None
    except (ValueError, EOFError, zipfile.BadZipFile, KeyError) as error:
        raise DataError(
            f"{path} is not an .npz file of plain arrays ({error}): write it with numpy.savez(path, x=..., y=...)"
        ) from None


def _examples(arrays: dict[str, Array], x: str, y: str, scale: float | None, path: str | os.PathLike[str]) -> Examples:
    for name in (x, y):
        if name not in arrays:
            raise DataError(f"{path} must hold arrays {x!r} and {y!r}, found {sorted(arrays)}: add {name!r}")
    inputs, targets = arrays[x], arrays[y]
    for name, array in ((x, inputs), (y, targets)):
        if array.dtype.kind not in "fiub":
            raise DataError(f"{path}: {name!r} is {array.dtype}, expected numbers or bools")
    if scale is not None:
        inputs = inputs.astype(np.float32) * np.float32(scale)
    elif inputs.dtype.kind == "f":
        inputs = inputs.astype(np.float32)
    return Examples(inputs, targets.astype(np.float32 if targets.dtype.kind == "f" else np.int64))
