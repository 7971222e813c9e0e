"""TLS and the list of clients, on real sockets: who is believed, who may join, and what changes while a run goes on."""

import contextlib
import shutil
import socket
import ssl
import threading
from base64 import b64encode
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import commands
import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.supercore import date

from fedtrain import Strategy
from fedtrain.aggregation import by_examples, weighted_mean
from fedtrain.client import Client, Evaluated, Fitted, Work
from fedtrain.errors import ConfigError
from fedtrain.fleet import Fleet, MemoryFleet
from fedtrain.flower import auth
from fedtrain.flower.fleet import FlowerFleet, new_run_id
from fedtrain.flower.server import serving
from fedtrain.local import sgd_epochs
from fedtrain.plan import CohortSettings
from fedtrain.rounds import first_state, run
from fedtrain.security import certificates, tls
from fedtrain.security.allow import AllowList, allow, key_text, revoke
from fedtrain.security.certificates import Made, make_certificates
from fedtrain.security.keys import load_or_create_key, public_pem
from fedtrain.security.tls import ServerCertificate
from fedtrain.selection import uniform
from fedtrain.state import RunState
from fedtrain.types import Params, Start

PATIENCE_S = 15.0
"""No test waits longer than this for anything; what it waits for comes within milliseconds or a second."""


class Log:
    """What a server reports and clients tell; it can be waited for."""

    def __init__(self) -> None:
        self.events = list[dict[str, Any]]()
        self._changed = threading.Condition()

    def __call__(self, event: str, round: int = 0, **fields: object) -> None:
        with self._changed:
            self.events.append({"event": event, "round": round, **fields})
            self._changed.notify_all()

    def of(self, client: str) -> Callable[[str, Mapping[str, object]], None]:
        """For a client's `tell`: its words begin with ``its_``."""
        return lambda word, details: self(f"its_{word}", **{**details, "client": client})  # type: ignore[arg-type]

    def all(self, event: str, **fields: object) -> list[dict[str, Any]]:
        wanted = {"event": event, **fields}
        return [found for found in list(self.events) if wanted.items() <= found.items()]

    def wait(self, event: str, **fields: object) -> dict[str, Any]:
        """The first event with these fields, as soon as it has happened."""
        with self._changed:
            if not self._changed.wait_for(lambda: bool(self.all(event, **fields)), PATIENCE_S):
                raise AssertionError(f"no {event} {fields} within {PATIENCE_S} s, only: {self.events}")
        return self.all(event, **fields)[0]


class Adds:
    """A trainer that adds its step to every element."""

    local_algorithms = ("sgd_epochs",)
    num_examples = 10

    def __init__(self, step: float, size: int = 3, before: Callable[[], object] = lambda: None) -> None:
        self.step, self.size, self.before = step, size, before

    def initial(self, seed: int) -> Start:
        return Start({"w": np.zeros(self.size, np.float32)}, {})

    def fit(self, start: Start, work: Work) -> Fitted:
        self.before()
        return Fitted({"w": start.params["w"] + np.float32(self.step)}, self.num_examples, 1, {})

    def evaluate(self, model: Params) -> Evaluated:
        return Evaluated(1, {})


def train(fleet: Fleet, rounds: int, *, connected: int, size: int = 3) -> RunState:
    strategy = Strategy(uniform(), sgd_epochs(1), weighted_mean(by_examples))
    state = first_state(strategy, Adds(0, size).initial(0), seed=0)
    settings = CohortSettings(deadline_s=PATIENCE_S, connect_deadline_s=PATIENCE_S, connected=connected, answers=1)
    return run(strategy, fleet, state, rounds=rounds, settings=settings, report=Log())


class Site:
    """A server and its clients."""

    def __init__(self, fleet: FlowerFleet, log: Log, port: int, folder: Path) -> None:
        self.fleet, self.log, self.port, self.folder = fleet, log, port, folder
        self.clients: list[Client] = []

    def client(self, id: str, *, host: str = "localhost", state: str = "", **settings: Any) -> Client:
        settings = {"trainer": Adds(1.0), "state_dir": self.folder / (state or id), "tell": self.log.of(id), **settings}
        client = Client(server=f"{host}:{self.port}", client_id=id, **settings)
        self.clients.append(client)
        client.start()
        return client

    def key(self, state: str) -> str:
        """The public key that a state folder holds."""
        return key_text(public_pem(load_or_create_key(self.folder / state)))


