from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from fakes import people

from fedtrain import RunState, Strategy
from fedtrain.aggregation import weighted_mean
from fedtrain.errors import ConfigError
from fedtrain.local import sgd_epochs
from fedtrain.plan import CohortSettings, plan, plan_evaluation, require_enough_asked, start_of
from fedtrain.rounds import first_state
from fedtrain.selection import Chosen, uniform
from fedtrain.state import start_digest
from fedtrain.transforms import identity
from fedtrain.types import ClientInfo, Cohort, Start

MODEL = Start({"w": np.zeros(1)}, {"n": np.array(0)})
EVERYBODY = people("a", "b", "c", "d", num_examples=10)


def strategy_of(**slots: Any) -> Strategy:
    return Strategy(**{"select": uniform(), "local": sgd_epochs(2), "aggregate": weighted_mean(), **slots})


def planned(
    eligible: Sequence[ClientInfo] = EVERYBODY,
    settings: CohortSettings | None = None,
    *,
    strategy: Strategy | None = None,
    state: RunState | None = None,
) -> Cohort:
    strategy = strategy or strategy_of()
    state = state or first_state(strategy, MODEL, seed=1)
    return plan(strategy, state, eligible, settings or CohortSettings(), start_of(strategy, state))


def test_a_plan_says_everything_before_anything_is_sent() -> None:
    strategy = strategy_of(on_client=identity()._replace(spec=(("clip", {"norm": 1.0}),)))
    state = replace(first_state(strategy, MODEL, seed=1), round=6, next_task=40)
    cohort = planned(strategy=strategy, state=state, settings=CohortSettings(deadline_s=9.0, grace_s=2.0))
    assert (cohort.round, cohort.num_eligible, cohort.eligible_examples) == (7, 4, 40)
    assert (cohort.deadline_s, cohort.grace_s, cohort.retry) == (9.0, 2.0, False)
    assert [task.client for task in cohort.tasks] == ["a", "b", "c", "d"]
    assert [task.number for task in cohort.tasks] == [40, 41, 42, 43]
    task = cohort.tasks[0]
    assert (task.round, task.kind, task.deadline_s, task.probability, task.num_examples) == (7, "train", 9.0, 1.0, 10)
    assert (task.local, task.on_client) == (("sgd_epochs", {"epochs": 2}), (("clip", {"norm": 1.0}),))


def test_a_plan_is_a_function_of_its_arguments_and_not_of_the_order_of_clients() -> None:
    strategy = strategy_of(select=uniform(2))
    assert planned(strategy=strategy) == planned(list(reversed(EVERYBODY)), strategy=strategy)


def test_every_task_has_a_seed_of_its_own_which_depends_on_run_round_and_client_alone() -> None:
    first = planned()
    seeds = {task.client: task.seed for task in first.tasks}
    assert len(set(seeds.values())) == 4
    assert all(0 <= seed < 2**63 for seed in seeds.values())
    fewer = planned(EVERYBODY[2:])
    assert [task.seed for task in fewer.tasks] == [seeds["c"], seeds["d"]]
    strategy = strategy_of()
    for other in (
        first_state(strategy, MODEL, seed=2),
        replace(first_state(strategy, MODEL, seed=1), round=1),
    ):
        cohort = planned(state=other)
        assert not {task.seed for task in cohort.tasks} & set(seeds.values())
        assert cohort.entropy != first.entropy


def test_work_is_decided_for_each_client() -> None:
    local = sgd_epochs()._replace(
        task=lambda state, client, round: ("sgd_epochs", {"epochs": client.num_examples + round})
    )
    cohort = planned([ClientInfo("a", 1), ClientInfo("b", 5)], strategy=strategy_of(local=local))
    assert [task.local[1]["epochs"] for task in cohort.tasks] == [2, 6]


def test_the_start_is_named_by_params_buffers_and_the_local_algorithms_payload() -> None:
    def digest(start: Start, c: float) -> str:
        strategy = strategy_of(local=sgd_epochs()._replace(payload=lambda state: {"c": np.array(c)}))
        (digest,) = {task.start for task in planned(state=first_state(strategy, start, 1), strategy=strategy).tasks}
        return digest

    base = digest(MODEL, 0.0)
    assert base == start_digest(replace(MODEL, payload={"c": np.array(0.0)}))
    others = [
        digest(MODEL, 1.0),
        digest(Start({"w": np.ones(1)}, MODEL.buffers), 0.0),
        digest(Start(MODEL.params, {"n": np.array(1)}), 0.0),
    ]
    assert len({base, *others}) == 4


