"""Tasks, answers and enrolments as ordinary Flower records: what travels over a `Grid` that is not ours.

An instruction holds ArrayRecords ``params``, ``buffers`` and ``payload`` and a ConfigRecord ``fedtrain``; a reply
holds ArrayRecords ``delta`` and ``extra``, a MetricRecord ``metrics`` and a ConfigRecord ``fedtrain``. Arrays keep
their names, shapes and dtypes. Flower's NumPy form knows no bfloat16: such an array travels as its bytes,
little-endian, under the serialization type ``fedtrain.bfloat16``.
"""

import io
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
from flwr.app import Array as FlowerArray
from flwr.app import ArrayRecord, ConfigRecord, MetricRecord, RecordDict

from fedtrain.client.identity import CLIENT_ID, capacity_from
from fedtrain.errors import ConnectionRefused, ParamsError
from fedtrain.params import BFLOAT16, DTYPES
from fedtrain.types import Array, ClientInfo, Outcome, Params, Start, Task, Update

_RECORD = "fedtrain"
_METRICS = "metrics"
_STARTS = ("params", "buffers", "payload")
_NUMPY = "numpy.ndarray"
_BFLOAT16 = "fedtrain.bfloat16"
_MAX_METRICS = 1000
_MAX_REASON = 2000


def array_record(arrays: Params) -> ArrayRecord:
    """Named arrays as a Flower record.

    Raises:
        ParamsError: an array has a dtype that no model may have.
    """
    return ArrayRecord({name: _flower_array(name, np.asarray(array)) for name, array in arrays.items()})


def arrays_from(record: ArrayRecord) -> dict[str, Array]:
    """The named arrays in a record, read-only and without copying. Nothing that a record says of itself is believed.

    Raises:
        ParamsError: an array is not what its record says.
    """
    return {name: _array(name, array) for name, array in record.items()}


def _flower_array(name: str, array: Array) -> FlowerArray:
    if array.dtype == BFLOAT16:
        return FlowerArray("bfloat16", array.shape, _BFLOAT16, array.tobytes())
    if array.dtype not in DTYPES.values():
        raise ParamsError(f"array {name!r} has dtype {array.dtype}, expected one of {', '.join(DTYPES)}")
    return FlowerArray(np.ascontiguousarray(array).reshape(array.shape))


def _array(name: str, array: FlowerArray) -> Array:
    def bad(found: str) -> ParamsError:
        return ParamsError(f"array {name!r} cannot be read: {found}: send it as fedtrain or NumPy writes it")

    fortran, begin = False, 0
    if array.stype == _BFLOAT16:
        dtype, shape = BFLOAT16, tuple(array.shape)
    elif array.stype == _NUMPY:
        # np.load would make an array of whatever size the header claims, before it looks for the bytes.
        file = io.BytesIO(array.data)
        try:
            version = np.lib.format.read_magic(file)
            read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
            shape, fortran, dtype = read(file)
        except Exception as error:  # NumPy hands it to Python's own parser, which raises errors of many kinds
            raise bad(f"its header is not NumPy's ({type(error).__name__})") from None
        begin = file.tell()
    else:
        raise bad(f"its serialization type is {array.stype!r}, expected {_NUMPY!r} or {_BFLOAT16!r}")
    if dtype not in DTYPES.values():
        raise bad(f"its dtype is {dtype}, expected one of {', '.join(DTYPES)}")
    if any(size < 0 for size in shape) or math.prod(shape) * dtype.itemsize != len(array.data) - begin:
        raise bad(f"it has {len(array.data) - begin} bytes for shape {shape} of {dtype}")
    flat = np.frombuffer(array.data, dtype, offset=begin) if len(array.data) > begin else np.empty(0, dtype)
    flat.flags.writeable = False
    try:
        return flat.reshape(shape, order="F" if fortran else "C")
    except ValueError:
        raise bad(f"no array has shape {shape}") from None


def start_records(start: Start) -> dict[str, ArrayRecord]:
    """What tasks start from, to be shared by the instructions of a round: Flower then stores it once."""
    groups = zip(_STARTS, (start.params, start.buffers, start.payload), strict=True)
    return {name: array_record(arrays) for name, arrays in groups}


def task_content(task: Task, run: str, start: Mapping[str, ArrayRecord], verdicts: Mapping[int, bool]) -> RecordDict:
    """An instruction: a task of a run, what it starts from, and the verdicts on its client's earlier tasks."""
    head = ConfigRecord({"run": run, "task": json.dumps(asdict(task)), "verdicts": json.dumps(verdicts)})
    return RecordDict({**start, _RECORD: head})


