"""GridFleet over a grid in this process, and what travels over it."""

import json
import math
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from flwr.app import Array as FlowerArray
from flwr.app import ArrayRecord, ConfigRecord, Context, Error, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.constant import SUPERLINK_NODE_ID, ErrorCode
from flwr.common.serde import message_from_proto, message_to_proto
from flwr.serverapp import Grid
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity

from fedtrain.client.trainer import Fitted, Work
from fedtrain.config import build_strategy, build_trainer, compose
from fedtrain.errors import ParamsError
from fedtrain.evaluate import evaluation
from fedtrain.fleet import MemoryFleet
from fedtrain.fleet.fleet import Fleet
from fedtrain.flower import records
from fedtrain.flower.app import client_app, server_app
from fedtrain.flower.grid import GridFleet
from fedtrain.flower.memory import NodeMemory
from fedtrain.params import digest, read_file
from fedtrain.rounds import first_state, run
from fedtrain.state import RunState, start_digest
from fedtrain.testing import task_of
from fedtrain.training import cohort_settings
from fedtrain.types import Capacity, ClientInfo, Outcome, Start, Task, Update

START = Start({"w": np.array([1.0, 2.0], np.float32)}, {"seen": np.array(3)})

Handler = Callable[[Message], "Message | Error | Exception | None"]


@pytest.fixture(autouse=True)
def identity(monkeypatch: pytest.MonkeyPatch) -> None:
    """What Flower sets in the process of a ServerApp, without which no `Message` can be made."""
    monkeypatch.setattr(TaskIdentity, "_run_id", 1)
    monkeypatch.setattr(TaskIdentity, "_node_id", SUPERLINK_NODE_ID)
    monkeypatch.setattr(TaskIdentity, "_task_id", 1)


class Clock:
    """Time that passes only by sleeping; `at` makes things happen meanwhile."""

    def __init__(self) -> None:
        self.now, self.slept, self.at = 100.0, list[float](), list[tuple[float, Callable[[], None]]]()

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds
        for due, action in [(due, action) for due, action in self.at if due <= self.now]:
            self.at.remove((due, action))
            action()


class LocalGrid(Grid):
    """A grid whose nodes are functions. What they answer waits until it is pulled; None is no answer yet."""

    def __init__(self, nodes: dict[int, Handler]) -> None:
        self.nodes, self.pushed, self.replies = dict(nodes), list[Message](), dict[str, Any]()
        self.refuses, self.num_pulls = False, 0

    def set_run(self, run: Run) -> None: ...

    @property
    def run(self) -> Run:
        raise NotImplementedError

    def create_message(self, *args: Any, **kwargs: Any) -> Message:
        raise NotImplementedError

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        raise NotImplementedError

    def get_node_ids(self) -> Iterable[int]:
        return list(self.nodes)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        if self.refuses:
            return []
        ids = []
        for message in messages:
            message.metadata.__dict__["_message_id"] = message_id = f"m{len(self.pushed)}"
            self.pushed.append(message)
            ids.append(message_id)
            self.replies[message_id] = self.nodes[message.metadata.dst_node_id](travelled(message))
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterator[Message]:
        self.num_pulls += 1
        for message_id in message_ids:
            found = self.replies.get(message_id)
            if found is None:
                continue
            del self.replies[message_id]
            if isinstance(found, Exception):
                raise found
            asked = self.pushed[int(message_id[1:])]
            yield Message(found, reply_to=asked) if isinstance(found, Error) else travelled(found)

    def answer(self, message_id: str, found: "Message | Error | Exception") -> None:
        """Let the answer to a message be there."""
        self.replies[message_id] = found

    def tasks(self) -> list[tuple[int, int]]:
        """Node and task number of each instruction that was sent."""
        sent = [message for message in self.pushed if message.metadata.message_type != "query"]
        return [(message.metadata.dst_node_id, records.read_task(message.content)[0].number) for message in sent]


def travelled(message: Message) -> Message:
    """The message as it arrives: through Flower's bytes and back."""
    sent = message_to_proto(message)
    arrived: Message = message_from_proto(type(sent).FromString(sent.SerializeToString()))
    return arrived


