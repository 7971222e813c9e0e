"""Every eligible client is equally likely."""

from collections.abc import Sequence

from numpy.random import Generator

from fedtrain.errors import StrategyError
from fedtrain.selection.selector import Chosen, Selector
from fedtrain.types import ClientInfo, State


def uniform(size: int | None = None, *, fraction: float = 1.0) -> Selector:
    """Choose clients uniformly at random, without replacement.

    Args:
        size: How many, >= 1. None: `fraction` of the eligible, rounded, at least one. A round's own size
            (``cohort.asked``) goes before both. Where fewer are eligible, all of them are chosen.
        fraction: In (0, 1]; C in McMahan et al. (2017).

    Raises:
        StrategyError: a number is out of its range.
    """
    if size is not None and size < 1:
        raise StrategyError(f"selection uniform: size must be >= 1, found {size}")
    if not 0 < fraction <= 1:
        raise StrategyError(f"selection uniform: fraction must be in (0, 1], found {fraction}")

    def choose(eligible: Sequence[ClientInfo], state: State, random: Generator, asked: int | None) -> list[Chosen]:
        wanted = asked or size or max(1, round(fraction * len(eligible)))
        count = min(wanted, len(eligible))
        picked = sorted(random.choice(len(eligible), size=count, replace=False).tolist()) if count else []
        return [Chosen(eligible[index], count / len(eligible)) for index in picked]

    return Selector(init=lambda: (), choose=choose, observe=lambda state, outcomes: state)
