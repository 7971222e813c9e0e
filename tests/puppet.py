"""A client that does what a test says, and what no client of fedtrain would do: signed requests, one by one."""

import contextlib
import hashlib
import http.client
import json
import socket
import threading
import time
from collections.abc import Mapping
from typing import Any

from cryptography.hazmat.primitives.asymmetric import ec
from flwr.app import Message
from flwr.common.serde import message_from_proto, message_to_proto
from flwr.proto.fleet_pb2 import PullMessagesRequest, PullMessagesResponse, PushMessagesRequest
from flwr.proto.node_pb2 import Node

from fedtrain.flower import wire
from fedtrain.flower.auth import Signer
from fedtrain.params import pack
from fedtrain.types import Params, Task

PATIENCE_S = 60.0


class Puppet:
    """A node with a key and a client id of its own, that has joined.

    Args:
        address: The server's ``HOST:PORT``.
        name: Its client id.
        connection: Used to join; None: one that ends with the request.
    """

    def __init__(self, address: str, name: str, *, connection: http.client.HTTPConnection | None = None) -> None:
        self.name = name
        self._host, _, port = address.rpartition(":")
        self._port = int(port)
        self.signer = Signer(ec.generate_private_key(ec.SECP256R1()))
        enrolment = {
            "protocol": wire.PROTOCOL,
            "client": name,
            "num_examples": 10,
            "tags": {},
            "capacity": {"num_cores": 1, "memory_bytes": 0, "devices": ["cpu"], "device_memory_bytes": 0},
            "local_algorithms": ["sgd_epochs"],
        }
        status, body, _ = self.ask("POST", wire.ENROL_PATH, json.dumps(enrolment).encode(), connection=connection)
        assert status == 200, body
        answer = json.loads(body)
        self.node, self.run = int(answer["node"]), str(answer["run"])

    def ask(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        *,
        connection: http.client.HTTPConnection | None = None,
    ) -> tuple[int, bytes, Mapping[str, str]]:
        """A signed request, on a connection of its own if none is given: status, body and headers of the answer."""
        if connection is None:
            connection = http.client.HTTPConnection(self._host, self._port, timeout=PATIENCE_S)
            with contextlib.closing(connection):
                return self.ask(method, path, body, headers, connection=connection)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it may answer before it has all
            connection.request(method, path, body, {**self.signer.headers(), **(headers or {})})
        response = connection.getresponse()
        return response.status, response.read(), {k.lower(): v for k, v in response.getheaders()}

    def begin(self, method: str, path: str, headers: Mapping[str, str]) -> socket.socket:
        """A connection on which the head of a signed request was sent, and nothing of its body."""
        sock = socket.create_connection((self._host, self._port), PATIENCE_S)
        lines = [f"{name}: {value}" for name, value in {"host": "x", **self.signer.headers(), **headers}.items()]
        sock.sendall("\r\n".join([f"{method} {path} HTTP/1.1", *lines, "", ""]).encode())
        return sock

    def pull(self, holding: list[int] | None = None) -> tuple[Message | None, str]:
        """Ask for news: a task, and the run's final status once it has one."""
        poll = json.dumps({"run": self.run, "holding": holding or [], "awaiting": []})
        body = PullMessagesRequest(node=Node(node_id=self.node)).SerializeToString()
        status, answer, headers = self.ask("POST", wire.PULL_PATH, body, {wire.POLL_HEADER: poll})
        assert status == 200, answer
        messages = PullMessagesResponse.FromString(answer).messages_list
        return (message_from_proto(messages[0]) if messages else None), headers.get(wire.OVER_HEADER, "")

    def task(self) -> tuple[Task, Message]:
        """Wait for a task."""
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            message, _ = self.pull()
            if message is not None:
                return wire.read_task(message)[0], message
        raise AssertionError(f"{self.name} was given no task")

    def linger(self, task: Task, stop: threading.Event | None = None) -> None:
        """Be there, as if busy with a task, until the run is over or `stop`."""
        while not (stop and stop.is_set()) and not self.pull([task.number])[1]:
            pass

    def push(self, message: Message, *, node: int | None = None) -> int:
        """Send an answer inside a message: the answer's status."""
        own = Node(node_id=self.node if node is None else node)
        body = PushMessagesRequest(node=own, messages_list=[message_to_proto(message)]).SerializeToString()
        return self.ask("POST", wire.PUSH_PATH, body)[0]

    def upload(self, number: int, answer: bytes) -> int:
        """Send an answer over the data route: the answer's status."""
        return self.put(number, answer)[0]

    def put(self, number: int, answer: bytes) -> tuple[int, bytes, Mapping[str, str]]:
        """The same: status, body and headers of the answer."""
        sha = {wire.SHA256_HEADER: hashlib.sha256(answer).hexdigest()}
        return self.ask("PUT", f"{wire.UPDATES_PATH}{self.run}/{number}", answer, sha)

    def answer(self, task: Task, delta: Params, **changes: Any) -> bytes:
        """An answer with this delta; `changes` are to its head."""
        head = {
            "run": self.run,
            "task": task.number,
            "start": task.start,
            "kind": "ok",
            "reason": "",
            "num_examples": 10,
            "num_steps": 1,
            "metrics": {},
        }
        return pack({f"delta/{name}": delta[name] for name in delta}, {"answer": json.dumps({**head, **changes})})
