"""`flwr run` with Flower's own programs: a stock SuperLink and two stock SuperNodes as processes on loopback."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from commands import site

from fedtrain.params import digest, read_file

APP = Path(__file__).parents[2] / "simulations" / "flwr_app"
NUM_CLIENTS = 2
PATIENCE_S = 180.0

CONNECTION = """
[superlink]
default = "here"

[superlink.here]
address = "127.0.0.1:{port}"
insecure = true
"""


class Flower:
    """A SuperLink and SuperNodes that run as long as the context lasts; all files lie in one folder."""

    def __init__(self, folder: Path, stack: ExitStack, *, supernodes: bool) -> None:
        self.folder, self._stack = folder, stack
        self.environment = {
            **os.environ,
            "FLWR_HOME": str(folder / "home"),
            "FLWR_TELEMETRY_ENABLED": "0",
            "OMP_NUM_THREADS": "1",
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        }
        link, *nodes = free_ports(1 + NUM_CLIENTS)
        (folder / "home").mkdir()
        (folder / "home" / "config.toml").write_text(CONNECTION.format(port=link))
        superlink = ("flower-superlink", "--insecure", "--port", str(link), "--disable-runtime-dependency-installation")
        self.superlink = self._start("superlink", *superlink)
        wait_until(lambda: listens(link), self.superlink, self.log("superlink"))
        self.address = f"127.0.0.1:{link}"
        for part, port in enumerate(nodes if supernodes else ()):
            own = ("--superlink", f"127.0.0.1:{link}", "--port", str(port))
            config = ("--node-config", f"partition-id={part} num-partitions={NUM_CLIENTS}")
            self._start(f"supernode-{part}", "flower-supernode", "--insecure", *own, *config)

    def run(self, overrides: str) -> None:
        """Submit the app with these overrides; it runs in the background."""
        command = ("flwr", "run", str(APP), "here", "--run-config", f"overrides={json.dumps(overrides)}")
        done = subprocess.run(self._path(*command), env=self.environment, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stdout + done.stderr

    def log(self, name: str) -> Path:
        """What a program has said."""
        return self.folder / f"{name}.log"

    def _start(self, name: str, *command: str) -> "subprocess.Popen[bytes]":
        with open(self.log(name), "wb") as log:
            process = subprocess.Popen(
                self._path(*command),
                cwd=self.folder,
                env=self.environment,
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
            )
        self._stack.callback(end_with_children, process)
        return process

    @staticmethod
    def _path(program: str, *arguments: str) -> list[str]:
        return [str(Path(sys.executable).parent / program), *arguments]


@contextmanager
def flower(folder: Path, *, supernodes: bool = True) -> Iterator[Flower]:
    with ExitStack() as stack:
        yield Flower(folder, stack, supernodes=supernodes)


def end_with_children(process: "subprocess.Popen[bytes]") -> None:
    try:
        family = [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]
    except psutil.NoSuchProcess:
        family = []
    for member in reversed(family):  # the program first: it would start its children anew
        with suppress(psutil.NoSuchProcess):
            member.kill()
    process.wait(30)


def free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


def listens(port: int) -> bool:
    with socket.socket() as one:
        return one.connect_ex(("127.0.0.1", port)) == 0


def wait_until(holds: Any, process: "subprocess.Popen[bytes]", log: Path) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not holds():
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.1)  # of another program's file or port nothing else tells


@pytest.mark.slow
def test_flwr_run_gives_the_model_that_a_simulation_gives(tmp_path: Path) -> None:
    overrides = ("experiment=quickstart_numpy", f"data.num_partitions={NUM_CLIENTS}", "rounds=2", "seed=7")
    run_dir = tmp_path / "run"
    with flower(tmp_path) as programs:
        programs.run(" ".join((*overrides, f"run_dir={run_dir}", "display=lines")))
        wait_until((run_dir / "result.json").exists, programs.superlink, programs.log("superlink"))

    simulation = [Path(sys.executable).parent / "fedtrain-sim", *overrides, f"run_dir={tmp_path / 'simulated'}"]
    subprocess.run(simulation, check=True, capture_output=True, timeout=PATIENCE_S)

    result = json.loads((run_dir / "result.json").read_text())
    expected = json.loads((tmp_path / "simulated" / "result.json").read_text())
    assert (result["status"], result["rounds_completed"], result["rounds_skipped"]) == ("completed", 2, 0)
    assert result["model_digest"] == expected["model_digest"] == digest(read_file(run_dir / "model.safetensors"))
    assert result["final_metrics"] == expected["final_metrics"]
    assert result["final_metrics"]["accuracy"] > 0.5
    events = [json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines()]
    assert {event["client"] for event in events if event["event"] == "outcome"} == {"client-0", "client-1"}


@pytest.mark.slow
def test_clients_of_a_stock_superlink_give_the_same_model_without_a_process_per_message(tmp_path: Path) -> None:
    overrides = ("experiment=quickstart_numpy", f"data.num_partitions={NUM_CLIENTS}", "rounds=2", "seed=7")
    run_dir = tmp_path / "run"
    with flower(tmp_path, supernodes=False) as programs, site(tmp_path, *overrides) as place:
        clients = [
            place.start(
                "fedtrain-client",
                "server.stock=true",
                f"server.addresses=[{programs.address}]",
                f"data.partition={part}",
                f"client.state_dir=state/{part}",
            )
            for part in range(NUM_CLIENTS)
        ]
        for client in clients:
            client.wait_for("connected")
        programs.run(" ".join((*overrides, f"run_dir={run_dir}", "display=lines")))
        wait_until((run_dir / "result.json").exists, programs.superlink, programs.log("superlink"))
        for client in clients:
            client.send(signal.SIGINT)
        assert [client.wait() for client in clients] == [130, 130], clients[0].output
        simulation = place.start("fedtrain-sim", "run_dir=simulated")
        assert simulation.wait() == 0, simulation.output

    result = json.loads((run_dir / "result.json").read_text())
    expected = json.loads((tmp_path / "simulated" / "result.json").read_text())
    assert (result["status"], result["rounds_completed"], result["rounds_skipped"]) == ("completed", 2, 0)
    assert result["model_digest"] == expected["model_digest"]
    assert "round 2: trained" in clients[1].output
