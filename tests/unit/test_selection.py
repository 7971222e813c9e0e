from collections.abc import Sequence

import numpy as np
import pytest

from fedtrain.errors import StrategyError
from fedtrain.random import generator
from fedtrain.selection import Chosen, Selector, uniform
from fedtrain.types import ClientInfo


def clients(count: int) -> list[ClientInfo]:
    return [ClientInfo(f"c{index:02d}", num_examples=10) for index in range(count)]


def ids(chosen: Sequence[Chosen]) -> list[str]:
    return [client.id for client, _ in chosen]


def choose(selector: Selector, count: int, *, seed: int = 0, asked: int | None = None) -> Sequence[Chosen]:
    return selector.choose(clients(count), selector.init(), generator(seed, "select", 1), asked)


@pytest.mark.parametrize(
    ("selector", "eligible", "asked", "size"),
    [
        (uniform(3), 10, None, 3),
        (uniform(3), 2, None, 2),  # fewer than wanted: all of them
        (uniform(3), 10, 4, 4),  # the round's own size goes first
        (uniform(fraction=0.5), 10, 4, 4),
        (uniform(), 10, 20, 10),
        (uniform(), 10, None, 10),
        (uniform(fraction=0.25), 10, None, 2),  # 2.5 is rounded to even
        (uniform(fraction=0.1), 3, None, 1),  # 0.3: at least one
        (uniform(), 1, None, 1),
        (uniform(3), 0, None, 0),
    ],
)
def test_the_cohort_has_the_size_that_was_asked_for(
    selector: Selector, eligible: int, asked: int | None, size: int
) -> None:
    chosen = choose(selector, eligible, asked=asked)
    assert len(chosen) == len(set(ids(chosen))) == size
    assert ids(chosen) == sorted(ids(chosen))
    assert {probability for _, probability in chosen} == ({size / eligible} if eligible else set())


def test_a_seed_names_one_cohort() -> None:
    assert ids(choose(uniform(3), 10, seed=0)) == ["c02", "c07", "c08"]
    assert ids(choose(uniform(3), 10, seed=1)) == ["c03", "c05", "c07"]
    assert choose(uniform(3), 10, seed=0) == choose(uniform(3), 10, seed=0)


def test_every_client_and_every_pair_is_equally_likely() -> None:
    draws, eligible, size = 20_000, 6, 2
    selector, everyone, random = uniform(size), clients(6), np.random.default_rng(0)
    together = np.zeros((eligible, eligible))
    for _ in range(draws):
        picked = [int(client.id[1:]) for client, _ in selector.choose(everyone, (), random, None)]
        together[np.ix_(picked, picked)] += 1
    single, pair = size / eligible, 1 / 15  # 15 pairs out of six clients
    once, both = together.diagonal(), together[np.triu_indices(eligible, 1)]
    for counts, probability in ((once, single), (both, pair)):
        standard_error = np.sqrt(draws * probability * (1 - probability))
        assert np.abs(counts - draws * probability).max() < 5 * standard_error


def test_uniform_selection_remembers_nothing() -> None:
    selector = uniform()
    assert selector.init() == ()
    assert selector.observe((), []) == ()


@pytest.mark.parametrize("size", [0, -1])
def test_a_size_below_one_is_refused(size: int) -> None:
    with pytest.raises(StrategyError, match=f"size must be >= 1, found {size}"):
        uniform(size)


@pytest.mark.parametrize("fraction", [0.0, -0.5, 1.5, float("nan")])
def test_a_fraction_outside_its_range_is_refused(fraction: float) -> None:
    with pytest.raises(StrategyError, match=rf"fraction must be in \(0, 1\], found {fraction}"):
        uniform(fraction=fraction)
