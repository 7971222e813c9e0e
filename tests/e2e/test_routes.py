"""The port, spoken to request by request: who may do what, how often, and how much."""

import contextlib
import hashlib
import http.client
import json
import logging
import socket
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.app import Message
from flwr.common.serde import message_from_proto, message_to_proto
from flwr.proto.fleet_pb2 import PullMessagesRequest, PullMessagesResponse, PushMessagesRequest
from flwr.proto.node_pb2 import Node

from fedtrain.flower import routes, wire
from fedtrain.flower.auth import Signer
from fedtrain.flower.fleet import FlowerFleet, new_run_id
from fedtrain.flower.server import serving
from fedtrain.params import pack
from fedtrain.state import start_digest
from fedtrain.testing import task_of
from fedtrain.types import Outcome, Start, Task, Update

PATIENCE_S = 10.0
START = Start({"w": np.zeros(3, np.float32)}, {})

ENROLMENT: dict[str, Any] = {
    "protocol": wire.PROTOCOL,
    "client": "a",
    "num_examples": 10,
    "tags": {},
    "capacity": {"num_cores": 1, "memory_bytes": 0, "devices": ["cpu"], "device_memory_bytes": 0},
    "local_algorithms": ["sgd_epochs"],
}


@dataclass
class Reply:
    status: int
    body: bytes
    headers: Mapping[str, str]

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def message(self) -> Message | None:
        messages = PullMessagesResponse.FromString(self.body).messages_list
        return message_from_proto(messages[0]) if messages else None


class Caller:
    """Sends signed requests as one node, each on a connection of its own."""

    def __init__(self, port: int, name: str = "a", *, signed: bool = True) -> None:
        self.port, self.name = port, name
        signer = Signer(ec.generate_private_key(ec.SECP256R1()))
        self.headers = signer.headers if signed else dict
        self.node = 0
        self.run = ""

    def ask(self, method: str, path: str, body: bytes | None = None, **headers: str) -> Reply:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_S)
        with contextlib.closing(connection):
            named = {name.replace("_", "-"): value for name, value in headers.items()}
            connection.request(method, path, body, {**self.headers(), **named})
            response = connection.getresponse()
            return Reply(response.status, response.read(), {k.lower(): v for k, v in response.getheaders()})

    def enrol(self, **changes: object) -> Reply:
        values = {**ENROLMENT, "client": self.name, **changes}
        reply = self.ask("POST", wire.ENROL_PATH, json.dumps(values).encode())
        if reply.status == 200:
            self.node, self.run = reply.json["node"], reply.json["run"]
        return reply

    def pull(self, holding: list[int] | None = None, *, node: int | None = None, **headers: str) -> Reply:
        poll = json.dumps({"run": self.run, "holding": holding or [], "awaiting": []})
        body = PullMessagesRequest(node=Node(node_id=self.node if node is None else node)).SerializeToString()
        return self.ask("POST", wire.PULL_PATH, body, **{"fedtrain_poll": poll, **headers})

    def push(self, message: Message, *, node: int | None = None) -> Reply:
        proto = message_to_proto(message)
        body = PushMessagesRequest(node=Node(node_id=self.node if node is None else node), messages_list=[proto])
        return self.ask("POST", wire.PUSH_PATH, body.SerializeToString())

    def put(self, number: int, answer: bytes, *, run: str | None = None, sha256: str | None = None) -> Reply:
        digest = sha256 if sha256 is not None else hashlib.sha256(answer).hexdigest()
        path = f"{wire.UPDATES_PATH}{self.run if run is None else run}/{number}"
        return self.ask("PUT", path, answer, fedtrain_sha256=digest)


