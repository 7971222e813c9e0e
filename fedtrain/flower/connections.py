"""Connections to the port: how many there may be, whose they are, and how long each may take.

An HTTP server reads whatever is sent to it, for as long as that takes. Here a connection is a stranger's until a client
that has joined signs a request on it. Strangers have ten seconds and a fixed number of places; a client's connections
are its own affair, up to a few. What stands before a request (its head) has a size, and requests come one at a time.
"""

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable
from typing import Any

from uvicorn import Config, Server
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from fedtrain.flower.limits import Limits

HEAD_S = 10.0
"""In this time a stranger's request must be answered, and a client's head complete; also a TLS handshake."""
MAX_HEAD_BYTES = 16 * 1024
MAX_HEADERS = 100
MAX_PER_CLIENT = 8
"""Connections of one client; it needs two, and as many again while the network has not noticed that two are dead."""

_log = logging.getLogger(__name__)
_quiet = logging.Logger(f"{__name__}.requests", logging.CRITICAL)
"""What strangers send is nothing to fill a log with."""


class _Refused(Exception):  # noqa: N818
    """A request that is not read on."""


class Gate:
    """Counts the connections, and ends those that take the place of others. Used in the event loop's thread only."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._strangers: dict[Connection, None] = {}  # in the order in which they came
        self._of_client: dict[str, dict[Connection, None]] = {}

    @property
    def num_strangers(self) -> int:
        """Connections that no client has signed for."""
        return len(self._strangers)

    def arrived(self, connection: "Connection") -> None:
        """A connection was accepted; it is a stranger's."""
        self._strangers[connection] = None
        self.make_room(self._limits.max_strangers)

    def make_room(self, most: int) -> None:
        """End the oldest strangers' connections until there are `most`."""
        while len(self._strangers) > most:
            oldest = next(iter(self._strangers))
            self.left(oldest)
            oldest.end()

    def recognised(self, connection: "Connection", client: str) -> None:
        """A client signed a request on it."""
        self.left(connection)
        own = self._of_client.setdefault(client, {})
        own[connection] = None
        if len(own) > MAX_PER_CLIENT:
            oldest = next(iter(own))
            self.left(oldest)
            oldest.end()

    def left(self, connection: "Connection") -> None:
        """It is closed, or does not count any more."""
        self._strangers.pop(connection, None)
        own = self._of_client.get(connection.client_id, {})
        own.pop(connection, None)
        if not own:
            self._of_client.pop(connection.client_id, None)


class Connection(HttpToolsProtocol):
    """One connection. Requests find it in their ASGI scope, as ``scope["state"]["connection"]``."""

    def __init__(self, server: Server, gate: Gate, end_handshake: Callable[[], object]) -> None:
        super().__init__(server.config, server.server_state, {"connection": self})
        self.logger = _quiet
        self.client_id = ""
        """The client that has signed a request on it; empty for a stranger."""
        self._gate, self._end_handshake = gate, end_handshake
        self._unread_bytes = 0
        """Received since the last piece of a body, or complete head."""
        self._head_bytes = 0
        self._deadline: asyncio.TimerHandle | None = None

    def recognise(self, client: str) -> None:
        """This request is signed by a client that has joined."""
        if self.client_id != client:
            self._gate.recognised(self, client)
            self.client_id = client
            self._set_deadline(None)

    def end(self) -> None:
        """Close it now, whatever is still to be sent or read."""
        if self.transport is None:
            self._end_handshake()
        else:
            self.transport.abort()

    # What asyncio calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """A stranger has come."""
        super().connection_made(transport)  # type: ignore[arg-type]
        self._set_deadline(HEAD_S)

    def connection_lost(self, exc: Exception | None) -> None:
        """It is closed, by whomever."""
        self._set_deadline(None)
        self._gate.left(self)
        super().connection_lost(exc)
        self.cycle, self.app_state = None, {}  # type: ignore[assignment]  # they refer to this object

    def data_received(self, data: bytes) -> None:
        """Parse what came, unless too much has come that was neither a head nor a body."""
        if self._unread_bytes > MAX_HEAD_BYTES:  # before this: a body may follow its head in one piece
            self.end()
            return
        self._unread_bytes += len(data)
        super().data_received(data)
        if self.client_id and self._deadline is None and self._is_idle():  # a part of a head
            self._set_deadline(HEAD_S)

    # What the parser calls. What is raised here becomes the answer 400, and the connection's end.

    def on_message_begin(self) -> None:
        """A request begins; the one before must have been answered."""
        if not self._is_idle():
            raise _Refused("the request before is not answered yet")
        self._head_bytes = 0
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        """A part of the path."""
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header; also one behind a body that comes in chunks."""
        self._count(len(name) + len(value))
        if len(self.headers) >= MAX_HEADERS:
            raise _Refused("too many headers")
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """The request can be answered."""
        self._unread_bytes = 0
        if self.client_id:
            self._set_deadline(None)
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """A part of the body."""
        self._unread_bytes = 0
        super().on_body(body)

    # What the request calls.

    def on_response_complete(self) -> None:
        """The next request may come."""
        if not self.client_id:
            self._set_deadline(HEAD_S)
        super().on_response_complete()

    def timeout_keep_alive_handler(self) -> None:
        """Nothing was asked for a while; who has not read the last answer by now will not."""
        self.end()

    def _is_idle(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _count(self, size: int) -> None:
        self._head_bytes += size
        if self._head_bytes > MAX_HEAD_BYTES:
            raise _Refused("its head is too long")

    def _set_deadline(self, seconds: float | None) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline = None if seconds is None else self.loop.call_later(seconds, self.end)


async def accept(listener: socket.socket, server: Server, gate: Gate, context: ssl.SSLContext | None) -> None:
    """Accept connections until this is cancelled. A handshake counts as a stranger's connection from its first byte."""
    loop = asyncio.get_running_loop()
    listener.setblocking(False)
    handshakes: set[asyncio.Task[Any]] = set()
    try:
        while True:
            try:
                sock, _ = await loop.sock_accept(listener)
            except OSError as error:  # out of descriptors, most likely: strangers have to make room
                _log.warning("a connection could not be accepted: %s", error)
                gate.make_room(gate.num_strangers // 2)
                await asyncio.sleep(0.1)
                continue
            handshake = loop.create_task(_begin(sock, server, gate, context))
            handshakes.add(handshake)
            handshake.add_done_callback(handshakes.discard)
    finally:
        listener.close()
        for handshake in handshakes:
            handshake.cancel()


async def _begin(sock: socket.socket, server: Server, gate: Gate, context: ssl.SSLContext | None) -> None:
    """Make a connection of an accepted socket: at once in plain text, after the handshake with TLS."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    connection = Connection(server, gate, task.cancel)
    gate.arrived(connection)
    try:
        await loop.connect_accepted_socket(
            lambda: connection, sock, ssl=context, ssl_handshake_timeout=HEAD_S if context else None
        )
    except (OSError, asyncio.CancelledError):  # whoever it was does not speak TLS, or was too slow
        gate.left(connection)


def configured(app: Callable[..., Any]) -> Config:
    """uvicorn's configuration; sockets are accepted here, so it has none."""
    return Config(
        app,
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        date_header=False,
        ws="none",
        timeout_keep_alive=75,
        timeout_graceful_shutdown=1,
    )
