import os
from pathlib import Path

import numpy as np
import pytest

from fedtrain.data.folder import data_folder
from fedtrain.data.heart_disease import HOSPITALS, load, model
from fedtrain.errors import DataError
from fedtrain.random import generator

FOLDER = Path(os.environ.get("FEDTRAIN_DATA", "../shared/data")).absolute() / "heart_disease"

needs_data = pytest.mark.skipif(
    not (FOLDER / "flamby_fed_heart.csv").exists(),
    reason=f"{FOLDER} does not hold the data of Fed-Heart-Disease: set FEDTRAIN_DATA to the folder of all data sets",
)


@needs_data
def test_each_hospital_has_its_published_numbers_of_rows() -> None:
    splits = [load(part, 4, 42, path=FOLDER) for part in range(4)]
    sizes = [(len(split.train or ()), len(split.test or ())) for split in splits]
    assert sizes == [(199, 104), (172, 89), (30, 16), (85, 45)]
    assert splits[HOSPITALS.index("switzerland")].train.targets.tolist() == [1] * 30  # type: ignore[union-attr]
    server = load(None, 4, 42, path=FOLDER)
    assert server.train is None
    assert len(server.test or ()) == 254


@needs_data
def test_features_are_normalised_by_a_hospitals_own_training_rows() -> None:
    train = load(0, 4, 42, path=FOLDER).train
    assert train is not None
    assert train.inputs.dtype == np.float32
    np.testing.assert_allclose(train.inputs.mean(axis=0), 0, atol=1e-5)
    np.testing.assert_allclose(train.inputs.std(axis=0, ddof=1), 1, atol=1e-5)
    cholesterol = load(2, 4, 42, path=FOLDER).train.inputs[:, 3]  # type: ignore[union-attr]
    assert not cholesterol.any()  # never measured in Switzerland


@needs_data
@pytest.mark.parametrize("seed", [42, 7])
@pytest.mark.parametrize(("part", "num_rows"), list(enumerate([199, 172, 30, 85])))
def test_batches_pass_over_all_rows_again_and_again(seed: int, part: int, num_rows: int) -> None:
    order = load(part, 4, seed, path=FOLDER).order
    assert order is not None
    assert order.shape == (1500, 4)
    per_pass = -(-num_rows // 4)
    for number in (0, 1, 1500 // per_pass - 1):
        rows = order[number * per_pass : (number + 1) * per_pass]
        assert sorted(rows[rows >= 0].tolist()) == list(range(num_rows))


@needs_data
def test_the_published_seeds_have_the_published_start_and_others_their_own() -> None:
    first = model(42, FOLDER).initial(generator(0))
    fixture = np.load(FOLDER / "flamby_rng_fixture.npz")
    assert first["weight"].tolist() == [fixture["init_weight"][0].tolist()]
    assert first["bias"].tolist() == [fixture["init_bias"][0].item()]
    assert model(42, FOLDER).initial(generator(1))["bias"] == first["bias"]
    assert model(7, FOLDER).initial(generator(0))["bias"] != model(7, FOLDER).initial(generator(1))["bias"]
    assert not np.array_equal(load(0, 4, 7, path=FOLDER).order, load(0, 4, 8, path=FOLDER).order)  # type: ignore[arg-type]


@needs_data
def test_another_number_of_hospitals_is_refused() -> None:
    with pytest.raises(DataError, match=r"found num_partitions=5: set data.num_partitions=4"):
        load(0, 5, 42, path=FOLDER)


def test_a_missing_or_broken_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"flamby_fed_heart.csv .* see the README beside it"):
        load(0, 4, 42, path=tmp_path)
    (tmp_path / "flamby_fed_heart.csv").write_text("center,split,age,disease\n0,train,old,1\n")
    with pytest.raises(DataError, match="could not convert string to float: 'old'"):
        load(0, 4, 42, path=tmp_path)
    (tmp_path / "flamby_rng_fixture.npz").write_text("no archive")
    with pytest.raises(DataError, match=r"flamby_rng_fixture.npz"):
        model(42, tmp_path)


def test_a_data_folder_is_looked_for_where_the_environment_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "hearts").mkdir()
    monkeypatch.setenv("FEDTRAIN_DATA", str(tmp_path))
    assert data_folder("hearts") == tmp_path / "hearts"
    with pytest.raises(
        DataError, match=r"lungs is expected in the folder .*lungs, which does not exist: set .* FEDTRAIN_DATA"
    ):
        data_folder("lungs")
    with pytest.raises(DataError, match="nowhere"):
        data_folder("hearts", tmp_path / "nowhere")
    monkeypatch.delenv("FEDTRAIN_DATA")
    monkeypatch.chdir(tmp_path / "hearts")
    (tmp_path / "shared" / "data" / "hearts").mkdir(parents=True)
    assert data_folder("hearts") == Path("../shared/data/hearts")
