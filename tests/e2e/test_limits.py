"""What one may take of a server: places, time and bytes, each limit by itself."""

import contextlib
import gc
import http.client
import json
import socket
import ssl
import threading
import time
from base64 import b64encode
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import psutil
import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.app import ConfigRecord, MetricRecord, RecordDict
from flwr.common.serde import message_from_proto
from flwr.supercore.constant import FLEET_HTTP_SIGNATURE_HEADER
from puppet import Puppet

from fedtrain.client.identity import client_info
from fedtrain.errors import ConnectionRefused
from fedtrain.flower import auth, connections, fleet, limits, routes, supernode, wire
from fedtrain.flower.auth import Signer
from fedtrain.flower.fleet import FlowerFleet, new_run_id
from fedtrain.flower.limits import Limits
from fedtrain.flower.server import serving
from fedtrain.security.tls import ServerCertificate
from fedtrain.state import start_digest
from fedtrain.testing import task_of
from fedtrain.types import Outcome, Start, Task

PATIENCE_S = 10.0
SMALL = Start({"w": np.zeros(3, np.float32)}, {})
LARGE = Start({"w": np.zeros(8 << 20, np.float32)}, {})  # 32 MiB: more than the system's buffers hold


class Place:
    """A server in this process, with tasks given and outcomes received by hand."""

    def __init__(self, fleet: FlowerFleet, port: int) -> None:
        self.fleet, self.port, self.address = fleet, port, f"127.0.0.1:{port}"

    def give(self, number: int, client: str, start: Start = SMALL) -> Task:
        task = task_of(number, client, start=start_digest(start))
        self.fleet.give([task], start)
        return task

    def outcomes(self) -> list[Outcome]:
        found = []
        while (outcome := self.fleet.receive(0)) is not None:
            found.append(outcome)
        return found

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), PATIENCE_S)


@contextlib.contextmanager
def place(
    folder: Path, *, max_clients: int = 100, certificate: ServerCertificate | None = None, **changes: float
) -> Iterator[Place]:
    there = FlowerFleet(new_run_id(), folder, max_clients=max_clients, lost_after_s=60.0)
    with serving(there, "127.0.0.1", 0, certificate=certificate, limits=Limits(**changes)) as (_, port):  # type: ignore[arg-type]
        yield Place(there, port)


def healthy(sock: socket.socket) -> bool:
    """Whether a request on this connection is answered."""
    try:
        sock.sendall(b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n")
        response = http.client.HTTPResponse(sock)
        response.begin()
        return response.read() == b"ok\n"
    except (OSError, http.client.HTTPException):
        return False


def closed_after(sock: socket.socket) -> float:
    """Seconds until the server closes a connection."""
    began = time.monotonic()
    sock.settimeout(PATIENCE_S)
    with contextlib.suppress(ConnectionError):
        while sock.recv(65_536):
            pass
    return time.monotonic() - began


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.005)  # what another thread of a server does can't be waited for otherwise


def peers(port: int) -> list[object]:
    """To whom a server in this process is connected."""
    found = psutil.Process().net_connections("tcp")
    return [connection.raddr for connection in found if connection.laddr.port == port and connection.raddr]


# Connections.


def test_the_oldest_strangers_make_room_for_new_ones_and_a_client_keeps_its_place(tmp_path: Path) -> None:
    with place(tmp_path, max_strangers=3) as here, contextlib.ExitStack() as stack:
        kept = http.client.HTTPConnection("127.0.0.1", here.port, timeout=PATIENCE_S)
        stack.enter_context(contextlib.closing(kept))
        puppet = Puppet(here.address, "a", connection=kept)
        strangers = [stack.enter_context(here.connect()) for _ in range(5)]
        assert [closed_after(sock) < 5 for sock in strangers[:2]] == [True, True]
        assert [healthy(sock) for sock in strangers[2:]] == [True] * 3
        assert puppet.ask("GET", wire.STARTS_PATH + "0" * 64, connection=kept)[0] == 404
        newest = [stack.enter_context(here.connect()) for _ in range(50)]
        assert [healthy(sock) for sock in newest[-3:]] == [True] * 3
        assert puppet.ask("GET", wire.STARTS_PATH + "0" * 64, connection=kept)[0] == 404


