"""``wire.dtype`` on loopback sockets: the same model as a simulation, in half the bytes."""

import contextlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedtrain import Strategy
from fedtrain.aggregation import by_examples, weighted_mean
from fedtrain.client import Client, Evaluated, Fitted, Work
from fedtrain.evaluate import evaluation
from fedtrain.fleet import Fleet, MemoryFleet
from fedtrain.flower.fleet import FlowerFleet, new_run_id
from fedtrain.flower.routes import Routes
from fedtrain.flower.server import serving
from fedtrain.local import sgd_epochs
from fedtrain.plan import CohortSettings
from fedtrain.rounds import first_state, run
from fedtrain.selection import uniform
from fedtrain.state import RunState
from fedtrain.types import Params, Start, WireDtype

PATIENCE_S = 20.0
SIZE = 400_000  # 1.6 MB, over the data route; 0.8 MB in half precision, inside the messages
STEPS = {"a": 0.1, "b": 0.7}


class Drifts:
    """A trainer whose delta differs from element to element, and is exact in no half precision."""

    num_examples = 3
    local_algorithms = ("sgd_epochs",)

    def __init__(self, step: float, size: int) -> None:
        self._step, self._size = step, size

    def initial(self, seed: int) -> Start:
        values = np.linspace(-1, 1, self._size, dtype=np.float32)
        return Start({"w": values, "half": values[:5].astype(np.float16)}, {"steps": np.array(0)})

    def fit(self, start: Start, work: Work) -> Fitted:
        moved = {name: (array * (1 + self._step)).astype(array.dtype) for name, array in start.params.items()}
        return Fitted({**moved, "steps": start.buffers["steps"] + 1}, self.num_examples)

    def evaluate(self, model: Params) -> Evaluated:
        return Evaluated(1, {"sum": float(model["w"].sum(dtype=np.float64))})


def trained(fleet: Fleet, dtype: WireDtype | None, size: int) -> RunState:
    strategy = Strategy(uniform(), sgd_epochs(1), weighted_mean(by_examples))
    trainer = Drifts(0, size)
    settings = CohortSettings(connected=2, connect_deadline_s=PATIENCE_S, deadline_s=PATIENCE_S, wire_dtype=dtype)
    measure = evaluation("clients", every=2, rounds=2, trainer=trainer, settings=settings)
    first = first_state(strategy, trainer.initial(0), 0)
    state = run(strategy, fleet, first, rounds=2, settings=settings, evaluate=measure)
    assert state.num_succeeded == 2
    return state


def over_sockets(
    folder: Path, dtype: WireDtype | None, size: int, monkeypatch: pytest.MonkeyPatch
) -> tuple[RunState, int]:
    """The state after two rounds, and the bytes of all bodies in both directions."""
    num_bytes, handle = 0, Routes.__call__

    async def counted(routes: Routes, scope: Any, receive: Any, send: Any) -> None:
        async def received() -> Any:
            return count(await receive())

        await handle(routes, scope, received, lambda event: send(count(event)))

    def count(event: Any) -> Any:
        nonlocal num_bytes
        num_bytes += len(event.get("body", b""))
        return event

    monkeypatch.setattr(Routes, "__call__", counted)
    fleet = FlowerFleet(new_run_id(), folder)
    with contextlib.ExitStack() as stack:
        _, port = stack.enter_context(serving(fleet, "127.0.0.1", 0))
        for id, step in STEPS.items():
            client = Client(
                Drifts(step, size), server=f"127.0.0.1:{port}", client_id=id, state_dir=folder / id, stay=True
            )
            stack.enter_context(client)
        return trained(fleet, dtype, size), num_bytes


@pytest.mark.parametrize("size", [40, SIZE], ids=["inline", "data route"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_every_fleet_gives_the_same_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: WireDtype, size: int
) -> None:
    expected = trained(MemoryFleet({id: Drifts(step, size) for id, step in STEPS.items()}), dtype, size)
    state, _ = over_sockets(tmp_path, dtype, size, monkeypatch)
    assert state.model_digest == expected.model_digest
    assert state.history[-1].evaluation == expected.history[-1].evaluation
    unrounded = trained(MemoryFleet({id: Drifts(step, size) for id, step in STEPS.items()}), None, size)
    assert state.model_digest != unrounded.model_digest


def test_half_precision_takes_half_the_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        _, full = over_sockets(tmp_path / "full", None, 2 * SIZE, patch)
    with monkeypatch.context() as patch:
        _, half = over_sockets(tmp_path / "half", "bfloat16", 2 * SIZE, patch)
    # Two clients, two rounds: each time a model there and a delta back; and a model for the last evaluation.
    assert full == pytest.approx(2 * 5 * 4 * 2 * SIZE, rel=0.01)
    assert half / full == pytest.approx(0.5, abs=0.005)
