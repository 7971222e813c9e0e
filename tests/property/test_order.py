"""Who answers first changes nothing."""

from collections.abc import Sequence
from random import Random

import numpy as np
from fakes import Adder, ScriptedFleet, ok, people
from hypothesis import given
from hypothesis import strategies as st

from fedtrain import RunState, Strategy
from fedtrain.aggregation import weighted_mean
from fedtrain.client.trainer import Fitted, Work
from fedtrain.client.worker import Worker
from fedtrain.collect import collect
from fedtrain.fleet.memory import MemoryFleet
from fedtrain.local import sgd_epochs
from fedtrain.plan import CohortSettings, plan, start_of
from fedtrain.rounds import first_state, run, step
from fedtrain.selection import uniform
from fedtrain.types import ClientInfo, Outcome, Start, Task

CLIENTS = people(*"abcdefgh")
MODEL = Start(
    {"w": np.linspace(-1, 1, 64, dtype=np.float32), "half": np.ones(7, np.float16)},
    {"mean": np.array([0.5]), "steps": np.array(3), "on": np.array([True, False])},
)


def reply(task: Task) -> Outcome:
    """A client's update: a function of its task, with magnitudes so different that sums in another order differ."""
    random = np.random.default_rng(task.seed)
    scale = 10.0 ** random.integers(-4, 5)
    delta = {
        "w": (scale * random.normal(size=64)).astype(np.float32),
        "half": random.normal(size=7).astype(np.float16),
        "mean": random.normal(size=1),
        "steps": np.array(int(random.integers(100))),
        "on": random.random(2) > 0.5,
    }
    return ok(task, delta, int(random.integers(1, 1000)), {"loss": float(random.normal())})


def strategy() -> Strategy:
    return Strategy(uniform(), sgd_epochs(1), weighted_mean())


def after_one_round(arrival: Sequence[int], clients: Sequence[ClientInfo] = CLIENTS) -> RunState:
    """One round in which the client at ``arrival[0]`` answers first."""
    parts = strategy()
    state = first_state(parts, MODEL, seed=5)
    start = start_of(parts, state)
    cohort = plan(parts, state, clients, CohortSettings(), start)
    script = ((float(time_s), reply(cohort.tasks[index])) for time_s, index in enumerate(arrival))
    fleet = ScriptedFleet(script)
    return step(parts, state, cohort, collect(cohort, fleet, start, clock=fleet.clock))


def test_fifty_orders_of_arrival_of_the_same_eight_replies_give_one_digest() -> None:
    random, orders = Random(0), set[tuple[int, ...]]()
    while len(orders) < 50:
        orders.add(tuple(random.sample(range(8), 8)))
    states = [after_one_round(order) for order in sorted(orders)]
    assert len({state.model_digest for state in states}) == 1
    assert len({str(state.history) for state in states}) == 1


def test_the_digest_would_show_it_if_updates_were_folded_in_another_order() -> None:
    parts = strategy()
    state = first_state(parts, MODEL, seed=5)
    cohort = plan(parts, state, CLIENTS, CohortSettings(), start_of(parts, state))
    replies = [reply(task) for task in cohort.tasks]
    assert step(parts, state, cohort, replies).model_digest != step(parts, state, cohort, replies[::-1]).model_digest


@given(st.permutations(range(8)), st.permutations(range(8)))
def test_neither_the_order_of_arrival_nor_that_of_connecting_matters(arrival: list[int], order: list[int]) -> None:
    state = after_one_round(arrival, [CLIENTS[index] for index in order])
    assert state.model_digest == after_one_round(range(8)).model_digest


class Seeded(Adder):
    """A trainer that adds numbers drawn with the task's seed."""

    def fit(self, start: Start, work: Work) -> Fitted:
        random = np.random.default_rng(work.seed)
        self.amount, self.num_examples = float(random.normal()), int(random.integers(1, 50))
        return super().fit(start, work)


def trained_in_memory(rounds: int) -> RunState:
    parts, fleet = strategy(), MemoryFleet({client.id: Seeded() for client in CLIENTS})
    return run(parts, fleet, first_state(parts, MODEL, seed=5), rounds=rounds, settings=CohortSettings(asked=5))


def trained_with_delays(rounds: int, delays: Random) -> RunState:
    """The same, with clients that answer after random times."""
    workers, parts = {client.id: Worker(Seeded()) for client in CLIENTS}, strategy()
    state = first_state(parts, MODEL, seed=5)
    for _ in range(rounds):
        start = start_of(parts, state)
        cohort = plan(parts, state, CLIENTS, CohortSettings(asked=5), start)
        done = [(delays.random(), workers[task.client].perform(task, start)) for task in cohort.tasks]
        fleet = ScriptedFleet(done)
        state = step(parts, state, cohort, collect(cohort, fleet, start, clock=fleet.clock))
    return state


def test_clients_that_answer_after_random_times_train_the_same_model_as_the_fleet_in_memory() -> None:
    expected = trained_in_memory(3)
    assert expected.num_succeeded == 3
    for seed in range(5):
        state = trained_with_delays(3, Random(seed))
        assert state.model_digest == expected.model_digest
        assert state.history == expected.history
