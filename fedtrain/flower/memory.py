"""What the local algorithm remembers on a Flower node, where each message is handled by a new process."""

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
from flwr.app import ConfigRecord, RecordDict

from fedtrain.flower.records import array_record, arrays_from
from fedtrain.types import Array, Params, State

_MEMORY = "fedtrain.memory"
"""Beginning of the names of our records in a node's `Context.state`."""


class NodeMemory:
    """What a node remembers from one message to the next, in Flower's records.

    ``counted`` is the local algorithm's state after the last update that the server counted, ``pending`` that after the
    last update, whose verdict comes with a later task.
    """

    def __init__(self, records: RecordDict) -> None:
        self._records = records

    @property
    def state(self) -> State:
        """The state to train from."""
        return self._get("counted", ())

    def keep(self, number: int, state: State) -> None:
        """Remember the state after a task until its verdict is known."""
        self._put("pending", {"task": number, "state": state})

    def settle(self, verdicts: Mapping[int, bool]) -> None:
        """Take over, or drop, what is pending if its verdict is among these."""
        pending = self._get("pending", None)
        if pending is not None and pending["task"] in verdicts:
            if verdicts[pending["task"]]:
                self._put("counted", pending["state"])
            for name in (f"{_MEMORY}.pending", f"{_MEMORY}.pending.arrays"):
                del self._records[name]

    def _get(self, name: str, default: State) -> State:
        name = f"{_MEMORY}.{name}"
        if name not in self._records:
            return default
        arrays = arrays_from(self._records.array_records[f"{name}.arrays"])
        return _from_json(json.loads(str(self._records.config_records[name]["json"])), arrays)

    def _put(self, name: str, state: State) -> None:
        name, arrays = f"{_MEMORY}.{name}", dict[str, Array]()
        self._records[name] = ConfigRecord({"json": json.dumps(_to_json(state, arrays))})
        self._records[f"{name}.arrays"] = array_record(arrays)


def _to_json(state: State, arrays: dict[str, Array]) -> Any:
    """A state as JSON; its arrays are put into `arrays`, under the numbers that stand for them."""
    if isinstance(state, np.ndarray):
        arrays[str(len(arrays))] = state
        return {"array": str(len(arrays) - 1)}
    if isinstance(state, tuple):
        return {"tuple": [_to_json(item, arrays) for item in state]}
    if isinstance(state, Mapping):
        return {"mapping": {name: _to_json(item, arrays) for name, item in state.items()}}
    return state.item() if isinstance(state, np.generic) else state


def _from_json(found: Any, arrays: Params) -> State:
    if not isinstance(found, dict):
        return found
    [(kind, value)] = found.items()
    if kind == "array":
        return arrays[value]
    if kind == "tuple":
        return tuple(_from_json(item, arrays) for item in value)
    return {name: _from_json(item, arrays) for name, item in value.items()}