@pytest.mark.parametrize(
    ("settings", "asked", "quorum", "retry"),
    [
        ({}, 4, 3, False),  # more than half
        ({"asked": 3}, 3, 2, False),
        ({"asked": 1}, 1, 1, False),
        ({"asked": 9}, 4, 3, False),
        ({"answers": 1}, 4, 1, False),
        ({"answers": 4, "under_quorum": "retry"}, 4, 4, True),
        ({"answers": 3, "asked": 2, "under_quorum": "retry"}, 2, 3, False),  # asking again would never help
    ],
)
def test_how_many_are_asked_and_must_answer(settings: dict[str, Any], asked: int, quorum: int, retry: bool) -> None:
    cohort = planned(settings=CohortSettings(**settings))
    assert (len(cohort.tasks), cohort.quorum, cohort.retry) == (asked, quorum, retry)


def test_a_rule_that_needs_more_updates_than_the_quorum_raises_it() -> None:
    aggregate = replace(weighted_mean(), min_updates=4)
    assert planned(settings=CohortSettings(answers=2), strategy=strategy_of(aggregate=aggregate)).quorum == 4
    assert planned(settings=CohortSettings(answers=5), strategy=strategy_of(aggregate=aggregate)).quorum == 5


def test_the_inclusion_probability_travels_in_the_task() -> None:
    assert [task.probability for task in planned(strategy=strategy_of(select=uniform(1))).tasks] == [0.25]


def test_without_eligible_clients_the_selector_is_not_asked() -> None:
    def choose(*arguments: object) -> list[Chosen]:
        raise AssertionError("nobody to choose from")

    cohort = planned([], strategy=strategy_of(select=uniform()._replace(choose=choose)))
    assert (cohort.tasks, cohort.num_eligible, cohort.retry) == ((), 0, False)
    assert cohort.quorum >= 1


@pytest.mark.parametrize(
    ("connected", "answers", "min_updates", "needed"),
    [(1, None, 1, 1), (3, None, 1, 3), (1, 2, 1, 2), (3, 2, 1, 3), (3, 5, 1, 5), (1, None, 4, 4), (3, 5, 4, 5)],
)
def test_a_round_needs_as_many_clients_as_must_be_connected_must_answer_and_can_be_combined(
    connected: int, answers: int | None, min_updates: int, needed: int
) -> None:
    strategy = strategy_of(aggregate=replace(weighted_mean(), min_updates=min_updates))
    assert CohortSettings(connected=connected, answers=answers).needed(strategy) == needed


def test_fewer_asked_than_can_be_combined_is_refused() -> None:
    strategy = strategy_of(aggregate=replace(weighted_mean(), min_updates=4))
    for asked in (None, 4, 5):
        require_enough_asked(strategy, CohortSettings(asked=asked))
    with pytest.raises(ConfigError, match=r"cohort.asked: expected at least 4, .* or null, found 3"):
        require_enough_asked(strategy, CohortSettings(asked=3))


def evaluated(*ids: str, settings: CohortSettings | None = None) -> Cohort:
    state = replace(first_state(strategy_of(), MODEL, seed=1), round=3, next_task=12)
    return plan_evaluation(state, people(*ids), settings or CohortSettings(), MODEL)


def test_an_evaluation_asks_everybody_and_goes_on_with_the_numbers_of_tasks() -> None:
    cohort = evaluated("b", "a", settings=CohortSettings(asked=1, deadline_s=5.0, under_quorum="retry"))
    assert [(task.number, task.client, task.kind, task.round) for task in cohort.tasks] == [
        (12, "a", "evaluate", 3),
        (13, "b", "evaluate", 3),
    ]
    assert {task.start for task in cohort.tasks} == {start_digest(MODEL)}
    assert {task.deadline_s for task in cohort.tasks} == {5.0}
    assert (cohort.deadline_s, cohort.retry) == (5.0, False)


@pytest.mark.parametrize(("ids", "quorum"), [("", 1), ("a", 1), ("ab", 2), ("abc", 2), ("abcde", 3)])
def test_the_grace_of_an_evaluation_begins_when_more_than_half_have_answered(ids: str, quorum: int) -> None:
    assert evaluated(*ids).quorum == quorum
