from itertools import islice

import numpy as np
import pytest

from fedtrain.data.batches import batches, num_batches, num_steps, positive, prescribed
from fedtrain.errors import Declined
from fedtrain.random import generator


def sizes(num_examples, batch_size, count, **options):
    return [len(batch) for batch in islice(batches(num_examples, batch_size, 0, **options), count)]


def test_an_epoch_is_one_random_order_cut_into_batches_the_last_one_short():
    order = generator(5, "batches").permutation(7).tolist()
    first_epoch = [batch.tolist() for batch in islice(batches(7, 3, 5), 3)]
    assert first_epoch == [order[:3], order[3:6], order[6:]]


def test_the_second_epoch_has_another_order_from_the_same_generator():
    random = generator(5, "batches")
    random.permutation(7)
    second = [index for batch in islice(batches(7, 3, 5), 3, 6) for index in batch.tolist()]
    assert second == random.permutation(7).tolist()


def test_a_single_last_example_joins_the_batch_before_it_when_asked():
    assert sizes(7, 3, 6) == [3, 3, 1, 3, 3, 1]
    assert sizes(7, 3, 4, keep_single=False) == [3, 4, 3, 4]
    assert sizes(8, 3, 3, keep_single=False) == [3, 3, 2]
    assert sizes(6, 3, 2, keep_single=False) == [3, 3]
    assert sizes(1, 3, 2, keep_single=False) == [1, 1]
    assert sizes(3, 1, 3, keep_single=False) == [1, 1, 1]


@pytest.mark.parametrize(("num_examples", "batch_size"), [(1, 1), (1, 3), (6, 3), (7, 3), (8, 3), (3, 1), (5, 9)])
@pytest.mark.parametrize("keep_single", [True, False])
def test_num_batches_counts_what_batches_cuts(num_examples, batch_size, keep_single):
    count = num_batches(num_examples, batch_size, keep_single=keep_single)
    assert sum(sizes(num_examples, batch_size, count, keep_single=keep_single)) == num_examples


@pytest.mark.parametrize(
    ("numbers", "steps"),
    [
        ({}, 100),
        ({"epochs": 3}, 300),
        ({"epochs": 0.07}, 7),
        ({"epochs": 0.071}, 8),
        ({"epochs": 1e-9}, 1),
        ({"steps": 4, "epochs": 3}, 4),
    ],
)
def test_steps_come_from_the_task(numbers, steps):
    assert num_steps(numbers, batches_per_epoch=100) == steps


@pytest.mark.parametrize("numbers", [{"epochs": 0}, {"steps": -1}, {"epochs": float("nan")}])
def test_an_impossible_amount_of_work_is_declined(numbers):
    with pytest.raises(Declined, match="must be a finite number > 0"):
        num_steps(numbers, 10)


def test_a_number_that_the_task_leaves_open_is_the_default():
    assert positive({}, "learning_rate", 0.5) == 0.5
    assert positive({"learning_rate": 0.1}, "learning_rate", 0.5) == 0.1


def test_prescribed_batches_go_on_from_any_update_and_begin_again_after_the_last() -> None:
    order = np.array([[3, 1], [0, -1], [2, 3]], np.int16)
    chosen = [batch.tolist() for batch in islice(prescribed(order, 1), 4)]
    assert chosen == [[0], [2, 3], [3, 1], [0]]
    assert next(prescribed(order, 8)).tolist() == [2, 3]
    assert next(prescribed(order, 0)).dtype == np.int64