@pytest.mark.parametrize("sent", [b"", b"GET /healthz HT", b"GET /healthz HTTP/1.1\r\nhost: "])
def test_a_stranger_that_has_not_asked_anything_in_time_is_sent_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sent: bytes
) -> None:
    monkeypatch.setattr(connections, "HEAD_S", 0.3)
    with place(tmp_path) as here, here.connect() as sock:
        for byte in sent:
            sock.sendall(bytes([byte]))
        assert 0.1 < closed_after(sock) < 3


def test_a_stranger_that_goes_on_asking_is_let_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "HEAD_S", 0.4)
    with place(tmp_path) as here, here.connect() as sock:
        began = time.monotonic()
        while time.monotonic() - began < 1:
            assert healthy(sock)
        assert 0.2 < closed_after(sock) < 3


def test_a_stranger_whose_head_drips_is_sent_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "HEAD_S", 0.4)
    with place(tmp_path) as here, here.connect() as sock:
        began = time.monotonic()
        sock.sendall(b"GET /healthz HTTP/1.1\r\n")
        with contextlib.suppress(OSError):
            while time.monotonic() - began < PATIENCE_S:
                sock.sendall(b"a")
                time.sleep(0.02)
        assert time.monotonic() - began < 3


def test_a_client_may_be_silent_but_not_in_the_middle_of_a_head(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "HEAD_S", 0.3)
    kept = http.client.HTTPConnection("127.0.0.1", 0, timeout=PATIENCE_S)
    with place(tmp_path) as here, contextlib.closing(kept):
        kept.port = here.port
        puppet = Puppet(here.address, "a", connection=kept)
        kept.sock.settimeout(1.0)
        with pytest.raises(TimeoutError):  # not closed
            kept.sock.recv(1)
        assert puppet.ask("GET", wire.STARTS_PATH + "0" * 64, connection=kept)[0] == 404
        kept.sock.sendall(b"GET /healthz HT")
        assert closed_after(kept.sock) < 3


def test_a_client_has_so_many_connections_and_its_oldest_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "MAX_PER_CLIENT", 3)
    with place(tmp_path) as here, contextlib.ExitStack() as stack:
        puppet = Puppet(here.address, "a")
        own = []
        for _ in range(5):
            connection = http.client.HTTPConnection("127.0.0.1", here.port, timeout=PATIENCE_S)
            own.append(stack.enter_context(contextlib.closing(connection)))
            puppet.ask("GET", wire.STARTS_PATH + "0" * 64, connection=connection)
        assert [closed_after(connection.sock) < 5 for connection in own[:2]] == [True, True]
        for connection in own[2:]:
            assert puppet.ask("GET", wire.STARTS_PATH + "0" * 64, connection=connection)[0] == 404


def test_a_handshake_that_never_comes_takes_a_strangers_place_and_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, certificate: ServerCertificate
) -> None:
    with place(tmp_path / "places", certificate=certificate, max_strangers=2) as here, contextlib.ExitStack() as stack:
        strangers = [stack.enter_context(here.connect()) for _ in range(3)]
        assert closed_after(strangers[0]) < 5
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        assert healthy(stack.enter_context(context.wrap_socket(stack.enter_context(here.connect()))))
    monkeypatch.setattr(connections, "HEAD_S", 0.3)
    with place(tmp_path / "time", certificate=certificate) as here, here.connect() as sock:
        assert 0.1 < closed_after(sock) < 3


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> ServerCertificate:
    from fedtrain.security.certificates import make_certificates

    folder = tmp_path_factory.mktemp("certificates")
    make_certificates(folder, ["localhost"])
    return ServerCertificate(folder / "server.pem", folder / "server-key.pem")


# Heads.


