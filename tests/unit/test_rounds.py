import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from fakes import Adder, Events, ScriptedFleet, ok, people

from fedtrain import RunState, Strategy
from fedtrain.aggregation import Aggregator, by_examples, weighted_mean
from fedtrain.collect import collect
from fedtrain.errors import AggregationError, ConfigError, ParamsError
from fedtrain.fleet.memory import MemoryFleet
from fedtrain.local import Local, sgd_epochs
from fedtrain.plan import CohortSettings, plan, start_of
from fedtrain.rounds import first_state, run, step
from fedtrain.selection import Chosen, Selector, uniform
from fedtrain.server_optimizers import Optimizer
from fedtrain.testing import cohort_of
from fedtrain.transforms import Transform
from fedtrain.types import ClientInfo, Cohort, Outcome, Params, Start, Task, Update

MODEL = Start({"w": np.array([1.0])}, {"n": np.array(5)})


def counting() -> Optimizer:
    """Moves by the delta, and counts its calls."""
    return Optimizer(init=lambda params: 0, apply=lambda delta, calls: (delta, calls + 1))


def noting() -> Selector:
    """Asks everybody, and remembers the outcomes that it was shown."""
    return Selector(
        init=lambda: (),
        choose=lambda eligible, state, random, size: [Chosen(client, 1.0) for client in eligible[:size]],
        observe=lambda state, outcomes: (*state, *[(outcome.task.client, outcome.kind) for outcome in outcomes]),
    )


def strategy_of(**slots: Any) -> Strategy:
    defaults = {
        "select": noting(),
        "local": sgd_epochs(1),
        "aggregate": weighted_mean(),
        "server_optimizer": counting(),
    }
    return Strategy(**{**defaults, **slots})


def delta(move: float, n: int = 5) -> Params:
    return {"w": np.array([move], np.float64), "n": np.array(n)}


def memory(**trainers: Adder) -> MemoryFleet:
    return MemoryFleet(trainers)


def raising(error: BaseException, *, rounds: Iterable[int]) -> Any:
    """Something that raises in some rounds, for `Adder(fit=…)`."""

    def fit(start: Start, work: Any) -> None:
        if work.round in rounds:
            raise error

    return fit


# step


def test_a_step_moves_the_model_by_the_mean_and_counts_round_and_tasks() -> None:
    strategy, cohort = strategy_of(), cohort_of(2)
    state = replace(first_state(strategy, MODEL, seed=3), next_task=10)
    outcomes = [ok(cohort.tasks[0], delta(1, 6), 1, {"loss": 4}), ok(cohort.tasks[1], delta(5, 10), 3, {"loss": 8})]
    after = step(strategy, state, cohort, outcomes)
    assert after.model == {"w": 5.0, "n": 9}  # 1 + (1 * 1 + 3 * 5) / 4; (1 * 6 + 3 * 10) / 4
    assert (after.round, after.next_task, after.seed, after.server_optimizer) == (1, 12, 3, 1)
    (record,) = after.history
    assert (record.round, record.num_ok, record.num_asked, record.skipped) == (1, 2, 2, "")
    assert record.metrics == {"loss": 7}
    assert after.num_succeeded == 1


def test_a_step_leaves_what_it_was_given_as_it_was() -> None:
    strategy, cohort = strategy_of(), cohort_of(1)
    state = first_state(strategy, MODEL, seed=0)
    before, update = state.model_digest, delta(1, 9)
    step(strategy, state, cohort, [ok(cohort.tasks[0], update)])
    assert state.model_digest == before
    assert (state.round, state.history) == (0, ())
    assert update == delta(1, 9)


def test_outcomes_that_are_not_ok_do_not_move_the_model() -> None:
    strategy, cohort = strategy_of(), cohort_of(4)
    kinds = ["failed", "late", "declined"]
    outcomes = [Outcome(task, kind) for task, kind in zip(cohort.tasks, kinds, strict=False)]  # type: ignore[arg-type]
    after = step(strategy, first_state(strategy, MODEL, 0), cohort, [*outcomes, ok(cohort.tasks[3], delta(2))])
    assert after.params == {"w": 3.0}
    assert (after.history[0].num_ok, after.history[0].num_asked) == (1, 4)


