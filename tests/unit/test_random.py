import hashlib

import numpy as np

from fedtrain.random import derived_seed, generator


def test_equal_keys_give_equal_streams() -> None:
    first, second = generator(3, "select", 7), generator(3, "select", 7)
    assert first.random(5).tolist() == second.random(5).tolist()


def test_keys_that_differ_anywhere_give_different_streams() -> None:
    keys = [(3, "select", 7), (4, "select", 7), (3, "noise", 7), (3, "select", 8), (3, "select"), ("3", "select", 7)]
    keys += [(), ("",), ("a", "b"), ("ab",), ("a", "", "b"), (37, "select"), (1, 23), (12, 3)]
    assert len({float(generator(*key).random()) for key in keys}) == len(keys)
    assert len({derived_seed(*key) for key in keys}) == len(keys)


def test_a_derived_seed_is_made_of_the_first_63_bits_of_the_keys_hash() -> None:
    raw = hashlib.sha256(b"int:3\0str:task\0int:1\0str:a").digest()
    low, high = int.from_bytes(raw[:4], "little"), int.from_bytes(raw[4:8], "little")
    assert derived_seed(3, "task", 1, "a") == low + (high // 2) * 2**32 == 644_067_459_254_453_862


def test_known_numbers_do_not_change_between_versions() -> None:
    assert generator(0, "select", 1).integers(1000, size=5).tolist() == [981, 951, 257, 348, 234]


def test_derived_seeds_fill_their_range() -> None:
    seeds = np.array([derived_seed(index) for index in range(4000)])
    assert seeds.dtype == np.int64
    assert seeds.min() >= 0
    bits = (seeds[:, None] >> np.arange(63)) & 1
    # 63 shares of 4,000 fair bits: five standard errors of 0.5 / sqrt(4000).
    assert np.abs(bits.mean(axis=0) - 0.5).max() < 5 * 0.5 / np.sqrt(4000)


def test_no_global_generator_is_used_or_changed() -> None:
    before = np.random.get_state()[1].tolist()  # noqa: NPY002
    generator(1).random(10)
    derived_seed(1)
    assert np.random.get_state()[1].tolist() == before  # noqa: NPY002