@pytest.mark.parametrize(
    "head",
    [
        b"GET /healthz HTTP/1.1\r\n" + b"a: b\r\n" * 101,
        b"GET /healthz HTTP/1.1\r\na: " + b"b" * 16_384 + b"\r\n",
        b"GET /" + b"a" * 16_384 + b" HTTP/1.1\r\nhost: x\r\n",
        b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n" * 2,
        b"\x16\x03\x01 hello",
    ],
    ids=["many headers", "a long header", "a long path", "two requests at once", "no HTTP"],
)
def test_a_head_that_is_too_much_is_refused(tmp_path: Path, head: bytes) -> None:
    with place(tmp_path) as here, here.connect() as sock:
        sock.sendall(head + b"\r\n")
        answer = b""
        with contextlib.suppress(ConnectionError):
            while piece := sock.recv(65_536):
                answer += piece
        assert answer.startswith(b"HTTP/1.1 400 ")


def test_a_head_of_the_largest_size_is_answered(tmp_path: Path) -> None:
    with place(tmp_path) as here, here.connect() as sock:
        sock.sendall(b"GET /healthz HTTP/1.1\r\n" + b"a: b\r\n" * 99 + b"c: " + b"d" * 16_000 + b"\r\n\r\n")
        assert sock.recv(100).startswith(b"HTTP/1.1 200 ")


def test_what_is_neither_head_nor_body_ends_the_connection(tmp_path: Path) -> None:
    with place(tmp_path) as here:
        puppet = Puppet(here.address, "a")
        task = here.give(0, "a")
        path = f"{wire.UPDATES_PATH}{puppet.run}/{task.number}"
        with puppet.begin("PUT", path, {"transfer-encoding": "chunked"}) as sock, contextlib.suppress(OSError):
            sock.sendall(b"1\r\nx\r\n0\r\n")
            for sent in range(1000):
                sock.sendall(b"a" * 65_536)  # the name of a header behind the body
                assert sent < 500


# Bodies and models on their way.


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "_START_S", 0.2)
    monkeypatch.setattr(limits, "_LOOK_S", 0.05)


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("method", ["POST", "PUT"])
def test_a_body_that_comes_too_slowly_is_given_up(tmp_path: Path, method: str) -> None:
    with place(tmp_path, min_bytes_per_s=1e6) as here:
        puppet = Puppet(here.address, "a")
        here.give(0, "a")
        path = wire.PUSH_PATH if method == "POST" else f"{wire.UPDATES_PATH}{puppet.run}/0"
        with puppet.begin(method, path, {"content-length": "100000"}) as sock:
            sock.sendall(bytes(1000))
            assert sock.recv(100).startswith(b"HTTP/1.1 408 ")
            assert closed_after(sock) < 3
        assert here.outcomes() == []
        assert list(here.fleet.spool.iterdir()) == []


@pytest.mark.usefixtures("impatient")
def test_an_upload_that_goes_on_when_its_round_is_over_is_given_up(tmp_path: Path) -> None:
    with place(tmp_path) as here:
        puppet = Puppet(here.address, "a")
        task = here.give(0, "a")
        with puppet.begin("PUT", f"{wire.UPDATES_PATH}{puppet.run}/0", {"content-length": "100000"}) as sock:
            sock.sendall(bytes(1000))
            until(lambda: list(here.fleet.spool.iterdir()) != [])
            here.fleet.settle(task, False)
            assert sock.recv(100).startswith(b"HTTP/1.1 408 ")
        assert list(here.fleet.spool.iterdir()) == []


def test_an_answer_that_comes_before_the_body_was_read_is_heard(tmp_path: Path) -> None:
    with place(tmp_path) as here:
        puppet = Puppet(here.address, "a")
        task = here.give(0, "a")
        body = puppet.answer(task, {"w": np.ones(8 << 20, np.float32)})  # 32 MiB: far too much
        path = f"{wire.UPDATES_PATH}{puppet.run}/0"
        with contextlib.closing(supernode.Line(here.address, puppet.signer)) as line:
            with pytest.raises(supernode.Unavailable, match=r"answered 413: the body may have \d+ bytes at most"):
                line.request("PUT", path, body, timeout_s=PATIENCE_S)
            assert puppet.upload(0, puppet.answer(task, {"w": np.ones(3, np.float32)})) == 201
            assert line.request("PUT", path, body, timeout_s=PATIENCE_S)[0] == 200, "it was answered before"


