from dataclasses import FrozenInstanceError

import numpy as np
import pytest

from fedtrain import RoundRecord, RunState
from fedtrain.errors import ParamsError
from fedtrain.params import digest
from fedtrain.state import start_arrays, start_digest, start_from_arrays
from fedtrain.types import Start

START = Start(
    params={"fc/weight": np.ones(2, np.float32), "bias": np.zeros(1)},
    buffers={"steps": np.array(3)},
    payload={"bias": np.full(1, 9.0)},
)


def state_of(*records: RoundRecord) -> RunState:
    return RunState(
        round=len(records), next_task=0, seed=0, params=START.params, buffers=START.buffers, history=records
    )


def test_the_model_is_its_params_and_its_buffers() -> None:
    assert sorted(state_of().model) == ["bias", "fc/weight", "steps"]
    assert state_of().model_digest == digest({**START.params, **START.buffers})


def test_rounds_that_were_skipped_have_not_succeeded() -> None:
    state = state_of(RoundRecord(1, 2, 2), RoundRecord(2, 0, 2, skipped="nobody"), RoundRecord(3, 1, 2))
    assert state.num_succeeded == 2
    assert state_of().num_succeeded == 0


def test_a_state_cannot_be_changed() -> None:
    with pytest.raises(FrozenInstanceError):
        state_of().round = 5  # type: ignore[misc]


def test_a_start_travels_as_one_mapping_and_comes_back() -> None:
    packed = start_arrays(START)
    assert sorted(packed) == ["buffers/steps", "params/bias", "params/fc/weight", "payload/bias"]
    back = start_from_arrays(packed)
    assert sorted(back.params) == ["bias", "fc/weight"]
    assert (back.buffers, back.payload) == ({"steps": 3}, {"bias": 9.0})
    assert start_digest(back) == start_digest(START)
    assert start_from_arrays({}) == Start({}, {}, {})


@pytest.mark.parametrize(
    "other",
    [
        Start(START.params, START.buffers),
        Start(START.params, {"steps": np.array(4)}, START.payload),
        Start({**START.params, "bias": np.ones(1)}, START.buffers, START.payload),
        Start({"fc/weight": START.params["fc/weight"]}, {**START.buffers, "bias": np.zeros(1)}, START.payload),
        Start(START.params, START.buffers, {"bias": np.full(1, 9.0, np.float32)}),
    ],
)
def test_a_starts_digest_names_all_of_it(other: Start) -> None:
    assert start_digest(other) != start_digest(START)


@pytest.mark.parametrize("name", ["bias", "param/bias", "/bias", ""])
def test_an_array_that_belongs_nowhere_is_refused_by_name(name: str) -> None:
    with pytest.raises(ParamsError, match=f"'{name}'"):
        start_from_arrays({name: np.zeros(1)})