def enrolment(message: Message, client: str) -> Message:
    info = ClientInfo(client, 10, {"site": "x"}, Capacity(2, 5, ("cpu",), 0), ("sgd_epochs",))
    return Message(records.enrolment_content(info), reply_to=message)


def trained(message: Message, delta: float = 1.0, **fields: Any) -> Message:
    task, run, start, _ = records.read_task(message.content)
    arrays = {"w": np.full(2, delta, np.float32), "seen": start.buffers["seen"] + 1}
    update = Update(task, arrays, 10, 4, {"loss": 0.5})
    content = records.answer_content(Outcome(task, "ok", update, {"loss": 0.5}, 10), run)
    for name, value in fields.items():
        content.config_records["fedtrain"][name] = value
    return Message(content, reply_to=message)


def node(client: str, act: Handler = trained) -> Handler:
    return lambda message: enrolment(message, client) if message.metadata.message_type == "query" else act(message)


def silent(message: Message) -> None:
    return None


def task(number: int = 0, client: str = "a", **fields: object) -> Task:
    return task_of(number, client, **{"start": start_digest(START), **fields})


class Seen:
    def __init__(self) -> None:
        self.events: list[tuple[str, dict[str, object]]] = []

    def __call__(self, event: str, round: int = 0, **fields: object) -> None:
        self.events.append((event, fields))

    def names(self) -> list[str]:
        return [name for name, _ in self.events]


def fleet_of(nodes: dict[int, Handler], **options: Any) -> tuple[GridFleet, LocalGrid, Clock, Seen]:
    grid, clock, seen = LocalGrid(nodes), Clock(), Seen()
    fleet = GridFleet(grid, run="r", report=seen, clock=clock, sleep=clock.sleep, **options)
    fleet.clients()
    return fleet, grid, clock, seen


def test_a_new_node_is_asked_who_it_is_and_then_is_a_client() -> None:
    fleet, grid, _, seen = fleet_of({8: node("b"), 7: node("a")})
    expected = [ClientInfo(name, 10, {"site": "x"}, Capacity(2, 5, ("cpu",), 0), ("sgd_epochs",)) for name in "ab"]
    assert fleet.clients() == expected
    fleet.wait(5.0)
    assert [message.metadata.dst_node_id for message in grid.pushed] == [7, 8]  # once each
    assert seen.names() == ["client_connected", "client_connected"]


def test_waiting_ends_as_soon_as_a_client_has_come() -> None:
    fleet, grid, clock, _ = fleet_of({})
    clock.at.append((103.0, lambda: grid.nodes.update({7: node("a")})))
    fleet.wait(60.0)
    assert [client.id for client in fleet.clients()] == ["a"]
    assert 103.0 <= clock.now <= 104.0


def test_an_answer_is_an_ok_outcome_with_its_update() -> None:
    fleet, grid, clock, _ = fleet_of({7: node("a")})
    given = task(4, round=3, deadline_s=9.0, on_client=(("clip", {"norm": 1.0}),))
    fleet.give([given], START)
    outcome = fleet.receive(5.0)
    assert outcome is not None
    assert outcome.update is not None
    assert (outcome.task, outcome.kind, outcome.num_examples, outcome.metrics) == (given, "ok", 10, {"loss": 0.5})
    assert (outcome.update.num_examples, outcome.update.num_steps) == (10, 4)
    np.testing.assert_array_equal(outcome.update.delta["w"], np.array([1.0, 1.0], np.float32))
    np.testing.assert_array_equal(outcome.update.delta["seen"], np.array(4))
    assert outcome.seconds == clock.now - 100.0
    sent, run, start, verdicts = records.read_task(grid.pushed[-1].content)
    assert (sent, run, verdicts, start_digest(start)) == (given, "r", {}, given.start)


