import numpy as np
import pytest

from fedtrain.data.partition import dirichlet, holdout, iid
from fedtrain.errors import DataError
from fedtrain.random import generator

LABELS = np.repeat(np.arange(10), 50)


def every_example_once(parts, num_examples):
    return sorted(np.concatenate(parts).tolist()) == list(range(num_examples))


def test_iid_parts_hold_every_example_once_and_differ_by_at_most_one():
    parts = iid(11, 4, generator(0))
    assert every_example_once(parts, 11)
    assert sorted(len(part) for part in parts) == [2, 3, 3, 3]


def test_iid_is_a_function_of_the_generator():
    one, same, other = (np.concatenate(iid(100, 4, generator(seed))).tolist() for seed in (1, 1, 2))
    assert one == same
    assert one != other


def test_more_iid_partitions_than_examples_are_refused_with_the_largest_number_possible():
    with pytest.raises(DataError, match="found 3: use at most 3 partitions"):
        iid(3, 4, generator(0))


@pytest.mark.parametrize("alpha", [1e-3, 0.1, 0.5, 10.0, 1e6])
@pytest.mark.parametrize("num_partitions", [1, 2, 7, 100])
def test_dirichlet_parts_hold_every_example_once_and_enough_each(alpha, num_partitions):
    parts = dirichlet(LABELS, num_partitions, alpha, generator(3), min_size=5)
    assert len(parts) == num_partitions
    assert every_example_once(parts, 500)
    assert min(len(part) for part in parts) >= 5
    assert all((np.diff(part) > 0).all() for part in parts)


def test_dirichlet_with_no_more_examples_than_needed_gives_each_part_the_same_number():
    parts = dirichlet(LABELS, 50, 0.1, generator(0), min_size=10)
    assert [len(part) for part in parts] == [10] * 50
    assert every_example_once(parts, 500)


def test_dirichlet_is_a_function_of_the_generator():
    one, same, other = (
        [part.tolist() for part in dirichlet(LABELS, 5, 0.5, generator(seed, "partition"))] for seed in (1, 1, 2)
    )
    assert one == same
    assert one != other


def test_a_large_alpha_gives_every_part_nearly_the_same_labels():
    for part in dirichlet(LABELS, 5, 1e6, generator(0)):
        counts = np.bincount(LABELS[part], minlength=10)
        assert counts.min() >= 9
        assert counts.max() <= 11


def test_a_small_alpha_leaves_each_label_mostly_to_one_part():
    parts = dirichlet(LABELS, 5, 0.01, generator(0))
    counts = np.array([np.bincount(LABELS[part], minlength=10) for part in parts])
    assert (counts.max(axis=0) >= 40).sum() >= 8


@pytest.mark.parametrize("alpha", [0.0, -1.0, float("nan"), float("inf")])
def test_an_impossible_alpha_is_refused(alpha):
    with pytest.raises(DataError, match="alpha"):
        dirichlet(LABELS, 5, alpha, generator(0))


def test_more_dirichlet_partitions_than_the_examples_can_fill_are_refused():
    with pytest.raises(DataError, match="51 partitions of at least 10 examples need 510 examples, found 500"):
        dirichlet(LABELS, 51, 0.5, generator(0), min_size=10)


def test_dirichlet_needs_one_label_per_example():
    with pytest.raises(DataError, match=r"\(4, 2\)"):
        dirichlet(np.zeros((4, 2)), 2, 0.5, generator(0))


def test_holdout_takes_the_same_share_of_each_label():
    stay, held_out = holdout(np.array([0] * 10 + [1] * 20), 0.2, generator(0))
    assert (held_out < 10).sum() == 2
    assert (held_out >= 10).sum() == 4
    assert sorted([*stay, *held_out]) == list(range(30))


def test_holding_out_nothing_leaves_all():
    stay, held_out = holdout(np.array([0, 1, 1]), 0.0, generator(0))
    assert stay.tolist() == [0, 1, 2]
    assert held_out.tolist() == []


@pytest.mark.parametrize("fraction", [-0.1, 1.0, float("nan")])
def test_an_impossible_fraction_is_refused(fraction):
    with pytest.raises(DataError, match="in \\[0, 1\\)"):
        holdout(np.zeros(3), fraction, generator(0))
