"""Starts the real commands as processes, and waits for what they tell. Ends only what it started."""

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

PATIENCE_S = 60.0
"""How long a process may take to say something; a busy machine starts Flower in seconds."""


class Command:
    """One running command; its output is kept, and can be waited for line by line."""

    def __init__(self, name: str, *arguments: str, cwd: Path) -> None:
        executable = Path(sys.executable).parent / name
        self.started = datetime.now(UTC)
        environment = {**os.environ, "FLWR_TELEMETRY_ENABLED": "0", "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        self.process = subprocess.Popen(
            [executable, *arguments],
            cwd=cwd,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.output = ""
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as stream:
            for line in stream:
                self.output += line
                self._lines.put(line)
        self._lines.put(None)

    def wait_for(self, text: str) -> str:
        """The next line that contains `text`; fails with all output if the process ends or says nothing for long."""
        while (line := self._lines.get(timeout=PATIENCE_S)) is not None:
            if text in line:
                return line
        raise AssertionError(f"{self.process.args} ended without saying {text!r}:\n{self.output}")

    def wait(self, timeout_s: float = PATIENCE_S) -> int:
        """The exit status, once it has ended."""
        status = self.process.wait(timeout_s)
        self._reader.join(5)
        return status

    def send(self, number: signal.Signals) -> None:
        """Send a signal."""
        self.process.send_signal(number)

    def end(self) -> None:
        """Kill it if it runs."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self._reader.join(5)


class Site:
    """A folder in which commands run, with short-hands for server, clients and what they write."""

    def __init__(self, folder: Path, *common: str) -> None:
        self.folder, self.common, self.started = folder, common, list[Command]()
        self.address = ""

    def start(self, name: str, *arguments: str) -> Command:
        """Start a command with the common arguments and these."""
        command = Command(name, *self.common, *arguments, cwd=self.folder)
        self.started.append(command)
        return command

    def server(self, *arguments: str, port: int = 0) -> Command:
        """Start a server and wait until it listens."""
        command = self.start("fedtrain-server", "run_dir=run", "display=lines", f"server.port={port}", *arguments)
        self.address = wait_for_event(self.folder / "run", "run_started", command)["address"]
        return command

    def client(self, part: int, *arguments: str, id: str = "") -> Command:
        """Start the client that holds a part of the data."""
        name = id or f"client-{part}"
        own = [f"client.id={name}", f"client.state_dir=state/{name}", f"data.partition={part}"]
        return self.start("fedtrain-client", *own, f"server.addresses=[{self.address}]", *arguments)

    @property
    def port(self) -> int:
        """The server's port."""
        return int(self.address.rpartition(":")[2])

    @property
    def result(self) -> dict[str, Any]:
        """What result.json says."""
        return json.loads((self.folder / "run" / "result.json").read_text())

    def events(self, name: str = "") -> list[dict[str, Any]]:
        """The events so far, or those of one name."""
        return [line for line in events_in(self.folder / "run") if not name or line["event"] == name]


@contextmanager
def site(folder: Path, *common: str) -> Iterator[Site]:
    """A `Site` all of whose commands are ended with the context."""
    place = Site(folder, *common)
    try:
        yield place
    finally:
        for command in place.started:
            command.end()


def events_in(run_dir: Path) -> list[dict[str, Any]]:
    """The complete lines of a run's events."""
    path = run_dir / "events.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def wait_for_event(run_dir: Path, name: str, command: Command, **fields: object) -> dict[str, Any]:
    """The first event of this command's run with this name and these fields, as soon as it is written."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline and command.process.poll() is None:
        for line in events_in(run_dir):
            its_own = datetime.fromisoformat(line["time"]) > command.started  # not of an earlier run in the folder
            if its_own and line["event"] == name and all(line.get(key) == value for key, value in fields.items()):
                return line
        time.sleep(0.02)  # a file can't be waited for otherwise without more dependencies
    raise AssertionError(f"no event {name} {fields} in time; the server said:\n{command.output}")