@pytest.mark.parametrize(
    ("answer", "kind", "reason"),
    [
        (
            Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, "KeyError:\n 'age'"),
            "failed",
            "KeyError: 'age' (Flower's error 2)",
        ),
        (Error(ErrorCode.CLIENT_APP_CRASHED), "failed", "no reason given"),
        (Error(ErrorCode.NODE_UNAVAILABLE, "gone"), "lost", "gone"),
        (Error(ErrorCode.REPLY_MESSAGE_UNAVAILABLE, "expired"), "lost", "expired"),
        (ValueError("no object with this id"), "invalid", "cannot be read: ValueError: no object with this id"),
    ],
)
def test_an_error_is_an_outcome_with_its_reason(answer: Any, kind: str, reason: str) -> None:
    fleet, _, _, _ = fleet_of({7: node("a", lambda message: answer), 8: node("b")})
    fleet.give([task(0, "a"), task(1, "b")], START)
    first, second = fleet.receive(5.0), fleet.receive(5.0)
    assert first is not None
    assert (first.task.number, first.kind) == (0, kind)
    assert reason in first.reason
    assert second is not None
    assert (second.task.number, second.kind) == (1, "ok")  # the others are not touched


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"task": 5}, "another run, task or start"),
        ({"run": "other"}, "another run, task or start"),
        ({"start": "0"}, "another run, task or start"),
        ({"kind": "late"}, "an answer of kind 'late'"),
        ({"num_examples": -1}, "whole numbers from 0 to 2**53"),
        ({"num_examples": 2**53 + 1}, "whole numbers from 0 to 2**53"),
        ({"num_steps": 0.5}, "whole numbers from 0 to 2**53"),
    ],
)
def test_an_answer_that_is_not_to_its_task_or_has_impossible_numbers_is_invalid(fields: Any, reason: str) -> None:
    fleet, _, _, _ = fleet_of({7: node("a", lambda message: trained(message, **fields))})
    fleet.give([task()], START)
    outcome = fleet.receive(5.0)
    assert outcome is not None
    assert (outcome.kind, outcome.update) == ("invalid", None)
    assert reason in outcome.reason


@pytest.mark.parametrize("missing", ["fedtrain", "metrics", "delta", "extra"])
def test_an_answer_without_one_of_its_records_is_invalid(missing: str) -> None:
    def without(message: Message) -> Message:
        reply = trained(message)
        del reply.content[missing]
        return reply

    fleet, _, _, _ = fleet_of({7: node("a", without)})
    fleet.give([task()], START)
    outcome = fleet.receive(5.0)
    assert outcome is not None
    assert outcome.kind == "invalid"
    assert missing in outcome.reason


def test_a_task_that_is_worked_on_is_not_sent_twice() -> None:
    fleet, grid, _, _ = fleet_of({7: node("a", silent)})
    fleet.give([task()], START)
    fleet.give([task()], START)
    assert fleet.receive(5.0) is None
    assert grid.tasks() == [(7, 0)]


def test_a_task_that_has_failed_is_sent_again_when_it_is_given_again() -> None:
    answers = iter([Error(ErrorCode.CLIENT_APP_CRASHED, "killed"), None])
    fleet, grid, _, _ = fleet_of({7: node("a", lambda message: next(answers) or trained(message))})
    kinds = []
    for _ in range(2):
        fleet.give([task()], START)
        outcome = fleet.receive(5.0)
        kinds.append(outcome and outcome.kind)
    assert kinds == ["failed", "ok"]
    assert grid.tasks() == [(7, 0), (7, 0)]


def test_a_client_that_is_gone_for_long_is_lost_and_gets_its_task_again_when_it_comes_back() -> None:
    fleet, grid, clock, seen = fleet_of({7: node("a", silent)}, lost_after_s=10.0)
    fleet.give([task()], START)
    clock.at.append((104.0, lambda: grid.nodes.pop(7)))
    outcome = fleet.receive(60.0)
    assert outcome is not None
    assert (outcome.kind, outcome.reason) == ("lost", "disconnected, and not back within 10 s")
    assert 114.0 <= clock.now <= 116.0
    assert fleet.clients() == []

    fleet.give([task()], START)  # waits for it
    clock.at.append((clock.now + 2.0, lambda: grid.nodes.update({9: node("a")})))
    outcome = fleet.receive(8.0)
    assert outcome is not None
    assert outcome.kind == "ok"
    assert grid.tasks() == [(7, 0), (9, 0)]
    assert seen.names() == ["client_connected", "client_lost", "client_returned"]