def failing_after(count: int) -> Aggregator:
    def combine(updates: Iterable[Update], cohort: Cohort) -> Params:
        for index, _ in enumerate(updates):
            if index + 1 == count:
                break
        raise AggregationError("these updates do not fit together")

    return Aggregator(combine)


@pytest.mark.parametrize(
    ("aggregate", "quorum", "moves", "reason"),
    [
        (weighted_mean(), 3, [1.0, 1.0], "2 usable answers of 3 asked, 3 are needed"),
        (failing_after(1), 2, [1.0, 1.0], "these updates do not fit together"),
        (failing_after(2), 2, [1.0, 1.0], "these updates do not fit together"),
        (weighted_mean(lambda update, cohort: 0.0), 2, [1.0, 1.0], "sum to zero"),
        (weighted_mean(), 2, [1e308, 1e308], "'w'"),
    ],
)
def test_a_skipped_round_keeps_the_very_same_objects_says_why_and_lets_the_selector_see_it(
    aggregate: Aggregator, quorum: int, moves: Sequence[float], reason: str
) -> None:
    touched = Transform(init=lambda params: [], apply=lambda delta, state, random: (delta, [*state, 1]))
    strategy = strategy_of(aggregate=aggregate, on_server=touched, local=control())
    state = first_state(strategy, replace(MODEL, params={"w": np.array([1e308])}), seed=0)
    cohort = cohort_of(3, quorum=quorum)
    updates = [ok(task, delta(move)) for task, move in zip(cohort.tasks, moves, strict=False)]
    after = step(strategy, state, cohort, [*updates, Outcome(cohort.tasks[2], "lost")])
    for part in ("params", "buffers", "server_optimizer", "on_server", "local"):
        assert getattr(after, part) is getattr(state, part)
    assert reason in after.history[-1].skipped
    assert after.selection == (("c00", "ok"), ("c01", "ok"), ("c02", "lost"))
    assert (after.round, after.next_task, after.num_succeeded) == (1, 3, 0)


def test_the_model_never_becomes_infinite_also_by_the_server_optimizer() -> None:
    huge = Optimizer(init=lambda params: 0, apply=lambda delta, state: ({"w": np.array([np.inf])}, 1))
    strategy = strategy_of(server_optimizer=huge)
    state, cohort = first_state(strategy, MODEL, 0), cohort_of(1)
    after = step(strategy, state, cohort, [ok(cohort.tasks[0], delta(1))])
    assert after.params is state.params
    assert after.history[0].skipped == "the combined update would make 'w' infinite or NaN"


def test_the_selector_sees_outcomes_in_cohort_order_and_without_arrays() -> None:
    seen: list[Outcome] = []
    watching = noting()._replace(observe=lambda state, outcomes: seen.extend(outcomes))
    cohort = cohort_of(2)
    strategy = strategy_of(select=watching)
    step(strategy, first_state(strategy, MODEL, 0), cohort, [ok(task, delta(1)) for task in cohort.tasks])
    assert [outcome.task.client for outcome in seen] == ["c00", "c01"]
    assert [outcome.update for outcome in seen] == [None, None]


def test_a_step_folds_each_update_before_it_asks_for_the_next() -> None:
    """The cohort's updates are never all in memory: each outcome is done with before the next one is taken."""
    log: list[str] = []

    def weight(update: Update, cohort: Cohort) -> float:
        log.append(f"weigh {update.task.client}")
        return 1.0

    def outcomes(cohort: Cohort) -> Iterator[Outcome]:
        for task in cohort.tasks:
            log.append(f"take {task.client}")
            yield ok(task, delta(1))

    strategy, cohort = strategy_of(aggregate=weighted_mean(weight)), cohort_of(2)
    step(strategy, first_state(strategy, MODEL, 0), cohort, outcomes(cohort))
    assert list(dict.fromkeys(log)) == ["take c00", "weigh c00", "take c01", "weigh c01"]


def test_the_first_update_is_folded_before_the_last_one_arrives() -> None:
    cohort, folded = cohort_of(2), list[tuple[str, float]]()
    fleet = ScriptedFleet([(1, ok(cohort.tasks[0], delta(1))), (60, ok(cohort.tasks[1], delta(1)))])

    def fold(acc: None, update: Update) -> None:
        folded.append((update.task.client, fleet.now))

    strategy = strategy_of(local=sgd_epochs(1)._replace(fold=fold))
    step(strategy, first_state(strategy, MODEL, 0), cohort, collect(cohort, fleet, MODEL, clock=fleet.clock))
    assert folded == [("c00", 1), ("c01", 60)]


