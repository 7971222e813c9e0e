import numpy as np
import pytest

from fedtrain.data import npz
from fedtrain.errors import DataError

X = np.arange(20.0).reshape(10, 2)
Y = np.arange(10, dtype=np.int32)


@pytest.fixture
def path(tmp_path):
    np.savez(tmp_path / "data.npz", x=X, y=Y)
    return tmp_path / "data.npz"


@pytest.fixture
def path_with_test(tmp_path):
    np.savez(tmp_path / "both.npz", x=X, y=Y, x_test=X[:3] + 100, y_test=Y[:3])
    return tmp_path / "both.npz"


def test_the_only_partition_is_the_whole_file(path):
    split = npz.load(0, 1, 0, path=path)
    assert split.train.inputs.tolist() == X.tolist()
    assert split.train.targets.tolist() == Y.tolist()
    assert split.test is None


def test_floats_become_float32_and_integer_targets_int64(path):
    train = npz.load(0, 1, 0, path=path).train
    assert train.inputs.dtype == np.float32
    assert train.targets.dtype == np.int64


def test_partitions_hold_every_example_once_with_its_own_target(path):
    parts = [npz.load(partition, 3, 0, path=path).train for partition in range(3)]
    assert sorted(np.concatenate([part.targets for part in parts]).tolist()) == list(range(10))
    for part in parts:
        assert np.array_equal(part.inputs[:, 0], 2.0 * part.targets)


def test_alpha_divides_by_label(tmp_path):
    np.savez(tmp_path / "d.npz", x=np.zeros((100, 1)), y=np.repeat([0, 1], 50))
    parts = [npz.load(partition, 2, 0, path=tmp_path / "d.npz", alpha=0.01).train for partition in range(2)]
    assert max(abs(float(part.targets.mean()) - 0.5) for part in parts) > 0.4


def test_a_client_holds_out_its_share(path):
    split = npz.load(0, 1, 0, path=path, client_test_fraction=0.3)
    assert (len(split.train), len(split.test)) == (7, 3)
    assert sorted([*split.train.targets, *split.test.targets]) == list(range(10))


def test_the_test_arrays_are_the_servers_and_those_of_a_client_that_owns_the_file(path_with_test):
    server = npz.load(None, 4, 0, path=path_with_test)
    assert server.train is None
    assert server.test.inputs.tolist() == (X[:3] + 100).tolist()
    assert npz.load(0, 1, 0, path=path_with_test).test.inputs.tolist() == (X[:3] + 100).tolist()
    assert npz.load(0, 4, 0, path=path_with_test).test is None


def test_without_test_arrays_the_server_has_none(path):
    assert npz.load(None, 4, 0, path=path).test is None


def test_scale_turns_bytes_into_floats(tmp_path):
    np.savez(tmp_path / "d.npz", x=np.array([[0], [51], [255]], np.uint8), y=np.array([0, 1, 2]))
    inputs = npz.load(0, 1, 0, path=tmp_path / "d.npz", scale=1 / 255).train.inputs
    assert inputs.dtype == np.float32
    assert inputs[:, 0].tolist() == pytest.approx([0.0, 0.2, 1.0])
    assert npz.load(0, 1, 0, path=tmp_path / "d.npz").train.inputs.dtype == np.uint8


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(DataError, match=r"none\.npz: No such file"):
        npz.load(0, 1, 0, path=tmp_path / "none.npz")


@pytest.mark.parametrize("content", [b"", b"text, not arrays", b"PK\x03\x04 damaged"])
def test_a_damaged_file_is_named(tmp_path, content):
    (tmp_path / "bad.npz").write_bytes(content)
    with pytest.raises(DataError, match=r"bad\.npz"):
        npz.load(0, 1, 0, path=tmp_path / "bad.npz")


def test_a_truncated_file_is_refused(path):
    path.write_bytes(path.read_bytes()[:-30])
    with pytest.raises(DataError, match=r"data\.npz"):
        npz.load(0, 1, 0, path=path)


def test_pickled_objects_are_never_loaded(tmp_path):
    np.savez(tmp_path / "objects.npz", x=np.array([object()], object), y=np.array([1]))
    with pytest.raises(DataError, match=r"objects\.npz"):
        npz.load(0, 1, 0, path=tmp_path / "objects.npz")


def test_a_single_array_file_is_refused(tmp_path):
    np.save(tmp_path / "one.npy", X)
    with pytest.raises(DataError, match="single array"):
        npz.load(0, 1, 0, path=tmp_path / "one.npy")


def test_a_missing_array_is_named(tmp_path):
    np.savez(tmp_path / "d.npz", x=X)
    with pytest.raises(DataError, match="add 'y'"):
        npz.load(0, 1, 0, path=tmp_path / "d.npz")


def test_text_is_refused_as_input(tmp_path):
    np.savez(tmp_path / "d.npz", x=np.array(["a", "b"]), y=np.array([0, 1]))
    with pytest.raises(DataError, match="'x' is <U1, expected numbers"):
        npz.load(0, 1, 0, path=tmp_path / "d.npz")