@pytest.mark.usefixtures("impatient")
def test_a_model_that_nobody_reads_is_let_go_of_with_its_round(tmp_path: Path) -> None:
    with place(tmp_path) as here:
        puppet = Puppet(here.address, "a")
        task = here.give(0, "a", LARGE)
        with puppet.begin("GET", wire.STARTS_PATH + task.start, {}) as sock:
            assert sock.recv(12) == b"HTTP/1.1 200"
            own = sock.getsockname()
            assert own in peers(here.port)
            here.fleet.settle(task, False)
            until(lambda: own not in peers(here.port))  # though it reads nothing, ever


def test_uploads_beyond_their_number_wait_their_turn_and_are_asked_to_come_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routes, "_PATIENCE_S", 0.3)
    with place(tmp_path, max_uploads=1) as here, ThreadPoolExecutor() as pool:
        a, b = Puppet(here.address, "a"), Puppet(here.address, "b")
        here.give(0, "a"), here.give(1, "b")
        task = task_of(1, "b", start=start_digest(SMALL))
        answer = b.answer(task, {"w": np.ones(3, np.float32)})
        with a.begin("PUT", f"{wire.UPDATES_PATH}{a.run}/0", {"content-length": "100000"}) as sock:
            sock.sendall(bytes(1000))
            until(lambda: list(here.fleet.spool.iterdir()) != [])
            status, _, headers = b.put(1, answer)
            assert (status, headers["retry-after"]) == (503, "5")
            monkeypatch.setattr(routes, "_PATIENCE_S", PATIENCE_S)
            waiting = pool.submit(b.upload, 1, answer)
        assert waiting.result() == 201
        assert [outcome.kind for outcome in here.outcomes()] == ["ok"]


def test_an_upload_that_begins_again_ends_the_one_before(tmp_path: Path) -> None:
    with place(tmp_path, max_uploads=1) as here:
        puppet = Puppet(here.address, "a")
        task = here.give(0, "a")
        with puppet.begin("PUT", f"{wire.UPDATES_PATH}{puppet.run}/0", {"content-length": "100000"}) as sock:
            sock.sendall(bytes(1000))
            until(lambda: list(here.fleet.spool.iterdir()) != [])
            assert puppet.upload(0, puppet.answer(task, {"w": np.ones(3, np.float32)})) == 201
            assert sock.recv(100).startswith(b"HTTP/1.1 408 ")
        assert [outcome.kind for outcome in here.outcomes()] == ["ok"]


def test_a_message_of_more_than_one_value_is_refused_before_objects_are_made_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def must_not(*args: object) -> None:
        raise AssertionError("objects were made")

    with place(tmp_path) as here:
        puppet = Puppet(here.address, "a")
        here.give(0, "a")
        task, message = puppet.task()
        monkeypatch.setattr(routes, "message_from_proto", must_not)
        many = {str(number): b"" for number in range(1000)}
        floats = [0.0] * 1000
        for content in (
            RecordDict(),
            RecordDict({str(number): ConfigRecord({"answer": b""}) for number in range(1000)}),
            RecordDict({"fedtrain": ConfigRecord(many)}),  # type: ignore[arg-type]
            RecordDict({"fedtrain": ConfigRecord({"answer": floats})}),
            RecordDict({"fedtrain": MetricRecord({"answer": floats})}),
        ):
            reply = wire.reply_message(message, b"")
            reply.content = content
            assert puppet.push(reply) == 400
        reply = wire.reply_message(message, puppet.answer(task, {}))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(routes, "message_from_proto", message_from_proto)
            assert puppet.push(reply) == 201


# Clients, and what is kept of them.