def test_noise_on_the_server_is_a_function_of_the_cohorts_entropy() -> None:
    noise = Transform(
        init=lambda params: (),
        apply=lambda delta, state, random: ({"w": delta["w"] + random.normal()}, state),
    )

    def after(entropy: int) -> float:
        strategy, cohort = strategy_of(on_server=noise), cohort_of(1, entropy=entropy)
        state = step(strategy, first_state(strategy, MODEL, 0), cohort, [ok(cohort.tasks[0], delta(0))])
        return float(state.params["w"].item())

    assert after(1) == after(1) != after(2)


def test_an_array_that_is_both_a_parameter_and_a_buffer_is_refused() -> None:
    with pytest.raises(ParamsError, match="'w' is both a parameter and a buffer"):
        first_state(strategy_of(), Start({"w": np.zeros(1)}, {"w": np.zeros(1)}), seed=0)


# A local algorithm with a memory on the server


def control() -> Local:
    """SCAFFOLD's bookkeeping: the server's control moves by the mean of the clients' second payloads."""
    return Local(
        init=lambda params: {"c": np.zeros(1)},
        task=lambda state, client, round: ("sgd_epochs", {"epochs": 1}),
        payload=lambda state: {"c": state["c"]},
        fold=lambda acc, update: [*(acc or []), (update.task.client, update.extra.get("c"))],
        finish=lambda state, acc, cohort: {"c": state["c"] + sum(c for _, c in acc) / cohort.num_eligible},
    )


def second(task: Task, move: float, c: float) -> Outcome:
    outcome = ok(task, delta(move))
    assert outcome.update is not None
    return replace(outcome, update=replace(outcome.update, extra={"c": np.array([c])}))


def test_a_local_algorithms_second_payloads_are_folded_once_each_in_cohort_order() -> None:
    finished: list[Any] = []
    local = control()._replace(
        finish=lambda state, acc, cohort: finished.append(acc) or control().finish(state, acc, cohort)
    )
    strategy, cohort = strategy_of(local=local), cohort_of(4, deadline_s=9.0)
    state = first_state(strategy, MODEL, seed=0)
    fleet = ScriptedFleet(
        [
            (1, second(cohort.tasks[3], 1, 8.0)),
            (2, second(cohort.tasks[0], 1, 2.0)),
            (3, second(cohort.tasks[0], 1, 2.0)),  # the same again
            (4, Outcome(cohort.tasks[1], "failed")),
            (10, second(cohort.tasks[2], 1, 100.0)),  # late
        ]
    )
    after = step(strategy, state, cohort, collect(cohort, fleet, start_of(strategy, state), clock=fleet.clock))
    assert finished == [[("c00", 2.0), ("c03", 8.0)]]
    assert after.local == {"c": 2.5}  # (2 + 8) / 4 eligible
    assert start_of(strategy, after).payload == {"c": 2.5}


def test_a_local_algorithm_does_not_finish_a_skipped_round() -> None:
    finished: list[Any] = []
    local = control()._replace(finish=lambda state, acc, cohort: finished.append(acc))
    for aggregate, quorum in ((weighted_mean(), 2), (failing_after(1), 1)):
        strategy, cohort = strategy_of(local=local, aggregate=aggregate), cohort_of(2, quorum=quorum)
        outcomes = [second(cohort.tasks[0], 1, 2.0), Outcome(cohort.tasks[1], "failed")]
        after = step(strategy, first_state(strategy, MODEL, 0), cohort, outcomes)
        assert after.history[0].skipped
    assert finished == []


# run


def test_a_run_repeats_rounds_until_there_are_enough_and_saves_each() -> None:
    saved: list[int] = []
    strategy = strategy_of()
    fleet = memory(a=Adder(1.0), b=Adder(3.0))
    state = run(
        strategy,
        fleet,
        first_state(strategy, MODEL, 0),
        rounds=3,
        settings=CohortSettings(),
        save=lambda state: saved.append(state.round),
    )
    assert state.params == {"w": 7.0}  # 1 + 3 * (1 + 3) / 2
    assert state.buffers == {"n": 8}  # each round's clients say: one more
    assert saved == [1, 1, 2, 2, 3, 3]  # when a round is finished, and once it is evaluated
    assert state.next_task == 6


