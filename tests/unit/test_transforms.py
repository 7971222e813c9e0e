from collections.abc import Callable

import numpy as np
import pytest
from numpy.random import Generator

from fedtrain.random import generator
from fedtrain.transforms import Transform, chain, identity
from fedtrain.types import Params, State

DELTA = {"w": np.array([1.0, 2.0])}


def mapped(name: str, change: Callable[[float, int], float]) -> Transform:
    """Changes every element by a function of it and of how often the transform has run."""

    def apply(delta: Params, state: State, random: Generator) -> tuple[Params, State]:
        return {key: np.array([change(x, state) for x in array]) for key, array in delta.items()}, state + 1

    return Transform(lambda params: 0, apply, ((name, {"size": len(name)}),))


double = mapped("double", lambda x, runs: 2 * x)
plus_runs = mapped("plus_runs", lambda x, runs: x + runs)


def test_identity_changes_nothing_and_remembers_nothing() -> None:
    transform = identity()
    delta, state = transform.apply(DELTA, transform.init(DELTA), generator(0))
    assert delta is DELTA
    assert state == ()
    assert transform.spec == ()


def test_a_chain_applies_its_transforms_in_order() -> None:
    random = generator(0)
    for transforms, expected in (((double, plus_runs), [3.0, 5.0]), ((plus_runs, double), [4.0, 6.0])):
        delta, state = chain(*transforms).apply(DELTA, (1, 1), random)
        assert delta["w"].tolist() == expected
        assert state == (2, 2)
    assert DELTA["w"].tolist() == [1.0, 2.0]


def test_each_transform_of_a_chain_keeps_its_own_memory() -> None:
    transform = chain(double, chain(plus_runs, plus_runs))
    assert transform.init(DELTA) == (0, (0, 0))
    _, state = transform.apply(DELTA, (5, (6, 7)), generator(0))
    assert state == (6, (7, 8))


def test_a_chain_travels_as_the_specs_of_its_transforms() -> None:
    assert chain(double, identity(), plus_runs).spec == (("double", {"size": 6}), ("plus_runs", {"size": 9}))


def test_an_empty_chain_is_the_identity() -> None:
    assert chain().apply(DELTA, chain().init(DELTA), generator(0)) == (DELTA, ())


def test_transforms_of_a_chain_draw_from_one_generator_one_after_the_other() -> None:
    def apply(delta: Params, state: State, random: Generator) -> tuple[Params, State]:
        return {"w": np.append(delta["w"], random.random())}, state

    noise = Transform(lambda params: (), apply)
    delta, _ = chain(noise, noise).apply({"w": np.zeros(0)}, ((), ()), generator(4))
    assert delta["w"].tolist() == generator(4).random(2).tolist()


def test_memory_of_another_chain_is_refused() -> None:
    with pytest.raises(ValueError, match="zip"):
        chain(double, plus_runs).apply(DELTA, (0,), generator(0))
