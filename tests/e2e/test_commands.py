"""The commands as users start them: separate processes, real sockets, real data."""

import json
import signal
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from commands import Command, site, wait_for_event

from fedtrain.params import digest, read_file

NUMPY = ("experiment=quickstart_numpy", "data.num_partitions=3")

OWN_TRAINER = '''
"""A trainer of a user's own: one number, moved towards the client's target."""
import os, time
import numpy as np
from fedtrain.client import Evaluated, Fitted
from fedtrain.types import Start

def load(partition, num_partitions, seed):
    return partition

class Trainer:
    local_algorithms = ("sgd_epochs",)

    def __init__(self, model, data, delays=(), hang=(), broken=False):
        self.part, self.num_examples = data, 0 if data is None else 10 * (data + 1)
        self.delays, self.hang, self.broken = delays, hang, broken

    def initial(self, seed):
        return Start({"w": np.zeros(3, np.float32)}, {"seen": np.array(0)})

    def fit(self, start, work):
        if self.broken:
            raise RuntimeError("no such column: age")
        if self.part in self.hang:
            open(f"training-{self.part}-{work.round}", "w").close()
            while not work.cancelled() and not os.path.exists("go-on"):
                time.sleep(0.01)
        if self.delays:
            time.sleep(self.delays[self.part])
        target = np.float32(self.part + 1) / np.float32(3)
        w = start.params["w"] + np.float32(0.5) * (target - start.params["w"])
        return Fitted({"w": w, "seen": start.buffers["seen"] + 1}, self.num_examples, 1, {"loss": float(abs(w[0]))})

    def evaluate(self, model):
        return Evaluated(1, {"accuracy": float(model["w"][0])})
'''
OWN = (
    "trainer=custom",
    "trainer._target_=own.Trainer",
    "model=custom",
    "model._target_=builtins.object",
    "data=custom",
    "data._target_=own.load",
    "data.num_partitions=3",
    "cohort.connected=3",
)


@pytest.fixture
def own(tmp_path: Path) -> Path:
    (tmp_path / "own.py").write_text(OWN_TRAINER)
    return tmp_path


def test_server_and_clients_train_the_model_that_the_simulation_trains(tmp_path: Path) -> None:
    with site(tmp_path, *NUMPY, "rounds=3", "evaluation.where=both") as place:
        server = place.server()
        clients = [place.client(part) for part in range(3)]
        assert server.wait() == 0, server.output
        assert [client.wait() for client in clients] == [0, 0, 0]
        result, events = place.result, place.events()
        simulation = place.start("fedtrain-sim", "run_dir=sim")
        assert simulation.wait() == 0, simulation.output

    assert result["status"] == "completed"
    assert result["rounds_completed"] == 3
    assert result["reason"] == ""
    assert result["final_metrics"]["accuracy"] > 0.8
    assert list(result["final_metrics"]["accuracy_by_client"]) == ["client-0", "client-1", "client-2"]
    assert result["model_digest"] == digest(read_file(tmp_path / "run" / "model.safetensors"))
    simulated = json.loads((tmp_path / "sim" / "result.json").read_text())
    assert simulated["model_digest"] == result["model_digest"]
    assert simulated["final_metrics"] == result["final_metrics"]

    assert all({"time", "event", "round"} <= line.keys() for line in events)
    outcomes = [line for line in events if line["event"] == "outcome" and line["kind"] == "train"]
    assert sorted((line["round"], line["client"], line["outcome"]) for line in outcomes) == [
        (round, f"client-{part}", "ok") for round in (1, 2, 3) for part in (0, 1, 2)
    ]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run", "sim", "state"]
    assert "model.safetensors" in server.output
    assert "the run is over: completed" in clients[0].output


def test_clients_that_answer_in_another_order_give_the_same_model(own: Path) -> None:
    digests, orders = [], []
    for delays in ("[0.4,0.2,0]", "[0,0.2,0.4]"):
        with site(own, *OWN, "rounds=2", f"+trainer.delays={delays}") as place:
            server = place.server()
            for part in range(3):
                place.client(part)
            assert server.wait() == 0, server.output
            digests.append(place.result["model_digest"])
            orders.append([line["client"] for line in place.events("outcome") if line["round"] == 2])
    assert orders == [["client-2", "client-1", "client-0"], ["client-0", "client-1", "client-2"]]
    assert digests[0] == digests[1]


def test_the_status_routes_answer_while_a_run_lasts(own: Path) -> None:
    with site(own, *OWN, "rounds=1", "+trainer.hang=[1]") as place:
        server = place.server()
        assert _get(f"http://{place.address}/healthz") == (200, "ok\n")
        assert _get(f"http://{place.address}/readyz") == (200, "ready\n")
        waiting = json.loads(_get(f"http://{place.address}/fedtrain/v1/status")[1])
        assert (waiting["status"], waiting["rounds"], waiting["connected"]) == ("waiting", 1, 0)
        for part in range(3):
            place.client(part)
        wait_for_event(own / "run", "outcome", server, client="client-0")
        wait_for_event(own / "run", "outcome", server, client="client-2")
        training = json.loads(_get(f"http://{place.address}/fedtrain/v1/status")[1])
        assert training["status"] == "training"
        assert training["answered"] == {"client-0": "ok", "client-2": "ok"}
        assert training["missing"] == ["client-1"]
        assert training["clients"]["client-2"]["num_examples"] == 30
        (own / "go-on").touch()
        assert server.wait() == 0


