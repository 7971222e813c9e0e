"""Fed-Heart-Disease: 740 patients of four hospitals, as FLamby prepares and divides them.

Ogier du Terrail et al., FLamby: Datasets and Benchmarks for Cross-Silo Federated Learning in Realistic Healthcare
Settings, NeurIPS 2022, arXiv:2210.04620. The records: Janosi, Steinbrunn, Pfisterer, Detrano, Heart Disease, UCI
Machine Learning Repository, 1988.

The folder holds ``flamby_fed_heart.csv``, a row per patient before normalisation, with its fixed split into training
and test rows, and ``flamby_rng_fixture.npz``, the initial weights and orders of batches of FLamby's published runs. A
run with one of their seeds begins with those weights and trains on those batches: its results can be compared exactly.
"""

import csv
import os
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fedtrain.data.folder import data_folder
from fedtrain.data.split import Examples, Split, require_partition
from fedtrain.errors import DataError
from fedtrain.models.logistic import Logistic
from fedtrain.random import generator
from fedtrain.types import Array

HOSPITALS = ("cleveland", "hungarian", "switzerland", "va")
"""Who holds which partition."""

BATCH_SIZE = 4
NUM_UPDATES = 1500
"""Updates of a client over a whole run: 15 rounds of 100."""

_NUM_FEATURES = 13


def load(partition: int | None, num_partitions: int, seed: int, *, path: str | os.PathLike[str] | None = None) -> Split:
    """One hospital's patients, or, for the server, the test patients of all four.

    Features are normalised, ``(x - mean) / (sd + 1e-9)`` with n - 1 in the sd, by the hospital's own training rows; the
    server's by those of all hospitals together, so the same patient has other features there.

    Batches are prescribed (`Split.order`): shuffled passes over the rows that go on from round to round. For the seeds
    42 to 46 they are those of FLamby's published runs, else drawn from `seed`.

    Args:
        partition: 0 .. 3, in the order of `HOSPITALS`; None for the server's view.
        num_partitions: 4.
        seed: The run's seed; decides the order of batches, nothing else.
        path: The folder; None: ``heart_disease`` in the folder of all data sets (see `data_folder`).

    Returns:
        Split of float32 features of shape (n, 13) and int64 targets: 1 for disease. Training and test rows: 199 and
        104, 172 and 89, 30 and 16, 85 and 45. Switzerland's training rows all have the disease.

    Raises:
        DataError: the files are missing or not as expected, or there are not four partitions.
    """
    require_partition(partition, num_partitions)
    if num_partitions != len(HOSPITALS):
        raise DataError(
            f"heart_disease has the {len(HOSPITALS)} hospitals {', '.join(HOSPITALS)}, found num_partitions="
            f"{num_partitions}: set data.num_partitions={len(HOSPITALS)}"
        )
    folder = data_folder("heart_disease", path)
    rows = _rows(folder)
    ours = np.ones(len(rows.center), np.bool_) if partition is None else rows.center == partition
    train, test = ours & rows.is_train, ours & ~rows.is_train
    mean, sd = rows.features[train].mean(axis=0), rows.features[train].std(axis=0, ddof=1)

    def examples(chosen: Array) -> Examples:
        normal = (rows.features[chosen] - mean) / (sd + 1e-9)
        return Examples(normal.astype(np.float32), rows.disease[chosen])

    if partition is None:
        return Split(None, examples(test))
    return Split(examples(train), examples(test), _order(folder, partition, seed, int(train.sum())))


def model(seed: int, path: str | os.PathLike[str] | None = None) -> Logistic:
    """Logistic regression on the 13 features; the seeds 42 to 46 have the initial weights of FLamby's published runs.

    Raises:
        DataError: the files are missing or not as expected.
    """
    fixture = _fixture(data_folder("heart_disease", path))
    which = np.flatnonzero(fixture["seeds"] == seed)
    if not which.size:
        return Logistic(_NUM_FEATURES)
    weight, bias = fixture["init_weight"][which[0]], fixture["init_bias"][which[0]]
    start = {"weight": weight.reshape(1, -1).astype(np.float32), "bias": bias.reshape(1).astype(np.float32)}
    return Logistic(_NUM_FEATURES, start)


class _Rows(NamedTuple):
    center: Array
    is_train: Array
    features: Array
    disease: Array


def _rows(folder: Path) -> _Rows:
    file = folder / "flamby_fed_heart.csv"
    try:
        with open(file, newline="", encoding="utf-8") as stream:
            rows = list(csv.DictReader(stream))
        names = [name for name in rows[0] if name not in ("center", "center_name", "source_row", "split", "disease")]
        return _Rows(
            np.array([int(row["center"]) for row in rows]),
            np.array([row["split"] == "train" for row in rows]),
            np.array([[float(row[name]) for name in names] for row in rows]),
            np.array([int(row["disease"]) for row in rows]),
        )
    except (OSError, KeyError, IndexError, TypeError, ValueError) as error:
        raise DataError(f"cannot read {file} ({error}): expected FLamby's 740 rows, see the README beside it") from None


def _fixture(folder: Path) -> dict[str, Array]:
    file = folder / "flamby_rng_fixture.npz"
    try:
        with np.load(file, allow_pickle=False) as arrays:
            return {name: arrays[name] for name in arrays.files}
    except (OSError, ValueError) as error:
        raise DataError(f"cannot read {file} ({error}): see the README beside it") from None


def _order(folder: Path, partition: int, seed: int, num_rows: int) -> Array:
    fixture = _fixture(folder)
    which = np.flatnonzero(fixture["seeds"] == seed)
    if which.size:
        published: Array = fixture[f"batches_center{partition}"][which[0]]
        return published
    random, per_pass = generator(seed, "heart_disease", partition), -(-num_rows // BATCH_SIZE)
    passes = []
    for _ in range(-(-NUM_UPDATES // per_pass)):
        padded = np.full(per_pass * BATCH_SIZE, -1)
        padded[:num_rows] = random.permutation(num_rows)
        passes.append(padded.reshape(per_pass, BATCH_SIZE))
    return np.concatenate(passes)[:NUM_UPDATES]
