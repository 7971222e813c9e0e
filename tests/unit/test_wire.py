"""Tasks and answers on the wire: everything survives the way, and nothing that arrives raises."""

import json
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from flwr.app import Message, RecordDict
from flwr.app.message import ConfigRecord
from flwr.app.message.message import make_message
from flwr.common.serde import message_from_proto, message_to_proto
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fedtrain.errors import ParamsError
from fedtrain.flower import wire
from fedtrain.params import BFLOAT16, DTYPES, Packed, digest, pack
from fedtrain.testing import task_of
from fedtrain.types import Array, Outcome, Task, Update

RUN = "0123456789abcdef"

TASK = Task(
    number=12,
    client="hospital-7",
    round=3,
    start="ab" * 32,
    local=("proximal", {"mu": 0.1, "epochs": 2}),
    on_client=(("clip", {"norm": 1.0}), ("top_k", {"fraction": 0.01})),
    seed=2**63 - 1,
    deadline_s=1.5,
    probability=1 / 3,
    num_examples=2**53,
)

ARRAYS: dict[str, Array] = {
    **{f"dtype/{key}": np.ones((2, 3), dtype) for key, dtype in DTYPES.items()},
    "bfloat16": np.array([1.0, -2.5, 3e38], BFLOAT16),
    "0-d": np.array(-0.0, np.float32),
    "0-d counter": np.array(2**62 + 1),
    "empty": np.zeros((0, 4), np.float16),
    "not contiguous": np.arange(12, dtype=np.float64).reshape(3, 4).T,
    "a/name with / and ünïcode": np.array([True, False]),
}


def over_the_wire(message: Message) -> Message:
    proto = message_to_proto(message)
    return message_from_proto(type(proto).FromString(proto.SerializeToString()))


def task_message(task: Task = TASK, start: bytes | None = None) -> Message:
    return wire.task_message(task, run=RUN, flower_run=5, node=7, attempt=2, now=1.7e9, start=start)


@pytest.mark.parametrize("task", [TASK, task_of(), replace(TASK, kind="evaluate", deadline_s=None, on_client=())])
@pytest.mark.parametrize("start", [None, b"", b"\x00\xff"])
def test_a_task_survives_its_way(task: Task, start: bytes | None) -> None:
    message = over_the_wire(task_message(task, start))
    assert wire.read_task(message) == (task, RUN, start)
    assert message.metadata.message_type == task.kind
    assert message.metadata.message_id == f"{RUN}-{task.number}-2"


def answered(outcome: Outcome, task: Task = TASK, *, run: str = RUN, seconds: float = 4.0) -> Outcome:
    return wire.read_answer(Packed(wire.pack_answer(outcome, run)), task, run, seconds)


def test_an_update_survives_its_way_with_every_dtype_and_both_payloads() -> None:
    metrics = {"loss": 0.25, "diverged": math.inf, "down": -math.inf}
    extra = {"control/w": np.array([0.5], np.float32), "empty": np.zeros(0, BFLOAT16)}
    sent = Update(TASK, ARRAYS, 10, 4, metrics, extra)
    answer = wire.pack_answer(Outcome(TASK, "ok", sent, metrics, 10, seconds=2.0), RUN)
    reply = over_the_wire(wire.reply_message(over_the_wire(task_message()), answer))
    assert wire.read_reply(reply) == answer
    got = wire.read_answer(Packed(wire.read_reply(reply)), TASK, RUN, 4.0)
    assert got.update is not None
    assert (got.kind, got.num_examples, got.metrics, got.seconds) == ("ok", 10, metrics, 4.0)
    assert (got.update.task, got.update.num_examples, got.update.num_steps) == (TASK, 10, 4)
    assert got.update.metrics == metrics
    assert set(got.update.delta) == set(ARRAYS)
    assert digest(got.update.delta) == digest(ARRAYS)
    assert digest(got.update.extra) == digest(extra)


