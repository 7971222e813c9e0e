from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from fakes import Adder, Events, ScriptedFleet, people

from fedtrain import RunState, Strategy
from fedtrain.aggregation import weighted_mean
from fedtrain.evaluate import evaluation
from fedtrain.fleet.memory import MemoryFleet
from fedtrain.local import sgd_epochs
from fedtrain.plan import CohortSettings
from fedtrain.rounds import first_state, run
from fedtrain.selection import uniform
from fedtrain.types import Outcome, Start, Task

MODEL = Start({"w": np.array([1.0])}, {"n": np.array(0)})
STRATEGY = Strategy(uniform(), sgd_epochs(1), weighted_mean())


def trained(
    where: Any,
    *,
    rounds: int = 1,
    every: int = 1,
    server: Adder | None = None,
    clients: dict[str, Adder] | None = None,
    settings: CohortSettings | None = None,
    events: Events | None = None,
) -> RunState:
    settings, report = settings or CohortSettings(), events or Events()
    measure = evaluation(where, every=every, rounds=rounds, trainer=server or Adder(), settings=settings, report=report)
    fleet = MemoryFleet(clients or {"a": Adder(2.0)})
    return run(
        STRATEGY,
        fleet,
        first_state(STRATEGY, MODEL, 0),
        rounds=rounds,
        settings=settings,
        evaluate=measure,
        report=report,
    )


def of_two() -> dict[str, Adder]:
    return {
        "a": Adder(num_examples=1, metrics={"accuracy": 0.5, "loss": 4.0}),
        "b": Adder(num_examples=3, metrics={"accuracy": 0.9}),
    }


def test_the_server_measures_the_model_after_the_round() -> None:
    server, events = Adder(num_examples=100, metrics={"accuracy": 0.75}), Events()
    state = trained("server", server=server, events=events)
    assert server.evaluated == [{"w": 3.0, "n": 1}]
    assert state.history[0].evaluation == {"accuracy": 0.75}
    assert state.history[0].evaluation_by_client == {}
    assert state.next_task == 1
    assert events.of("evaluated") == [{"where": "server", "metrics": {"accuracy": 0.75}, "by_client": {}}]


def test_a_server_without_held_out_data_measures_nothing() -> None:
    events = Events()
    assert trained("server", events=events).history[0].evaluation == {}
    assert events.of("evaluated") == []


def test_clients_measure_the_model_and_count_by_their_examples() -> None:
    events = Events()
    state = trained("clients", clients=of_two(), events=events)
    (record,) = state.history
    assert record.evaluation == pytest.approx({"accuracy": 0.8, "loss": 4.0})  # (0.5 + 3 * 0.9) / 4
    assert record.evaluation_by_client == {"a": {"accuracy": 0.5, "loss": 4.0}, "b": {"accuracy": 0.9}}
    assert state.next_task == 4  # two to train, two to evaluate
    assert [fields["kind"] for fields in events.of("outcome")] == ["train", "train", "evaluate", "evaluate"]
    assert events.of("evaluated")[0]["where"] == "clients"


def test_with_both_the_servers_figure_goes_before_the_clients_mean() -> None:
    record = trained("both", server=Adder(metrics={"accuracy": 0.25}), clients=of_two()).history[0]
    assert record.evaluation == {"accuracy": 0.25, "loss": 4.0}
    assert record.evaluation_by_client["b"] == {"accuracy": 0.9}


def test_with_both_and_no_data_on_the_server_the_clients_mean_stands() -> None:
    assert trained("both", clients=of_two()).history[0].evaluation["accuracy"] == pytest.approx(0.8)


def test_nothing_is_measured_where_nothing_was_asked_for() -> None:
    server = Adder(metrics={"accuracy": 1.0})
    assert trained("none", server=server).history[0].evaluation == {}
    assert server.evaluated == []


@pytest.mark.parametrize(
    ("every", "rounds", "measured"),
    [(1, 3, [1, 2, 3]), (2, 5, [2, 4, 5]), (2, 4, [2, 4]), (10, 3, [3]), (3, 1, [1])],
)
def test_the_model_is_measured_every_k_rounds_and_always_after_the_last(
    every: int, rounds: int, measured: list[int]
) -> None:
    server = Adder(metrics={"accuracy": 1.0})
    history = trained("server", every=every, rounds=rounds, server=server).history
    assert [record.round for record in history if record.evaluation] == measured


