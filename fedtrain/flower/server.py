"""The port of `fedtrain-server`: uvicorn in a thread of this process."""

import asyncio
import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import uvicorn

from fedtrain.errors import ConfigError
from fedtrain.flower.fleet import FlowerFleet
from fedtrain.flower.routes import Routes


@contextlib.contextmanager
def serving(
    fleet: FlowerFleet, host: str, port: int, status: Callable[[], dict[str, Any]] = dict
) -> Iterator[tuple[str, int]]:
    """Serve a fleet's routes while the context lasts; gives the host and the port (a free one where 0 was asked).

    Raises:
        ConfigError: the address can't be listened on.
    """
    listener = _listen(host, port)
    routes = Routes(fleet, status)
    config = uvicorn.Config(
        routes,
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        date_header=False,
        ws="none",
        timeout_keep_alive=75,
        timeout_graceful_shutdown=1,
    )
    server = uvicorn.Server(config)
    loops: list[asyncio.AbstractEventLoop] = []

    async def serve() -> None:
        loops.append(asyncio.get_running_loop())
        await server.serve(sockets=[listener])

    thread = threading.Thread(target=lambda: asyncio.run(serve()), name="fedtrain-port", daemon=True)
    thread.start()
    try:
        yield host, listener.getsockname()[1]
    finally:
        server.should_exit = True
        with contextlib.suppress(RuntimeError, IndexError):  # the loop may have ended
            loops[0].call_soon_threadsafe(routes.close)
        thread.join(timeout=3)
        listener.close()


def _listen(host: str, port: int) -> socket.socket:
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
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
