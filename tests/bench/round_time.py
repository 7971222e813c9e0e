"""Round time of fedtrain and of stock Flower, side by side on this machine.

    python tests/bench/round_time.py                          all cases, also with TLS, fedtrain and stock
    python tests/bench/round_time.py small bulk --no-stock    some cases, fedtrain alone
    python tests/bench/round_time.py tensors --no-tls --rounds 30

Both train the same arrays with a client that adds a constant, on loopback, without evaluation; every client is a
process. What is measured is a whole training round on the server: for fedtrain from the end of one round to the end of
the next (plan, digest, sending, training, answers, checks, mean, step, events), for Flower from `configure_train` to
the end of `aggregate_train`. The first round of fedtrain is left out. Flower's programs are started as its
documentation says, with nothing changed. Figures of a busy machine are worth little: compare those of one run.
"""

import argparse
import contextlib
import dataclasses
import itertools
import json
import os
import resource
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil  # type: ignore[import-untyped, unused-ignore]

from fedtrain.client.trainer import Evaluated, Fitted, Work
from fedtrain.types import Params, Start

PATIENCE_S = 600.0


@dataclass(frozen=True)
class Case:
    """What is trained, and by how many."""

    name: str
    num_arrays: int
    size: int
    """Float32 elements of each array."""
    num_clients: int
    rounds: int
    stock_rounds: int = 3


CASES = {
    case.name: case
    for case in (
        Case("small", 10, 100, 8, rounds=100),
        Case("bulk", 10, 1_000_000, 4, rounds=10),
        Case("tensors", 300, 83_333, 2, rounds=10),
    )
}


@dataclass(frozen=True)
class Timing:
    """What one system needed for one case."""

    system: str
    case: str
    tls: bool
    seconds: list[float]
    """One per round."""
    server_peak_mib: float
    """Resident memory of the server's processes; Flower's: of SuperLink, SuperExec and ServerApp together."""
    requests: float | None = None
    """Requests per client and round that the server has seen."""
    mb: float | None = None
    """Megabytes (1e6) of bodies per client and round, both directions together."""
    server_cpu_s: float | None = None
    """Processor time of the server per round; says more than the clock on a busy machine."""
    client_cpu_s: float | None = None
    """Processor time of one client per round."""
    wire_dtype: str | None = None

    @property
    def median(self) -> float:
        """Seconds of the middle round."""
        return statistics.median(self.seconds)


class Constant:
    """A trainer whose training adds 0.5 to every element."""

    num_examples = 1
    local_algorithms = ("sgd_epochs",)

    def __init__(self, case: Case) -> None:
        self._case = case
        self.cpu_s: list[float] = []
        """Processor time of the process at the beginning of each round."""

    def initial(self, seed: int) -> Start:
        """Random arrays."""
        random = np.random.default_rng(seed)
        return Start(
            {f"w{i:03d}": random.random(self._case.size, np.float32) for i in range(self._case.num_arrays)}, {}
        )

    def fit(self, start: Start, work: Work) -> Fitted:
        """One addition."""
        self.cpu_s.append(time.process_time())
        return Fitted({name: array + np.float32(0.5) for name, array in start.params.items()}, 1, 1)

    def evaluate(self, model: Params) -> Evaluated | None:
        """Nothing is held out."""
        return None


# fedtrain: this file is started again as the server, and once per client.


def time_fedtrain(case: Case, folder: Path, *, tls: bool, wire_dtype: str | None) -> Timing:
    """Run a server and its clients as processes."""
    certificates = certificates_in(folder) if tls else None
    job = {"case": dataclasses.asdict(case), "folder": str(folder), "certificates": certificates, "dtype": wire_dtype}
    with contextlib.ExitStack() as stack:
        server = started(stack, [sys.executable, __file__, "--as-server", json.dumps(job)], folder, pipe=True)
        assert server.stdout is not None
        port = int(server.stdout.readline())
        clients = [
            started(
                stack, [sys.executable, __file__, "--as-client", json.dumps({**job, "port": port, "index": i})], folder
            )
            for i in range(case.num_clients)
        ]
        found = json.loads(server.stdout.readline())
        for process in (server, *clients):
            if process.wait(PATIENCE_S):
                raise SystemExit(f"a process of fedtrain failed: {process.args!r}")
        client_cpu_s = statistics.mean(float((folder / f"cpu-c{i}").read_text()) for i in range(case.num_clients))
    return Timing("fedtrain", case.name, tls, **found, client_cpu_s=client_cpu_s, wire_dtype=wire_dtype)