def test_an_evaluation_keeps_what_the_record_said_of_the_round() -> None:
    record = trained("both", clients=of_two()).history[0]
    assert (record.round, record.num_ok, record.num_asked, record.skipped) == (1, 2, 2, "")
    assert record.metrics["loss"] == 4.0


def broken(start: Start, work: Any) -> None:
    raise ValueError


def test_a_skipped_round_is_measured_all_the_same() -> None:
    server = Adder(metrics={"accuracy": 0.1})
    record = trained("server", server=server, clients={"a": Adder(fit=broken)}).history[0]
    assert record.skipped
    assert record.evaluation == {"accuracy": 0.1}


def test_clients_that_do_not_measure_are_left_out() -> None:
    record = trained("clients", clients={**of_two(), "c": Adder(num_examples=1000)}).history[0]
    assert sorted(record.evaluation_by_client) == ["a", "b"]
    assert record.evaluation["accuracy"] == pytest.approx(0.8)


def test_extra_missing_and_undefined_metrics_disturb_nobody() -> None:
    clients = {
        "a": Adder(num_examples=2, metrics={"accuracy": 0.5, "loss": float("nan")}),
        "b": Adder(num_examples=2, metrics={"accuracy": 1.0, "loss": 2.0, "f1": 0.3}),
        "c": Adder(num_examples=0, metrics={"accuracy": 0.0}),
    }
    assert trained("clients", clients=clients).history[0].evaluation == {"accuracy": 0.75, "f1": 0.3, "loss": 2.0}


def test_what_is_trained_does_not_depend_on_where_it_is_measured() -> None:
    digests = {
        trained(where, rounds=3, every=2, clients=of_two()).model_digest
        for where in ("none", "server", "clients", "both")
    }
    assert len(digests) == 1


def measure_with(
    answers: Callable[[Task, int], Iterator[tuple[float, Outcome]]], settings: CohortSettings, clients: str = "abc"
) -> tuple[RunState, ScriptedFleet]:
    """One evaluation by clients, on the real clock: the answers come at once or not at all."""
    fleet = ScriptedFleet(answers=answers, clients=[(0, people(*clients))])
    state = run(
        STRATEGY, MemoryFleet({"a": Adder()}), first_state(STRATEGY, MODEL, 0), rounds=1, settings=CohortSettings()
    )
    measure = evaluation("clients", every=1, rounds=1, trainer=Adder(), settings=settings)
    return measure(state, fleet), fleet


def test_an_evaluation_is_settled_and_asks_for_the_model_without_a_payload() -> None:
    def answers(task: Task, attempt: int) -> Iterator[tuple[float, Outcome]]:
        yield 0, Outcome(task, "ok", metrics={"accuracy": 1.0}, num_examples=1)

    state, fleet = measure_with(answers, CohortSettings())
    assert fleet.settled == [(1, False), (2, False), (3, False)]
    assert [sorted(start.params) + sorted(start.buffers) + sorted(start.payload) for start in fleet.starts] == [
        ["w", "n"]
    ]
    assert state.next_task == 4


def test_an_impossible_number_of_examples_does_not_count_in_the_mean() -> None:
    def answers(task: Task, attempt: int) -> Iterator[tuple[float, Outcome]]:
        examples = -1 if task.client == "a" else 2
        yield 0, Outcome(task, "ok", metrics={"accuracy": 9.0 if task.client == "a" else 0.5}, num_examples=examples)

    state, _ = measure_with(answers, CohortSettings())
    assert state.history[0].evaluation == {"accuracy": 0.5}


def test_an_evaluation_that_nobody_answers_says_nothing() -> None:
    state, _ = measure_with(lambda task, attempt: iter([(0.0, Outcome(task, "lost"))]), CohortSettings())
    assert (state.history[0].evaluation, state.history[0].evaluation_by_client) == ({}, {})
    state, fleet = measure_with(lambda task, attempt: iter([]), CohortSettings(), clients="")
    assert state.history[0].evaluation == {}
    assert fleet.tasks == []
