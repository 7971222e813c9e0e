"""Server and clients on loopback sockets: order, size, crashes, restarts, identity, stopping, clocks.

Both sides run in this process (the clients in their own threads), except where one is killed.
"""

import contextlib
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.supercore import date

from fedtrain import Strategy
from fedtrain.aggregation import by_examples, weighted_mean
from fedtrain.client import Client, Evaluated, Fitted, Work
from fedtrain.errors import ConfigError
from fedtrain.fleet import Fleet, MemoryFleet
from fedtrain.flower import auth, routes, wire
from fedtrain.flower.fleet import FlowerFleet, new_run_id
from fedtrain.flower.server import serving
from fedtrain.local import sgd_epochs
from fedtrain.plan import CohortSettings
from fedtrain.rounds import first_state, run
from fedtrain.selection import uniform
from fedtrain.state import RunState
from fedtrain.types import Params, Start

Tell = Callable[[str, Mapping[str, object]], None]

PATIENCE_S = 10.0
"""No test waits longer than this for anything; what it waits for comes within milliseconds or a second."""


class Log:
    """A `Report` that can be waited for."""

    def __init__(self) -> None:
        self.events: list[dict[str, object]] = []
        self._changed = threading.Condition()

    def __call__(self, event: str, round: int = 0, **fields: object) -> None:
        with self._changed:
            self.events.append({"event": event, "round": round, **fields})
            self._changed.notify_all()

    def tell(self, word: str, details: Mapping[str, object]) -> None:
        """The same for a client's callback."""
        self(word, **details)  # type: ignore[arg-type]

    def all(self, event: str, **fields: object) -> list[dict[str, object]]:
        wanted = {"event": event, **fields}
        return [found for found in list(self.events) if wanted.items() <= found.items()]

    def wait(self, event: str, *, times: int = 1, **fields: object) -> dict[str, object]:
        """The `times`-th event with these fields, as soon as it has happened."""
        with self._changed:
            if not self._changed.wait_for(lambda: len(self.all(event, **fields)) >= times, PATIENCE_S):
                raise AssertionError(f"no {event} {fields} within {PATIENCE_S} s, only: {self.events}")
        return self.all(event, **fields)[times - 1]


class Adds:
    """A trainer that adds its step to every element; `before` is called with the work first."""

    local_algorithms = ("sgd_epochs",)

    def __init__(self, step: float, size: int = 3, before: Callable[[Work], object] = lambda work: None) -> None:
        self.step, self.size, self.before = step, size, before
        self.num_examples = 10

    def initial(self, seed: int) -> Start:
        return Start({"w": np.zeros(self.size, np.float32)}, {"count": np.array(0)})

    def fit(self, start: Start, work: Work) -> Fitted:
        self.before(work)
        model = {"w": start.params["w"] + np.float32(self.step), "count": start.buffers["count"] + 1}
        return Fitted(model, self.num_examples, 1, {"loss": self.step})

    def evaluate(self, model: Params) -> Evaluated:
        return Evaluated(1, {"accuracy": 0.5})


class Site:
    """One server, and the clients that a test starts at it."""

    def __init__(self, fleet: FlowerFleet, log: Log, port: int, folder: Path) -> None:
        self.fleet, self.log, self.port, self.folder = fleet, log, port, folder
        self.address = f"127.0.0.1:{port}"
        self.clients: list[Client] = []

    def client(self, id: str, trainer: Adds, tell: Tell = lambda word, details: None, **settings: object) -> Client:
        folder = settings.pop("state_dir", self.folder / id)
        client = Client(trainer, server=self.address, client_id=id, state_dir=folder, tell=tell, **settings)  # type: ignore[arg-type]
        self.clients.append(client)
        client.start()
        return client


@contextlib.contextmanager
def site(folder: Path, *, port: int = 0, lost_after_s: float = 5.0) -> Iterator[Site]:
    log = Log()
    fleet = FlowerFleet(new_run_id(), folder, lost_after_s=lost_after_s, report=log)
    with serving(fleet, "127.0.0.1", port) as (_, bound):
        there = Site(fleet, log, bound, folder)
        try:
            yield there
        finally:
            assert [client.id for client in there.clients if not client.stop(2.0)] == [], "a client did not stop"


