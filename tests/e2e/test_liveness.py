"""Clients that die or fall asleep, and a server that has run for long."""

import contextlib
import gc
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sized
from pathlib import Path

import numpy as np
import psutil
import pytest
from commands import Site, site, wait_for_event

from fedtrain import Strategy
from fedtrain.aggregation import weighted_mean
from fedtrain.client import Client, Fitted, Work
from fedtrain.flower.fleet import FlowerFleet, Member, new_run_id
from fedtrain.flower.server import serving
from fedtrain.local import sgd_epochs
from fedtrain.params import read_file
from fedtrain.plan import CohortSettings
from fedtrain.rounds import first_state, run
from fedtrain.selection import uniform
from fedtrain.types import Params, Start

TRAINER = '''
"""Adds 1, 3, 5 ... to the model; the clients that are to hang do so until the file `go-on` is there."""
import os, time
import numpy as np
from fedtrain.client import Fitted
from fedtrain.types import Start

def load(partition, num_partitions, seed):
    return partition

class Trainer:
    num_examples, local_algorithms = 10, ("sgd_epochs",)

    def __init__(self, model, data, hang=()):
        self.part, self.hang = data, hang

    def initial(self, seed):
        return Start({"w": np.zeros(2, np.float32)}, {})

    def fit(self, start, work):
        open(f"training-{self.part}-{work.round}", "w").close()
        while self.part in self.hang and work.round == 1 and not os.path.exists("go-on"):
            time.sleep(0.01)
        return Fitted({"w": start.params["w"] + np.float32(2 * self.part + 1)}, 10, 1)

    def evaluate(self, model):
        return None
'''
OWN = (
    "trainer=custom",
    "trainer._target_=own.Trainer",
    "model=custom",
    "model._target_=builtins.object",
    "data=custom",
    "data._target_=own.load",
    "data.num_partitions=3",
    "evaluation.where=none",
)

SLEEPER = """
import sys
import numpy as np
from puppet import Puppet
puppet = Puppet(sys.argv[1], "sleeper")
task, message = puppet.task()
print("ready", flush=True)
sys.stdin.readline()
print(puppet.upload(task.number, puppet.answer(task, {"w": np.full(2, 1000, np.float32)})), flush=True)
"""
"""A client that hears nothing between its task and its answer: a real one would hear first that it is called off."""


@pytest.fixture
def own(tmp_path: Path) -> Iterator[Site]:
    (tmp_path / "own.py").write_text(TRAINER)
    with site(tmp_path, *OWN) as place:
        yield place


def until_trains(place: Site, part: int) -> None:
    while not (place.folder / f"training-{part}-1").exists():
        time.sleep(0.01)  # a file can't be waited for otherwise without more dependencies


def outcomes(place: Site, round: int) -> dict[str, str]:
    return {event["client"]: event["outcome"] for event in place.events("outcome") if event["round"] == round}


def test_a_client_that_is_killed_while_it_trains_holds_the_round_for_seconds_and_is_named(own: Site) -> None:
    server = own.server("rounds=1", "cohort.connected=3", "cohort.deadline_s=120")
    clients = [own.client(part, "+trainer.hang=[2]") for part in range(3)]
    until_trains(own, 2)
    for name in ("client-0", "client-1"):
        wait_for_event(own.folder / "run", "outcome", server, client=name, outcome="ok")
    clients[2].send(signal.SIGKILL)
    killed_at = time.monotonic()
    finished = wait_for_event(own.folder / "run", "round_finished", server)
    assert time.monotonic() - killed_at < 10
    assert (finished["counted"], finished["asked"]) == (2, 3)
    assert outcomes(own, 1) == {"client-0": "ok", "client-1": "ok", "client-2": "lost"}
    (lost,) = [event for event in own.events("outcome") if event["outcome"] == "lost"]
    assert lost["reason"] == "disconnected, and not back within 5 s"
    assert server.wait() == 0
    np.testing.assert_array_equal(read_file(own.folder / "run" / "model.safetensors")["w"], [2.0, 2.0])


