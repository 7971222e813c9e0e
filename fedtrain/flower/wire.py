"""What travels between server and client: header names, and tasks and outcomes as bytes.

One form for every answer, whether it travels inline in a Flower message, over the data route, or lies in a file: a
safetensors buffer whose arrays are the delta (and a second payload) and whose metadata holds the rest as JSON.
"""

import contextlib
import json
import math
from collections.abc import Mapping
from dataclasses import asdict
from operator import index
from typing import Any, Literal, NamedTuple

import numpy as np
from flwr.app import Message, RecordDict
from flwr.app.message import ConfigRecord
from flwr.app.message.message import make_message
from flwr.app.metadata import Metadata
from flwr.common.constant import SUPERLINK_NODE_ID
from flwr.proto.message_pb2 import Message as ProtoMessage

from fedtrain.errors import ParamsError
from fedtrain.params import Packed, pack_pieces
from fedtrain.precision import narrowed, widened
from fedtrain.state import start_arrays, start_from_arrays
from fedtrain.stored import rest
from fedtrain.types import Outcome, Params, Start, Task, Update, WireDtype

PROTOCOL = 1
"""Version of what is described here; server and client must have the same."""

MAX_VERDICTS = 16
"""As many of a client's last verdicts go with every answer: it has them before it begins its next task."""

INLINE_BYTES = 1 << 20
"""Up to this size arrays travel inside the Flower message, above it over the data route."""

ENROL_PATH = "/fedtrain/v1/enrol"
STARTS_PATH = "/fedtrain/v1/starts/"
UPDATES_PATH = "/fedtrain/v1/updates/"
STATUS_PATH = "/fedtrain/v1/status"
PULL_PATH = "/v1/fleet/pull-messages"
PUSH_PATH = "/v1/fleet/push-messages"

POLL_HEADER = "fedtrain-poll"
"""JSON in a pull request: ``run``, ``holding`` (tasks being worked on), ``awaiting`` (answered, verdict unknown)."""
SETTLED_HEADER = "fedtrain-settled"
"""JSON in its answer: verdicts by task number, true if the update was counted."""
OVER_HEADER = "fedtrain-over"
"""In its answer when the run has ended: its status."""
TIME_HEADER = "fedtrain-time"
"""The server's clock, ISO 8601, in every answer: a client signs with the server's time."""
SHA256_HEADER = "fedtrain-sha256"
"""Of an uploaded body, in hex."""

_FLOAT32 = "float32"
"""Metadata of a buffer: names (JSON) of the arrays that are float32 and travel in the task's ``wire_dtype``."""
_RECORD = "fedtrain"
_TTL_S = 10 * 365 * 86_400.0  # deadlines are the round's business; a message never expires by the wall clock
_PREFIXES = ("delta/", "extra/")
_MAX_COUNT = 2**53
_MAX_TEXT = 2000
_MAX_METRICS, _MAX_NAME = 200, 100
"""What is kept of a client's metrics: they go into every round's record, for as long as the run lasts."""


def task_message(
    task: Task, *, run: str, flower_run: int, node: int, attempt: int, now: float, start: bytes | None
) -> Message:
    """A Flower message that carries a task, with its start inline where it is small."""
    values: dict[str, Any] = {"task": json.dumps(asdict(task)), "run": run, "attempt": attempt}
    if start is not None:
        values["start"] = start
    metadata = Metadata(
        run_id=flower_run,
        message_id=f"{run}-{task.number}-{attempt}",
        src_node_id=SUPERLINK_NODE_ID,
        dst_node_id=node,
        reply_to_message_id="",
        group_id=str(task.round),
        created_at=now,
        ttl=_TTL_S,
        message_type=task.kind,
    )
    return make_message(metadata, RecordDict({_RECORD: ConfigRecord(values)}))


def read_task(message: Message) -> tuple[Task, str, bytes | None]:
    """The task, its run, and its start where that is inline."""
    record = message.content.config_records[_RECORD]
    values = json.loads(str(record["task"]))
    values["local"] = tuple(values["local"])
    values["on_client"] = tuple((name, numbers) for name, numbers in values["on_client"])
    start = record.get("start")
    return Task(**values), str(record["run"]), start if isinstance(start, bytes) else None