def read_task(content: RecordDict) -> tuple[Task, str, Start, dict[int, bool]]:
    """The task, its run, its start and the verdicts in an instruction.

    Raises:
        ParamsError: it is not an instruction of fedtrain's, or its arrays can't be read.
    """
    try:
        head = content.config_records[_RECORD]
        values = json.loads(str(head["task"]))
        values["local"] = tuple(values["local"])
        values["on_client"] = tuple((name, numbers) for name, numbers in values["on_client"])
        verdicts = {int(number): counted for number, counted in json.loads(str(head["verdicts"])).items()}
        params, buffers, payload = (arrays_from(content.array_records[name]) for name in _STARTS)
        return Task(**values), str(head["run"]), Start(params, buffers, payload), verdicts
    except (KeyError, TypeError, ValueError) as error:
        raise ParamsError(
            f"the message is no task of fedtrain ({type(error).__name__}: {error}): "
            "use the same version of fedtrain in the ServerApp and the ClientApp"
        ) from error


def answer_content(outcome: Outcome, run: str) -> RecordDict:
    """A reply: how a task ended on the client."""
    update, task = outcome.update, outcome.task
    head = {
        "run": run,
        "task": task.number,
        "start": task.start,
        "kind": outcome.kind,
        "reason": outcome.reason,
        "num-examples": outcome.num_examples,
        "num-steps": update.num_steps if update is not None else 0,
        "seconds": outcome.seconds,
    }
    metrics = MetricRecord({name: float(value) for name, value in outcome.metrics.items()})
    content = RecordDict({_RECORD: ConfigRecord(head), _METRICS: metrics})  # type: ignore[arg-type]
    if update is not None:
        content["delta"], content["extra"] = array_record(update.delta), array_record(update.extra)
    return content


def read_answer(content: RecordDict, task: Task, run: str, seconds: float) -> Outcome:
    """The outcome in a reply to `task`; one of kind ``invalid`` if the reply is not well-formed or not to it."""

    def invalid(reason: str) -> Outcome:
        return Outcome(task, "invalid", reason=reason, seconds=seconds)

    try:
        head = dict(content.config_records[_RECORD])
        key = (head["run"], head["task"], head["start"])
        kind, reason = head["kind"], head["reason"]
        num_examples, num_steps = head["num-examples"], head["num-steps"]
        metrics = _numbers(content.metric_records[_METRICS])
    except KeyError as error:
        return invalid(f"the answer lacks {error}: use the same version of fedtrain on server and client")
    if key != (run, task.number, task.start):
        return invalid("the answer is to another run, task or start")
    if kind not in ("ok", "declined", "failed") or not isinstance(reason, str):
        return invalid(f"an answer of kind {kind!r}, expected ok, declined or failed")
    if type(num_examples) is not int or num_examples < 0 or type(num_steps) is not int or num_steps < 0:
        return invalid("num-examples and num-steps must be whole numbers >= 0")
    update = None
    if kind == "ok" and task.kind == "train":
        try:
            delta = arrays_from(content.array_records["delta"])
            extra = arrays_from(content.array_records["extra"])
        except (KeyError, ParamsError) as error:
            return invalid(f"the update cannot be read: {error}")
        update = Update(task, delta, num_examples, num_steps, metrics, extra)
    return Outcome(task, kind, update, metrics, num_examples, reason[:_MAX_REASON], seconds)  # type: ignore[arg-type]


def _numbers(metrics: Mapping[str, object]) -> dict[str, float]:
    items = [(name, float(value)) for name, value in metrics.items() if isinstance(value, (int, float))]
    return {name: value for name, value in items[:_MAX_METRICS] if not math.isnan(value)}


def enrolment_content(info: ClientInfo) -> RecordDict:
    """What a client says of itself."""
    return RecordDict({_RECORD: ConfigRecord({"enrolment": json.dumps(asdict(info))})})


def read_enrolment(content: RecordDict) -> ClientInfo:
    """Who a node says it is.

    Raises:
        ConnectionRefused: something is missing or not what it should be.
    """
    try:
        values = json.loads(str(content.config_records[_RECORD]["enrolment"]))
        client, num_examples, tags = values["id"], values["num_examples"], values["tags"]
        algorithms, capacity = values["local_algorithms"], capacity_from(values["capacity"])
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise ConnectionRefused(f"its enrolment is not fedtrain's ({error!r}): use fedtrain's client_app") from None
    if not isinstance(client, str) or not CLIENT_ID.fullmatch(client):
        raise ConnectionRefused(f"client-id must be a letter, then up to 63 letters, digits and ._-, found {client!r}")
    if type(num_examples) is not int or not 0 <= num_examples <= 2**53:
        raise ConnectionRefused(f"num_examples must be a whole number from 0 to 2**53, found {num_examples!r}")
    if not isinstance(tags, dict) or not all(isinstance(value, str) for value in tags.values()):
        raise ConnectionRefused("tags must be text by name")
    if not _are_names(algorithms):
        raise ConnectionRefused("local_algorithms must be a list of names")
    return ClientInfo(client, num_examples, tags, capacity, tuple(algorithms))


def _are_names(found: Any) -> bool:
    return isinstance(found, Sequence) and all(isinstance(name, str) for name in found)