@contextlib.contextmanager
def site(
    folder: Path, made: Made | None = None, *, port: int = 0, log: Log | None = None, listed: Path | None = None
) -> Iterator[Site]:
    log = log or Log()
    fleet = FlowerFleet(new_run_id(), folder, lost_after_s=1.0, report=log, allow=AllowList(listed) if listed else None)
    certificate = ServerCertificate(made.certificate, made.key) if made else None
    with serving(fleet, "127.0.0.1", port, certificate=certificate) as (_, bound):
        there = Site(fleet, log, bound, folder)
        try:
            yield there
        finally:
            assert [client.id for client in there.clients if not client.stop(2.0)] == [], "a client did not stop"


@pytest.fixture
def made(tmp_path: Path) -> Made:
    return make_certificates(tmp_path / "certificates")


@contextlib.contextmanager
def handshakes_with(made: Made) -> Iterator[tuple[int, threading.Semaphore]]:
    """A port that shakes hands with this certificate, whatever its dates; released at every attempt."""
    attempts = threading.Semaphore(0)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(made.certificate, made.key)
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                attempts.release()
                with contextlib.suppress(OSError), context.wrap_socket(connection, server_side=True):
                    pass

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield listener.getsockname()[1], attempts
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()


# TLS.


@pytest.mark.parametrize("size", [3, 700_000], ids=["inline", "data route"])
def test_training_over_tls_gives_the_model_that_it_gives_without(tmp_path: Path, made: Made, size: int) -> None:
    with site(tmp_path, made) as here:
        for host, (client, step) in zip(("localhost", "127.0.0.1"), STEPS.items(), strict=True):
            here.client(client, host=host, trainer=Adds(step, size), ca=made.ca)
        state = train(here.fleet, 2, connected=2, size=size)
        here.fleet.finish("completed", timeout_s=5.0)
        assert all(client.wait(5.0) for client in here.clients)
    expected = train(
        MemoryFleet({client: Adds(step, size) for client, step in STEPS.items()}), 2, connected=2, size=size
    )
    assert state.num_succeeded == 2
    assert state.model_digest == expected.model_digest


STEPS = {"a": 0.1, "b": 0.7}


def test_bad_certificates_are_named_by_clients_that_then_go_on_trying(tmp_path: Path, made: Made) -> None:
    other = make_certificates(tmp_path / "other")
    elsewhere = make_certificates(tmp_path / "elsewhere", ["fl.example.org"])
    with site(tmp_path, made) as here:
        wrong_authority = here.client("authority", ca=other.ca)
        told = here.log.wait("its_disconnected", client="authority")
        assert told["reason"] == (
            f"localhost:{here.port}: its certificate is not signed by the authority that this client trusts, "
            f"server.ca={other.ca}"
        )
        good = here.client("good", ca=made.ca)
        here.log.wait("its_connected", client="good")
        assert (wrong_authority.status.phase, good.status.phase) == ("connecting", "idle")
        assert wrong_authority.status.error == told["reason"]
        assert train(here.fleet, 1, connected=1).num_succeeded == 1  # the others go on
        plain = here.client("plain")
        assert "does it speak TLS? then set server.ca" in here.log.wait("its_disconnected", client="plain")["reason"]
        assert plain.status.phase == "connecting"
    with site(tmp_path / "second", elsewhere) as here:
        here.client("host", ca=elsewhere.ca)
        assert "its certificate is not for 'localhost'" in here.log.wait("its_disconnected", client="host")["reason"]
    with site(tmp_path / "third") as here:
        here.client("encrypted", ca=made.ca)
        assert "it does not speak TLS" in here.log.wait("its_disconnected", client="encrypted")["reason"]