def test_what_is_too_long_for_a_signature_takes_no_memory() -> None:
    signer = Signer(ec.generate_private_key(ec.SECP256R1()))
    before = auth._verified.cache_info().currsize
    for size in (257, 10_000):
        with pytest.raises(auth.NotAuthenticated):
            auth.authenticate({**signer.headers(), FLEET_HTTP_SIGNATURE_HEADER: b64encode(bytes(size)).decode()})
    assert auth._verified.cache_info().currsize == before
    auth.authenticate(signer.headers())
    assert auth._verified.cache_info().currsize == before + 1


def test_only_so_many_clients_may_join_and_the_others_are_told(tmp_path: Path) -> None:
    with place(tmp_path, max_clients=2) as here:
        for name in ("a", "b"):
            Puppet(here.address, name)
        with pytest.raises(
            AssertionError, match=r"2 clients have joined, which is all that server\.max_clients allows"
        ):
            Puppet(here.address, "c")
        assert [client.id for client in here.fleet.clients()] == ["a", "b"]
        assert list(json.loads((tmp_path / "clients.json").read_text())) == ["a", "b"]


GOOD_INFO = {
    "client": "a",
    "num_examples": 1,
    "tags": {f"tag{number}": "x" * 200 for number in range(64)},
    "capacity": {"num_cores": 2**63 - 1, "memory_bytes": 0, "devices": ["cpu"] * 64, "device_memory_bytes": 0},
    "local_algorithms": ["x"] * 64,
}


@pytest.mark.parametrize(
    "changes",
    [
        {"tags": {f"tag{number}": "x" for number in range(65)}},
        {"tags": {"x": "x" * 201}},
        {"tags": {"x" * 201: "x"}},
        {"local_algorithms": ["x"] * 65},
        {"local_algorithms": ["x" * 201]},
        {"capacity": {**GOOD_INFO["capacity"], "num_cores": 2**63}},  # type: ignore[dict-item]
        {"capacity": {**GOOD_INFO["capacity"], "memory_bytes": -1}},  # type: ignore[dict-item]
    ],
)
def test_a_client_that_says_too_much_about_itself_is_refused(changes: dict[str, object]) -> None:
    assert client_info(GOOD_INFO).id == "a"
    with pytest.raises(ConnectionRefused):
        client_info({**GOOD_INFO, **changes})


def test_a_client_that_comes_and_goes_all_the_time_does_not_fill_the_events(tmp_path: Path) -> None:
    events: list[str] = []
    there = FlowerFleet(new_run_id(), tmp_path, report=lambda event, round=0, **fields: events.append(event))
    info = client_info(GOOD_INFO)
    for _ in range(1000):
        there.enrol(b"key", info)
    assert events == ["client_connected"] + ["client_returned"] * 19


def test_small_answers_that_wait_beyond_a_limit_wait_in_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start = Start({"w": np.zeros(10_000, np.float32)}, {})
    monkeypatch.setattr(fleet, "_MAX_EARLY_BYTES", 100_000)
    with place(tmp_path) as here:
        puppet = Puppet(here.address, "a")

        def answered(number: int) -> Outcome:
            here.give(number, "a", start)
            task, message = puppet.task()
            delta = {"w": np.full(10_000, number, np.float32)}
            assert puppet.push(wire.reply_message(message, puppet.answer(task, delta))) == 201
            (outcome,) = here.outcomes()
            return outcome

        outcomes = [answered(number) for number in range(4)]  # 40 KB each
        in_files = [path.name for path in sorted(here.fleet.spool.iterdir())]
        assert in_files == ["task-000000002.safetensors", "task-000000003.safetensors"]
        for number, outcome in enumerate(outcomes):
            assert outcome.update is not None
            assert set(outcome.update.delta["w"].tolist()) == {number}
        del outcome
        outcomes.clear()
        gc.collect()
        assert list(here.fleet.spool.iterdir()) == []
        later = answered(4)
        assert list(here.fleet.spool.iterdir()) == [], "there is room in memory again"
        assert later.kind == "ok"


def test_threads_and_files_end_with_the_server(tmp_path: Path) -> None:
    with place(tmp_path) as here, here.connect() as sock:
        assert healthy(sock)
    assert not any(thread.name == "fedtrain-port" for thread in threading.enumerate())
    with pytest.raises(OSError, match="refused"):
        here.connect()