def train(fleet: Fleet, rounds: int, log: Log | None = None, size: int = 3, **settings: object) -> RunState:
    strategy = Strategy(uniform(), sgd_epochs(1), weighted_mean(by_examples))
    state = first_state(strategy, Adds(0, size).initial(0), seed=0)
    cohort = CohortSettings(**{"deadline_s": PATIENCE_S, "connect_deadline_s": PATIENCE_S, **settings})  # type: ignore[arg-type]
    return run(strategy, fleet, state, rounds=rounds, settings=cohort, report=log or Log())


@pytest.fixture
def background() -> Iterator[Callable[..., "Future[RunState]"]]:
    with ThreadPoolExecutor() as pool:
        yield lambda *args, **settings: pool.submit(train, *args, **settings)


STEPS = {"a": 0.1, "b": 0.7, "c": 1e4}
"""Their mean in float32 depends on the order in which they are added."""


def digest_in_order(folder: Path, order: Sequence[str]) -> str:
    """Two rounds in which the clients answer one after the other in this order."""
    with site(folder) as here:

        def turn(client: str, work: Work) -> None:
            position = order.index(client)
            if position:
                here.log.wait("outcome", client=order[position - 1], round=work.round)

        for client, step in STEPS.items():
            here.client(client, Adds(step, before=lambda work, client=client: turn(client, work)))  # type: ignore[misc]
        state = train(here.fleet, 2, here.log, connected=3)
        arrived = [event["client"] for event in here.log.all("outcome")]
        assert arrived == [*order, *order]
        assert state.num_succeeded == 2
        return state.model_digest


def test_the_order_of_answers_does_not_change_the_model_nor_does_the_fleet(tmp_path: Path) -> None:
    expected = train(MemoryFleet({client: Adds(step) for client, step in STEPS.items()}), 2).model_digest
    assert digest_in_order(tmp_path / "1", "abc") == expected
    assert digest_in_order(tmp_path / "2", "cba") == expected
    assert digest_in_order(tmp_path / "3", "bca") == expected


@pytest.mark.parametrize("inline_bytes", [wire.INLINE_BYTES, 16 << 20], ids=["data route", "inline"])
def test_a_large_model_gives_the_same_digest_on_either_route(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, inline_bytes: int
) -> None:
    monkeypatch.setattr(wire, "INLINE_BYTES", inline_bytes)
    monkeypatch.setattr(routes, "_MAX_MESSAGE_BYTES", inline_bytes + 65_536)
    size = 700_000  # 2.8 MB
    paths: list[Path] = []
    original = FlowerFleet.upload_path

    def upload_path(fleet: FlowerFleet, number: int) -> Path:
        paths.append(original(fleet, number))
        return paths[-1]

    monkeypatch.setattr(FlowerFleet, "upload_path", upload_path)
    with site(tmp_path) as here:
        for client, step in STEPS.items():
            here.client(client, Adds(step, size))
        state = train(here.fleet, 2, here.log, size, connected=3)
        assert list(here.fleet.spool.iterdir()) == []
        assert here.fleet.broker.num_messages == 0
    expected = train(MemoryFleet({client: Adds(step, size) for client, step in STEPS.items()}), 2, size=size)
    assert state.model_digest == expected.model_digest
    # Each task's file is asked for when it is settled, and before that when it is uploaded.
    assert len(paths) == (6 if inline_bytes > 4 * size else 6 + 6)


# Crashes and restarts.

PROCESS = """
import sys, time
import numpy as np
from fedtrain.client import Client, Fitted
class Trainer:
    num_examples, local_algorithms = 10, ("sgd_epochs",)
    def fit(self, start, work):
        print("training", work.round, work.seed, flush=True)
        while {blocked}:
            time.sleep(60)
        return Fitted({{"w": start.params["w"] + 1, "count": start.buffers["count"] + 1}}, 10, 1)
client = Client(Trainer(), server="{address}", client_id="p", state_dir=sys.argv[1])
client.start()
client.wait()
"""


@contextlib.contextmanager
def process(here: Site, *, blocked: bool) -> Iterator["subprocess.Popen[str]"]:
    code = PROCESS.format(blocked=blocked, address=here.address)
    child = subprocess.Popen([sys.executable, "-c", code, str(here.folder / "p")], stdout=subprocess.PIPE, text=True)
    try:
        yield child
    finally:
        child.kill()
        child.wait()
        assert child.stdout is not None
        child.stdout.close()


