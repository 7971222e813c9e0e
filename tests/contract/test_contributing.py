"""The code in CONTRIBUTING.md works, and its parts keep what their text promises."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedtrain import Strategy
from fedtrain.client.trainer import Trainer
from fedtrain.errors import StrategyError
from fedtrain.testing import task_of
from fedtrain.types import ClientInfo, Outcome

GUIDE = Path(__file__).parents[2] / "CONTRIBUTING.md"


@pytest.fixture(scope="module")
def examples() -> Mapping[str, Any]:
    """The names that all code blocks of the guide, run from top to bottom, define."""
    names: dict[str, Any] = {}
    blocks = re.findall(r"^```python\n(.*?)^```", GUIDE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert len(blocks) == 4
    for block in blocks:
        exec(compile(block, str(GUIDE), "exec"), names)
    return names


def test_the_strategy_of_the_guide_is_a_strategy(examples: Mapping[str, Any]) -> None:
    assert isinstance(examples["build"](), Strategy)


def test_the_selector_of_the_guide_asks_everyone_in_turn(examples: Mapping[str, Any]) -> None:
    selector, clients = examples["round_robin"](2), [ClientInfo(name, 1) for name in "abc"]
    state, turns = selector.init(), []
    for _ in range(3):
        chosen = selector.choose(clients, state, np.random.default_rng(0), None)
        turns.append("".join(client.id for client, _ in chosen))
        assert {probability for _, probability in chosen} == {2 / 3}
        state = selector.observe(state, [Outcome(task_of(client=client.id), "ok") for client, _ in chosen])
    assert turns == ["ab", "ca", "bc"]
    with pytest.raises(StrategyError, match="size must be >= 1, found 0"):
        examples["round_robin"](0)


def test_the_trainer_of_the_guide_is_a_trainer_and_learns(examples: Mapping[str, Any]) -> None:
    assert all(isinstance(trainer, Trainer) for trainer in examples["trainers"].values())
    assert examples["state"].params["w"] == pytest.approx([2.0, -1.0], abs=1e-6)


def test_the_guide_names_targets_that_exist() -> None:
    makefile = (GUIDE.parent / "Makefile").read_text(encoding="utf-8")
    for target in set(re.findall(r"`make ([a-z-]+)", GUIDE.read_text(encoding="utf-8"))):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
