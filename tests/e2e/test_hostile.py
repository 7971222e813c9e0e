"""One real run among strangers and clients that mean no good: a server process, and a connection and key for each.

What they send, how long they take, and how much of it there is: none of it stops the run, bends the model or fills the
server's memory.
"""

import contextlib
import json
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import Command, Site, site, wait_for_event
from flwr.app import Message
from puppet import Puppet

from fedtrain.client import Client, Fitted, Work
from fedtrain.flower import wire
from fedtrain.types import Array, Params, Start, Task

MIB = 2**20
ARRAYS, SIZE = 4, 1_250_000
MODEL_BYTES = ARRAYS * SIZE * 4  # 20 MB
DEADLINE_S = 20.0

TRAINER = f"""
import numpy as np
from fedtrain.types import Start

def load(partition, num_partitions, seed):
    return None

class Trainer:
    num_examples, local_algorithms = 0, ("sgd_epochs",)

    def __init__(self, model, data):
        pass

    def initial(self, seed):
        return Start({{f"layer{{i}}": np.full({SIZE}, 0.1, np.float32) for i in range({ARRAYS})}}, {{}})

    def fit(self, start, work):
        raise NotImplementedError

    def evaluate(self, model):
        return None
"""
CONFIG = (
    "trainer=custom",
    "trainer._target_=own.Trainer",
    "model=custom",
    "model._target_=builtins.object",
    "data=custom",
    "data._target_=own.load",
    "evaluation.where=none",
    "rounds=1",
    "cohort.answers=3",
    f"cohort.deadline_s={DEADLINE_S}",
    "cohort.max_examples=1000000",
    "cohort.max_update_norm=1e9",
)


# What clients send.


def good_delta(step: float) -> dict[str, Array]:
    """Values whose float32 mean depends on the order of the sum."""
    values = np.linspace(-1, 1, SIZE, dtype=np.float32) * np.float32(step)
    return {f"layer{i}": values + np.float32(i) for i in range(ARRAYS)}


GOOD = {"good-a": 0.1, "good-b": 0.7, "good-c": 0.7}
"""The last two answer with equal content."""


class Adds:
    """What a good client trains."""

    num_examples, local_algorithms = 10, ("sgd_epochs",)

    def __init__(self, step: float, before: Callable[[], object] = lambda: None) -> None:
        self.step, self.before = step, before

    def fit(self, start: Start, work: Work) -> Fitted:
        self.before()
        delta = good_delta(self.step)
        return Fitted({name: array + delta[name] for name, array in start.params.items()}, 10, 1)

    def evaluate(self, model: Params) -> None:
        return None

    def initial(self, seed: int) -> Start:
        raise NotImplementedError


Act = Callable[[Puppet, Task, Message], object]


def sends(change: Callable[[dict[str, Array]], Params] = dict, *, status: int = 201, **head: object) -> Act:
    """Upload one answer with a changed delta or head."""

    def act(puppet: Puppet, task: Task, message: Message) -> None:
        assert puppet.upload(task.number, puppet.answer(task, change(good_delta(0.5)), **head)) == status

    return act


