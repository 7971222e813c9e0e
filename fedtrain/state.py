"""RunState: everything that the next round depends on."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from fedtrain import params as arrays
from fedtrain.errors import ParamsError
from fedtrain.types import Array, Params, Start, State


@dataclass(frozen=True)
class RoundRecord:
    """What is remembered of one round."""

    round: int
    num_ok: int
    num_asked: int
    skipped: str = ""
    """Why the model was left as it was; empty when the round counted."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Training metrics, averaged over the counted updates by their number of examples."""
    evaluation: Mapping[str, float] = field(default_factory=dict)
    evaluation_by_client: Mapping[str, Mapping[str, float]] = field(default_factory=dict)


@dataclass(frozen=True)
class RunState:
    """Arrays, numbers, strings, tuples and mappings of them; resuming from it equals never having stopped."""

    round: int
    """Rounds finished."""
    next_task: int
    seed: int
    params: Params
    """Trainable floating-point arrays: the only ones that the server optimizer sees."""
    buffers: Params
    """All other arrays of the model: running statistics, counters, masks."""
    selection: State = ()
    local: State = ()
    on_server: State = ()
    server_optimizer: State = ()
    history: tuple[RoundRecord, ...] = ()

    @property
    def model(self) -> dict[str, Array]:
        """All arrays of the global model by name."""
        return {**self.params, **self.buffers}

    @property
    def model_digest(self) -> str:
        """`fedtrain.params.digest` of the global model."""
        return arrays.digest(self.model)

    @property
    def num_succeeded(self) -> int:
        """Rounds whose updates moved the model."""
        return sum(not record.skipped for record in self.history)


def start_digest(start: Start) -> str:
    """Digest of what tasks start from: the model's arrays and the local algorithm's payload."""
    return arrays.digest(start_arrays(start))


def start_arrays(start: Start) -> dict[str, Array]:
    """One mapping of all that a task starts from; names begin with ``params/``, ``buffers/`` or ``payload/``."""
    return {
        **{f"params/{name}": array for name, array in start.params.items()},
        **{f"buffers/{name}": array for name, array in start.buffers.items()},
        **{f"payload/{name}": array for name, array in start.payload.items()},
    }


def start_from_arrays(packed: Params) -> Start:
    """The inverse of `start_arrays`.

    Raises:
        ParamsError: an array's name has none of the three beginnings.
    """
    groups: dict[str, dict[str, Array]] = {"params": {}, "buffers": {}, "payload": {}}
    for name, array in packed.items():
        group, slash, rest = name.partition("/")
        if group not in groups or not slash:
            raise ParamsError(
                f"the start holds an array {name!r}, expected params/, buffers/ or payload/ before a name"
            )
        groups[group][rest] = array
    return Start(**groups)
