"""How much memory the server needs while 4, 8, 16, 32 client processes each send it a large update.

    python tests/bench/server_memory.py                       # 10 million float32 parameters in 10 arrays
    python tests/bench/server_memory.py --clients 4 32 --arrays 1 --json memory.json

Server and clients are processes on loopback, and train two rounds. In each, the client whose turn to be folded comes
first answers last, so that all other updates wait: the worst order there is. Reported is the server's peak of resident
memory (VmHWM, which counts the pages of mapped files), of anonymous memory and of its proportional share (Pss), both
looked at every 20 ms, and what it had when all clients were connected, before the first round.

The clients are forked from this process, after its imports, so that many of them fit into a small machine.
"""

import argparse
import json
import multiprocessing
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import numpy as np

from fedtrain.aggregation import by_examples, weighted_mean
from fedtrain.client import Client, Evaluated, Fitted, Work
from fedtrain.flower.fleet import FlowerFleet, new_run_id
from fedtrain.flower.server import serving
from fedtrain.local import sgd_epochs
from fedtrain.plan import CohortSettings
from fedtrain.rounds import first_state, run
from fedtrain.selection import uniform
from fedtrain.strategy import Strategy
from fedtrain.types import Params, Start

ROUNDS = 2
MIB = 2**20


class Constant:
    """A trainer that adds a number to everything; `turn` is waited for first."""

    num_examples, local_algorithms = 10, ("sgd_epochs",)

    def __init__(self, amount: float, turns: tuple[Event, ...] = ()) -> None:
        self._amount, self._turns = np.float32(amount), turns

    def fit(self, start: Start, work: Work) -> Fitted:
        """Add."""
        if self._turns:
            self._turns[work.round - 1].wait()
        return Fitted({name: array + self._amount for name, array in start.params.items()}, 10, 1)

    def evaluate(self, model: Params) -> Evaluated | None:
        """Nothing to measure."""

    def initial(self, seed: int) -> Start:
        """Not asked of a client."""
        raise NotImplementedError


@dataclass
class Peak:
    """Bytes of the server's memory."""

    pid: int
    before: dict[str, int] = field(default_factory=dict)
    most: dict[str, int] = field(default_factory=dict)

    def watch(self, stop: threading.Event) -> None:
        """Look every 20 ms until `stop`."""
        while not stop.wait(0.02):
            self.look()

    def look(self) -> None:
        """Note what the kernel says now."""
        found = _fields(f"/proc/{self.pid}/status") | _fields(f"/proc/{self.pid}/smaps_rollup")
        for name in ("RssAnon", "Pss", "VmHWM"):
            if name in found:
                self.most[name] = max(self.most.get(name, 0), found[name])

    def begin(self) -> None:
        """The first round is about to begin."""
        Path(f"/proc/{self.pid}/clear_refs").write_text("5")  # the imports' peak is not of interest
        found = _fields(f"/proc/{self.pid}/status")
        self.before, self.most = {"rss": found["VmRSS"], "anonymous": found["RssAnon"]}, {}


def _fields(path: str) -> dict[str, int]:
    try:
        lines = [line.split() for line in Path(path).read_text().splitlines()]
    except OSError:  # it has just ended
        return {}
    return {words[0].rstrip(":"): int(words[1]) * 1024 for words in lines if len(words) == 3 and words[2] == "kB"}


def serve(num_clients: int, num_arrays: int, num_parameters: int) -> None:
    """The server's process: events on standard output; begins when a line comes on standard input."""

    def report(event: str, round: int = 0, **fields: object) -> None:
        print(json.dumps({"event": event, "round": round, **fields}), flush=True)

    size = num_parameters // num_arrays
    model = {f"layer{i}": np.zeros(size, np.float32) for i in range(num_arrays)}
    strategy = Strategy(uniform(), sgd_epochs(1), weighted_mean(by_examples))
    with tempfile.TemporaryDirectory() as folder:
        fleet = FlowerFleet(new_run_id(), Path(folder), report=report, lost_after_s=60)
        with serving(fleet, "127.0.0.1", 0) as (_, port):
            report("listening", port=port)
            sys.stdin.readline()
            settings = CohortSettings(connected=num_clients, answers=num_clients)
            state = first_state(strategy, Start(model, {}), seed=0)
            del model
            state = run(strategy, fleet, state, rounds=ROUNDS, settings=settings, report=report)
            report("finished", succeeded=state.num_succeeded, spooled=len(list(fleet.spool.iterdir())))
            fleet.finish("completed", 10.0)