def with_value(value: float) -> Callable[[dict[str, Array]], Params]:
    def change(delta: dict[str, Array]) -> Params:
        delta["layer2"][SIZE // 2] = value
        return delta

    return change


def lies(change: Callable[[dict[str, Any], int], object]) -> Act:
    """Upload a good answer whose safetensors header was changed."""

    def act(puppet: Puppet, task: Task, message: Message) -> None:
        answer = puppet.answer(task, good_delta(0.5))
        (size,) = struct.unpack("<Q", answer[:8])
        header, data = json.loads(answer[8 : 8 + size]), answer[8 + size :]
        changed = change(header, len(data))
        text = json.dumps(header).encode() if changed is None else bytes(changed)  # type: ignore[call-overload]
        assert puppet.upload(task.number, struct.pack("<Q", len(text)) + text + data) == 201

    return act


def claims_more(header: dict[str, Any], length: int) -> None:
    entry = header["delta/layer3"]
    entry["shape"], entry["data_offsets"] = [SIZE * 1000], [0, SIZE * 4000]


def shares_bytes(header: dict[str, Any], length: int) -> None:
    header["delta/layer3"]["data_offsets"] = header["delta/layer2"]["data_offsets"]


def has_a_huge_shape(header: dict[str, Any], length: int) -> None:
    header["delta/layer3"]["shape"] = [2**31, 2**31, 2**31]


def is_a_bomb(header: dict[str, Any], length: int) -> bytes:
    """12 MB of JSON that become some 300 MB of lists."""
    return b"[" + b"[]," * 4_000_000 + b"[]]"


def never_answers(puppet: Puppet, task: Task, message: Message) -> None:
    puppet.linger(task)


def drips(puppet: Puppet, task: Task, message: Message) -> float:
    """Upload five kilobytes a second until the server has enough; how long that was."""
    began, over = time.monotonic(), threading.Event()
    path = f"{wire.UPDATES_PATH}{puppet.run}/{task.number}"
    with ThreadPoolExecutor() as pool, puppet.begin("PUT", path, {"content-length": str(MODEL_BYTES)}) as sock:
        lingering = pool.submit(puppet.linger, task, over)
        with contextlib.suppress(OSError):
            sock.settimeout(0.2)
            while time.monotonic() - began < 4 * DEADLINE_S:
                sock.sendall(bytes(1000))
                with contextlib.suppress(TimeoutError):
                    if sock.recv(1000):
                        break
        over.set()
        lingering.result()
    return time.monotonic() - began


def forges_a_name(victim: Puppet) -> Act:
    """Answer in another's name, in all the ways that a message has; then keep silent."""

    def act(puppet: Puppet, task: Task, message: Message) -> None:
        reply = wire.reply_message(message, puppet.answer(task, {"layer0": np.zeros(1, np.float32)}))
        reply.metadata.__dict__["_src_node_id"] = victim.node
        assert puppet.push(reply) == 403
        assert puppet.push(reply, node=victim.node) == 403
        puppet.linger(task)

    return act


def answers_anothers_task(puppet: Puppet, task: Task, message: Message) -> None:
    """All the tasks around its own, on both routes; then keep silent."""
    for number in {*range(task.number + 30)} - {task.number}:
        assert puppet.upload(number, b"x" * 100) == 404
    other = wire.reply_message(message, puppet.answer(replace(task, number=0 if task.number else 1), {}))
    assert puppet.push(other) == 404
    puppet.linger(task)


def sends_too_much(*, chunked: bool) -> Act:
    """Two gigabytes, as far as the server reads them; then keep silent."""

    def act(puppet: Puppet, task: Task, message: Message) -> int:
        size = {"transfer-encoding": "chunked"} if chunked else {"content-length": str(2 * 2**30)}
        path = f"{wire.UPDATES_PATH}{puppet.run}/{task.number}"
        with puppet.begin("PUT", path, size) as sock:
            sent = send_until_refused(sock, chunked=chunked)
        puppet.linger(task)
        return sent

    return act


def send_until_refused(sock: socket.socket, *, chunked: bool) -> int:
    """Send two gigabytes until the server answers or closes the connection; how many bytes were sent."""
    piece = bytes(65_536)
    if chunked:
        piece = b"%x\r\n%s\r\n" % (len(piece), piece)
    left, sent = memoryview(piece), 0
    sock.settimeout(10)
    with contextlib.suppress(OSError):
        while sent < 2 * 2**30 and not select.select([sock], [], [], 0)[0]:
            if not select.select([sock], [sock], [], 10)[1]:
                continue
            count = sock.send(left, socket.MSG_DONTWAIT)
            left, sent = left[count:] or memoryview(piece), sent + count
    return sent


def raises() -> None:
    raise RuntimeError("no such column: age")


BAD: dict[str, tuple[Act, str, str]] = {
    "shape": (sends(lambda delta: {**delta, "layer1": np.zeros((SIZE, 1), np.float32)}), "invalid", "has shape"),
    "missing": (sends(lambda delta: {k: v for k, v in delta.items() if k != "layer1"}), "invalid", "lacks 'layer1'"),
    "additional": (sends(lambda delta: {**delta, "extra": np.zeros(1)}), "invalid", "has 'extra', which"),
    "nan": (sends(with_value(np.nan)), "invalid", "'layer2' holds NaN or infinity"),
    "infinite": (sends(with_value(-np.inf)), "invalid", "'layer2' holds NaN or infinity"),
    "overflowing": (sends(with_value(3e38)), "invalid", "'layer2' holds a value of magnitude 3e+38"),
    "large": (sends(with_value(1e10)), "invalid", "L2 norm is 1e+10, expected at most 1e+09"),
    "half": (
        sends(lambda delta: {name: array.astype(np.float16) for name, array in delta.items()}),
        "invalid",
        "'layer0' is float16, the server's model has float32",
    ),
    "negative-weight": (sends(num_examples=-10), "invalid", "num_examples and num_steps must be whole"),
    "infinite-weight": (sends(num_examples=float("inf")), "invalid", "num_examples and num_steps must be whole"),
    "nan-weight": (sends(num_examples=float("nan")), "invalid", "num_examples and num_steps must be whole"),
    "huge-weight": (sends(num_examples=10**300), "invalid", "num_examples and num_steps must be whole"),
    "large-weight": (sends(num_examples=2**53), "invalid", "expected 0 to 1000000 (cohort.max_examples)"),
    "no-examples": (sends(num_examples=0, num_steps=0), "ok", ""),
    "many-steps": (sends(num_steps=2**53), "invalid", "9007199254740992 steps, expected 0 to 10 in 1 epochs"),
    "claims-more": (lies(claims_more), "invalid", "has shape [1250000000]"),
    "shares-bytes": (lies(shares_bytes), "invalid", "two of its arrays share the bytes"),
    "huge-shape": (lies(has_a_huge_shape), "invalid", "has a shape that no array can have"),
    "bomb": (lies(is_a_bomb), "invalid", "its header claims 12000004 bytes"),
    "silent": (never_answers, "late", f"no answer within {DEADLINE_S:g}"),
    "dripping": (drips, "late", f"no answer within {DEADLINE_S:g}"),
    "thief": (answers_anothers_task, "late", "no answer within"),
    "flood": (sends_too_much(chunked=False), "late", "no answer within"),
    "chunked-flood": (sends_too_much(chunked=True), "late", "no answer within"),
}
"""By client id: what it does, and the outcome and reason that the events name."""


# What strangers do.


@contextlib.contextmanager
def idle_connections(port: int, count: int) -> Iterator[list[socket.socket]]:
    with contextlib.ExitStack() as stack:
        yield [
            stack.enter_context(contextlib.closing(socket.create_connection(("127.0.0.1", port), 10)))
            for _ in range(count)
        ]


def stranger_sends(port: int, head: str, *, chunked: bool = False) -> int:
    with socket.create_connection(("127.0.0.1", port), 10) as sock:
        sock.sendall(head.encode())
        return send_until_refused(sock, chunked=chunked)


def sends_repeatedly(port: int, head: bytes, piece: bytes, seconds: float) -> float:
    """Send the same again and again behind a head, and read no answer, until it is closed; how long that took."""
    began = time.monotonic()
    with socket.create_connection(("127.0.0.1", port), 10) as sock, contextlib.suppress(OSError):
        sock.settimeout(seconds)
        sock.sendall(head)
        while time.monotonic() - began < seconds:
            sock.sendall(piece)
    return time.monotonic() - began


def is_closed(sock: socket.socket) -> bool:
    sock.settimeout(20)
    try:
        return sock.recv(1) == b""
    except ConnectionError:
        return True


# The server's memory.


class Memory:
    """The resident memory of a server's process, and its peak since `begin`."""

    def __init__(self, command: Command) -> None:
        self._folder = Path(f"/proc/{command.process.pid}")
        self._before = 0

    def begin(self) -> None:
        (self._folder / "clear_refs").write_text("5")
        self._before = self._read("VmRSS")

    @property
    def peak(self) -> int:
        """In bytes."""
        return self._read("VmHWM")

    @property
    def growth(self) -> int:
        """Bytes that the peak lies above what was there at the beginning."""
        return self.peak - self._before

    def _read(self, name: str) -> int:
        lines = (self._folder / "status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


# The runs.


@contextlib.contextmanager
def server(folder: Path, *arguments: str) -> Iterator[tuple[Site, Command]]:
    (folder / "own.py").write_text(TRAINER)
    with site(folder, *CONFIG) as place:
        yield place, place.server(*arguments)


@contextlib.contextmanager
def good_client(place: Site, name: str, trainer: Adds) -> Iterator[Client]:
    client = Client(trainer, server=place.address, client_id=name, state_dir=place.folder / "state" / name)
    with client:
        yield client


def answers_twice(puppet: Puppet, task: Task, message: Message) -> None:
    """A good client's answer, and the same once more."""
    answer = puppet.answer(task, good_delta(GOOD[puppet.name]))
    assert [puppet.upload(task.number, answer), puppet.upload(task.number, answer)] == [201, 200]


def play(puppet: Puppet, act: Act) -> object:
    """What a puppet's part is; what came of it."""
    return act(puppet, *puppet.task())


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], int]:
    """The result, and the server's memory, of the three good clients alone."""
    folder = tmp_path_factory.mktemp("alone")
    with server(folder, "cohort.connected=3") as (place, command), contextlib.ExitStack() as stack:
        first = Puppet(place.address, "good-a")
        stack.enter_context(good_client(place, "good-b", Adds(GOOD["good-b"])))
        wait_for_event(folder / "run", "client_connected", command, client="good-b")
        memory = Memory(command)
        memory.begin()
        stack.enter_context(good_client(place, "good-c", Adds(GOOD["good-c"])))
        play(first, answers_twice)
        wait_for_event(folder / "run", "round_finished", command)
        peak = memory.peak
        assert command.wait() == 0
        return place.result, peak


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the system does not tell a process's peak")
def test_nothing_that_is_sent_stops_or_bends_a_run(tmp_path: Path, alone: tuple[dict[str, Any], int]) -> None:
    num_clients = len(BAD) + len(GOOD) + 2  # one that raises, one that forges
    with (
        server(tmp_path, f"cohort.connected={num_clients}") as (place, command),
        contextlib.ExitStack() as stack,
        ThreadPoolExecutor(max_workers=2 * num_clients) as pool,
    ):
        puppets = {name: Puppet(place.address, name) for name in ["good-a", *BAD, "forger"]}
        stack.enter_context(good_client(place, "raising", Adds(0.0, raises)))
        stack.enter_context(good_client(place, "good-b", Adds(GOOD["good-b"])))
        for name in ("raising", "good-b"):
            wait_for_event(tmp_path / "run", "client_connected", command, client=name)
        memory = Memory(command)

        # Strangers, while the server waits for its last client.
        memory.begin()
        idle = stack.enter_context(idle_connections(place.port, 500))
        put = f"PUT {wire.UPDATES_PATH}x/0 HTTP/1.1\r\nhost: x\r\n"
        floods = [
            pool.submit(stranger_sends, place.port, f"{put}content-length: {2 * 2**30}\r\n\r\n"),
            pool.submit(stranger_sends, place.port, f"{put}transfer-encoding: chunked\r\n\r\n", chunked=True),
        ]
        pieces = [
            (b"", b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n" * 8000),
            (b"GET /healthz HTTP/1.1\r\n", b"a: b\r\n" * 40_000),
            (b"GET /healthz HTTP/1.1\r\n", b"a" * 262_144),
            (b"GET /", b"a" * 262_144),
        ]
        endless = [pool.submit(sends_repeatedly, place.port, *piece, 30.0) for piece in pieces for _ in "1234"]
        assert all(flood.result() < 16 * MIB for flood in floods)
        assert max(each.result() for each in endless) < 25
        assert memory.growth < 64 * MIB, f"{memory.growth / MIB:.0f} MiB"

        # Clients, beside 500 connections that never ask for anything.
        memory.begin()
        stack.enter_context(good_client(place, "good-c", Adds(GOOD["good-c"])))
        parts: dict[str, Future[object]] = {
            name: pool.submit(play, puppets[name], act) for name, (act, _, _) in BAD.items()
        }
        parts["forger"] = pool.submit(play, puppets["forger"], forges_a_name(puppets["good-a"]))
        parts["good-a"] = pool.submit(play, puppets["good-a"], answers_twice)
        finished = wait_for_event(tmp_path / "run", "round_finished", command)
        peak = memory.peak
        results = {name: part.result() for name, part in parts.items()}
        assert command.wait() == 0
        assert all(is_closed(sock) for sock in idle)

        assert place.result["status"] == "completed"
        assert place.result["model_digest"] == alone[0]["model_digest"]
        assert (finished["counted"], finished["asked"]) == (4, num_clients)
        assert DEADLINE_S <= finished["seconds"] < DEADLINE_S + 2
        told = {event["client"]: event for event in place.events("outcome")}
        expected = {
            **{name: (kind, reason) for name, (_, kind, reason) in BAD.items()},
            **dict.fromkeys(GOOD, ("ok", "")),
            "raising": ("failed", "RuntimeError: no such column: age"),
            "forger": ("late", "no answer within"),
        }
        assert {name: (event["outcome"], expected[name][1] in event["reason"]) for name, event in told.items()} == {
            name: (kind, True) for name, (kind, _) in expected.items()
        }, told
        assert len(place.events("outcome")) == num_clients
        drip_s = results["dripping"]
        assert isinstance(drip_s, float)
        assert drip_s < DEADLINE_S + 5
        for name in ("flood", "chunked-flood"):
            sent = results[name]
            assert isinstance(sent, int)
            assert sent < 2 * MODEL_BYTES + 64 * MIB, "the limit, and what the system holds on its way"
        assert peak - alone[1] < 2 * MODEL_BYTES, f"{peak / MIB:.0f} MiB, alone {alone[1] / MIB:.0f} MiB"
        assert list((tmp_path / "run" / "spool").iterdir()) == []