class Port:
    """A server on loopback, with tasks given and outcomes received by hand."""

    def __init__(self, fleet: FlowerFleet, port: int) -> None:
        self.fleet, self.port = fleet, port
        self.callers: dict[str, Caller] = {}

    def caller(self, name: str = "a") -> Caller:
        caller = self.callers[name] = Caller(self.port, name)
        assert caller.enrol().status == 200
        return caller

    def give(self, number: int, client: str = "a") -> Task:
        task = task_of(number, client, start=start_digest(START))
        self.fleet.give([task], START)
        return task

    def answer(self, task: Task, value: float = 1.0) -> bytes:
        delta = {"w": np.full(3, value, np.float32)}
        return wire.pack_answer(Outcome(task, "ok", Update(task, delta, 10), num_examples=10), self.fleet.run)

    def outcomes(self) -> list[Outcome]:
        found = []
        while (outcome := self.fleet.receive(0)) is not None:
            found.append(outcome)
        return found


@pytest.fixture
def port(tmp_path: Path) -> Iterator[Port]:
    fleet = FlowerFleet(new_run_id(), tmp_path)
    with serving(fleet, "127.0.0.1", 0, lambda: {"status": "running", "round": 3}) as (_, bound):
        yield Port(fleet, bound)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Port]:
    """One port for all requests that are to have no effect."""
    fleet = FlowerFleet(new_run_id(), tmp_path_factory.mktemp("shared"), lost_after_s=60.0)
    with serving(fleet, "127.0.0.1", 0) as (_, bound):
        there = Port(fleet, bound)
        there.caller("known")
        yield there


@pytest.fixture(scope="module")
def known(shared: Port) -> Caller:
    return shared.callers["known"]


@pytest.fixture
def later() -> Iterator[Callable[..., "Future[Reply]"]]:
    with ThreadPoolExecutor() as pool:
        yield pool.submit


ROUTES = [
    ("POST", wire.ENROL_PATH),
    ("POST", wire.PULL_PATH),
    ("POST", wire.PUSH_PATH),
    ("GET", wire.STARTS_PATH + "0" * 64),
    ("PUT", wire.UPDATES_PATH + "run/0"),
]
FLOWERS = [
    ("POST", "/v1/fleet/register-node"),
    ("POST", "/v1/fleet/activate-node"),
    ("POST", "/v1/fleet/push-object"),
    ("POST", "/v1/fleet/pull-object"),
    ("POST", "/v1/runtime/push-messages"),
    ("POST", "/v1/control/start-run"),
    ("POST", "/v1/control/list-runs"),
    ("GET", "/docs"),
    ("GET", "/openapi.json"),
    ("GET", "/"),
]


# Who may do what.


@pytest.mark.parametrize(("method", "path"), ROUTES + FLOWERS)
def test_a_request_that_is_not_signed_is_refused(shared: Port, method: str, path: str) -> None:
    reply = Caller(shared.port, signed=False).ask(method, path, b"x")
    assert (reply.status, reply.json) == (401, {"error": "not signed by a node key with the server's time"})


@pytest.mark.parametrize(("method", "path"), ROUTES[1:])
def test_a_signed_request_of_a_client_that_did_not_enrol_is_refused(shared: Port, method: str, path: str) -> None:
    assert Caller(shared.port).ask(method, path, b"x").status == 403


@pytest.mark.parametrize(("method", "path"), FLOWERS)
def test_nothing_else_of_flowers_is_there(known: Caller, method: str, path: str) -> None:
    assert known.ask(method, path, b"x").status == 404


def test_health_readiness_and_status_are_open(port: Port) -> None:
    anyone = Caller(port.port, signed=False)
    assert (anyone.ask("GET", "/healthz").status, anyone.ask("GET", "/healthz").body) == (200, b"ok\n")
    assert (anyone.ask("GET", "/readyz").status, anyone.ask("GET", "/readyz").body) == (200, b"ready\n")
    status = anyone.ask("GET", wire.STATUS_PATH)
    assert (status.status, status.headers["content-type"]) == (200, "application/json")
    assert status.json == {"status": "running", "round": 3}