def be_server(job: dict[str, Any]) -> None:
    """Serve one run, and print what it took."""
    from fedtrain import Strategy
    from fedtrain.aggregation import by_examples, weighted_mean
    from fedtrain.flower.fleet import FlowerFleet, new_run_id
    from fedtrain.flower.routes import Routes
    from fedtrain.flower.server import serving
    from fedtrain.local import sgd_epochs
    from fedtrain.observe.events import Events
    from fedtrain.observe.status import Status
    from fedtrain.plan import CohortSettings
    from fedtrain.rounds import first_state, run
    from fedtrain.security.tls import ServerCertificate
    from fedtrain.selection import uniform

    num_requests, num_bytes, ends, counts = 0, 0, list[float](), list[tuple[int, int, float]]()
    handle = Routes.__call__

    async def counted(routes: Routes, scope: Any, receive: Any, send: Any) -> None:
        nonlocal num_requests
        num_requests += 1

        def count(event: Any) -> Any:
            nonlocal num_bytes
            num_bytes += len(event.get("body", b""))
            return event

        async def received() -> Any:
            return count(await receive())

        await handle(routes, scope, received, lambda event: send(count(event)))

    Routes.__call__ = counted  # type: ignore[method-assign,assignment]

    def note(event: str, round: int = 0, **fields: object) -> None:
        if event == "round_finished":
            assert not fields["skipped"], fields
            ends.append(time.perf_counter())
            counts.append((num_requests, num_bytes, time.process_time()))

    case, folder, paths = Case(**job["case"]), Path(job["folder"]), job["certificates"]
    report = Events(folder / "events.jsonl", [Status(), note])
    fleet = FlowerFleet(new_run_id(), folder, report=report)
    certificate = ServerCertificate(paths["certificate"], paths["key"]) if paths else None
    strategy = Strategy(select=uniform(case.num_clients), local=sgd_epochs(1), aggregate=weighted_mean(by_examples))
    settings = CohortSettings(connected=case.num_clients, answers=case.num_clients, wire_dtype=job["dtype"])
    start = Constant(case).initial(0)
    with serving(fleet, "127.0.0.1", 0, certificate=certificate) as (_, port):
        print(port, flush=True)
        run(strategy, fleet, first_state(strategy, start, 0), rounds=case.rounds + 1, settings=settings, report=report)
        fleet.finish("completed", timeout_s=5.0)
    seconds = [end - begin for begin, end in itertools.pairwise(ends)]
    requests, body_bytes, cpu_s = (end - begin for begin, end in zip(counts[0], counts[-1], strict=True))
    found = {
        "seconds": seconds,
        "server_peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "requests": requests / case.num_clients / case.rounds,
        "mb": body_bytes / 1e6 / case.num_clients / case.rounds,
        "server_cpu_s": cpu_s / case.rounds,
    }
    print(json.dumps(found), flush=True)


def be_client(job: dict[str, Any]) -> None:
    """Take part until the run is over."""
    from fedtrain.client import Client

    name, paths = f"c{job['index']}", job["certificates"]
    trainer = Constant(Case(**job["case"]))
    client = Client(
        trainer,
        server=f"127.0.0.1:{job['port']}",
        client_id=name,
        state_dir=Path(job["folder"]) / name,
        ca=paths["ca"] if paths else None,
    )
    client.start()
    client.wait(PATIENCE_S)
    cpu_s = (trainer.cpu_s[-1] - trainer.cpu_s[0]) / (len(trainer.cpu_s) - 1)
    (Path(job["folder"]) / f"cpu-{name}").write_text(str(cpu_s))


# Flower: its own programs, and an app that does the same.