def test_a_client_that_is_killed_and_started_again_takes_part_in_the_next_round(own: Path) -> None:
    settings = ("rounds=2", "+trainer.hang=[1]", "server.lost_after_s=1", "cohort.answers=2")
    with site(own, *OWN, *settings) as place:
        server = place.server()
        clients = [place.client(part) for part in range(3)]
        _wait_for_file(own / "training-1-1", server)
        clients[1].send(signal.SIGKILL)
        lost = wait_for_event(own / "run", "outcome", server, client="client-1")
        assert (lost["outcome"], lost["round"]) == ("lost", 1)
        (own / "go-on").touch()
        clients[1] = place.client(1)
        assert server.wait() == 0, server.output
        assert [client.wait() for client in clients] == [0, 0, 0]
        second = {line["client"]: line["outcome"] for line in place.events("outcome") if line["round"] == 2}
    assert second == {"client-0": "ok", "client-1": "ok", "client-2": "ok"}


def test_with_retry_a_killed_client_gets_its_task_again_and_the_model_is_the_undisturbed_one(own: Path) -> None:
    settings = ("rounds=2", "server.lost_after_s=1", "cohort.answers=3", "cohort.under_quorum=retry")
    with site(own, *OWN, *settings) as place:
        server = place.server()
        for part in range(3):
            place.client(part)
        assert server.wait() == 0, server.output
        undisturbed = place.result["model_digest"]
    with site(own, *OWN, *settings, "+trainer.hang=[1]") as place:
        server = place.server()
        clients = [place.client(part) for part in range(3)]
        _wait_for_file(own / "training-1-1", server)
        clients[1].send(signal.SIGKILL)
        wait_for_event(own / "run", "outcome", server, client="client-1", outcome="lost")
        (own / "go-on").touch()
        place.client(1)
        assert server.wait() == 0, server.output
        assert place.result["model_digest"] == undisturbed


def test_clients_come_back_by_themselves_when_the_server_is_started_again(own: Path) -> None:
    with site(own, *OWN, "rounds=2", "+trainer.hang=[1]") as place:
        first = place.server()
        clients = [place.client(part) for part in range(3)]
        _wait_for_file(own / "training-1-1", first)
        first.send(signal.SIGKILL)
        first.wait()
        second = place.server(port=place.port)
        (own / "go-on").touch()
        assert second.wait() == 0, second.output
        assert [client.wait() for client in clients] == [0, 0, 0]
        assert place.result["rounds_completed"] == 2
    assert "connection lost" in clients[0].output
    assert (own / "run" / "previous-1" / "events.jsonl").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_ends_a_server_within_two_seconds_and_keeps_the_model(own: Path, number: signal.Signals) -> None:
    with site(own, *OWN, "rounds=1000000", "+trainer.hang=[1]", "cohort.grace_s=0", "cohort.answers=2") as place:
        server = place.server()
        for part in range(3):
            place.client(part)
        wait_for_event(own / "run", "round_finished", server, round=3)
        began = time.monotonic()
        server.send(number)
        assert server.wait() == 130
        assert time.monotonic() - began < 2.0
        result = place.result
    assert (result["status"], result["reason"]) == ("stopped", "interrupted")
    assert result["rounds_completed"] >= 3
    assert result["model_digest"] == digest(read_file(own / "run" / "model.safetensors"))
    assert "stopped" in server.output
    assert "run/model.safetensors" in server.output


def test_ctrl_c_ends_a_client_within_two_seconds_while_it_trains(own: Path) -> None:
    with site(own, *OWN, "+trainer.hang=[0]") as place:
        server = place.server()
        clients = [place.client(part) for part in range(3)]
        _wait_for_file(own / "training-0-1", server)
        began = time.monotonic()
        clients[0].send(signal.SIGINT)
        assert clients[0].wait() == 130
        assert time.monotonic() - began < 2.0
    assert "stopped" in clients[0].output


def test_a_run_without_a_successful_round_fails_and_says_why(own: Path) -> None:
    with site(own, *OWN, "rounds=2", "+trainer.broken=true") as place:
        server = place.server()
        clients = [place.client(part) for part in range(3)]
        assert server.wait() == 1
        assert [client.wait() for client in clients] == [0, 0, 0]
        result, outcomes = place.result, place.events("outcome")
    assert result["status"] == "failed"
    assert result["rounds_completed"] == 2
    assert "0 usable answers of 3 asked, 2 are needed" in result["reason"]
    assert {line["reason"] for line in outcomes} == {"RuntimeError: no such column: age"}
    assert "Traceback" in clients[0].output
    assert read_file(own / "run" / "model.safetensors")["w"].tolist() == [0, 0, 0]