def test_a_client_that_sleeps_past_the_deadline_is_late_its_answer_is_not_counted_and_it_trains_again(
    own: Site,
) -> None:
    server = own.server("rounds=2", "cohort.connected=4", "cohort.answers=2", "cohort.deadline_s=4")
    path = [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    sleeper = subprocess.Popen(
        [sys.executable, "-c", SLEEPER, own.address],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with sleeper:
        try:
            assert sleeper.stdin is not None
            assert sleeper.stdout is not None
            clients = [own.client(part, "+trainer.hang=[2]") for part in range(3)]
            assert sleeper.stdout.readline() == "ready\n"
            until_trains(own, 2)
            sleeper.send_signal(signal.SIGSTOP)
            clients[2].send(signal.SIGSTOP)
            (own.folder / "go-on").touch()
            first = wait_for_event(own.folder / "run", "round_finished", server, round=1)
            clients[2].send(signal.SIGCONT)
            sleeper.send_signal(signal.SIGCONT)
            print("go on", file=sleeper.stdin, flush=True)
            assert sleeper.stdout.readline() == "200\n", "it is acknowledged"
            second = wait_for_event(own.folder / "run", "round_finished", server, round=2)
        finally:
            sleeper.kill()
    assert server.wait() == 0
    assert [(done["counted"], done["asked"]) for done in (first, second)] == [(2, 4), (3, 4)]
    assert 4 <= first["seconds"] < 6
    late = [event for event in own.events("outcome") if event["client"] == "sleeper"]
    assert [event["outcome"] for event in late][:2] == ["late", "late"]
    assert [event["reason"] for event in late][:2] == ["no answer within 4 s", "answered after its round had closed"]
    assert outcomes(own, 2)["client-2"] == "ok"
    # Means of 1 and 3, then of 1, 3 and 5; the sleeper's 1000 in neither.
    np.testing.assert_array_equal(read_file(own.folder / "run" / "model.safetensors")["w"], [5.0, 5.0])


class Adds:
    """A trainer of a small model."""

    num_examples, local_algorithms = 10, ("sgd_epochs",)

    def initial(self, seed: int) -> Start:
        return Start({"w": np.zeros(2, np.float32)}, {})

    def fit(self, start: Start, work: Work) -> Fitted:
        return Fitted({"w": start.params["w"] + np.float32(1)}, 10, 1, {"loss": 0.5})

    def evaluate(self, model: Params) -> None:
        return None


def sizes(of: object, seen: frozenset[int] = frozenset()) -> dict[str, int]:
    """How much each container has that an object, or what belongs to Flower or fedtrain in it, refers to."""
    found: dict[str, int] = {}
    for name, value in vars(of).items():
        if isinstance(value, Sized) and not isinstance(value, (str, bytes)):
            found[name] = len(value)
            inner_values = value.values() if isinstance(value, Mapping) else ()
            found[f"{name}.*"] = sum(sum(sizes(inner).values()) for inner in inner_values if isinstance(inner, Member))
        elif type(value).__module__.startswith(("flwr.", "fedtrain.")) and hasattr(value, "__dict__"):
            inside = sizes(value, seen | {id(of)}) if id(value) not in seen else {}
            found.update({f"{name}.{inner}": size for inner, size in inside.items()})
    return found


@pytest.mark.parametrize("rounds", [200, pytest.param(4000, marks=pytest.mark.slow)])
def test_a_long_run_leaves_nothing_behind_in_broker_fleet_or_memory(tmp_path: Path, rounds: int) -> None:
    fleet = FlowerFleet(new_run_id(), tmp_path, lost_after_s=60.0)
    process = psutil.Process()
    seen: dict[int, tuple[dict[str, int], int, int]] = {}

    def report(event: str, round: int = 0, **fields: object) -> None:
        if event == "selected" and round in (rounds // 2, rounds):  # nothing is under way then
            gc.collect()
            seen[round] = sizes(fleet), len(gc.get_objects()), process.memory_info().rss

    strategy = Strategy(uniform(), sgd_epochs(1), weighted_mean())
    with serving(fleet, "127.0.0.1", 0) as (_, port), contextlib.ExitStack() as clients:
        for name in ("a", "b"):
            client = Client(Adds(), server=f"127.0.0.1:{port}", client_id=name, state_dir=tmp_path / name)
            clients.enter_context(client)
        state = first_state(strategy, Adds().initial(0), seed=0)
        settings = CohortSettings(connected=2, answers=2)
        state = run(strategy, fleet, state, rounds=rounds, settings=settings, report=report)
    assert state.num_succeeded == rounds
    (half_sizes, half_objects, half_bytes), (sizes_now, objects, num_bytes) = seen[rounds // 2], seen[rounds]
    assert len(sizes_now) > 20, "Flower's containers were not found"
    assert sizes_now == half_sizes
    assert fleet.broker.num_messages == 0
    # The history has one record, with its metrics, for each round; nothing else grows.
    assert objects - half_objects < 3 * (rounds // 2) + 500
    assert num_bytes - half_bytes < 2048 * (rounds // 2) + 4 * 2**20