_APP = {
    "pyproject.toml": """
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"
[project]
name = "constant-app"
version = "1.0.0"
description = "Adds a constant"
license = "Apache-2.0"
dependencies = []
[tool.hatch.build.targets.wheel]
packages = ["constant_app"]
[tool.flwr.app]
publisher = "fedtrain"
[tool.flwr.app.components]
serverapp = "constant_app.server:app"
clientapp = "constant_app.client:app"
[tool.flwr.app.config]
rounds = 3
clients = 1
arrays = 1
size = 1
result = ""
""",
    "constant_app/__init__.py": "",
    "constant_app/client.py": """
import numpy as np
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()

@app.train()
def train(message, context):
    arrays = [array + np.float32(0.5) for array in message.content["arrays"].to_numpy_ndarrays()]
    content = {"arrays": ArrayRecord(arrays), "metrics": MetricRecord({"num-examples": 1})}
    return Message(RecordDict(content), reply_to=message)
""",
    "constant_app/server.py": """
import json
import os
import time

import numpy as np
from flwr.app import ArrayRecord
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg

app = ServerApp()

@app.main()
def main(grid, context):
    config, began, seconds = context.run_config, [], []

    class Timed(FedAvg):
        def configure_train(self, *arguments):
            began.append(time.perf_counter())
            return super().configure_train(*arguments)

        def aggregate_train(self, round, replies):
            replies = list(replies)
            found = super().aggregate_train(round, replies)
            assert len(replies) == config["clients"] and all(reply.has_content() for reply in replies)
            seconds.append(time.perf_counter() - began[-1])
            return found

    random, n = np.random.default_rng(0), config["clients"]
    initial = ArrayRecord([random.random(config["size"], np.float32) for _ in range(config["arrays"])])
    strategy = Timed(fraction_train=1.0, fraction_evaluate=0.0, min_train_nodes=n, min_available_nodes=n)
    strategy.start(grid, initial, num_rounds=config["rounds"], timeout=540)
    with open(config["result"] + ".tmp", "w") as file:
        json.dump(seconds, file)
    os.replace(config["result"] + ".tmp", config["result"])
""",
}


def time_stock(case: Case, folder: Path, *, tls: bool) -> Timing:
    """Run a stock SuperLink and SuperNodes, and `flwr run`."""
    for name, text in _APP.items():
        path = folder / "app" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    paths = certificates_in(folder) if tls else None
    link, *nodes = free_ports(1 + case.num_clients)
    home = folder / "home"
    home.mkdir()
    trust = f'root-certificates = "{paths["ca"]}"' if paths else "insecure = true"
    (home / "config.toml").write_text(
        f'[superlink]\ndefault = "here"\n\n[superlink.here]\naddress = "127.0.0.1:{link}"\n{trust}\n'
    )
    secure_link, secure_node = ["--insecure"], ["--insecure"]
    if paths:
        secure_link = ["--ssl-certfile", paths["certificate"], "--ssl-keyfile", paths["key"]]
        secure_link += ["--ssl-ca-certfile", paths["ca"]]
        secure_node = ["--root-certificates", paths["ca"]]
    result = folder / "stock.json"
    with contextlib.ExitStack() as stack:
        superlink = started(
            stack,
            program("flower-superlink", *secure_link, "--port", str(link), "--disable-runtime-dependency-installation"),
            folder,
        )
        wait_until(lambda: listens(link), superlink, 0.1)
        for index, port in enumerate(nodes):
            own = ["--superlink", f"127.0.0.1:{link}", "--port", str(port)]
            config = ["--node-config", f"partition-id={index} num-partitions={case.num_clients}"]
            started(stack, program("flower-supernode", *secure_node, *own, *config), folder)
        settings = f"rounds={case.stock_rounds} clients={case.num_clients} arrays={case.num_arrays} size={case.size}"
        command = program("flwr", "run", str(folder / "app"), "here", "--run-config", f'{settings} result="{result}"')
        if started(stack, command, folder).wait(PATIENCE_S):
            raise SystemExit(f"flwr run failed:\n{(folder / 'flwr.log').read_text()}")
        peak = 0

        def finished() -> bool:
            nonlocal peak
            peak = max(peak, family_rss(superlink.pid))
            return result.exists()

        wait_until(finished, superlink, 0.25)
    return Timing("stock", case.name, tls, json.loads(result.read_text()), peak / 2**20)


# Processes, ports, certificates.


def program(name: str, *arguments: str) -> list[str]:
    """A command of the environment that this runs in."""
    return [str(Path(sys.executable).parent / name), *arguments]


def started(
    stack: contextlib.ExitStack, command: Sequence[str], folder: Path, *, pipe: bool = False
) -> "subprocess.Popen[str]":
    """A process that ends, with all that it has started, when `stack` is left."""
    environment = {
        **os.environ,
        "FLWR_HOME": str(folder / "home"),
        "FLWR_TELEMETRY_ENABLED": "0",
        "OMP_NUM_THREADS": "1",
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    }
    with open(folder / f"{Path(command[0]).name}.log", "ab") as log:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE if pipe else log,
            stderr=None if pipe else log,
            text=True,
        )
    stack.callback(end, process)
    return process


def end(process: "subprocess.Popen[str]") -> None:
    """End a process and its descendants."""
    family = []
    with contextlib.suppress(psutil.NoSuchProcess):
        parent = psutil.Process(process.pid)
        family = [parent, *parent.children(recursive=True)]
    for member in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            member.kill()
    process.wait(30)