def test_a_run_that_goes_on_from_a_state_ends_like_one_that_never_stopped() -> None:
    def trained(*stops: int) -> RunState:
        strategy = strategy_of(select=uniform(2))
        state = first_state(strategy, MODEL, seed=7)
        for rounds in stops:
            fleet = memory(a=Adder(0.1), b=Adder(0.3, 2), c=Adder(0.7, 3))
            state = run(strategy, fleet, state, rounds=rounds, settings=CohortSettings())
        return state

    assert trained(2, 5).model_digest == trained(5).model_digest
    assert trained(2, 5).history == trained(5).history
    assert trained(5, 5).round == 5


def test_each_client_is_told_whether_its_update_was_counted_after_the_step() -> None:
    def answers(task: Task, attempt: int) -> Iterator[tuple[float, Outcome]]:
        yield 0, Outcome(task, "failed") if task.client == "b" else ok(task, delta(1))

    fleet = ScriptedFleet(answers=answers, clients=[(0, people("a", "b", "c"))])
    strategy = strategy_of()
    run(strategy, fleet, first_state(strategy, MODEL, 0), rounds=1, settings=CohortSettings())
    assert fleet.settled == [(0, True), (1, False), (2, True)]
    assert fleet.log.index("settle 0") > fleet.log.index("receive 2")

    fleet = ScriptedFleet(answers=answers, clients=[(0, people("a", "b", "c"))])
    run(strategy, fleet, first_state(strategy, MODEL, 0), rounds=1, settings=CohortSettings(answers=3))
    assert fleet.settled == [(0, False), (1, False), (2, False)]


def test_a_run_whose_clients_all_fail_ends_with_the_model_that_it_began_with() -> None:
    strategy = strategy_of()
    first = first_state(strategy, MODEL, 0)
    fleet = memory(a=Adder(fit=raising(ValueError("no data"), rounds=range(9))))
    events = Events()
    state = run(strategy, fleet, first, rounds=3, settings=CohortSettings(), report=events)
    assert (state.round, state.num_succeeded) == (3, 0)
    assert state.params is first.params
    assert [record.skipped for record in state.history] == ["0 usable answers of 1 asked, 1 are needed"] * 3
    assert [fields["reason"] for fields in events.of("outcome")] == ["ValueError: no data"] * 3
    assert [fields["counted"] for fields in events.of("round_finished")] == [0, 0, 0]


def test_a_round_that_was_skipped_does_not_disturb_the_next() -> None:
    strategy = strategy_of()
    fleet = memory(a=Adder(2.0, fit=raising(ValueError(), rounds=[1])))
    state = run(strategy, fleet, first_state(strategy, MODEL, 0), rounds=2, settings=CohortSettings())
    assert state.params == {"w": 3.0}
    assert state.server_optimizer == 1


def test_the_selector_may_choose_fewer_than_asked() -> None:
    strategy = strategy_of(select=uniform(2))
    fleet = memory(a=Adder(1.0), b=Adder(1.0))
    state = run(strategy, fleet, first_state(strategy, MODEL, 0), rounds=1, settings=CohortSettings(asked=5))
    assert (state.history[0].num_asked, state.history[0].skipped) == (2, "")


@pytest.mark.parametrize("under_quorum", ["skip", "retry"])
def test_a_quorum_above_the_number_of_chosen_clients_skips_the_round_and_is_not_tried_for_ever(
    under_quorum: Any,
) -> None:
    asked = list[int]()

    def broken(start: Start, work: Any) -> None:
        if work.round in asked:
            pytest.fail("asked again")
        asked.append(work.round)
        raise ValueError

    strategy = strategy_of(select=uniform(1))
    fleet = memory(a=Adder(fit=broken), b=Adder(fit=broken))
    settings = CohortSettings(answers=2, under_quorum=under_quorum)
    events = Events()
    state = run(strategy, fleet, first_state(strategy, MODEL, 0), rounds=2, settings=settings, report=events)
    assert {record.skipped.split(",")[1] for record in state.history} == {" 2 are needed"}
    assert events.of("retry") == []