def test_a_server_whose_run_is_over_is_not_ready(tmp_path: Path) -> None:
    fleet = FlowerFleet(new_run_id(), tmp_path)
    with serving(fleet, "127.0.0.1", 0, lambda: {"status": "failed"}) as (_, bound):
        assert Caller(bound, signed=False).ask("GET", "/readyz").status == 503
        assert Caller(bound, signed=False).ask("GET", "/healthz").status == 200


def test_a_pull_for_another_node_is_refused(port: Port) -> None:
    a, b = port.caller("a"), port.caller("b")
    port.give(0, "b")
    assert a.pull(node=b.node).status == 403
    assert b.pull().message is not None


def test_a_message_in_another_nodes_name_is_refused_and_has_no_effect(port: Port) -> None:
    a, b = port.caller("a"), port.caller("b")
    task = port.give(0, "b")
    asked = b.pull().message
    assert asked is not None
    forged = wire.reply_message(asked, port.answer(task))
    assert a.push(forged).status == 403
    assert a.push(forged, node=b.node).status == 403
    own = port.give(1, "a")
    asked = a.pull().message
    assert asked is not None
    assert a.push(wire.reply_message(asked, port.answer(own)), node=b.node).status == 403
    assert port.outcomes() == []


def test_an_answer_to_another_clients_task_is_unknown_and_has_no_effect(port: Port) -> None:
    a, b = port.caller("a"), port.caller("b")
    own, others = port.give(0, "a"), port.give(1, "b")
    asked = a.pull().message
    assert asked is not None
    assert a.push(wire.reply_message(asked, port.answer(others))).status == 404
    assert a.put(1, port.answer(others)).status == 404
    assert port.outcomes() == []
    assert a.put(0, port.answer(own)).status == 201
    assert b.put(1, port.answer(others)).status == 201
    assert [outcome.task.number for outcome in port.outcomes()] == [0, 1]


def test_an_answer_to_another_run_or_an_unknown_task_is_unknown(port: Port) -> None:
    a = port.caller()
    task = port.give(0)
    asked = a.pull().message
    assert asked is not None
    assert a.put(0, port.answer(task), run="0" * 16).status == 404
    assert a.put(7, port.answer(task)).status == 404
    for path in ["x", "1/x", f"{a.run}/-1", f"{a.run}/", f"{a.run}/1e3", f"{a.run}/{'9' * 40}", f"{a.run}/%D9%A3"]:
        assert a.ask("PUT", wire.UPDATES_PATH + path, b"x").status == 404
    other_run = wire.pack_answer(Outcome(task, "failed"), "0" * 16)
    assert a.push(wire.reply_message(asked, other_run)).status == 404
    assert port.outcomes() == []


# Once, again, late.


def test_an_answer_that_is_pushed_twice_counts_once_and_is_acknowledged_twice(port: Port) -> None:
    a = port.caller()
    task = port.give(0)
    asked = a.pull().message
    assert asked is not None
    reply = wire.reply_message(asked, port.answer(task))
    assert [a.push(reply).status, a.push(reply).status] == [201, 200]
    assert [outcome.kind for outcome in port.outcomes()] == ["ok"]
    assert a.put(0, port.answer(task, 9.0)).status == 200, "nor on the other route"
    assert port.outcomes() == []


def test_an_answer_that_is_uploaded_twice_counts_once_and_is_acknowledged_twice(port: Port) -> None:
    a = port.caller()
    task = port.give(0)
    answers = [a.put(0, port.answer(task)), a.put(0, port.answer(task, 9.0))]
    assert [(answer.status, answer.json) for answer in answers] == [
        (201, {"receipt": "taken"}),
        (200, {"receipt": "repeated"}),
    ]
    (outcome,) = port.outcomes()
    assert outcome.update is not None
    np.testing.assert_array_equal(outcome.update.delta["w"], [1.0, 1.0, 1.0])
    assert [file.name for file in port.fleet.spool.iterdir()] == ["task-000000000.safetensors"]
    port.fleet.settle(task, True)
    assert list(port.fleet.spool.iterdir()) == []


