"""The nouns: who takes part, what they are asked, and what they answer."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from numpy.typing import NDArray

Array = NDArray[Any]
Params = Mapping[str, Array]
"""Named arrays. The names are the model's own; order carries no meaning."""

Spec = tuple[str, Mapping[str, float]]
"""A registered name and numbers: all that travels to a client instead of code."""

State = Any
"""What a part remembers: arrays, numbers, strings, tuples and string-keyed mappings of them."""

OutcomeKind = Literal["ok", "declined", "failed", "late", "invalid", "lost"]
TaskKind = Literal["train", "evaluate"]
WireDtype = Literal["bfloat16", "float16"]
"""What float32 arrays may be rounded to, so that they travel in half the bytes."""


@dataclass(frozen=True)
class Capacity:
    """What a client's machine has, as the client reports it."""

    num_cores: int = 1
    memory_bytes: int = 0
    """Physical memory; 0 if unknown."""
    devices: tuple[str, ...] = ("cpu",)
    """Kinds of devices a trainer can use, such as ``cuda:0``, ``mps``, ``cpu``."""
    device_memory_bytes: int = 0
    """Memory of all accelerators together; 0 without one, or before torch has been imported."""


@dataclass(frozen=True)
class Partitioning:
    """What decides how examples are shared out: the parts of two different ones overlap."""

    data: str
    """Import path of what loads and splits them."""
    num_partitions: int
    """Into how many parts, >= 1."""
    seed: int
    """In [0, 2**63)."""


@dataclass(frozen=True)
class ClientInfo:
    """One connected client, as the server knows it."""

    id: str
    num_examples: int
    """Examples that it trains on, as enrolled; >= 0."""
    tags: Mapping[str, str] = field(default_factory=dict)
    capacity: Capacity = field(default_factory=Capacity)
    local_algorithms: tuple[str, ...] = ()
    """Local algorithms that its trainer can do; empty means: not reported."""
    partitioning: Partitioning | None = None
    """How the data was shared out of which it holds a part; None: its data is its own."""


@dataclass(frozen=True)
class Task:
    """One client's part of a round, fully decided before anything is sent."""

    number: int
    """Position in the run's sequence of tasks; (run, number) is the key of the update."""
    client: str
    round: int
    """Rounds are counted from 1; the task starts from the model after ``round - 1``."""
    start: str
    """Digest of what it starts from: params, buffers and the local algorithm's payload."""
    local: Spec
    on_client: tuple[Spec, ...] = ()
    seed: int = 0
    """In [0, 2**63): decides the order of batches in every engine."""
    deadline_s: float | None = None
    """Time to answer, counted from when the task is given."""
    probability: float = 1.0
    """With which the client was included, in (0, 1]."""
    num_examples: int = 0
    kind: TaskKind = "train"
    wire_dtype: WireDtype | None = None
    """Its model was rounded to this dtype, and its delta is to be; None: to none."""


@dataclass(frozen=True)
class Cohort:
    """The plan of a round: who is asked for what, and when the round counts."""

    round: int
    tasks: tuple[Task, ...]
    num_eligible: int
    eligible_examples: int
    quorum: int
    """Usable answers without which the model stays as it is."""
    deadline_s: float | None
    grace_s: float | None
    """Time that stragglers have once the quorum has answered; None: until the deadline."""
    retry: bool
    """Below the quorum: ask again (True) or skip the round (False)."""
    entropy: int
    """All server randomness of the round comes from it."""
    max_update_norm: float | None = None
    """An update whose delta or second payload has a larger L2 norm is invalid; None: any may be."""
    max_examples: int | None = None
    """An answer that counts more examples is invalid; None: up to 2**53."""


@dataclass(frozen=True)
class Update:
    """What a client sends back from a training task."""

    task: Task
    delta: Params
    """Floating-point arrays: ``local - start``. Integers and bools: the local values themselves."""
    num_examples: int
    num_steps: int = 0
    metrics: Mapping[str, float] = field(default_factory=dict)
    extra: Params = field(default_factory=dict)
    """Second payload of a local algorithm, such as SCAFFOLD's control difference."""


@dataclass(frozen=True)
class Outcome:
    """How a client's task ended."""

    task: Task
    kind: OutcomeKind
    update: Update | None = None
    """Only for ``ok`` training tasks."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """What the client measured (evaluation tasks; training metrics are in the update too)."""
    num_examples: int = 0
    reason: str = ""
    seconds: float = 0.0
    """From giving the task to its answer, on the server's monotonic clock."""


@dataclass(frozen=True)
class Start:
    """What the tasks of a round start from; the same for all of them."""

    params: Params
    buffers: Params
    payload: Params = field(default_factory=dict)
    """What the local algorithm's server half sends beside the model."""


__all__ = [
    "Array",
    "Capacity",
    "ClientInfo",
    "Cohort",
    "Outcome",
    "OutcomeKind",
    "Params",
    "Spec",
    "Start",
    "State",
    "Task",
    "TaskKind",
    "Update",
    "WireDtype",
]