@pytest.mark.parametrize("under_quorum", ["skip", "retry"])
def test_a_selector_that_chooses_nobody_skips_the_round(under_quorum: Any) -> None:
    nobody = noting()._replace(choose=lambda eligible, state, random, size: [])
    strategy = strategy_of(select=nobody)
    fleet = memory(a=Adder(1.0))
    settings = CohortSettings(under_quorum=under_quorum)
    state = run(strategy, fleet, first_state(strategy, MODEL, 0), rounds=2, settings=settings)
    assert [record.skipped for record in state.history] == [
        "nobody was asked: the selector chose none of 1 clients"
    ] * 2


def test_an_interruption_leaves_the_last_saved_state_usable() -> None:
    fleet = memory(a=Adder(1.0), b=Adder(1.0, fit=raising(KeyboardInterrupt(), rounds=[3])))
    strategy, saved = strategy_of(), list[RunState]()
    with pytest.raises(KeyboardInterrupt):
        run(strategy, fleet, first_state(strategy, MODEL, 0), rounds=5, settings=CohortSettings(), save=saved.append)
    assert [state.round for state in saved] == [1, 1, 2, 2]
    again = memory(a=Adder(1.0), b=Adder(1.0))
    state = run(strategy, again, saved[-1], rounds=5, settings=CohortSettings())
    undisturbed = run(
        strategy,
        memory(a=Adder(1.0), b=Adder(1.0)),
        first_state(strategy, MODEL, 0),
        rounds=5,
        settings=CohortSettings(),
    )
    assert state.model_digest == undisturbed.model_digest
    assert state.history == undisturbed.history


def test_an_interruption_of_the_evaluation_does_not_cost_the_finished_round() -> None:
    def interrupted(state: RunState, fleet: Any) -> RunState:
        raise KeyboardInterrupt

    saved = list[RunState]()
    with pytest.raises(KeyboardInterrupt):
        run(
            strategy_of(),
            memory(a=Adder(1.0)),
            first_state(strategy_of(), MODEL, 0),
            rounds=2,
            settings=CohortSettings(),
            evaluate=interrupted,
            save=saved.append,
        )
    assert [state.round for state in saved] == [1]


# Waiting for clients