def test_a_client_that_comes_back_soon_is_not_lost_and_answers_only_once() -> None:
    fleet, grid, clock, _ = fleet_of({7: node("a", silent)}, lost_after_s=10.0)
    fleet.give([task()], START)
    first = grid.pushed[-1]
    clock.at += [(102.0, lambda: grid.nodes.pop(7)), (106.0, lambda: grid.nodes.update({7: node("a", silent)}))]
    clock.at.append((112.0, lambda: grid.answer(first.metadata.message_id, trained(first, 1.0))))
    clock.at.append((112.5, lambda: grid.answer(grid.pushed[-1].metadata.message_id, trained(grid.pushed[-1], 2.0))))
    outcome = fleet.receive(60.0)
    assert grid.tasks() == [(7, 0), (7, 0)]  # it may have lost the first
    assert outcome is not None
    assert outcome.update is not None
    assert outcome.update.delta["w"].tolist() == [1.0, 1.0]
    assert fleet.receive(30.0) is None
    fleet.settle(task(), True)
    assert fleet.receive(30.0) is None


def test_an_error_for_an_earlier_sending_does_not_end_a_later_one() -> None:
    fleet, grid, clock, _ = fleet_of({7: node("a", silent)})
    fleet.give([task()], START)
    first = grid.pushed[-1].metadata.message_id
    clock.at += [(102.0, lambda: grid.nodes.pop(7)), (104.0, lambda: grid.nodes.update({7: node("a", silent)}))]
    clock.at.append((107.0, lambda: grid.answer(first, Error(ErrorCode.NODE_UNAVAILABLE, "was away"))))
    clock.at.append((109.0, lambda: grid.answer(grid.pushed[-1].metadata.message_id, trained(grid.pushed[-1]))))
    outcome = fleet.receive(60.0)
    assert outcome is not None
    assert outcome.kind == "ok"


def test_an_answer_after_its_task_was_settled_is_late_once() -> None:
    fleet, grid, clock, _ = fleet_of({7: node("a", silent)})
    fleet.give([task()], START)
    asked = grid.pushed[-1]
    fleet.settle(task(), False)
    clock.at.append((103.0, lambda: grid.answer(asked.metadata.message_id, trained(asked))))
    outcome = fleet.receive(60.0)
    assert outcome is not None
    assert (outcome.kind, outcome.task.number, outcome.task.client, outcome.update) == ("late", 0, "a", None)
    assert fleet.receive(30.0) is None


def sent_twice() -> tuple[GridFleet, LocalGrid]:
    fleet, grid, clock, _ = fleet_of({7: node("a", silent)})
    fleet.give([task()], START)
    clock.at += [(102.0, lambda: grid.nodes.pop(7)), (104.0, lambda: grid.nodes.update({7: node("a", silent)}))]
    assert fleet.receive(10.0) is None
    assert grid.tasks() == [(7, 0), (7, 0)]
    return fleet, grid


def test_late_answers_to_two_sendings_of_a_task_are_one_outcome() -> None:
    fleet, grid = sent_twice()
    fleet.settle(task(), False)
    for message in grid.pushed:
        if message.metadata.message_type == "train":
            grid.answer(message.metadata.message_id, trained(message))
    outcome = fleet.receive(10.0)
    assert outcome is not None
    assert outcome.kind == "late"
    assert fleet.receive(60.0) is None


def test_the_second_answer_to_a_task_that_was_counted_is_not_late() -> None:
    fleet, grid = sent_twice()
    first, _, second = grid.pushed[1:]  # the one between asks the node again who it is
    grid.answer(first.metadata.message_id, trained(first))
    outcome = fleet.receive(10.0)
    assert outcome is not None
    assert outcome.kind == "ok"
    fleet.settle(task(), True)
    grid.answer(second.metadata.message_id, trained(second))
    assert fleet.receive(60.0) is None


def test_a_message_that_the_superlink_does_not_take_is_a_lost_task() -> None:
    fleet, grid, _, _ = fleet_of({7: node("a")})
    grid.refuses = True
    fleet.give([task()], START)
    outcome = fleet.receive(5.0)
    assert outcome is not None
    assert outcome.kind == "lost"
    assert "did not take the message" in outcome.reason


def test_verdicts_travel_with_the_next_task_of_the_client() -> None:
    fleet, grid, _, _ = fleet_of({7: node("a"), 8: node("b")})
    for number in range(2):
        fleet.give([task(2 * number, "a"), task(2 * number + 1, "b")], START)
        assert fleet.receive(5.0) is not None
        assert fleet.receive(5.0) is not None
        fleet.settle(task(2 * number, "a"), True)
        fleet.settle(task(2 * number + 1, "b"), False)
    fleet.give([task(4, "a"), task(5, "b")], START)
    assert [records.read_task(message.content)[3] for message in grid.pushed[-2:]] == [
        {0: True, 2: True},
        {1: False, 3: False},
    ]