def first_line(child: "subprocess.Popen[str]") -> list[str]:
    assert child.stdout is not None
    return child.stdout.readline().split()


def test_a_killed_client_is_lost_within_seconds_and_takes_part_in_the_next_round(
    tmp_path: Path, background: Callable[..., "Future[RunState]"]
) -> None:
    with site(tmp_path, lost_after_s=1.0) as here, process(here, blocked=True) as child:
        here.client("a", Adds(1.0))
        result = background(here.fleet, 2, here.log, connected=2, answers=1)
        assert first_line(child)[:2] == ["training", "1"]
        until(lambda: here.fleet._members["p"].polls == 1)
        child.send_signal(signal.SIGKILL)
        killed_at = time.monotonic()
        here.log.wait("client_lost", client="p")
        assert time.monotonic() - killed_at < 0.5, "a closed connection is noticed at once"
        lost = here.log.wait("outcome", client="p", outcome="lost", round=1)
        assert 0.9 < time.monotonic() - killed_at < 2.0
        assert lost["reason"] == "disconnected, and not back within 1 s"
        with process(here, blocked=False) as again:
            assert first_line(again)[:2] == ["training", "2"]
            state = result.result(PATIENCE_S)
        here.log.wait("client_returned", client="p")
    assert [(record.num_ok, record.num_asked) for record in state.history] == [(1, 2), (2, 2)]


def test_with_retry_a_client_that_was_killed_gets_the_same_task_again(
    tmp_path: Path, background: Callable[..., "Future[RunState]"]
) -> None:
    with site(tmp_path, lost_after_s=1.0) as here, process(here, blocked=True) as child:
        here.client("a", Adds(1.0))
        result = background(here.fleet, 1, here.log, connected=2, answers=2, under_quorum="retry")
        before = first_line(child)
        child.send_signal(signal.SIGKILL)
        here.log.wait("outcome", client="p", outcome="lost")
        with process(here, blocked=False) as again:
            assert first_line(again) == before, "same round, same seed"
            state = result.result(PATIENCE_S)
    expected = train(MemoryFleet({"a": Adds(1.0), "p": Adds(1.0)}), 1)
    assert state.model_digest == expected.model_digest


def test_clients_of_a_server_that_was_restarted_come_back_and_train_in_the_new_run(
    tmp_path: Path, background: Callable[..., "Future[RunState]"]
) -> None:
    started, told = threading.Event(), Log()
    cancelled: list[str] = []

    def first_time_endless(work: Work) -> None:
        if not started.is_set():
            started.set()
            wait_for_cancel(work)
            cancelled.append("old run")
            work.progress(1.0)  # and goes on to finish: its answer is to the old run

    with contextlib.ExitStack() as old:
        here = old.enter_context(site(tmp_path))
        client = Client(
            Adds(1.0, before=first_time_endless),
            server=here.address,
            client_id="a",
            state_dir=tmp_path / "a",
            tell=told.tell,
        )
        client.start()
        abandoned = background(here.fleet, 1, here.log, deadline_s=1.0)
        assert started.wait(PATIENCE_S)
    try:
        told.wait("disconnected")
        with site(tmp_path, port=here.port) as new:
            told.wait("connected", times=2)
            assert told.all("connected")[-1]["run"] == new.fleet.run != here.fleet.run
            state = train(new.fleet, 2, new.log)
            assert [event["outcome"] for event in new.log.all("outcome")] == ["ok", "ok"]
            np.testing.assert_array_equal(state.params["w"], [2.0, 2.0, 2.0])
        assert cancelled == ["old run"]
        assert [event["outcome"] for event in told.all("done")] == ["ok", "ok"]
        assert abandoned.result(PATIENCE_S).num_succeeded == 0
    finally:
        assert client.stop(2.0)


def wait_for_cancel(work: Work) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not work.cancelled():
        assert time.monotonic() < deadline, "the work was never called off"
        time.sleep(0.002)


# Identity.


