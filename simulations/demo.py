"""The demonstration of `make demo`: one server and five clients, each a process of its own, on handwritten digits.

    python simulations/demo.py --seed 0

Everything is written under runs/demo, which is cleared first. The commands that it starts are printed: they are what a
user types on six machines.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NUM_CLIENTS = 5
FOLDER = Path("runs/demo")


def main() -> int:
    """Run the demonstration; its exit status is the server's."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seed", type=int, default=0, help="of the initial model, the split and the order of batches")
    parser.add_argument("--rounds", type=int, default=None, help="rounds; default: the experiment's")
    arguments = parser.parse_args()
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir(parents=True)
    rounds = [] if arguments.rounds is None else [f"rounds={arguments.rounds}"]
    common = ["experiment=quickstart", f"data.num_partitions={NUM_CLIENTS}", f"seed={arguments.seed}"]
    began = time.monotonic()
    with started("fedtrain-server", *common, *rounds, f"run_dir={FOLDER}", "server.port=0") as server:
        address = wait_for_event(server, "run_started")["address"]
        with clients(common, address):
            status = server.wait()
    result = json.loads((FOLDER / "result.json").read_text())
    accuracy = result["final_metrics"].get("accuracy", float("nan"))
    print(
        f"\nheld-out accuracy {accuracy:.4f} after {result['rounds_completed']} rounds, "
        f"{training_seconds():.1f} s of training ({time.monotonic() - began:.1f} s with starting everything)\n"
        f"model: {FOLDER / 'model.safetensors'}   events: {FOLDER / 'events.jsonl'}   clients: {FOLDER}/client-*.log"
    )
    return status


@contextmanager
def started(command: str, *arguments: str, log: Path | None = None) -> Iterator["subprocess.Popen[bytes]"]:
    """A command of this environment, running while the context lasts."""
    print("$", command, *arguments, flush=True)
    path = Path(sys.executable).parent / command
    output = open(log, "wb") if log else None  # noqa: SIM115  closed below, with the process
    environment = {"FLWR_TELEMETRY_ENABLED": "0", "OMP_NUM_THREADS": "1", **os.environ}
    process = subprocess.Popen([path, *arguments], stdout=output, stderr=output and subprocess.STDOUT, env=environment)
    try:
        yield process
    finally:
        try:
            process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if output:
            output.close()


@contextmanager
def clients(common: list[str], address: str) -> Iterator[None]:
    """All clients of the demonstration, as processes."""
    from contextlib import ExitStack

    with ExitStack() as stack:
        for part in range(NUM_CLIENTS):
            name = f"client-{part}"
            own = [f"client.id={name}", f"data.partition={part}", f"client.state_dir={FOLDER / name}"]
            stack.enter_context(
                started("fedtrain-client", *common, *own, f"server.addresses=[{address}]", log=FOLDER / f"{name}.log")
            )
        yield


def wait_for_event(server: "subprocess.Popen[bytes]", event: str) -> dict[str, Any]:
    """The first line of this event in the server's events, as soon as it is there."""
    while server.poll() is None:
        for line in events():
            if line["event"] == event:
                return line
        time.sleep(0.05)
    sys.exit(server.returncode or 1)


def events() -> list[dict[str, Any]]:
    """The events so far; a line that is being written is left out."""
    path = FOLDER / "events.jsonl"
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


def training_seconds() -> float:
    """From the first selection of clients to the end of the run."""
    from datetime import datetime

    first = next(line["time"] for line in events() if line["event"] == "selected")
    return (datetime.fromisoformat(events()[-1]["time"]) - datetime.fromisoformat(first)).total_seconds()


if __name__ == "__main__":
    sys.exit(main())