def test_polls_come_quickly_after_a_task_and_ever_more_slowly_while_nothing_comes() -> None:
    fleet, _, clock, _ = fleet_of({7: node("a", silent)}, max_poll_s=1.0)
    assert fleet.receive(20.0) is None
    clock.slept.clear()
    fleet.give([task()], START)
    assert fleet.receive(20.0) is None
    assert sum(clock.slept) == pytest.approx(20.0)  # and not past its time
    expected = [0.05, *(0.05 * 1.5**step for step in range(1, 8)), 1.0]
    assert clock.slept[: len(expected)] == pytest.approx(expected)
    assert max(clock.slept) <= 1.0 + 1e-9
    assert fleet.receive(0.0) is None


def test_receiving_never_takes_longer_than_its_timeout() -> None:
    fleet, _, clock, _ = fleet_of({7: node("a", silent)}, max_poll_s=5.0)
    assert fleet.receive(100.0) is None
    before = clock.now
    assert fleet.receive(0.25) is None
    assert clock.now - before == pytest.approx(0.25)


def test_the_second_node_with_a_client_id_is_refused_until_the_first_has_left() -> None:
    fleet, grid, clock, seen = fleet_of({7: node("a"), 8: node("a")})
    assert seen.names() == ["client_connected", "client_refused"]
    assert "client id 'a' is that of another node" in str(seen.events[1][1]["reason"])
    del grid.nodes[7]
    fleet.wait(60.0)  # it is gone
    fleet.wait(60.0)  # the other is asked again
    assert [client.id for client in fleet.clients()] == ["a"]
    fleet.give([task()], START)
    assert grid.tasks() == [(8, 0)]
    assert clock.now <= 132.0


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, "no such file"), "no such file"),
        (ValueError("broken"), "cannot be read: ValueError: broken"),
        (RecordDict(), "its enrolment is not fedtrain's"),
        (records.enrolment_content(ClientInfo("9 lives", 1)), "id must be a letter"),
        (records.enrolment_content(ClientInfo("a", -1)), "num_examples must be a whole number"),
        (records.enrolment_content(ClientInfo("a", 1, {"site": "\x1b[2J"})), "tags must be printable text"),
        (records.enrolment_content(ClientInfo("a", 1, {str(number): "" for number in range(65)})), "at most 64"),
        (records.enrolment_content(ClientInfo("a", 1, local_algorithms=("x" * 201,))), "of up to 200 characters"),
        (RecordDict({"fedtrain": ConfigRecord({"enrolment": "[]"})}), "the enrolment lacks a field"),
    ],
)
def test_a_node_that_cannot_say_who_it_is_is_refused_and_asked_again_later(answer: Any, reason: str) -> None:
    def act(message: Message) -> Any:
        return Message(answer, reply_to=message) if isinstance(answer, RecordDict) else answer

    fleet, grid, _, seen = fleet_of({7: act})
    assert fleet.clients() == []
    assert seen.names() == ["client_refused"]
    assert reason in str(seen.events[0][1]["reason"])
    fleet.wait(29.0)
    assert len(grid.pushed) == 1
    grid.nodes[7] = node("a")
    fleet.wait(3.0)
    assert [client.id for client in fleet.clients()] == ["a"]


def test_a_node_that_does_not_answer_is_asked_again_and_enrols_once() -> None:
    fleet, grid, _, seen = fleet_of({7: silent})
    fleet.wait(170.0)
    assert len(grid.pushed) == 1
    fleet.wait(20.0)
    assert len(grid.pushed) == 2
    for message in grid.pushed:
        grid.answer(message.metadata.message_id, enrolment(message, "a"))
    fleet.wait(10.0)
    assert fleet.receive(400.0) is None
    assert [client.id for client in fleet.clients()] == ["a"]
    assert seen.names() == ["client_connected"]
    assert len(grid.pushed) == 2


