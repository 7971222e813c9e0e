"""Transforms: what happens to a delta before it leaves a client, or to the aggregate on the server."""

from collections.abc import Callable
from typing import NamedTuple

from numpy.random import Generator

from fedtrain.types import Params, Spec, State


class Transform(NamedTuple):
    """A pure change of named deltas, with memory that goes in and comes out."""

    init: Callable[[Params], State]
    apply: Callable[[Params, State, Generator], tuple[Params, State]]
    spec: tuple[Spec, ...] = ()
    """Names and numbers: what travels to a client when the transform runs there; code never does."""


def identity() -> Transform:
    """The transform that changes nothing and remembers nothing.

    >>> identity().apply({"w": 1}, (), None)
    ({'w': 1}, ())
    """
    return Transform(init=lambda params: (), apply=lambda delta, state, random: (delta, state))


def chain(*transforms: Transform) -> Transform:
    """Apply transforms one after the other; the state is the tuple of theirs, the spec their specs in order."""

    def init(params: Params) -> State:
        return tuple(transform.init(params) for transform in transforms)

    def apply(delta: Params, states: State, random: Generator) -> tuple[Params, State]:
        new_states = []
        for transform, state in zip(transforms, states, strict=True):
            delta, state = transform.apply(delta, state, random)
            new_states.append(state)
        return delta, tuple(new_states)

    return Transform(init, apply, sum((transform.spec for transform in transforms), ()))


ON_CLIENT: dict[str, Callable[..., Transform]] = {}
"""Transforms that a client can run, by the name in their spec; called with the spec's numbers."""