def test_another_key_that_claims_an_enrolled_id_is_refused_also_after_a_restart(tmp_path: Path) -> None:
    with site(tmp_path) as here:
        owner = here.client("a", Adds(1.0))
        here.log.wait("client_connected", client="a")
        thief = here.client("a", Adds(1.0), state_dir=tmp_path / "thief")
        assert thief.wait(PATIENCE_S)
        assert thief.status.phase == "refused"
        assert "client id 'a' belongs to another key" in thief.status.error
        assert owner.status.phase == "idle"
    with site(tmp_path) as here:
        thief = here.client("a", Adds(1.0), state_dir=tmp_path / "thief")
        assert thief.wait(PATIENCE_S)
        assert thief.status.phase == "refused"
        here.client("a", Adds(1.0))
        here.log.wait("client_connected", client="a")


@pytest.mark.parametrize("restarted", [False, True])
def test_a_key_that_is_refused_a_second_id_does_not_take_it_from_its_owner(tmp_path: Path, restarted: bool) -> None:
    with contextlib.ExitStack() as stack:
        here = stack.enter_context(site(tmp_path))
        owner = here.client("a", Adds(1.0))
        here.log.wait("client_connected", client="a")
        assert owner.stop(2.0)
        if restarted:
            stack.close()
            here = stack.enter_context(site(tmp_path))
        greedy = here.client("b", Adds(1.0), state_dir=tmp_path / "a")
        assert greedy.wait(PATIENCE_S)
        assert "this key belongs to the client id 'a'" in greedy.status.error
        here.client("b", Adds(1.0))
        here.log.wait("client_connected", client="b")


@pytest.mark.parametrize("address", ["host", "host:", "host:port", ":9092", "host:0", "::1:9092", []])
def test_an_address_that_is_none_is_refused_when_the_client_is_made(tmp_path: Path, address: str | list[str]) -> None:
    with pytest.raises(ConfigError, match=r"server\.addresses"):
        Client(Adds(1.0), server=address, client_id="a", state_dir=tmp_path)