def start_pieces(start: Start, wire_dtype: WireDtype | None) -> list[memoryview]:
    """What tasks start from as bytes, in pieces that follow one another: see `pack_pieces`."""
    return _pieces(start_arrays(start), ("params/", "buffers/"), wire_dtype, {})


def read_start(packed: Packed, wire_dtype: WireDtype | None) -> Start:
    """The inverse of `start_pieces`.

    Raises:
        ParamsError: the names are not those of a start.
    """
    halved = _halved(packed) if wire_dtype else frozenset()
    return start_from_arrays(
        {name: widened(array, wire_dtype) if wire_dtype and name in halved else array for name, array in packed.items()}
    )


def _pieces(
    arrays: Params, prefixes: tuple[str, ...], wire_dtype: WireDtype | None, metadata: Mapping[str, str]
) -> list[memoryview]:
    if wire_dtype is None:
        return pack_pieces(arrays, metadata)
    halved = [name for name in arrays if name.startswith(prefixes) and arrays[name].dtype == np.float32]
    arrays = {**arrays, **{name: narrowed(arrays[name], wire_dtype) for name in halved}}
    return pack_pieces(arrays, {**metadata, _FLOAT32: json.dumps(halved)})


def _halved(packed: Packed) -> frozenset[str]:
    """The arrays that are float32 and travel in half precision, as the sender says."""
    try:
        return frozenset(map(str, json.loads(packed.metadata[_FLOAT32])))
    except (KeyError, TypeError, ValueError, RecursionError):  # then an array has a dtype that the model has not
        return frozenset()


def reply_message(to: Message, answer: bytes) -> Message:
    """The Flower reply that carries an answer inline. Its times are the instruction's: no client clock counts."""
    asked = to.metadata
    metadata = Metadata(
        run_id=asked.run_id,
        message_id=f"{asked.message_id}-reply",
        src_node_id=asked.dst_node_id,
        dst_node_id=SUPERLINK_NODE_ID,
        reply_to_message_id=asked.message_id,
        group_id=asked.group_id,
        created_at=asked.created_at,
        ttl=asked.ttl,
        message_type=asked.message_type,
    )
    return make_message(metadata, RecordDict({_RECORD: ConfigRecord({"answer": answer})}))


def require_answer(proto: ProtoMessage) -> None:
    """Refuse a message that is not one record with one value: Flower would make objects of all that is in it.

    Raises:
        ParamsError: it is not.
    """
    items = proto.content.items
    values = list(items[0].config_record.items) if len(items) == 1 else []
    if len(values) != 1 or values[0].value.WhichOneof("value") != "bytes":
        raise ParamsError("the reply holds no answer of fedtrain's protocol")


def read_reply(message: Message) -> bytes:
    """The answer in a reply.

    Raises:
        ParamsError: the message holds no answer.
    """
    record = message.content.config_records.get(_RECORD) if message.has_content() else None
    answer = record.get("answer") if record is not None else None
    if not isinstance(answer, bytes):
        raise ParamsError("the reply holds no answer of fedtrain's protocol")
    return answer


def pack_answer(outcome: Outcome, run: str) -> bytes:
    """An outcome as bytes.

    Raises:
        TypeError, ValueError, ParamsError: it holds something that is not a number or an array that can travel.
    """
    return b"".join(answer_pieces(outcome, run))


def answer_pieces(outcome: Outcome, run: str) -> list[memoryview]:
    """What `pack_answer` gives, as pieces that follow one another: see `pack_pieces`."""
    update = outcome.update
    arrays: dict[str, Any] = {}
    head = {
        "run": run,
        "task": outcome.task.number,
        "start": outcome.task.start,
        "kind": outcome.kind,
        "reason": outcome.reason[:_MAX_TEXT],  # all that the server keeps of it
        "num_examples": index(outcome.num_examples),
        "metrics": {name: float(value) for name, value in outcome.metrics.items()},
        "trained_s": outcome.seconds,
    }
    if update is not None:
        head["num_steps"] = index(update.num_steps)
        arrays.update({f"delta/{name}": array for name, array in update.delta.items()})
        arrays.update({f"extra/{name}": array for name, array in update.extra.items()})
    return _pieces(arrays, ("delta/",), outcome.task.wire_dtype, {"answer": json.dumps(head)})