@pytest.fixture
def time_of(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Lets `run` read a fleet's clock."""
    return lambda fleet: monkeypatch.setattr("fedtrain.rounds.time", SimpleNamespace(monotonic=fleet.clock))


def good(task: Task, attempt: int) -> Iterator[tuple[float, Outcome]]:
    yield 1.0, ok(task, delta(1))


def test_a_round_begins_as_soon_as_enough_clients_are_connected(time_of: Any) -> None:
    fleet = ScriptedFleet(
        answers=good, clients=[(5, people("a")), (7, people("a", "b")), (8, people("a", "b", "c")), (9, people("d"))]
    )
    time_of(fleet)
    strategy, events = strategy_of(), Events()
    settings = CohortSettings(connected=3, connect_deadline_s=60)
    run(strategy, fleet, first_state(strategy, MODEL, 0), rounds=1, settings=settings, report=events)
    assert fleet.given[0].time_s == 8
    assert [task.client for task in fleet.tasks] == ["a", "b", "c"]
    assert events.of("waiting") == [{"connected": number, "needed": 3} for number in (0, 1, 2)]


def test_as_many_clients_as_must_answer_are_waited_for(time_of: Any) -> None:
    fleet = ScriptedFleet(answers=good, clients=[(0, people("a")), (4, people("a", "b"))])
    time_of(fleet)
    strategy = strategy_of()
    settings = CohortSettings(connected=1, answers=2)
    state = run(strategy, fleet, first_state(strategy, MODEL, 0), rounds=1, settings=settings)
    assert fleet.given[0].time_s == 4
    assert state.history[0].skipped == ""


def test_as_many_clients_as_the_aggregator_needs_are_waited_for(time_of: Any) -> None:
    fleet = ScriptedFleet(answers=good, clients=[(0, people("a")), (4, people("a", "b")), (6, people("a", "b", "c"))])
    time_of(fleet)
    strategy = strategy_of(aggregate=replace(weighted_mean(), min_updates=3))
    state = run(strategy, fleet, first_state(strategy, MODEL, 0), rounds=1, settings=CohortSettings())
    assert fleet.given[0].time_s == 6
    assert state.history[0].skipped == ""


def test_a_run_that_asks_fewer_than_the_aggregator_needs_does_not_begin() -> None:
    fleet = ScriptedFleet(answers=good, clients=[(0, people("a", "b", "c"))])
    strategy = strategy_of(aggregate=replace(weighted_mean(), min_updates=3))
    with pytest.raises(ConfigError, match=r"cohort.asked: expected at least 3"):
        run(strategy, fleet, first_state(strategy, MODEL, 0), rounds=1, settings=CohortSettings(asked=2))
    assert not fleet.tasks


@pytest.mark.parametrize("there", [(), ("a", "b")])
@pytest.mark.parametrize("under_quorum", ["skip", "retry"])
def test_a_round_is_skipped_when_too_few_connect_in_time_and_the_run_ends(
    there: Sequence[str], under_quorum: Any, time_of: Any
) -> None:
    fleet = ScriptedFleet(answers=good, clients=[(0, people(*there))])
    time_of(fleet)
    strategy = strategy_of()
    first = first_state(strategy, MODEL, 0)
    settings = CohortSettings(connected=3, connect_deadline_s=60, under_quorum=under_quorum)
    state = run(strategy, fleet, first, rounds=2, settings=settings)
    assert fleet.now == 120
    assert (state.round, state.num_succeeded, state.next_task) == (2, 0, 0)
    assert state.params is first.params
    assert [record.skipped for record in state.history] == [
        "nobody was asked: too few clients were connected in time"
    ] * 2


def test_a_client_that_connects_for_the_second_round_makes_it_succeed(time_of: Any) -> None:
    fleet = ScriptedFleet(answers=good, clients=[(70, people("a"))])
    time_of(fleet)
    strategy = strategy_of()
    state = run(
        strategy, fleet, first_state(strategy, MODEL, 0), rounds=2, settings=CohortSettings(connect_deadline_s=60)
    )
    assert [bool(record.skipped) for record in state.history] == [True, False]
    assert fleet.given[-1].time_s == 70


# Asking again


def played(fleet: ScriptedFleet, settings: CohortSettings, *, rounds: int = 2) -> RunState:
    """Some rounds on the fleet's own clock."""
    strategy = strategy_of(aggregate=weighted_mean(by_examples))
    state = first_state(strategy, Start({"w": np.array([0.1, 0.2], np.float32)}, {}), seed=11)
    for _ in range(rounds):
        start = start_of(strategy, state)
        cohort = plan(strategy, state, fleet.clients(), settings, start)
        state = step(strategy, state, cohort, collect(cohort, fleet, start, clock=fleet.clock))
        for task in cohort.tasks:
            fleet.settle(task, True)
    return state


def work_of(task: Task) -> Outcome:
    """What a client would answer: a function of the task alone."""
    random = np.random.default_rng(task.seed)
    return ok(task, {"w": random.normal(size=2).astype(np.float32)}, int(random.integers(1, 100)))


@pytest.mark.parametrize("trouble", ["lost", "late", "failed", "declined", "invalid"])
def test_a_disturbed_run_that_asks_again_ends_with_the_undisturbed_runs_digest(trouble: str) -> None:
    clients: list[tuple[float, Sequence[ClientInfo]]] = [(0, people("a", "b", "c"))]
    settings = CohortSettings(answers=3, deadline_s=30.0, under_quorum="retry")

    def disturbed(task: Task, attempt: int) -> Iterator[tuple[float, Outcome]]:
        good = work_of(task)
        assert good.update is not None
        if attempt > 0 or (task.client == "a") == (task.round == 1):
            yield 1.0, good
        elif trouble == "invalid":
            yield 1.0, replace(good, update=replace(good.update, delta={"w": np.full(2, math.nan, np.float32)}))
        elif trouble != "late":
            yield 1.0, Outcome(task, trouble)  # type: ignore[arg-type]

    fleet = ScriptedFleet(answers=disturbed, clients=clients)
    state = played(fleet, settings)
    calm = ScriptedFleet(answers=lambda task, attempt: [(1.0, work_of(task))], clients=clients)
    undisturbed = played(calm, settings)
    assert state.model_digest == undisturbed.model_digest
    assert state.history == undisturbed.history
    # Lost clients are waited for one by one, the others are asked again together.
    asked = [given.numbers for given in fleet.given]
    assert asked == [(0, 1, 2), *([(1,), (2,)] if trouble == "lost" else [(1, 2)]), (3, 4, 5), (3,)]
    assert list(dict.fromkeys(map(str, fleet.tasks))) == [str(task) for task in calm.tasks]
