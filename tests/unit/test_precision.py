"""Half precision on the wire: values worked out by hand, and the same numbers in every fleet."""

import json
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from fakes import Adder
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hypothesis_numpy

from fedtrain import Strategy
from fedtrain.aggregation import by_examples, weighted_mean
from fedtrain.client.worker import Worker
from fedtrain.config import compose
from fedtrain.errors import ConfigError, ParamsError
from fedtrain.fleet import MemoryFleet
from fedtrain.flower import wire
from fedtrain.flower.records import read_task, start_records, task_content
from fedtrain.local import sgd_epochs
from fedtrain.params import BFLOAT16, Packed, digest, num_bytes, pack
from fedtrain.plan import CohortSettings, plan, plan_evaluation, start_of
from fedtrain.precision import narrowed, rounded, rounded_start, widened
from fedtrain.rounds import first_state, run
from fedtrain.selection import uniform
from fedtrain.state import start_digest
from fedtrain.testing import task_of, update_of
from fedtrain.training import cohort_settings
from fedtrain.types import Array, ClientInfo, Outcome, Params, Start, Task, WireDtype

HALVES: Sequence[WireDtype] = ("bfloat16", "float16")

STRATEGY = Strategy(uniform(), sgd_epochs(1), weighted_mean(by_examples))


def f32(*values: float) -> Array:
    return np.array(values, np.float32)


def of(values: Array, dtype: WireDtype) -> list[float]:
    found = rounded({"w": values}, dtype, what="the model")["w"]
    assert found.dtype == np.float32
    return [float(value) for value in found]


# Rounding


def test_bfloat16_has_eight_significant_bits_and_ties_go_to_even() -> None:
    step = 2.0**-7  # between neighbours from 1 to 2
    values = f32(1 + step / 2, 1 + 3 * step / 2, 1 + step / 2 + 2.0**-20, -(1 + step / 2), 0.3, 3e38, 1e-38)
    expected = [1, 1 + 2 * step, 1 + step, -1, 0.30078125, 226 * 2.0**120, 218 * 2.0**-134]
    assert of(values, "bfloat16") == expected


def test_float16_has_eleven_significant_bits_and_ties_go_to_even() -> None:
    step = 2.0**-10
    values = f32(1 + step / 2, 1 + 3 * step / 2, 1 + step / 2 + 2.0**-20, 0.3, 65519, -65519)
    assert of(values, "float16") == [1, 1 + 2 * step, 1 + step, 1229 * 2.0**-12, 65504, -65504]
    assert of(f32(2.0**-25, 3 * 2.0**-25, 2.0**-24), "float16") == [0, 2.0**-23, 2.0**-24]


def test_a_value_beyond_the_range_is_named_and_not_made_infinite() -> None:
    message = "the update: 'w' holds 65520, beyond the range of float16, .*: use wire.dtype=bfloat16 or null"
    with pytest.raises(ParamsError, match=message):
        rounded({"w": f32(1, 65520)}, "float16", what="the update")
    with pytest.raises(
        ParamsError, match=r"'w' holds -3.4.*e.38, beyond the range of bfloat16, .*: use wire.dtype=null"
    ):
        rounded({"w": f32(1, -3.4e38)}, "bfloat16", what="the update")


@pytest.mark.parametrize("dtype", HALVES)
def test_infinities_and_nan_of_the_model_itself_stay(dtype: WireDtype) -> None:
    found = of(f32(-np.inf, np.inf, np.nan, -0.0), dtype)
    assert found[:2] == [-np.inf, np.inf]
    assert np.isnan(found[2])
    assert str(found[3]) == "-0.0"


@pytest.mark.parametrize("dtype", HALVES)
def test_other_dtypes_stay_as_they_are(dtype: WireDtype) -> None:
    arrays: Params = {
        "double": np.array([0.1]),
        "half": np.array([0.1], np.float16),
        "brain": np.array([0.1], BFLOAT16),
        "count": np.array(3),
        "mask": np.array([True]),
    }
    found = rounded(arrays, dtype, what="the model")
    assert all(found[name] is array for name, array in arrays.items())


def test_without_a_dtype_nothing_is_touched() -> None:
    arrays = {"w": f32(0.1)}
    assert rounded(arrays, None, what="the model") is arrays