def test_an_impossible_setting_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with site(tmp_path) as place:
        command = place.start("fedtrain-server", "cohort.asked=2", "cohort.answers=3", "run_dir=run")
        assert command.wait() == 2
    assert command.output.startswith("error: cohort.answers: expected at most cohort.asked, which is 2, found 3")
    assert list(tmp_path.iterdir()) == []


def test_a_second_server_with_the_run_folder_of_a_running_one_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    with site(tmp_path, *NUMPY) as place:
        place.server()
        second = place.start("fedtrain-server", "run_dir=run", "server.port=0")
        assert second.wait() == 2
    assert "run_dir=run: a server or simulation that is running writes there" in second.output
    assert not (tmp_path / "run" / "previous-1").exists()


def test_a_port_in_use_is_named(tmp_path: Path) -> None:
    with site(tmp_path, *NUMPY) as place:
        place.server()
        second = place.start("fedtrain-server", "run_dir=other", f"server.port={place.port}")
        assert second.wait() == 2
    assert f"server.port={place.port}: cannot listen there" in second.output


@pytest.mark.parametrize("cause", ["port", "clients.json"])
def test_a_refused_start_leaves_the_files_of_the_run_before(own: Path, cause: str) -> None:
    with site(own, *OWN, "rounds=1") as place:
        assert place.start("fedtrain-sim", "run_dir=other").wait() == 0
        before = {name: (own / "other" / name).read_bytes() for name in ("events.jsonl", "result.json")}
        if cause == "port":
            place.server()
            port = place.port
        else:
            (own / "other" / "clients.json").write_text("{")
            port = 0
        second = place.start("fedtrain-server", "run_dir=other", f"server.port={port}")
        assert second.wait() == 2, second.output
    assert second.output.count("\n") == 1
    assert cause == "port" or second.output.startswith("error: other/clients.json: expected JSON that says which key")
    assert cause == "port" or "restore it, or delete it" in second.output
    assert {name: (own / "other" / name).read_bytes() for name in before} == before
    assert not (own / "other" / "previous-1").exists()


def test_a_second_client_with_the_state_folder_of_a_running_one_is_refused(tmp_path: Path) -> None:
    with site(tmp_path, *NUMPY) as place:
        place.server()
        first = place.client(0)
        first.wait_for("connected")
        second = place.client(0)
        assert second.wait() == 2
    assert "a client that is running uses this folder" in second.output


def test_another_key_that_claims_a_taken_id_is_refused(tmp_path: Path) -> None:
    with site(tmp_path, *NUMPY) as place:
        place.server()
        place.client(0).wait_for("connected")
        thief = place.client(1, "client.state_dir=state/thief", id="client-0")
        assert thief.wait() == 1
    assert "client id 'client-0' belongs to another key" in thief.output


def test_a_client_without_a_name_is_asked_for_one(tmp_path: Path) -> None:
    with site(tmp_path, *NUMPY) as place:
        command = place.start("fedtrain-client")
        assert command.wait() == 2
    assert "client.id: a client needs a name" in command.output


def test_a_run_can_start_from_a_file(own: Path) -> None:
    with site(own, *OWN, "rounds=1") as place:
        assert place.start("fedtrain-sim", "run_dir=first").wait() == 0
        again = place.start("fedtrain-sim", "run_dir=second", "model.initial=first/model.safetensors")
        assert again.wait() == 0, again.output
    # One round moves every client half-way to its target; the mean by examples of the targets is 7/9.
    first, second = (read_file(own / name / "model.safetensors") for name in ("first", "second"))
    assert first["w"] == pytest.approx(7 / 18, rel=1e-6)
    assert second["w"] == pytest.approx(7 / 12, rel=1e-6)
    assert (first["seen"], second["seen"]) == (1, 2)


def test_a_run_can_start_from_the_model_that_its_own_folder_holds(own: Path) -> None:
    with site(own, *OWN, "rounds=1", "run_dir=run") as place:
        assert place.start("fedtrain-sim").wait() == 0
        again = place.start("fedtrain-sim", "model.initial=run/model.safetensors")
        assert again.wait() == 0, again.output
    assert read_file(own / "run" / "model.safetensors")["w"] == pytest.approx(7 / 12, rel=1e-6)
    assert read_file(own / "run" / "previous-1" / "model.safetensors")["w"] == pytest.approx(7 / 18, rel=1e-6)


@pytest.mark.parametrize("command", ["fedtrain-sim", "fedtrain-server"])
def test_a_first_model_that_is_missing_is_refused_before_anything_is_written(own: Path, command: str) -> None:
    with site(own, *OWN, "run_dir=run", "server.port=0") as place:
        refused = place.start(command, "model.initial=gone.safetensors")
        assert refused.wait() == 2, refused.output
    assert refused.output.startswith("error: model.initial=gone.safetensors: cannot read")
    assert refused.output.count("\n") == 1
    assert not (own / "run").exists()


def _get(url: str) -> tuple[int, str]:
    with urllib.request.urlopen(url, timeout=5) as answer:
        return answer.status, answer.read().decode()


def _wait_for_file(path: Path, command: Command) -> None:
    deadline = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < deadline, command.output
        assert command.process.poll() is None, command.output
        time.sleep(0.01)