@pytest.mark.parametrize("status", [302, 400, 403, 404, 413, 500, 503])
def test_what_something_between_answers_is_never_final_and_makes_no_client_hurry(tmp_path: Path, status: int) -> None:
    requests: list[str] = []

    class Between(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            requests.append(self.path)
            self.send_error(status)

        def log_message(self, *args: object) -> None:
            pass

    with (
        ThreadingHTTPServer(("127.0.0.1", 0), Between) as proxy,
        ThreadPoolExecutor() as pool,
        contextlib.ExitStack() as stack,
    ):
        pool.submit(proxy.serve_forever, 0.02)
        stack.callback(proxy.shutdown)
        address = f"127.0.0.1:{proxy.server_address[1]}"
        with Client(Adds(1.0), server=address, client_id="a", state_dir=tmp_path) as client:
            assert not client.wait(0.5)
            assert client.status.phase == "connecting"
            assert client.status.error
    assert 1 < len(requests) < 10, "at pauses of 0.1, 0.2, 0.4 s at most"


# Rounds.


def test_a_round_that_closes_calls_off_its_stragglers_work(tmp_path: Path) -> None:
    seen, told = threading.Event(), Log()
    in_fit = threading.Event()

    def straggle(work: Work) -> None:
        in_fit.set()
        wait_for_cancel(work)
        seen.set()

    with site(tmp_path) as here:
        here.client("a", Adds(1.0, before=lambda work: in_fit.wait(PATIENCE_S)))
        here.client("b", Adds(1.0, before=straggle), tell=told.tell)
        state = train(here.fleet, 1, here.log, connected=2, answers=1, grace_s=0.0)
        closed_at = time.monotonic()
        assert seen.wait(PATIENCE_S)
        assert time.monotonic() - closed_at < 0.5
        told.wait("cancelled", round=1)
    assert (state.history[0].num_ok, here.log.all("outcome", client="b")[0]["outcome"]) == (1, "late")


def test_a_trainer_that_raises_is_a_failed_outcome_and_its_client_lives_on(tmp_path: Path) -> None:
    def once(work: Work) -> None:
        if work.round == 1:
            raise RuntimeError("no space left on the accelerator")

    with site(tmp_path) as here:
        here.client("a", Adds(1.0, before=once))
        state = train(here.fleet, 2, here.log)
        outcomes = here.log.all("outcome")
    assert [event["outcome"] for event in outcomes] == ["failed", "ok"]
    assert outcomes[0]["reason"] == "RuntimeError: no space left on the accelerator"
    assert state.num_succeeded == 1


class Wrong(Adds):
    """Gives something that cannot be sent, or ends in a way of its own."""

    def __init__(self, mistake: str) -> None:
        super().__init__(1.0)
        self.mistake, self.calls = mistake, 0

    def fit(self, start: Start, work: Work) -> Fitted:
        self.calls += 1
        fitted = super().fit(start, work)
        match self.mistake:
            case "metrics":
                return Fitted(fitted.model, 10, 1, {"loss": "small"})  # type: ignore[dict-item]
            case "extra":
                return Fitted(fitted.model, 10, 1, extra={"c": np.zeros(2, np.complex64)})
            case "exit":
                sys.exit(3)
            case "cancel":
                from fedtrain.errors import Cancelled

                raise Cancelled
        return Fitted(fitted.model, np.int64(10), np.int64(1), {"loss": np.float32(0.5)})  # type: ignore[arg-type, dict-item]


@pytest.mark.parametrize(
    ("mistake", "outcome", "reason"),
    [
        ("numpy numbers", "ok", ""),
        ("metrics", "failed", "small"),
        ("extra", "failed", "complex64"),
        ("exit", "failed", "SystemExit: 3"),
        ("cancel", "failed", "Cancelled"),
    ],
)
def test_a_trainer_that_breaks_its_contract_is_asked_once_and_told_of_in_an_outcome(
    tmp_path: Path, mistake: str, outcome: str, reason: str
) -> None:
    with site(tmp_path) as here:
        trainer = Wrong(mistake)
        here.client("a", trainer)
        train(here.fleet, 1, here.log, deadline_s=3.0)
        found = here.log.all("outcome")
    assert [(event["outcome"], trainer.calls) for event in found] == [(outcome, 1)], found
    assert reason in str(found[0]["reason"])


# Stopping.


def assert_stops(client: Client) -> None:
    began = time.monotonic()
    assert client.stop(2.0), [thread.name for thread in threading.enumerate()]
    assert time.monotonic() - began < 2.0
    assert [thread for thread in threading.enumerate() if thread.name.startswith(f"fedtrain-{client.id}-")] == []
    assert client.status.phase == "stopped"


def test_a_client_stops_while_it_connects_to_a_host_that_does_not_answer(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full, contextlib.ExitStack() as stack:
        address = full.getsockname()
        for _ in range(3):  # once the queue is full, further connections wait without an answer
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(address)
        client = Client(Adds(1.0), server=f"127.0.0.1:{address[1]}", client_id="a", state_dir=tmp_path)
        client.start()
        time.sleep(0.2)  # nothing tells that a connection is being attempted
        assert_stops(client)


def test_a_client_stops_while_it_waits_for_the_answer_to_its_enrolment(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        client = Client(Adds(1.0), server=f"127.0.0.1:{silent.getsockname()[1]}", client_id="a", state_dir=tmp_path)
        client.start()
        connection, _ = silent.accept()
        with connection:
            assert connection.recv(1)
            assert_stops(client)


def test_a_client_stops_between_attempts_to_connect(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    told = Log()
    client = Client(
        Adds(1.0),
        server=f"127.0.0.1:{port}",
        client_id="a",
        state_dir=tmp_path,
        tell=told.tell,
    )
    client.start()
    told.wait("disconnected")
    assert_stops(client)


def test_a_client_stops_while_it_waits_for_a_task(tmp_path: Path) -> None:
    with site(tmp_path) as here:
        client = here.client("a", Adds(1.0))
        here.log.wait("client_connected")
        member = here.fleet._members["a"]
        until(lambda: member.polls == 1)
        assert_stops(client)
        here.log.wait("client_lost", client="a")
        assert member.polls == 0


def test_a_client_stops_while_it_trains(tmp_path: Path, background: Callable[..., "Future[RunState]"]) -> None:
    in_fit = threading.Event()

    def endless(work: Work) -> None:
        in_fit.set()
        wait_for_cancel(work)

    with site(tmp_path, lost_after_s=0.3) as here:
        client = here.client("a", Adds(1.0, before=endless))
        result = background(here.fleet, 1, here.log)
        assert in_fit.wait(PATIENCE_S)
        assert_stops(client)
        assert result.result(PATIENCE_S).num_succeeded == 0


def test_a_client_stops_while_it_uploads_to_a_server_that_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, background: Callable[..., "Future[RunState]"]
) -> None:
    uploading, size = threading.Event(), 8_000_000

    async def hang(self: object, request: object, *args: object) -> str:
        uploading.set()
        await request.disconnected()  # type: ignore[attr-defined]
        return "unknown"

    monkeypatch.setattr(routes.Routes, "_store", hang)
    with site(tmp_path, lost_after_s=0.3) as here:
        client = here.client("a", Adds(1.0, size))
        result = background(here.fleet, 1, here.log, size)
        assert uploading.wait(PATIENCE_S)
        assert_stops(client)
        result.result(PATIENCE_S)


def test_an_upload_that_is_called_off_ends_at_once_and_the_client_is_ready_for_the_next_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uploading, size, told = threading.Event(), 8_000_000, Log()
    original = routes.Routes._store

    async def hang_once(self: routes.Routes, request: Any, *args: Any) -> Any:
        if uploading.is_set():
            return await original(self, request, *args)
        uploading.set()
        await request.disconnected()  # reads on, but never answers
        raise routes._Gone

    monkeypatch.setattr(routes.Routes, "_store", hang_once)
    with site(tmp_path) as here:
        here.client("b", Adds(1.0, size), tell=told.tell)
        state = train(here.fleet, 2, here.log, size, deadline_s=1.5)
        told.wait("cancelled", round=1)
    assert [record.num_ok for record in state.history] == [0, 1]


def test_a_client_may_be_stopped_from_its_own_callback(tmp_path: Path) -> None:
    with site(tmp_path) as here:
        clients: list[Client] = []
        stopped = Log()

        def tell(word: str, details: object) -> None:
            if word == "connected":
                stopped("stop", returned=clients[0].stop(2.0))

        clients.append(Client(Adds(1.0), server=here.address, client_id="a", state_dir=tmp_path / "a", tell=tell))
        clients[0].start()
        stopped.wait("stop")
        assert_stops(clients[0])


def test_clients_end_by_themselves_when_the_run_is_over_unless_they_stay(tmp_path: Path) -> None:
    told = Log()
    with site(tmp_path) as here:
        leaves = here.client("leaves", Adds(1.0))
        stays = Client(
            Adds(1.0),
            server=here.address,
            client_id="stays",
            state_dir=tmp_path / "stays",
            stay=True,
            tell=told.tell,
        )
        stays.start()
        train(here.fleet, 1, here.log, connected=2)
        began = time.monotonic()
        here.fleet.finish("completed", PATIENCE_S)
        assert time.monotonic() - began < 1.0
        assert leaves.wait(2.0)
        assert (leaves.status.phase, leaves.status.run_status, leaves.status.rounds) == ("stopped", "completed", 1)
        told.wait("over", status="completed")
    try:
        with site(tmp_path, port=here.port) as new:
            state = train(new.fleet, 1, new.log)
            assert state.num_succeeded == 1
            assert stays.status.run_status == ""
            until(lambda: stays.status.rounds == 2)
    finally:
        assert stays.stop(2.0)


# Clocks, and the server's own waiting.


@pytest.mark.parametrize("minutes", [-10, 10])
def test_a_client_whose_clock_is_wrong_takes_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, minutes: int
) -> None:
    def now() -> datetime:
        of_client = threading.current_thread().name.startswith("fedtrain-a-")
        return date.now() + timedelta(minutes=minutes if of_client else 0)

    monkeypatch.setattr(auth, "now", now)
    with site(tmp_path) as here:
        here.client("a", Adds(1.0))
        assert train(here.fleet, 1, here.log).num_succeeded == 1


def test_a_client_that_enrols_just_before_the_server_begins_to_wait_ends_the_wait(tmp_path: Path) -> None:
    with site(tmp_path) as here:
        assert here.fleet.clients() == []
        here.client("a", Adds(1.0))
        here.log.wait("client_connected")
        began = time.monotonic()
        here.fleet.wait(PATIENCE_S)
        assert time.monotonic() - began < 1.0


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.002)