def test_a_reply_carries_the_times_and_the_address_of_its_instruction() -> None:
    asked, reply = task_message().metadata, wire.reply_message(task_message(), b"x").metadata
    assert (reply.created_at, reply.ttl, reply.run_id) == (asked.created_at, asked.ttl, asked.run_id)
    assert (reply.src_node_id, reply.dst_node_id) == (asked.dst_node_id, asked.src_node_id) == (7, 1)
    assert reply.reply_to_message_id == asked.message_id


@pytest.mark.parametrize("kind", ["declined", "failed"])
def test_an_answer_without_an_update_survives_its_way(kind: Any) -> None:
    got = answered(Outcome(TASK, kind, reason="no memory\nleft"))
    assert got == Outcome(TASK, kind, reason="no memory\nleft", seconds=4.0)


def test_the_answer_to_an_evaluation_has_metrics_and_no_update() -> None:
    task = replace(TASK, kind="evaluate")
    got = answered(Outcome(task, "ok", metrics={"accuracy": 0.75}, num_examples=8), task)
    assert got == Outcome(task, "ok", metrics={"accuracy": 0.75}, num_examples=8, seconds=4.0)


def test_a_metric_that_is_nan_or_no_number_is_left_out() -> None:
    got = answered(Outcome(TASK, "declined", metrics={"loss": math.nan, "f1": np.float32(0.5)}))  # type: ignore[dict-item]
    assert got.metrics == {"f1": 0.5}
    assert read({"metrics": {"a": "1", "b": None, "c": [1], "d": True, "e": 10**400, "f": 2}}).metrics == {"f": 2.0}


def test_only_so_many_metrics_are_taken_and_texts_are_cut() -> None:
    got = read({"metrics": {str(i) + "x" * 200: i for i in range(5000)}, "reason": "x" * 5000, "kind": "failed"})
    assert (len(got.metrics), {len(name) for name in got.metrics}) == (200, {100})
    assert got.reason == "x" * 2000
    assert read({"reason": "a\x1b[2J\ud800\nü", "kind": "failed"}).reason == "a?[2J?\nü"


@pytest.mark.parametrize(
    ("outcome", "error"),
    [
        (Outcome(TASK, "ok", num_examples=1.0), TypeError),  # type: ignore[arg-type]
        (Outcome(TASK, "ok", metrics={"loss": "small"}), ValueError),  # type: ignore[dict-item]
        (Outcome(TASK, "ok", Update(TASK, {"w": np.zeros(1, np.complex64)}, 1)), ParamsError),
    ],
)
def test_what_cannot_be_sent_is_refused_where_it_is_packed(outcome: Outcome, error: type[Exception]) -> None:
    with pytest.raises(error):
        wire.pack_answer(outcome, RUN)


def test_numpy_integers_count_as_numbers() -> None:
    sent = Update(TASK, {}, np.int64(3), np.int32(2))  # type: ignore[arg-type]
    got = answered(Outcome(TASK, "ok", sent, num_examples=np.int64(3)))  # type: ignore[arg-type]
    assert got.update is not None
    assert (got.num_examples, got.update.num_steps) == (3, 2)


HEAD: dict[str, Any] = {
    "run": RUN,
    "task": TASK.number,
    "start": TASK.start,
    "kind": "ok",
    "reason": "",
    "num_examples": 10,
    "num_steps": 1,
    "metrics": {},
}