def read_answer(packed: Packed, task: Task, run: str, seconds: float) -> Outcome:
    """The outcome in an answer to `task`; one of kind ``invalid`` if the answer is not well-formed or not to it."""

    try:
        try:
            values = json.loads(packed.metadata["answer"])
        except (KeyError, ValueError, RecursionError):
            values = None
        head = read_head(values, task, run)
        update = None
        if head.kind == "ok" and task.kind == "train":
            for name in packed:
                if not name.startswith(_PREFIXES):
                    raise ParamsError(f"the answer holds an array {name!r} that is neither delta/ nor extra/")
            delta, extra = Group(packed, "delta/", task.wire_dtype), Group(packed, "extra/")
            update = Update(task, delta, head.num_examples, head.num_steps, head.metrics, extra)
    except ParamsError as error:
        return invalid(task, error, seconds)
    return Outcome(task, head.kind, update, head.metrics, head.num_examples, head.reason, seconds)


class Head(NamedTuple):
    """What an answer says beside its arrays, once it is found to be possible."""

    kind: Literal["ok", "declined", "failed"]
    reason: str
    num_examples: int
    num_steps: int
    metrics: dict[str, float]


def read_head(values: Any, task: Task, run: str) -> Head:
    """The head of an answer to `task`, from the values by name that came, however they travelled.

    Raises:
        ParamsError: it is not well-formed, or not to this task of this run.
    """
    try:
        key = (values["run"], values["task"], values["start"])
        kind, reason, num_examples = values["kind"], values["reason"], values["num_examples"]
        num_steps, metrics = values.get("num_steps", 0), values["metrics"]
    except (KeyError, TypeError):
        raise ParamsError("the answer's head is not what fedtrain's protocol says") from None
    if key != (run, task.number, task.start):
        raise ParamsError("the answer is to another run, task or start")
    if kind not in ("ok", "declined", "failed") or not isinstance(reason, str):
        raise ParamsError(f"an answer of kind {kind!r}, expected ok, declined or failed")
    if not all(type(number) is int and 0 <= number <= _MAX_COUNT for number in (num_examples, num_steps)):
        raise ParamsError("num_examples and num_steps must be whole numbers from 0 to 2**53")
    if not isinstance(metrics, dict):
        raise ParamsError("metrics must be numbers by name")
    return Head(kind, _printable(reason), num_examples, num_steps, _numbers(metrics))


def invalid(task: Task, error: Exception, seconds: float) -> Outcome:
    """The outcome of an answer that cannot be used; the error may repeat what the client sent."""
    return Outcome(task, "invalid", reason=_printable(str(error)), seconds=seconds)


def _numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """The metrics that are numbers (JSON knows NaN and infinity); not all if there are very many."""
    numbers = {}
    for name, value in list(metrics.items())[:_MAX_METRICS]:
        with contextlib.suppress(OverflowError):  # a whole number beyond float64
            if type(value) in (int, float) and not math.isnan(value):
                numbers[_printable(name[:_MAX_NAME])] = float(value)
    return numbers


def _printable(text: str) -> str:
    """Text of a client's that is safe in logs and on terminals: cut, and without halves of characters and controls."""
    return "".join(char if char.isprintable() or char == "\n" else "?" for char in text[:_MAX_TEXT])


class Group(Mapping[str, Any]):
    """The arrays whose names begin with a prefix, without it; each is read, and widened, when it is used."""

    def __init__(self, packed: Packed, prefix: str, wire_dtype: WireDtype | None = None) -> None:
        self._packed, self._prefix, self._wire_dtype = packed, prefix, wire_dtype
        self._names = [name[len(prefix) :] for name in packed if name.startswith(prefix)]
        self._halved = _halved(packed) if wire_dtype else frozenset[str]()

    def __getitem__(self, name: str) -> Any:
        array = self._packed[self._prefix + name]
        return widened(array, self._wire_dtype) if self._wire_dtype and self._prefix + name in self._halved else array

    def __iter__(self) -> Any:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def rest(self) -> None:
        """Let what they are read from rest."""
        rest(self._packed)