@given(hypothesis_numpy.arrays(np.float32, 4, elements=st.floats(-65000, 65000, width=32)), st.sampled_from(HALVES))
def test_what_was_rounded_travels_in_half_the_bytes_without_loss(values: Array, dtype: WireDtype) -> None:
    start = rounded({"w": values}, dtype, what="the model")["w"]
    half = narrowed(start, dtype)
    assert half.nbytes * 2 == start.nbytes
    assert widened(half, dtype).tobytes() == start.tobytes()
    assert not widened(half, dtype).flags.writeable


# A run


def test_the_plan_names_the_digest_of_the_rounded_model_and_the_dtype() -> None:
    state = first_state(STRATEGY, Start({"w": f32(0.1)}, {"mean": f32(0.3), "steps": np.array(5)}), 0)
    settings, clients = CohortSettings(wire_dtype="bfloat16"), [ClientInfo("a", 1)]
    start = start_of(STRATEGY, state, "bfloat16")
    assert start.params["w"].tolist() == [0.10009765625]
    assert start.buffers["mean"].tolist() == [0.30078125]
    expected = digest(
        {"params/w": f32(0.10009765625), "buffers/mean": f32(0.30078125), "buffers/steps": np.array(5)},
    )
    for cohort in (
        plan(STRATEGY, state, clients, settings, start),
        plan_evaluation(state, clients, settings, start),
    ):
        assert [(task.start, task.wire_dtype) for task in cohort.tasks] == [(expected, "bfloat16")]


def test_by_default_a_plan_is_what_it_was() -> None:
    start = Start({"w": f32(0.1)}, {})
    state = first_state(STRATEGY, start, 0)
    (task,) = plan(STRATEGY, state, [ClientInfo("a", 1)], CohortSettings(), start_of(STRATEGY, state)).tasks
    assert task.wire_dtype is None
    assert task.start == start_digest(start) == digest({"params/w": f32(0.1)})


def test_the_payload_of_the_local_algorithm_keeps_its_precision() -> None:
    start = rounded_start(Start({}, {}, {"c": f32(0.1)}), "bfloat16")
    assert start.payload["c"].tobytes() == f32(0.1).tobytes()


def performed(task: Task, start: Start, amount: float) -> Outcome:
    return Worker(Adder(amount)).perform(task, start)


def test_a_client_rounds_its_delta() -> None:
    task = task_of(wire_dtype="bfloat16")
    update = performed(task, Start({"w": f32(0), "v": np.zeros(1)}, {"n": np.array(1)}), 0.3).update
    assert update is not None
    assert update.delta["w"].tolist() == [0.30078125]
    assert update.delta["v"].tolist() == [0.3]  # float64
    assert update.delta["n"].tolist() == 2


def test_a_delta_beyond_the_range_of_float16_fails_with_the_reason() -> None:
    outcome = performed(task_of(wire_dtype="float16"), Start({"w": f32(0)}, {}), 70_000)
    assert (outcome.kind, outcome.update) == ("failed", None)
    assert "the update: 'w' holds 70000, beyond the range of float16" in outcome.reason


def test_a_client_that_does_not_know_the_dtype_declines() -> None:
    outcome = performed(task_of(wire_dtype="float8"), Start({"w": f32(0)}, {}), 1)
    assert (outcome.kind, outcome.reason) == (
        "declined",
        "this client can't send 'float8': update fedtrain on this client",
    )


def test_rounded_deltas_are_added_to_the_unrounded_model() -> None:
    first = Start({"w": f32(1 + 2.0**-8)}, {})  # in bfloat16: 1
    fleet = MemoryFleet({"a": Adder(0.3), "b": Adder(0.5)})  # deltas 0.29999995 and 0.5, in bfloat16 0.30078125 and 0.5
    settings = CohortSettings(connected=2, wire_dtype="bfloat16")
    state = run(STRATEGY, fleet, first_state(STRATEGY, first, 0), rounds=1, settings=settings)
    assert state.params["w"].tolist() == [1 + 2.0**-8 + (0.30078125 + 0.5) / 2]


def test_a_model_beyond_the_range_ends_the_run_with_the_reason() -> None:
    state = first_state(STRATEGY, Start({"w": f32(1e5)}, {}), 0)
    with pytest.raises(ParamsError, match="the model: 'w' holds 100000, beyond the range of float16"):
        run(STRATEGY, MemoryFleet({"a": Adder()}), state, rounds=1, settings=CohortSettings(wire_dtype="float16"))


