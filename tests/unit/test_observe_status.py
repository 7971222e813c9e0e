"""Status and result: where a run is, and how it ended."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from fedtrain.observe.result import write_result
from fedtrain.observe.status import Status


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def asked(*clients: str) -> list[dict[str, object]]:
    return [{"client": client, "probability": 1.0, "work": {}} for client in clients]


def started(clock: Clock | None = None) -> Status:
    status = Status(clock or Clock())
    status("run_started", run="r1", rounds=3, seed=0, address="", run_dir="", clients_needed=2)
    status("client_connected", client="a", num_examples=10, tags={"site": "x"})
    status("client_connected", client="b", num_examples=20, tags={})
    return status


def test_before_anything_happened_the_snapshot_is_complete() -> None:
    assert Status().snapshot() == {
        "run": "",
        "status": "waiting",
        "reason": "",
        "round": 0,
        "rounds": 0,
        "rounds_completed": 0,
        "needed": 0,
        "metrics": {},
        "started": None,
        "asked": [],
        "answered": {},
        "missing": [],
        "connected": 0,
        "clients": {},
        "elapsed_s": 0.0,
    }


def test_the_snapshot_follows_a_round() -> None:
    status = started()
    assert status.snapshot()["status"] == "waiting"
    status("selected", 1, eligible=2, quorum=1, chosen=asked("a", "b"))
    status("outcome", 1, client="b", outcome="ok", kind="train", seconds=0.1)
    status("client_lost", client="a", reason="silent")
    found = status.snapshot()
    assert (found["status"], found["round"], found["rounds"], found["rounds_completed"]) == ("training", 1, 3, 0)
    assert (found["asked"], found["answered"], found["missing"]) == (["a", "b"], {"b": "ok"}, ["a"])
    assert found["connected"] == 1
    assert found["clients"] == {
        "a": {"connected": False, "num_examples": 10, "tags": {"site": "x"}, "last_outcome": None},
        "b": {"connected": True, "num_examples": 20, "tags": {}, "last_outcome": "ok"},
    }
    status("client_returned", client="a")
    assert status.snapshot()["connected"] == 2
    status("round_finished", 1, counted=1, asked=2, skipped="", seconds=1.0, metrics={"loss": 0.5})
    found = status.snapshot()
    assert (found["status"], found["rounds_completed"], found["metrics"]) == ("evaluating", 1, {"loss": 0.5})
    status("evaluated", 1, where="server", metrics={"accuracy": 0.75, "loss": 0.25}, by_client={})
    assert status.snapshot()["metrics"] == {"loss": 0.25, "accuracy": 0.75}
    status("round_finished", 1, counted=1, asked=2, skipped="", seconds=1.0, metrics={"loss": 0.125, "other": 1.0})
    assert status.snapshot()["metrics"] == {"loss": 0.25, "accuracy": 0.75, "other": 1.0}
    status("selected", 2, eligible=2, quorum=1, chosen=asked("a"))
    found = status.snapshot()
    assert (found["round"], found["asked"], found["answered"], found["missing"]) == (2, ["a"], {}, ["a"])


def test_answers_to_an_evaluation_are_not_answers_to_the_round() -> None:
    status = started()
    status("selected", 1, eligible=2, quorum=1, chosen=asked("a"))
    status("outcome", 1, client="a", outcome="failed", kind="evaluate")
    found = status.snapshot()
    assert (found["status"], found["answered"], found["clients"]["a"]["last_outcome"]) == ("evaluating", {}, None)


def test_who_is_asked_again_is_missing_again() -> None:
    status = started()
    status("selected", 1, eligible=2, quorum=2, chosen=asked("a", "b"))
    status("outcome", 1, client="a", outcome="ok", kind="train")
    status("outcome", 1, client="b", outcome="failed", kind="train")
    status("retry", 1, missing=["b"], attempt=1)
    found = status.snapshot()
    assert (found["answered"], found["missing"]) == ({"a": "ok"}, ["b"])


@pytest.mark.parametrize("ending", ["completed", "failed", "stopped"])
def test_the_end_of_a_run_stops_its_clock(ending: str) -> None:
    clock = Clock()
    status = started(clock)
    clock.now = 107.5
    assert status.snapshot()["elapsed_s"] == 7.5
    status("run_finished", status=ending, rounds_completed=3, reason="why", metrics={"accuracy": 1.0})
    clock.now = 200.0
    found = status.snapshot()
    assert (found["status"], found["reason"], found["rounds_completed"]) == (ending, "why", 3)
    assert (found["metrics"], found["elapsed_s"]) == ({"accuracy": 1.0}, 7.5)


def test_a_snapshot_is_json_and_a_copy() -> None:
    status = started()
    status("evaluated", 1, where="server", metrics={"loss": float("nan")}, by_client={})
    first = status.snapshot()
    assert json.loads(json.dumps(first, allow_nan=False))["metrics"] == {"loss": "NaN"}
    first["clients"]["a"]["num_examples"] = -1
    first["metrics"]["loss"] = 0
    assert status.snapshot()["clients"]["a"]["num_examples"] == 10
    assert status.snapshot()["metrics"] == {"loss": "NaN"}


def test_events_that_it_does_not_know_are_ignored() -> None:
    status = started()
    before = status.snapshot()
    status("something_new", colour="green")
    assert status.snapshot() == before


RESULT: dict[str, Any] = {
    "status": "completed",
    "rounds_completed": 3,
    "model_digest": "ab12",
    "final_metrics": {"accuracy": 0.5, "loss": float("inf")},
}


def test_the_result_has_the_promised_names(tmp_path: Path) -> None:
    write_result(tmp_path / "result.json", **RESULT, run="r1", seed=7, seconds=1.23456, model="model.safetensors")
    assert json.loads((tmp_path / "result.json").read_text()) == {
        "status": "completed",
        "rounds_completed": 3,
        "model_digest": "ab12",
        "final_metrics": {"accuracy": 0.5, "loss": "Infinity"},
        "reason": "",
        "run": "r1",
        "seed": 7,
        "seconds": 1.235,
        "model": "model.safetensors",
    }
    assert [path.name for path in tmp_path.iterdir()] == ["result.json"]


def test_a_result_that_could_not_be_written_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "result.json"
    write_result(path, **RESULT)
    old = path.read_text()

    def fail(descriptor: int) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="disk full"):
        write_result(path, **{**RESULT, "rounds_completed": 9})
    assert path.read_text() == old