def family_rss(pid: int) -> int:
    """Resident bytes of a process and its descendants."""
    total = 0
    with contextlib.suppress(psutil.NoSuchProcess):
        parent = psutil.Process(pid)
        for member in (parent, *parent.children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess):
                total += member.memory_info().rss
    return total


def wait_until(holds: Any, process: "subprocess.Popen[str]", look_s: float) -> None:
    """Look every `look_s` seconds: of another program's file or port nothing else tells."""
    deadline = time.monotonic() + PATIENCE_S
    while not holds():
        if process.poll() is not None or time.monotonic() > deadline:
            raise SystemExit(f"{process.args!r} ended, or took too long")
        time.sleep(look_s)


def free_ports(count: int) -> list[int]:
    """Ports that nobody uses now."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


def listens(port: int) -> bool:
    """Whether somebody listens on a port of loopback."""
    with socket.socket() as one:
        return one.connect_ex(("127.0.0.1", port)) == 0


def certificates_in(folder: Path) -> dict[str, str]:
    """Paths of a new test authority and a certificate for loopback."""
    from fedtrain.security.certificates import make_certificates

    made = make_certificates(folder / "certificates")
    return {"ca": str(made.ca), "certificate": str(made.certificate), "key": str(made.key)}


# What is run, and what is printed.


def timings(options: argparse.Namespace) -> Iterator[Timing]:
    """One after the other."""
    for name in options.cases or CASES:
        case = CASES[name]
        case = dataclasses.replace(case, rounds=options.rounds or case.rounds)
        for tls in (False,) if options.no_tls else (False, True):
            with tempfile.TemporaryDirectory(prefix="round-time-") as folder:
                yield time_fedtrain(case, Path(folder), tls=tls, wire_dtype=options.wire_dtype)
            if not options.no_stock:
                with tempfile.TemporaryDirectory(prefix="round-time-") as folder:
                    yield time_stock(case, Path(folder), tls=tls)


_HEAD = (
    "| case | system | | median ms | min | max | rounds | ratio | server CPU ms | client CPU ms | requests "
    "| MB | server peak MiB |"
)


def row(timing: Timing, all_timings: Sequence[Timing]) -> str:
    """One line of the table; the ratio is that to stock Flower in the same run, with or without TLS alike."""
    stock = [t for t in all_timings if (t.system, t.case, t.tls) == ("stock", timing.case, timing.tls)]
    ratio = f"{stock[0].median / timing.median:.0f}x" if stock and timing.system != "stock" else ""
    cells = [
        timing.case,
        timing.system + (f" {timing.wire_dtype}" if timing.wire_dtype else ""),
        "TLS" if timing.tls else "plain",
        *(f"{value * 1000:.1f}" for value in (timing.median, min(timing.seconds), max(timing.seconds))),
        str(len(timing.seconds)),
        ratio,
        *("" if value is None else f"{value * 1000:.1f}" for value in (timing.server_cpu_s, timing.client_cpu_s)),
        *("" if value is None else f"{value:.2f}" for value in (timing.requests, timing.mb)),
        f"{timing.server_peak_mib:.0f}",
    ]
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    """Parse the command line, measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"{', '.join(CASES)}; none: all")
    parser.add_argument("--no-stock", action="store_true", help="leave Flower's own programs out")
    parser.add_argument("--no-tls", action="store_true", help="plain text only")
    parser.add_argument("--rounds", type=int, help="of fedtrain, instead of each case's own number")
    parser.add_argument("--wire-dtype", choices=("bfloat16", "float16"), help="fedtrain's wire.dtype")
    parser.add_argument("--json", type=Path, help="write all rounds' times there")
    parser.add_argument("--as-server", type=json.loads, help=argparse.SUPPRESS)
    parser.add_argument("--as-client", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.as_server:
        be_server(options.as_server)
    elif options.as_client:
        be_client(options.as_client)
    else:
        for name in options.cases:
            if name not in CASES:
                parser.error(f"expected cases {', '.join(CASES)}, found {name!r}")
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(1))  # so that what was started is ended
        found = []
        print("load of the machine at the start:", *(f"{load:.2f}" for load in os.getloadavg()))
        for timing in timings(options):
            found.append(timing)
            print(f"  {row(timing, found)}", flush=True)
        print(f"\n{_HEAD}")
        print("|" + "---|" * 13)
        for timing in found:
            print(row(timing, found))
        if options.json:
            options.json.write_text(json.dumps([dataclasses.asdict(timing) for timing in found], indent=1))


if __name__ == "__main__":
    main()