# The wire


MODEL = Start(
    {"w": f32(*[0.1] * 1000), "native": np.array([0.5], np.float16), "brain": np.array([0.5], BFLOAT16)},
    {"double": np.array([0.1]), "steps": np.array(3)},
    {"c": f32(0.1)},
)


def sent(start: Start, dtype: WireDtype | None) -> Start:
    return wire.read_start(Packed(b"".join(wire.start_pieces(start, dtype))), dtype)


@pytest.mark.parametrize("dtype", [None, *HALVES])
def test_a_start_arrives_as_it_was_sent(dtype: WireDtype | None) -> None:
    start = rounded_start(MODEL, dtype)
    assert start_digest(sent(start, dtype)) == start_digest(start)


@pytest.mark.parametrize("dtype", HALVES)
def test_float32_arrays_of_model_and_delta_take_half_the_bytes(dtype: WireDtype) -> None:
    def data_bytes(blob: bytes) -> int:
        return len(blob) - 8 - int.from_bytes(blob[:8], "little")

    full, half = (b"".join(wire.start_pieces(rounded_start(MODEL, kind), kind)) for kind in (None, dtype))
    assert data_bytes(full) - data_bytes(half) == 2000
    delta, extra = rounded({"w": MODEL.params["w"]}, dtype, what="the update"), {"c": f32(0.1)}
    answers = []
    for kind in (None, dtype):
        task = task_of(wire_dtype=kind)
        update = replace(update_of(delta), task=task, extra=extra)
        answers.append(wire.pack_answer(Outcome(task, "ok", update), "run"))
        found = wire.read_answer(Packed(answers[-1]), task, "run", 0.0).update
        assert found is not None
        assert digest(found.delta) == digest(delta)
        assert digest(found.extra) == digest(extra)
    assert [data_bytes(answer) for answer in answers] == [4004, 2004]


def test_an_answer_can_not_pass_off_another_dtype_as_the_models() -> None:
    task, half = task_of(wire_dtype="float16"), np.array([1.5], np.float16)

    def read(array: Array, metadata: str | None, task: Task) -> np.dtype:
        head = {"run": "r", "task": 0, "start": "", "kind": "ok", "reason": "", "num_examples": 1, "metrics": {}}
        extra = {} if metadata is None else {"float32": metadata}
        packed = Packed(pack({"delta/w": array}, {"answer": json.dumps(head), **extra}))
        update = wire.read_answer(packed, task, "r", 0.0).update
        assert update is not None
        dtype: np.dtype = update.delta["w"].dtype
        return dtype

    named = json.dumps(["delta/w"])
    assert read(half, named, task) == np.float32
    # The check against the model's layout refuses all of these where the model is float32.
    assert read(half, named, replace(task, wire_dtype=None)) == np.float16
    assert read(half, named, replace(task, wire_dtype="bfloat16")) == np.float16
    for metadata in (None, "[]", "7", "{", "[" * 10_000, json.dumps([["delta/w"]])):
        assert read(half, metadata, task) == np.float16


def test_a_grid_carries_the_dtype_of_a_task_too() -> None:
    task = task_of(wire_dtype="bfloat16")
    assert read_task(task_content(task, "run", start_records(Start({}, {})), {}))[0] == task


def test_pieces_of_a_start_are_not_copies_of_the_model_without_a_dtype() -> None:
    large = np.zeros(100_000, np.float32)
    pieces = wire.start_pieces(Start({"w": large}, {}), None)
    large[0] = 1
    assert num_bytes(pieces) > large.nbytes
    assert any(piece.nbytes == large.nbytes and bytes(piece[2:4]) == b"\x80\x3f" for piece in pieces)


# The configuration


@pytest.mark.parametrize("dtype", [None, *HALVES])
def test_the_configuration_says_what_travels(dtype: WireDtype | None) -> None:
    config = compose([f"wire.dtype={dtype or 'null'}"])
    assert cohort_settings(config).wire_dtype == dtype


def test_another_dtype_is_refused_with_what_is_allowed() -> None:
    with pytest.raises(ConfigError, match=r"wire.dtype: expected bfloat16, float16 or null, found 'int8'"):
        compose(["wire.dtype=int8"])