def test_a_task_whose_delivery_was_lost_is_delivered_again_with_the_next_attempt_number(port: Port) -> None:
    a = port.caller()
    task = port.give(0)
    lost, again = a.pull().message, a.pull().message
    assert lost is not None
    assert again is not None
    assert [message.content.config_records["fedtrain"]["attempt"] for message in (lost, again)] == [1, 2]
    assert wire.read_task(again)[0] == wire.read_task(lost)[0]
    assert port.fleet.broker.num_messages == 1, "the first attempt is forgotten"
    assert a.push(wire.reply_message(lost, port.answer(task))).status == 201, "an answer to it is as good"
    assert a.push(wire.reply_message(again, port.answer(task))).status == 200
    assert len(port.outcomes()) == 1
    port.fleet.settle(task, True)
    assert port.fleet.broker.num_messages == 0


def test_a_task_that_is_being_worked_on_is_not_delivered_again(port: Port, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes, "_HELD_BUSY_S", 0.05)
    a = port.caller()
    port.give(0)
    assert a.pull().message is not None
    assert a.pull([0]).message is None


def test_a_task_with_an_unusable_answer_is_delivered_again_when_it_is_given_again(port: Port) -> None:
    a = port.caller()
    task = port.give(0)
    assert a.pull().message is not None
    failed = wire.pack_answer(Outcome(task, "failed", reason="no memory"), a.run)
    assert a.put(0, failed).status == 201
    assert [(outcome.kind, outcome.reason) for outcome in port.outcomes()] == [("failed", "no memory")]
    port.fleet.give([task], START)
    asked = a.pull().message
    assert asked is not None
    assert asked.content.config_records["fedtrain"]["attempt"] == 2
    assert a.put(0, port.answer(task)).status == 201
    assert [outcome.kind for outcome in port.outcomes()] == ["ok"]
    port.fleet.settle(task, True)
    assert port.fleet.broker.num_messages == 0


@pytest.mark.parametrize("route", ["push", "put"])
def test_an_answer_after_its_round_has_closed_is_late_and_acknowledged(port: Port, route: str) -> None:
    a = port.caller()
    task = port.give(0)
    asked = a.pull().message
    assert asked is not None
    port.fleet.settle(task, False)
    answer = port.answer(task)
    reply = a.put(0, answer) if route == "put" else a.push(wire.reply_message(asked, answer))
    assert reply.status == 200
    assert [(outcome.kind, outcome.task.number, outcome.task.client) for outcome in port.outcomes()] == [
        ("late", 0, "a")
    ]


def test_a_client_hears_at_once_that_its_task_is_called_off_and_whether_it_counted(
    port: Port, later: Callable[..., "Future[Reply]"], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routes, "_HELD_BUSY_S", PATIENCE_S)
    a = port.caller()
    task = port.give(0)
    assert a.pull().message is not None
    held = later(a.pull, [0])
    until_held(port, "a")
    port.fleet.settle(task, False)
    reply = held.result(2.0)
    assert json.loads(reply.headers["fedtrain-settled"]) == {"0": False}
    counted = port.give(1)
    assert a.put(1, port.answer(counted)).status == 201
    port.fleet.settle(counted, True)
    later_news = later(a.pull)
    until_held(port, "a")
    port.fleet.finish("completed", 2.0)
    reply = later_news.result(2.0)
    assert json.loads(reply.headers["fedtrain-settled"]) == {"0": False, "1": True}
    assert reply.headers["fedtrain-over"] == "completed"


def until_held(port: Port, client: str) -> None:
    with port.fleet._lock:
        held = port.fleet._lock.wait_for(lambda: port.fleet._members[client].polls == 1, 0)
    while not held:
        with port.fleet._lock:
            held = port.fleet._lock.wait_for(lambda: port.fleet._members[client].polls == 1, 0.01)


