import numpy as np
import pytest
from fakes import Adder

from fedtrain.client.trainer import Work
from fedtrain.fleet.memory import MemoryFleet
from fedtrain.testing import task_of
from fedtrain.types import Start

START = Start({"w": np.zeros(1)}, {"n": np.array(0)}, {"c": np.zeros(1)})


@pytest.fixture
def slept(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds that the fleet wanted to sleep."""
    seconds: list[float] = []
    monkeypatch.setattr("fedtrain.fleet.memory.time.sleep", seconds.append)
    return seconds


def test_clients_come_in_the_order_of_their_ids_with_what_their_trainers_say() -> None:
    fleet = MemoryFleet({"c2": Adder(num_examples=2), "c10": Adder(num_examples=10), "a": Adder()})
    assert [(client.id, client.num_examples) for client in fleet.clients()] == [("a", 1), ("c10", 10), ("c2", 2)]
    assert {client.local_algorithms for client in fleet.clients()} == {("sgd_epochs",)}


def test_tasks_are_done_one_by_one_in_the_order_in_which_they_were_given() -> None:
    trainers = {"a": Adder(1.0), "b": Adder(2.0)}
    fleet = MemoryFleet(trainers)
    fleet.give([task_of(0, "b"), task_of(1, "a")], START)
    assert not trainers["a"].works
    assert not trainers["b"].works
    first = fleet.receive(0.0)
    assert first is not None
    assert first.task.client == "b"
    assert first.update is not None
    assert first.update.delta == {"w": 2.0, "n": 1}
    assert not trainers["a"].works
    second = fleet.receive(0.0)
    assert second is not None
    assert second.task.client == "a"


def test_nothing_to_do_takes_as_long_as_the_caller_waits(slept: list[float]) -> None:
    fleet = MemoryFleet({"a": Adder()})
    assert fleet.receive(1.5) is None
    fleet.wait(2.5)
    assert slept == [1.5, 2.5]


def test_a_task_that_waits_is_not_queued_again_and_one_that_is_done_may_be() -> None:
    trainer = Adder()
    fleet = MemoryFleet({"a": trainer})
    fleet.give([task_of(0)], START)
    fleet.give([task_of(0)], START)
    assert fleet.receive(0.0) is not None
    assert fleet.receive(0.0) is None
    fleet.give([task_of(0)], START)
    assert fleet.receive(0.0) is not None
    assert len(trainer.works) == 2


def test_a_task_that_is_settled_before_its_turn_is_not_done() -> None:
    trainer = Adder()
    fleet = MemoryFleet({"a": trainer})
    fleet.give([task_of(0), task_of(1)], START)
    fleet.settle(task_of(0), counted=False)
    outcome = fleet.receive(0.0)
    assert outcome is not None
    assert outcome.task.number == 1
    assert fleet.receive(0.0) is None


@pytest.mark.parametrize("name", ["params", "buffers", "payload"])
def test_a_trainer_that_writes_into_its_start_fails_and_changes_nobody_elses(name: str) -> None:
    def careless(start: Start, work: Work) -> None:
        for array in getattr(start, name).values():
            array += 1

    fleet = MemoryFleet({"a": Adder(fit=careless), "b": Adder()})
    fleet.give([task_of(0, "a"), task_of(1, "b")], START)
    first, second = fleet.receive(0.0), fleet.receive(0.0)
    assert first is not None
    assert second is not None
    assert (first.kind, second.kind) == ("failed", "ok")
    assert "read-only" in first.reason
    assert START.params == {"w": 0.0}
    assert START.params["w"].flags.writeable
