"""The port of `fedtrain-server`: uvicorn in a thread of this process."""

import asyncio
import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import uvicorn

from fedtrain.errors import ConfigError
from fedtrain.flower.connections import Gate, accept, configured
from fedtrain.flower.fleet import FlowerFleet
from fedtrain.flower.limits import Limits
from fedtrain.flower.routes import Routes
from fedtrain.observe.events import Report
from fedtrain.security.allow import require_listed
from fedtrain.security.tls import ServerCertificate, require_encrypted

_LOOK_S = 0.5
"""Seconds between two looks at the files of a certificate."""


@contextlib.contextmanager
def serving(
    fleet: FlowerFleet,
    host: str,
    port: int,
    status: Callable[[], dict[str, Any]] = dict,
    *,
    certificate: ServerCertificate | None = None,
    insecure: bool = False,
    anyone: bool = False,
    limits: Limits = Limits(),  # noqa: B008
    listener: socket.socket | None = None,
) -> Iterator[tuple[str, int]]:
    """Serve a fleet's routes while the context lasts; gives the host and the port (a free one where 0 was asked).

    Args:
        fleet: Whose routes; it also says who may join.
        host: Name or address to listen on.
        port: In [0, 65535].
        status: Gives what ``/fedtrain/v1/status`` says.
        certificate: Speak TLS with this, which is renewed when its files change; None: plain text.
        insecure: Allow plain text where other machines connect.
        anyone: Allow anyone to join where other machines connect.
        limits: What strangers and clients may take.
        listener: What `listen` gave for this host and port; None: listen there now. It is closed with the context.

    Raises:
        ConfigError: the address can't be listened on, or is no loopback one and lacks a certificate or an allow-list.
    """
    require_encrypted(host, certificate=certificate is not None, insecure=insecure)
    require_listed(host, listed=fleet.allow is not None, anyone=anyone)
    listener = listener or listen(host, port)
    routes = Routes(fleet, status, limits)
    server = uvicorn.Server(configured(routes))
    stops: list[Callable[[], object]] = []

    async def serve() -> None:
        loop, context = asyncio.get_running_loop(), certificate.context if certificate else None
        tasks = [
            loop.create_task(accept(listener, server, Gate(limits), context)),
            loop.create_task(_renew(certificate, fleet.report)),
        ]
        stops.extend(partial(loop.call_soon_threadsafe, stop) for stop in (tasks[0].cancel, routes.close))
        await server.serve(sockets=[])
        for task in tasks:
            task.cancel()

    thread = threading.Thread(target=lambda: asyncio.run(serve()), name="fedtrain-port", daemon=True)
    thread.start()
    try:
        yield host, listener.getsockname()[1]
    finally:
        server.should_exit = True
        with contextlib.suppress(RuntimeError):  # the loop may have ended
            for stop in stops:
                stop()
        thread.join(timeout=3)
        listener.close()


async def _renew(certificate: ServerCertificate | None, report: Report) -> None:
    while certificate is not None:
        await asyncio.sleep(_LOOK_S)
        await asyncio.to_thread(certificate.refresh, report)  # reading files must not hold up requests


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens; who connects waits until it is served.

    Raises:
        ConfigError: the address can't be listened on.
    """
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, proto)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(2048)
        except OSError:
            listener.close()
            raise
    except OSError as error:
        raise ConfigError(
            f"server.host={host} server.port={port}: cannot listen there ({error.strerror}): "
            "stop what uses the port, or choose another one"
        ) from None
    return listener
