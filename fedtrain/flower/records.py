"""Tasks, answers and enrolments as ordinary Flower records: what travels over a `Grid` that is not ours.

An instruction holds ArrayRecords ``params``, ``buffers`` and ``payload`` and a ConfigRecord ``fedtrain``; a reply
holds ArrayRecords ``delta`` and ``extra``, a MetricRecord ``metrics`` and a ConfigRecord ``fedtrain``. Arrays keep
their names, shapes and dtypes. Flower's NumPy form knows no bfloat16: such an array travels as its bytes,
little-endian, under the serialization type ``fedtrain.bfloat16``.
"""

import io
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict

import numpy as np
from flwr.app import Array as FlowerArray
from flwr.app import ArrayRecord, ConfigRecord, MetricRecord, RecordDict

from fedtrain.client.identity import client_info, enrolment
from fedtrain.client.worker import Worker
from fedtrain.errors import ConnectionRefused, ParamsError
from fedtrain.flower.wire import invalid, read_head
from fedtrain.params import BFLOAT16, DTYPES
from fedtrain.state import start_digest
from fedtrain.types import Array, ClientInfo, Outcome, Params, Start, Task, Update

_RECORD = "fedtrain"
_METRICS = "metrics"
_STARTS = ("params", "buffers", "payload")
_NUMPY = "numpy.ndarray"
_BFLOAT16 = "fedtrain.bfloat16"


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


def performed(worker: Worker, task: Task, start: Start, on_error: Callable[[Exception], object]) -> Outcome:
    """What came of a task whose start came as records; failed if that is not what the task names."""
    if (found := start_digest(start)) == task.start:
        return worker.perform(task, start, on_error=on_error)
    reason = f"what the task starts from has digest {found}, expected {task.start}: it changed on its way"
    return Outcome(task, "failed", reason=reason)


def answer_content(outcome: Outcome, run: str) -> RecordDict:
    """A reply: how a task ended on the client."""
    update, task = outcome.update, outcome.task
    head = {
        "run": run,
        "task": task.number,
        "start": task.start,
        "kind": outcome.kind,
        "reason": outcome.reason,
        "num_examples": outcome.num_examples,
        "num_steps": update.num_steps if update is not None else 0,
        "seconds": outcome.seconds,
    }
    metrics = MetricRecord({name: float(value) for name, value in outcome.metrics.items()})
    content = RecordDict({_RECORD: ConfigRecord(head), _METRICS: metrics})  # type: ignore[arg-type]
    if update is not None:
        content["delta"], content["extra"] = array_record(update.delta), array_record(update.extra)
    return content


def read_answer(content: RecordDict, task: Task, run: str, seconds: float) -> Outcome:
    """The outcome in a reply to `task`; one of kind ``invalid`` if the reply is not well-formed or not to it."""

    try:
        head = read_head(
            {**content.config_records[_RECORD], _METRICS: dict(content.metric_records[_METRICS])}, task, run
        )
        update = None
        if head.kind == "ok" and task.kind == "train":
            delta, extra = (arrays_from(content.array_records[name]) for name in ("delta", "extra"))
            update = Update(task, delta, head.num_examples, head.num_steps, head.metrics, extra)
    except KeyError as error:
        lacks = ParamsError(f"the answer lacks {error}: use the same version of fedtrain on server and client")
        return invalid(task, lacks, seconds)
    except ParamsError as error:
        return invalid(task, error, seconds)
    return Outcome(task, head.kind, update, head.metrics, head.num_examples, head.reason, seconds)


def enrolment_content(info: ClientInfo) -> RecordDict:
    """What a client says of itself."""
    return RecordDict({_RECORD: ConfigRecord({"enrolment": json.dumps(enrolment(info))})})


def read_enrolment(content: RecordDict) -> ClientInfo:
    """Who a node says it is.

    Raises:
        ConnectionRefused: something is missing or not what it should be.
    """
    try:
        values = json.loads(str(content.config_records[_RECORD]["enrolment"]))
    except (KeyError, ValueError, RecursionError) as error:
        raise ConnectionRefused(f"its enrolment is not fedtrain's ({error!r}): use fedtrain's client_app") from None
    return client_info(values)