def test_a_client_whose_connection_breaks_is_gone_at_once_without_an_error_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fleet = FlowerFleet(new_run_id(), tmp_path)
    with serving(fleet, "127.0.0.1", 0) as (_, bound):
        port = Port(fleet, bound)
        a = port.caller()
        assert [client.id for client in fleet.clients()] == ["a"]
        poll = PullMessagesRequest(node=Node(node_id=a.node)).SerializeToString()
        connection = http.client.HTTPConnection("127.0.0.1", bound)
        connection.request("POST", wire.PULL_PATH, poll, {**a.headers(), "fedtrain-poll": json.dumps({"run": a.run})})
        until_held(port, "a")
        connection.close()
        fleet.wait(2.0)
        assert fleet.clients() == []
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


# How much.


@pytest.mark.parametrize(
    ("method", "path", "limit"),
    [("POST", wire.ENROL_PATH, 65_536), ("POST", wire.PULL_PATH, 65_536), ("POST", wire.PUSH_PATH, (1 << 20) + 65_536)],
)
def test_a_body_over_the_limit_is_refused_without_reading_it(port: Port, method: str, path: str, limit: int) -> None:
    signed = port.caller().headers()
    declared = {**signed, "content-length": str(limit + 1)}
    assert raw(port, method, path, declared) == (413, "close")  # not one byte of the body was sent
    chunked = {**signed, "transfer-encoding": "chunked"}
    piece = b"%x\r\n%s\r\n" % (65_536, bytes(65_536))
    assert raw(port, method, path, chunked, piece * (limit // 65_536 + 1)) == (413, "close")


def test_an_upload_over_the_limit_is_refused_and_leaves_nothing_in_the_spool(port: Port) -> None:
    a = port.caller()
    task = port.give(0)
    limit = port.fleet.max_answer_bytes(0)
    assert 2 * wire.INLINE_BYTES < limit < 2 * wire.INLINE_BYTES + 1000
    path = f"{wire.UPDATES_PATH}{a.run}/0"
    assert raw(port, "PUT", path, {**a.headers(), "content-length": str(limit + 1)}) == (413, "close")
    piece = b"%x\r\n%s\r\n" % (65_536, bytes(65_536))
    chunked = {**a.headers(), "transfer-encoding": "chunked"}
    assert raw(port, "PUT", path, chunked, piece * (limit // 65_536 + 1)) == (413, "close")
    assert list(port.fleet.spool.iterdir()) == []
    assert a.put(0, port.answer(task)).status == 201


def test_a_refused_request_with_a_body_ends_its_connection_without_reading_it(port: Port) -> None:
    large = {"content-length": str(10**12)}
    a = port.caller()
    assert raw(port, "PUT", wire.UPDATES_PATH + "run/0", large) == (401, "close")
    assert raw(port, "PUT", wire.UPDATES_PATH + "run/0", {**a.headers(), **large}) == (404, "close")
    assert raw(port, "POST", "/v1/fleet/push-object", {**a.headers(), **large}) == (404, "close")


def raw(port: Port, method: str, path: str, headers: Mapping[str, str], body: bytes = b"") -> tuple[int, str]:
    """Status and ``connection`` of the answer to a request of which only the head and `body` are sent."""
    with socket.create_connection(("127.0.0.1", port.port), PATIENCE_S) as sock:
        head = "".join(f"{name}: {value}\r\n" for name, value in {"host": "x", **headers}.items())
        sock.sendall(f"{method} {path} HTTP/1.1\r\n{head}\r\n".encode())
        with contextlib.suppress(ConnectionError):  # the server need not take all of it
            sock.sendall(body)
        response = http.client.HTTPResponse(sock)
        response.begin()
        return response.status, response.getheader("connection", "")


def test_an_upload_that_was_damaged_on_its_way_is_not_counted_and_may_be_sent_again(port: Port) -> None:
    a = port.caller()
    task = port.give(0)
    assert a.put(0, port.answer(task), sha256="0" * 64).status == 400
    assert a.ask("PUT", f"{wire.UPDATES_PATH}{a.run}/0", port.answer(task)).status == 400
    assert port.outcomes() == []
    assert list(port.fleet.spool.iterdir()) == []
    assert a.put(0, port.answer(task)).status == 201


def test_an_upload_that_breaks_off_leaves_nothing_in_the_spool(port: Port) -> None:
    a = port.caller()
    port.give(0)
    with socket.create_connection(("127.0.0.1", port.port)) as sock:
        head = "".join(f"{name}: {value}\r\n" for name, value in {**a.headers(), "content-length": "1000"}.items())
        sock.sendall(f"PUT {wire.UPDATES_PATH}{a.run}/0 HTTP/1.1\r\nhost: x\r\n{head}\r\n".encode() + bytes(500))
        until(lambda: len(list(port.fleet.spool.iterdir())) == 1)
    until(lambda: list(port.fleet.spool.iterdir()) == [])
    assert port.outcomes() == []


def test_an_upload_that_the_disk_refuses_is_asked_for_again(port: Port, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    a = port.caller()
    task = port.give(0)
    with monkeypatch.context() as patch:
        patch.setattr("fedtrain.flower.routes.os.replace", full)
        assert a.put(0, port.answer(task)).status == 500
    assert port.outcomes() == []
    assert a.put(0, port.answer(task)).status == 201
    assert [outcome.kind for outcome in port.outcomes()] == ["ok"]


def until(condition: Callable[[], bool]) -> None:
    for _ in range(2000):
        if condition():
            return
        with contextlib.suppress(TimeoutError):
            Future().result(0.005)
    raise AssertionError("it never came true")


def test_what_earlier_processes_left_in_the_spool_is_removed_at_start(tmp_path: Path) -> None:
    FlowerFleet(new_run_id(), tmp_path)
    (tmp_path / "spool" / "task-000000003.1f.part").write_bytes(b"half")
    (tmp_path / "spool" / "task-000000002.safetensors").write_bytes(b"whole")
    assert list(FlowerFleet(new_run_id(), tmp_path).spool.iterdir()) == []


# What is not what it should be.


@pytest.mark.parametrize(
    "head",
    [
        {"metrics": {"loss": 10**400}},
        {"num_examples": 10**400},
        {"num_steps": 2**53 + 1},
        {"num_examples": True},
        {"num_examples": 1.5},
        {"metrics": []},
        {"kind": "lost"},
        {"kind": "x" * 100_000},
        {"kind": {"a": 1}},
        {"reason": 3},
        {"start": "0" * 64},
        {"reason": "\x1b[2J\ud800"},
    ],
)
@pytest.mark.parametrize("route", ["push", "put"])
def test_an_answer_with_an_impossible_head_is_an_outcome_not_an_error(port: Port, route: str, head: Any) -> None:
    a = port.caller()
    task = port.give(0)
    asked = a.pull().message
    assert asked is not None
    values = {
        "run": a.run,
        "task": 0,
        "start": task.start,
        "kind": "ok",
        "reason": "",
        "num_examples": 1,
        "metrics": {},
    }
    answer = pack({"delta/w": np.zeros(3, np.float32)}, {"answer": json.dumps({**values, **head})})
    reply = a.put(0, answer) if route == "put" else a.push(wire.reply_message(asked, answer))
    assert reply.status == 201
    (outcome,) = port.outcomes()
    assert len(outcome.reason) <= 2000
    assert outcome.reason.isprintable()
    usable = head.get("metrics") == {"loss": 10**400} or head.get("reason") == "\x1b[2J\ud800"
    assert (outcome.kind, outcome.metrics) == ("ok" if usable else "invalid", {})


@pytest.mark.parametrize("task", [None, "0", 0.0, float("inf"), True, [0]])
def test_a_pushed_answer_whose_task_is_no_number_is_refused(port: Port, task: object) -> None:
    a = port.caller()
    port.give(0)
    asked = a.pull().message
    assert asked is not None
    answer = pack({}, {"answer": json.dumps({"run": a.run, "task": task})})
    assert a.push(wire.reply_message(asked, answer)).status == 400
    assert port.outcomes() == []


@pytest.mark.parametrize("body", [b"", b"\xff\xff", b"\x0a\x03abc"])
@pytest.mark.parametrize("path", [wire.PULL_PATH, wire.PUSH_PATH])
def test_a_body_that_is_no_message_is_refused(known: Caller, path: str, body: bytes) -> None:
    assert known.ask("POST", path, body).status in (400, 403)


@pytest.mark.parametrize(
    "poll",
    ["x", "[]", "3", '{"holding": 3}', '{"holding": "0"}', '{"holding": [true]}', '{"awaiting": null}', "[" * 5000],
)
def test_a_poll_header_that_is_not_the_protocols_is_refused(known: Caller, poll: str) -> None:
    assert known.pull(fedtrain_poll=poll).status == 400


CAPACITY: dict[str, Any] = ENROLMENT["capacity"]


@pytest.mark.parametrize(
    ("changes", "status"),
    [
        ({"protocol": 0}, 409),
        ({"protocol": None}, 409),
        ({"client": "1a"}, 409),
        ({"client": "a/../b"}, 409),
        ({"client": 3}, 409),
        ({"num_examples": -1}, 409),
        ({"num_examples": 2**53 + 1}, 409),
        ({"num_examples": True}, 409),
        ({"tags": {"site": 3}}, 409),
        ({"tags": {"site": "\x1b[2J"}}, 409),
        ({"tags": {"\ud800": "x"}}, 409),
        ({"local_algorithms": "sgd"}, 409),
        ({"capacity": {}}, 409),
        ({"capacity": None}, 409),
        ({"capacity": {**CAPACITY, "num_cores": float("inf")}}, 409),
        ({"capacity": {**CAPACITY, "num_cores": "many"}}, 409),
        ({"capacity": {**CAPACITY, "devices": 3}}, 409),
        ({"capacity": {**CAPACITY, "devices": ["\x07"]}}, 409),
    ],
)
def test_an_enrolment_with_an_impossible_value_is_refused_and_leaves_nothing_behind(
    shared: Port, changes: dict[str, object], status: int
) -> None:
    reply = Caller(shared.port).enrol(**changes)
    assert (reply.status, list(reply.json)) == (status, ["error"])
    assert [client.id for client in shared.fleet.clients()] == ["known"]
    assert list(json.loads((shared.fleet.spool.parent / "clients.json").read_text())) == ["known"]


@pytest.mark.parametrize("body", [b"", b"{", b"\xff", b"[" * 60_000])
def test_an_enrolment_that_is_not_json_is_refused(shared: Port, body: bytes) -> None:
    assert Caller(shared.port).ask("POST", wire.ENROL_PATH, body).status == 400


def test_a_model_is_sent_as_long_as_a_task_starts_from_it(port: Port) -> None:
    a = port.caller()
    task = port.give(0)
    path = wire.STARTS_PATH + task.start
    reply = a.ask("GET", path)
    assert (reply.status, hashlib.sha256(reply.body).digest()) == (
        200,
        hashlib.sha256(pack({"params/w": np.zeros(3, np.float32)})).digest(),
    )
    port.fleet.settle(task, False)
    assert a.ask("GET", path).status == 404


def test_a_task_may_be_given_and_settled_after_the_port_was_closed(tmp_path: Path) -> None:
    fleet = FlowerFleet(new_run_id(), tmp_path)
    with serving(fleet, "127.0.0.1", 0) as (_, bound), ThreadPoolExecutor() as pool:
        port = Port(fleet, bound)
        held = pool.submit(port.caller().pull)
        until_held(port, "a")
        port.give(0)
        held.result(2.0)
    task = port.give(1)
    fleet.settle(task, False)
    fleet.finish("stopped", 0.0)