def test_a_late_answer_is_found_among_many_that_never_come_without_looking_for_all_at_once() -> None:
    fleet, grid, clock, _ = fleet_of({7: node("a", silent)}, max_poll_s=1.0)
    tasks = [task(number) for number in range(100)]
    fleet.give(tasks, START)
    for each in tasks:
        fleet.settle(each, False)
    grid.answer(grid.pushed[-1].metadata.message_id, trained(grid.pushed[-1]))
    before = grid.num_pulls
    assert fleet.receive(0.0) is None
    clock.now += 1.0
    assert fleet.receive(0.0) is None
    assert grid.num_pulls - before == 16
    outcome = fleet.receive(20.0)
    assert outcome is not None
    assert (outcome.kind, outcome.task.number) == ("late", 99)


# What travels


def flower_record(record: ArrayRecord) -> ArrayRecord:
    """The record as it arrives."""
    asked = Message(RecordDict({"x": record}), 7, "train")
    return travelled(asked).content.array_records["x"]


@pytest.mark.parametrize(
    "array",
    [
        np.array([[0.1, -2.5], [math.inf, math.nan]], np.float64),
        np.array([0.1, 65504.0], np.float16),
        np.array([[0.1, 1e30, -0.0]], ml_dtypes.bfloat16),
        np.array(1.5, ml_dtypes.bfloat16),
        np.array(2**63 - 1, np.int64),
        np.array([2**64 - 1], np.uint64),
        np.array([[True], [False]]),
        np.zeros((3, 0, 2), np.float32),
        np.zeros((0,), ml_dtypes.bfloat16),
        np.asfortranarray(np.arange(6, dtype=np.int8).reshape(2, 3)),
        np.arange(12, dtype=np.float32)[::3],
    ],
    ids=lambda array: f"{array.dtype}{array.shape}",
)
def test_an_array_keeps_its_name_dtype_shape_and_bits(array: np.ndarray[Any, Any]) -> None:
    found = records.arrays_from(flower_record(records.array_record({"layer.0/w": array})))["layer.0/w"]
    assert (found.dtype, found.shape, found.tobytes()) == (array.dtype, array.shape, array.tobytes())
    assert not found.flags.writeable


def test_what_flower_itself_makes_of_an_array_is_read() -> None:
    array = np.asfortranarray(np.arange(6, dtype=np.float32).reshape(2, 3))
    found = records.arrays_from(ArrayRecord({"w": FlowerArray(array)}))["w"]
    np.testing.assert_array_equal(found, array)


HEADER = b"\x93NUMPY\x01\x00v\x00"


def npy(descr: str, shape: str, data: bytes = b"") -> bytes:
    text = f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}, }}"
    return HEADER + text.ljust(117).encode() + b"\n" + data


@pytest.mark.parametrize(
    ("stype", "data", "reason"),
    [
        ("numpy.ndarray", b"", "its header is not NumPy's"),
        ("numpy.ndarray", npy("'<f4'", "(((("), "its header is not NumPy's"),
        ("numpy.ndarray", npy("'<f4'", "(10**15,)".replace("10**15", str(10**15)), b"1234"), "has 4 bytes for shape"),
        ("numpy.ndarray", npy("'<f4'", "(-1,)", b"1234"), "has 4 bytes for shape"),
        ("numpy.ndarray", npy("'<f4'", "(-1, -1)", b"1234"), "has 4 bytes for shape"),
        ("numpy.ndarray", npy("'<f4'", "(1,)", b"12345"), "has 5 bytes for shape"),
        ("numpy.ndarray", npy("'>f4'", "(1,)", b"1234"), "its dtype is >f4"),
        ("numpy.ndarray", npy("'|O'", "(1,)", b"1234"), "its dtype is object"),
        ("fedtrain.bfloat16", b"123", "has 3 bytes for shape (2,)"),
        ("pickle", b"123", "its serialization type is 'pickle'"),
    ],
)
def test_an_array_that_is_not_what_it_says_is_refused(stype: str, data: bytes, reason: str) -> None:
    record = ArrayRecord({"w": FlowerArray("float32", (2,), stype, data)})
    with pytest.raises(ParamsError, match="array 'w' cannot be read") as error:
        records.arrays_from(record)
    assert reason in str(error.value)


def test_an_array_that_no_model_may_have_is_not_sent() -> None:
    with pytest.raises(ParamsError, match="'w' has dtype complex64"):
        records.array_record({"w": np.zeros(1, np.complex64)})