def be_client(number: int, port: int, folder: str, turns: tuple[Event, ...]) -> None:
    """A client's process."""
    name = f"c{number:03d}"
    client = Client(
        Constant(0.01 * (number + 1), turns if number == 0 else ()),
        server=f"127.0.0.1:{port}",
        client_id=name,
        state_dir=Path(folder) / name,
    )
    client.start()
    client.wait()


def measure(num_clients: int, num_arrays: int, num_parameters: int) -> dict[str, Any]:
    """One run; what the server needed."""
    began = time.monotonic()
    server = subprocess.Popen(
        [sys.executable, __file__, "--serve", *map(str, (num_clients, num_arrays, num_parameters))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert server.stdin is not None
    assert server.stdout is not None
    context = multiprocessing.get_context("fork")
    turns = tuple(context.Event() for _ in range(ROUNDS))
    clients = []
    peak, stop, connected, seconds = Peak(server.pid), threading.Event(), 0, []
    answered = [0] * (ROUNDS + 1)
    watching = threading.Thread(target=peak.watch, args=(stop,))
    with tempfile.TemporaryDirectory() as folder:
        try:
            for line in server.stdout:
                event = json.loads(line)
                match event["event"]:
                    case "listening":
                        clients = [
                            context.Process(target=be_client, args=(number, event["port"], folder, turns))
                            for number in range(num_clients)
                        ]
                        for client in clients:  # before any thread is started here: they are forked
                            client.start()
                    case "client_connected":
                        connected += 1
                        if connected == num_clients:
                            peak.begin()
                            watching.start()
                            print("begin", file=server.stdin, flush=True)
                    case "outcome":
                        answered[event["round"]] += event["outcome"] == "ok"
                        if answered[event["round"]] == num_clients - 1:
                            turns[event["round"] - 1].set()
                    case "round_finished":
                        seconds.append(event["seconds"])
                    case "finished":
                        assert event == {"event": "finished", "round": 0, "succeeded": ROUNDS, "spooled": 0}, event
                        peak.look()
        finally:
            stop.set()
            for client in clients:
                client.join(20)
                client.kill()
            server.kill()
            server.wait()
    return {
        "clients": num_clients,
        "arrays": num_arrays,
        "parameters": num_parameters,
        "before_rss": peak.before["rss"],
        "before_anonymous": peak.before["anonymous"],
        "peak_rss": peak.most["VmHWM"],
        "peak_anonymous": peak.most["RssAnon"],
        "peak_pss": peak.most["Pss"],
        "round_s": seconds,
        "seconds": time.monotonic() - began,
    }


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, nargs="+", default=[4, 8, 16, 32])
    parser.add_argument("--parameters", type=int, default=10_000_000)
    parser.add_argument("--arrays", type=int, default=10)
    parser.add_argument("--json", type=Path, help="also write the figures here")
    parser.add_argument("--serve", type=int, nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        serve(*arguments.serve)
        return
    print(f"{arguments.parameters:,} float32 parameters in {arguments.arrays} arrays; MiB of the server's process")
    print(f"{'clients':>8}{'before':>10}{'peak RSS':>10}{'peak anon':>11}{'peak Pss':>10}{'round s':>10}", flush=True)
    found = []
    for num_clients in arguments.clients:
        one = measure(num_clients, arguments.arrays, arguments.parameters)
        found.append(one)
        sizes = [one[name] / MIB for name in ("before_rss", "peak_rss", "peak_anonymous", "peak_pss")]
        slowest = max(one["round_s"])
        print(
            f"{num_clients:>8}{sizes[0]:>10.0f}{sizes[1]:>10.0f}{sizes[2]:>11.0f}{sizes[3]:>10.0f}{slowest:>10.1f}",
            flush=True,
        )
    first, last = found[0], found[-1]
    for name in ("peak_rss", "peak_anonymous", "peak_pss"):
        print(
            f"{name}: {last['clients']} clients need {last[name] / first[name]:.2f} times what {first['clients']} need"
        )
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