def test_a_client_says_that_the_certificate_has_expired_and_joins_once_it_is_renewed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class LastYear(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> Any:
            return datetime.now(tz) - timedelta(days=400)

    with monkeypatch.context() as patch:
        patch.setattr(certificates, "datetime", LastYear)
        expired = make_certificates(tmp_path / "certificates")
    log = Log()
    with handshakes_with(expired) as (port, attempts):
        client = Client(
            Adds(1.0),
            server=f"localhost:{port}",
            client_id="a",
            state_dir=tmp_path / "a",
            ca=expired.ca,
            tell=log.of("a"),
        )
        client.start()
        told = log.wait("its_disconnected")
        assert all(attempts.acquire(timeout=PATIENCE_S) for _ in range(4))
    try:
        assert "its certificate (or its authority's) has expired: renew it" in told["reason"]
        renewed = make_certificates(tmp_path / "certificates", force=True)
        with site(tmp_path / "run", renewed, port=port, log=log):
            log.wait("client_connected", client="a")
            log.wait("its_connected")
    finally:
        assert client.stop(2.0)
    assert len(log.all("its_disconnected", reason=told["reason"])) == 1  # said once, not at every attempt


def test_a_renewed_certificate_is_served_without_a_restart_and_a_broken_one_is_not(
    tmp_path: Path, made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tls, "_SETTLE_S", 0.1)
    context = ssl.create_default_context(cafile=made.ca)

    def served(port: int) -> bytes | None:
        with (
            socket.create_connection(("127.0.0.1", port), PATIENCE_S) as plain,
            context.wrap_socket(plain, server_hostname="localhost") as connection,
        ):
            return connection.getpeercert(binary_form=True)

    with site(tmp_path, made) as here:
        here.client("early", ca=made.ca)
        here.log.wait("client_connected", client="early")
        first = served(here.port)
        make_certificates(made.ca.parent, force=True)
        here.log.wait("certificate_renewed")
        second = served(here.port)
        assert second == ssl.PEM_cert_to_DER_cert(made.certificate.read_text()) != first
        made.key.write_text("gone wrong")
        assert f"server.key={made.key}" in here.log.wait("certificate_refused")["reason"]
        assert served(here.port) == second
        here.client("later", ca=made.ca)
        here.log.wait("client_connected", client="later")
        assert train(here.fleet, 1, connected=2).num_succeeded == 1
        assert not here.log.all("client_lost")  # who was connected stays so


def test_a_client_whose_clock_is_ten_minutes_off_takes_part_over_tls(
    tmp_path: Path, made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    offsets = {"ahead": timedelta(minutes=10), "behind": timedelta(minutes=-10)}

    def now() -> datetime:
        client = threading.current_thread().name.removeprefix("fedtrain-").partition("-")[0]
        return date.now() + offsets.get(client, timedelta(0))

    monkeypatch.setattr(auth, "now", now)
    with site(tmp_path, made) as here:
        for client in offsets:
            here.client(client, ca=made.ca)
        assert train(here.fleet, 2, connected=2).num_succeeded == 2
        for client in offsets:
            here.log.wait("its_done", client=client, round=2, taken=True)


def test_a_client_stops_at_once_while_a_server_keeps_silent_in_the_handshake(tmp_path: Path, made: Made) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"localhost:{listener.getsockname()[1]}"
        client = Client(Adds(1.0), server=address, client_id="a", state_dir=tmp_path / "a", ca=made.ca)
        client.start()
        connection, _ = listener.accept()
        with connection:
            assert connection.recv(1)  # it has said hello, and waits
            assert client.stop(2.0)


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_other_machines_are_let_in_only_with_a_certificate_and_a_list(tmp_path: Path, made: Made, host: str) -> None:
    fleet = FlowerFleet(new_run_id(), tmp_path)
    certificate = ServerCertificate(made.certificate, made.key)
    with pytest.raises(ConfigError, match=r"needs a certificate"), serving(fleet, host, 0, anyone=True):
        pass
    with pytest.raises(ConfigError, match=r"needs a list"), serving(fleet, host, 0, certificate=certificate):
        pass


# The list of clients.


@pytest.fixture
def listed(tmp_path: Path) -> Path:
    path = tmp_path / "clients.txt"
    path.write_text("# nobody yet\n")
    return path


def test_only_listed_clients_join_and_the_others_hear_why(tmp_path: Path, listed: Path) -> None:
    with site(tmp_path, listed=listed) as here:
        stranger = here.client("stranger")
        assert stranger.wait(5.0)
        assert stranger.status.phase == "refused"
        assert "'stranger' is not in the server's list of clients" in stranger.status.error
        allow(listed, "a", here.key("a"))
        allow(listed, "b", here.key("b"))
        here.client("a")
        here.log.wait("client_connected", client="a")
        posing = here.client("c", state="b")
        assert posing.wait(5.0)
        assert "this key is listed for the client id 'b', found 'c'" in posing.status.error
        wrong = here.client("b", state="elsewhere")
        assert wrong.wait(5.0)
        assert "client id 'b' is listed with another key" in wrong.status.error
        assert train(here.fleet, 1, connected=1).num_succeeded == 1
        refused = [(event["client"], event["reason"]) for event in here.log.all("client_refused")]
        assert [client for client, _ in refused] == ["stranger", "c", "b"]
        again = here.client("b", state="elsewhere")
        assert again.wait(5.0)
        assert len(here.log.all("client_refused")) == 3  # one event, however often it tries


def test_a_client_can_be_revoked_while_it_trains_and_the_round_goes_on(tmp_path: Path, listed: Path) -> None:
    with site(tmp_path, listed=listed) as here, ThreadPoolExecutor() as pool:
        training, revoked = threading.Event(), threading.Event()

        def hold() -> None:
            training.set()
            assert revoked.wait(PATIENCE_S)

        for client in ("good", "bad"):
            allow(listed, client, here.key(client))
        good = here.client("good")
        bad = here.client("bad", trainer=Adds(5.0, before=hold))
        future = pool.submit(train, here.fleet, 1, connected=2)
        assert training.wait(PATIENCE_S)
        revoke(listed, "bad")
        lost = here.log.wait("client_lost", client="bad")
        revoked.set()
        assert lost["reason"] == f"revoked: its id and key are not in {listed} any more"
        assert bad.wait(5.0)
        assert bad.status.phase == "refused"
        assert good.status.phase != "refused"
        state = future.result(PATIENCE_S)
        assert [client.id for client in here.fleet.clients()] == ["good"]
        assert len(here.log.all("client_lost", client="bad")) == 1
        assert state.params["w"].tolist() == [1.0, 1.0, 1.0]  # without the revoked client's 5
        assert bad.status.rounds == 0


def test_an_upload_that_ends_after_its_client_was_revoked_is_not_counted(tmp_path: Path, listed: Path) -> None:
    size = 700_000
    with site(tmp_path, listed=listed) as here, ThreadPoolExecutor() as pool:
        original = here.fleet.max_answer_bytes

        def revoke_meanwhile(number: int) -> int:  # asked when an upload begins
            revoke(listed, "bad")
            return original(number)

        here.fleet.max_answer_bytes = revoke_meanwhile  # type: ignore[method-assign]
        allow(listed, "bad", here.key("bad"))
        bad = here.client("bad", trainer=Adds(5.0, size))
        state = pool.submit(train, here.fleet, 1, connected=1, size=size).result(PATIENCE_S)
        assert bad.wait(5.0)
        assert (bad.status.phase, bad.status.rounds) == ("refused", 0)
        assert (state.num_succeeded, state.params["w"].max()) == (0, 0.0)


def test_a_revoked_client_that_only_waits_is_told_at_once(tmp_path: Path, listed: Path) -> None:
    with site(tmp_path, listed=listed) as here:
        allow(listed, "a", here.key("a"))
        client = here.client("a")
        here.log.wait("its_connected")
        revoke(listed, "a")
        assert here.fleet.clients() == []  # as the loop asks again and again
        assert client.wait(3.0)  # the request that it waits in would last 20 s
        assert client.status.phase == "refused"


def test_a_lost_key_is_replaced_while_the_run_goes_on(tmp_path: Path, listed: Path) -> None:
    with site(tmp_path, listed=listed) as here:
        allow(listed, "a", here.key("a"))
        first = here.client("a")
        assert train(here.fleet, 1, connected=1).num_succeeded == 1
        first.stop()
        shutil.rmtree(tmp_path / "a")
        refused = here.client("a")
        assert refused.wait(5.0)
        assert "replace it (`fedtrain clients allow`)" in refused.status.error
        assert allow(listed, "a", here.key("a"))
        here.client("a")
        assert train(here.fleet, 1, connected=1).num_succeeded == 1
        assert [info.id for info in here.fleet.clients()] == ["a"]


def test_a_key_that_moves_to_another_id_is_that_client_from_then_on(tmp_path: Path, listed: Path) -> None:
    with site(tmp_path, listed=listed) as here:
        allow(listed, "a", here.key("x"))
        first = here.client("a", state="x")
        here.log.wait("client_connected", client="a")
        first.stop()
        listed.write_text("")  # in place: taken when it has settled
        allow(listed, "b", here.key("x"))
        here.client("b", state="x")
        here.log.wait("client_connected", client="b")
        assert [info.id for info in here.fleet.clients()] == ["b"]


def test_a_broken_list_is_reported_and_changes_nothing(tmp_path: Path, listed: Path) -> None:
    with site(tmp_path, listed=listed) as here:
        allow(listed, "a", here.key("a"))
        here.client("a")
        here.log.wait("client_connected", client="a")
        before = listed.read_text()
        listed.write_text(before + "what is this\n")
        with ThreadPoolExecutor() as pool:
            pool.submit(train, here.fleet, 1, connected=2)  # the loop looks at the list while it waits
            assert "line 3: expected ID KEY" in here.log.wait("allow_list_refused")["reason"]
            key = ec.generate_private_key(ec.SECP256R1())
            listed.write_text(f"{before}b {b64encode(_der(key)).decode()}\n")
            assert here.log.wait("allow_list_changed", clients=2)
            refused = here.client("c")
            here.log.wait("client_refused", client="c")
            assert refused.wait(10)  # it has given its state folder back
            allow(listed, "c", here.key("c"))
            here.client("c")
            here.log.wait("client_connected", client="c")
        assert not here.log.all("client_lost")


def _der(key: ec.EllipticCurvePrivateKey) -> bytes:
    from cryptography.hazmat.primitives import serialization

    return key.public_key().public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)


# The commands.

NUMPY = ("experiment=quickstart_numpy", "data.num_partitions=2", "rounds=2")


def test_the_commands_train_over_tls_with_a_list(tmp_path: Path) -> None:
    with commands.site(tmp_path, *NUMPY) as here:
        assert "server.ca=certificates/ca.pem" in _tool(here, "certificates")
        for part in (0, 1):
            line = _tool(here, "key", "--id", f"client-{part}", "--state-dir", f"state/client-{part}")
            assert "may join" in _tool(here, "clients", "allow", "clients.txt", f"client-{part}", line)
        server = here.server(
            "server.host=0.0.0.0",
            "server.certificate=certificates/server.pem",
            "server.key=certificates/server-key.pem",
            "clients.allow=clients.txt",
        )
        here.address = f"localhost:{here.port}"
        clients = [here.client(part, "server.ca=certificates/ca.pem") for part in (0, 1)]
        assert server.wait() == 0
        assert [client.wait() for client in clients] == [0, 0]
        assert here.result["status"] == "completed"
        assert here.result["rounds_completed"] == 2
        assert {event["client"] for event in here.events("outcome")} == {"client-0", "client-1"}


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ((), "error: server.host=0.0.0.0: other machines can connect there, which needs a certificate"),
        (("server.insecure=true",), "error: server.host=0.0.0.0: other machines can connect there, which needs a list"),
        (("server.certificate=c.pem", "server.key=k.pem"), "error: server.certificate=c.pem: expected a file"),
        (
            ("clients.allow=none.txt",),
            "error: clients.allow: none.txt: expected a list of clients, found: No such file or directory: give the "
            "path of one (`fedtrain clients allow FILE ID KEY` makes it)\n",
        ),
    ],
)
def test_a_server_that_would_be_open_to_all_is_refused_at_start(
    tmp_path: Path, settings: tuple[str, ...], says: str
) -> None:
    with commands.site(tmp_path, *NUMPY) as here:
        server = here.start("fedtrain-server", "run_dir=run", "server.port=0", "server.host=0.0.0.0", *settings)
        assert server.wait() == 2
        assert server.output.startswith(says)
        assert not (tmp_path / "run").exists()


def _tool(here: commands.Site, *arguments: str) -> str:
    """What the command `fedtrain` says."""
    command = commands.Command("fedtrain", *arguments, cwd=here.folder)
    assert command.wait() == 0, command.output
    return command.output
