import numpy as np
import pytest

from fedtrain.data import Examples, Split
from fedtrain.data.split import require_partition
from fedtrain.errors import DataError


def test_examples_count_their_first_dimension():
    assert len(Examples(np.zeros((3, 2)), np.zeros(3))) == 3


def test_unequal_numbers_of_inputs_and_targets_are_refused_with_both_shapes():
    with pytest.raises(DataError, match=r"\(3, 2\) and \(4,\)"):
        Examples(np.zeros((3, 2)), np.zeros(4))


def test_arrays_without_dimensions_are_refused():
    with pytest.raises(DataError, match="first dimension"):
        Examples(np.zeros(()), np.zeros(()))


def test_take_gives_the_examples_in_the_order_asked_for():
    taken = Examples(np.array([[0.0], [1.0], [2.0]]), np.array([0, 10, 20])).take(np.array([2, 0]))
    assert taken.inputs.tolist() == [[2.0], [0.0]]
    assert taken.targets.tolist() == [20, 0]


def test_a_split_may_lack_either_side():
    assert Split(None, None) == Split(train=None, test=None)


@pytest.mark.parametrize("partition", [-1, 5, 6])
def test_a_partition_that_does_not_exist_is_refused_with_the_allowed_range(partition):
    with pytest.raises(DataError, match=rf"in 0 \.\. 4 .* found {partition}"):
        require_partition(partition, 5)


def test_no_partitions_at_all_is_refused():
    with pytest.raises(DataError, match="num_partitions must be >= 1, found 0"):
        require_partition(None, 0)