def read(changes: dict[str, Any], arrays: dict[str, Array] | None = None) -> Outcome:
    packed = Packed(pack(arrays or {}, {"answer": json.dumps({**HEAD, **changes})}))
    return wire.read_answer(packed, TASK, RUN, 4.0)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"run": "other"}, "the answer is to another run, task or start"),
        ({"task": 11}, "the answer is to another run, task or start"),
        ({"start": ""}, "the answer is to another run, task or start"),
        ({"kind": "late"}, "an answer of kind 'late', expected ok, declined or failed"),
        ({"kind": ["ok"]}, "an answer of kind ['ok'], expected ok, declined or failed"),
        ({"reason": None}, "an answer of kind 'ok', expected ok, declined or failed"),
        ({"num_examples": -1}, "num_examples and num_steps must be whole numbers from 0 to 2**53"),
        ({"num_examples": 2**53 + 1}, "num_examples and num_steps must be whole numbers from 0 to 2**53"),
        ({"num_examples": 1.0}, "num_examples and num_steps must be whole numbers from 0 to 2**53"),
        ({"num_steps": True}, "num_examples and num_steps must be whole numbers from 0 to 2**53"),
        ({"metrics": [1]}, "metrics must be numbers by name"),
    ],
)
def test_a_malformed_answer_is_invalid_with_the_reason(changes: dict[str, Any], reason: str) -> None:
    assert read(changes) == Outcome(TASK, "invalid", reason=reason, seconds=4.0)


@pytest.mark.parametrize("head", ["", "{", "[]", "3", '"text"', "null", "{}", "[" * 100_000])
def test_an_answer_whose_head_is_not_the_protocols_is_invalid(head: str) -> None:
    got = wire.read_answer(Packed(pack({}, {"answer": head})), TASK, RUN, 4.0)
    assert (got.kind, got.reason) == ("invalid", "the answer's head is not what fedtrain's protocol says")


def test_an_answer_without_a_head_or_with_foreign_arrays_is_invalid() -> None:
    got = wire.read_answer(Packed(pack({}, {"x": ""})), TASK, RUN, 4.0)
    assert (got.kind, got.reason) == ("invalid", "the answer's head is not what fedtrain's protocol says")
    got = read({}, {"params/w": np.zeros(1)})
    assert got.reason == "the answer holds an array 'params/w' that is neither delta/ nor extra/"


@pytest.mark.parametrize(
    "content",
    [
        RecordDict(),
        RecordDict({"other": ConfigRecord({"answer": b""})}),
        RecordDict({"fedtrain": ConfigRecord()}),
        RecordDict({"fedtrain": ConfigRecord({"answer": "text"})}),
    ],
)
def test_a_reply_without_an_answer_is_refused(content: RecordDict) -> None:
    with pytest.raises(ParamsError, match="holds no answer"):
        wire.read_reply(make_message(task_message().metadata, content))


# Fuzzing: whatever comes, there is an outcome.

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.sampled_from([10**400, -(2**63), 2**53]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=8,
)


def checked(got: Outcome) -> None:
    assert got.kind in ("ok", "declined", "failed", "invalid")
    assert all(type(value) is float and not math.isnan(value) for value in got.metrics.values())
    assert 0 <= got.num_examples <= 2**53
    got.reason.encode()
    for name in got.metrics:
        name.encode()
    if got.update is not None:
        digest({**got.update.delta, **{f"extra/{name}": array for name, array in got.update.extra.items()}})


@given(st.dictionaries(st.sampled_from(sorted(HEAD)), JSON))
def test_any_head_gives_an_outcome(changes: dict[str, Any]) -> None:
    checked(read(changes, {"delta/w": np.zeros(2, np.float32)}))


@given(JSON)
def test_any_json_as_head_gives_an_outcome(value: Any) -> None:
    checked(wire.read_answer(Packed(pack({}, {"answer": json.dumps(value)})), TASK, RUN, 0.0))


GOOD = wire.pack_answer(Outcome(TASK, "ok", Update(TASK, {"w": np.zeros(2, np.float32)}, 1)), RUN)


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.tuples(st.integers(0, len(GOOD) - 1), st.integers(0, 255)), min_size=1, max_size=4), st.booleans())
def test_any_damaged_bytes_are_refused_or_give_an_outcome(flips: list[tuple[int, int]], cut: bool) -> None:
    damaged = bytearray(GOOD)
    for position, byte in flips:
        damaged[position] = byte
    if cut:
        del damaged[flips[0][0] :]
    try:
        packed = Packed(bytes(damaged))
    except ParamsError:
        return
    checked(wire.read_answer(packed, TASK, RUN, 0.0))