def test_a_message_of_another_app_is_no_task() -> None:
    with pytest.raises(ParamsError, match="no task of fedtrain"):
        records.read_task(RecordDict({"arrays": ArrayRecord(), "config": ConfigRecord(), "m": MetricRecord()}))


def test_only_metrics_that_are_numbers_are_taken() -> None:
    content = records.answer_content(Outcome(task(kind="evaluate"), "ok", metrics={"a": 1, "b": math.nan}), "r")
    content.metric_records["metrics"]["c"] = [1.0, 2.0]
    assert records.read_answer(content, task(kind="evaluate"), "r", 0.0).metrics == {"a": 1.0}


def test_a_reason_and_the_names_of_metrics_are_printable_and_cut() -> None:
    declined = Outcome(task(), "declined", metrics={"a\x1b" + "x" * 200: 1.0}, reason="no\x1b[2J" + "x" * 5000)
    got = records.read_answer(records.answer_content(declined, "r"), task(), "r", 0.0)
    assert (got.kind, got.reason) == ("declined", "no?[2J" + "x" * 1994)
    assert got.metrics == {"a?" + "x" * 98: 1.0}


def test_what_a_client_remembers_changes_only_by_a_verdict_that_counts() -> None:
    kept = RecordDict()
    state = {"c": (np.array([0.5], ml_dtypes.bfloat16), 3, "x", 0.1, None), "empty": ()}
    NodeMemory(kept).keep(4, state)
    assert NodeMemory(kept).state == ()
    NodeMemory(kept).settle({3: True})
    assert NodeMemory(kept).state == ()
    NodeMemory(kept).settle({3: False, 4: True})
    found = NodeMemory(kept).state
    assert found["c"][0].dtype == ml_dtypes.bfloat16
    assert (found["c"][0].tolist(), *found["c"][1:], found["empty"]) == ([0.5], 3, "x", 0.1, None, ())
    NodeMemory(kept).keep(5, ())
    NodeMemory(kept).settle({5: False})
    NodeMemory(kept).settle({5: True})  # the first verdict stands
    assert NodeMemory(kept).state == found


# The client app


def app_node(app: ClientApp, run_config: dict[str, Any], node_config: dict[str, Any]) -> Handler:
    state = RecordDict()

    def act(message: Message) -> Message | Error:
        context = Context(1, message.metadata.dst_node_id, node_config, state, run_config)
        try:
            return app(message, context)
        except Exception as error:  # as Flower's own process does
            return Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, f"{type(error)}:<'{error}'>")

    return act


OVERRIDES = ("experiment=quickstart_numpy", "data.num_partitions=2", "rounds=2", "evaluation.where=both")


def trained_state(fleet: Fleet) -> RunState:
    config = compose(OVERRIDES)
    strategy, trainer, settings = build_strategy(config), build_trainer(config, partition=None), cohort_settings(config)
    return run(
        strategy,
        fleet,
        first_state(strategy, trainer.initial(config.seed), config.seed),
        rounds=config.rounds,
        settings=settings,
        evaluate=evaluation("both", every=1, rounds=config.rounds, trainer=trainer, settings=settings),
    )


def test_a_run_over_a_grid_equals_one_in_memory() -> None:
    run_config = {"overrides": " ".join(OVERRIDES)}
    nodes = {
        10 + part: app_node(client_app(), run_config, {"partition-id": part, "num-partitions": 2}) for part in range(2)
    }
    fleet, _, _, _ = fleet_of(nodes)
    trainers = {f"client-{part}": build_trainer(compose(OVERRIDES), partition=part) for part in range(2)}
    found, expected = trained_state(fleet), trained_state(MemoryFleet(trainers))
    assert found.model_digest == expected.model_digest
    assert found.history == expected.history


@pytest.mark.parametrize(
    ("node_config", "client"),
    [
        ({"partition-id": 1, "num-partitions": 2}, "client-1"),
        ({"partition-id": 1, "client-id": "ward-3"}, "ward-3"),
        ({"partition-id": 1, "overrides": "client.id=ward-4"}, "ward-4"),
        ({"overrides": "data.partition=0 +client.tags.site=berlin"}, "client-0"),
        ({}, "node-7"),
    ],
)
def test_a_client_is_called_by_its_own_id_or_its_partition_or_its_node(
    node_config: dict[str, Any], client: str
) -> None:
    fleet, _, _, seen = fleet_of({7: app_node(client_app(OVERRIDES), {}, node_config)})
    assert [info.id for info in fleet.clients()] == [client], seen.events


