import subprocess
import sys

import numpy as np
import pytest

from fedtrain.data import digits
from fedtrain.errors import DataError
from fedtrain.params import digest


def keys(*groups):
    """Each image with its digit as bytes, for comparing sets of examples."""
    return [x.tobytes() + bytes([y]) for g in groups if g for x, y in zip(g.inputs, g.targets, strict=True)]


def test_clients_and_server_together_hold_each_of_the_1797_images_once():
    server = digits.load(None, 5, 0)
    clients = [digits.load(partition, 5, 0) for partition in range(5)]
    found = keys(server.test, *(client.train for client in clients), *(client.test for client in clients))
    assert len(found) == 1797
    assert len(set(found)) == len(set(keys(digits.load(0, 1, 0, test_fraction=0.0, client_test_fraction=0.0).train)))
    assert server.train is None


def test_images_are_float32_in_0_to_1_and_digits_are_int64():
    train = digits.load(0, 5, 0).train
    assert train.inputs.dtype == np.float32
    assert train.inputs.shape[1:] == (1, 8, 8)
    assert train.inputs.min() == 0.0
    assert train.inputs.max() == 1.0
    assert train.targets.dtype == np.int64
    assert set(train.targets.tolist()) <= set(range(10))


def test_flat_images_are_the_same_numbers_in_one_row():
    square, flat = digits.load(2, 5, 0).train, digits.load(2, 5, 0, flat=True).train
    assert flat.inputs.shape == (len(square), 64)
    assert np.array_equal(flat.inputs, square.inputs.reshape(-1, 64))


def test_the_held_out_set_is_the_same_for_every_seed_and_number_of_clients():
    one, other = digits.load(None, 5, 0).test, digits.load(None, 50, 9, alpha=10.0).test
    assert np.array_equal(one.inputs, other.inputs)
    assert len(one) == 359
    assert np.bincount(one.targets).tolist() == [36, 36, 35, 37, 36, 36, 36, 36, 35, 36]


def test_the_partition_varies_with_the_seed():
    one, other = (digits.load(0, 5, seed, client_test_fraction=0.0).train for seed in (0, 1))
    assert keys(one) != keys(other)


def test_another_process_computes_the_same_partition():
    script = (
        "from fedtrain.data import digits; from fedtrain.params import digest\n"
        "split = digits.load(3, 5, 7)\n"
        "print(digest({'x': split.train.inputs, 'y': split.train.targets, 't': split.test.inputs}))"
    )
    there = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    split = digits.load(3, 5, 7)
    assert there.stdout.strip() == digest({"x": split.train.inputs, "y": split.train.targets, "t": split.test.inputs})


@pytest.mark.parametrize("num_partitions", [1, 5, 179, 180, 1438])
def test_any_number_of_clients_up_to_the_number_of_images_has_data(num_partitions):
    for partition in (0, num_partitions - 1):
        split = digits.load(partition, num_partitions, 0)
        assert len(split.train) + (len(split.test) if split.test else 0) >= min(8, 1438 // num_partitions)


def test_more_clients_than_images_are_refused():
    with pytest.raises(DataError, match="use at most 1438 partitions"):
        digits.load(0, 1439, 0)


def test_nothing_held_out_gives_none():
    assert digits.load(None, 5, 0, test_fraction=0.0).test is None
    assert digits.load(0, 5, 0, client_test_fraction=0.0).test is None


def test_a_partition_outside_of_the_range_is_refused():
    with pytest.raises(DataError, match=r"0 \.\. 4"):
        digits.load(5, 5, 0)