@pytest.mark.parametrize(
    ("node_config", "reason"),
    [
        (
            {"partition-id": 1, "num-partitions": 3},
            "num-partitions in the node config is 3, data.num_partitions of",
        ),
        ({"client-id": "9 lives"}, "client.id='9 lives': expected a letter"),
        ({"overrides": 3}, "overrides: expected text"),
        ({"overrides": "round=3"}, "round"),
    ],
)
def test_an_impossible_node_config_is_refused_with_its_reason(node_config: dict[str, Any], reason: str) -> None:
    fleet, _, _, seen = fleet_of({7: app_node(client_app(OVERRIDES), {}, node_config)})
    assert fleet.clients() == []
    assert reason in str(seen.events[0][1]["reason"])


def test_a_start_that_changed_on_its_way_is_a_failed_outcome() -> None:
    config = {"partition-id": 0}
    fleet, _, _, _ = fleet_of({7: app_node(client_app(OVERRIDES), {}, config)})
    fleet.give([task(0, "client-0", start="0" * 64)], START)
    outcome = fleet.receive(5.0)
    assert outcome is not None
    assert outcome.kind == "failed"
    assert "it changed on its way" in outcome.reason


class CountingTrainer:
    """Remembers how often it has trained with an update that counted; and says so."""

    num_examples = 10
    local_algorithms = ("sgd_epochs",)

    def __init__(self, model: Any, data: Any) -> None: ...

    def initial(self, seed: int) -> Start:
        return START

    def fit(self, start: Start, work: Work) -> Fitted:
        (before,) = work.client_state or (np.zeros(1),)
        model = {**start.params, **start.buffers}
        return Fitted(model, 10, metrics={"before": float(before[0])}, client_state=(before + 1,))

    def evaluate(self, model: Any) -> None:
        return None


def test_a_client_goes_on_from_what_it_remembers_of_its_last_counted_update(monkeypatch: pytest.MonkeyPatch) -> None:
    counting = ModuleType("counting")
    counting.Trainer, counting.load = CountingTrainer, dict  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "counting", counting)
    own = ("trainer=custom", "trainer._target_=counting.Trainer", "data=custom", "data._target_=counting.load")
    fleet, _, _, _ = fleet_of({7: app_node(client_app(own), {}, {"client-id": "a"})})
    before = []
    for number, counted in enumerate([True, False, True]):
        fleet.give([task(number)], START)
        outcome = fleet.receive(5.0)
        assert outcome is not None
        before.append(outcome.metrics.get("before", outcome.reason))
        fleet.settle(task(number), counted)
    assert before == [0.0, 1.0, 1.0]


# The server app


def serve(grid: LocalGrid, run_dir: Path, *overrides: str) -> dict[str, Any]:
    words = " ".join(
        (*OVERRIDES, f"run_dir='{run_dir}'", "display=none", "rounds=1", "evaluation.where=server", *overrides)
    )
    server_app()(grid, Context(5, SUPERLINK_NODE_ID, {}, RecordDict(), {"overrides": words}))
    result: dict[str, Any] = json.loads((run_dir / "result.json").read_text())
    return result


def test_the_server_app_leaves_what_a_server_leaves(tmp_path: Path) -> None:
    nodes = {10 + part: app_node(client_app(OVERRIDES), {}, {"partition-id": part}) for part in range(2)}
    result = serve(LocalGrid(nodes), tmp_path / "a run")
    assert (result["status"], result["rounds_completed"], result["run"]) == ("completed", 1, "5")
    assert result["model_digest"] == digest(read_file(tmp_path / "a run" / "model.safetensors"))
    assert (tmp_path / "a run" / "events.jsonl").exists()


def test_a_run_that_fails_raises_so_that_flower_knows(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="the run has failed: no round succeeded"):
        serve(LocalGrid({}), tmp_path, "cohort.connect_deadline_s=0.01")
    assert json.loads((tmp_path / "result.json").read_text())["status"] == "failed"
