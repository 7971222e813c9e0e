"""What strangers and clients may take of a server: connections, time, bytes."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

_START_S = 10.0
"""A transfer has this long to begin before its pace counts: a client may be busy."""

_LOOK_S = 1.0


@dataclass(frozen=True)
class Limits:
    """The limits that an operator may want to change."""

    max_strangers: int = 256
    """Connections at once of which no client that has joined is known, >= 1; the oldest makes room for a new one."""
    max_uploads: int = 64
    """Large answers that are received at once, >= 1; others wait their turn."""
    min_bytes_per_s: float = 1024.0
    """A request's body, or a model on its way, that is slower is given up, >= 0."""


@contextlib.asynccontextmanager
async def paced(
    moved: Callable[[], int], min_bytes_per_s: float, *, wanted: Callable[[], bool] = lambda: True
) -> AsyncIterator[asyncio.Timeout]:
    """End a transfer that is too slow, or that nobody waits for any more.

    Args:
        moved: Bytes so far.
        min_bytes_per_s: On average, after the first ten seconds.
        wanted: Asked every second.

    Raises:
        TimeoutError: it was ended.
    """
    loop = asyncio.get_running_loop()
    began = loop.time()
    async with asyncio.timeout(None) as limit:
        timer = loop.call_later(_LOOK_S, lambda: look())

        def look() -> None:
            nonlocal timer
            slow = moved() < min_bytes_per_s * (loop.time() - began - _START_S)
            if slow or not wanted():
                limit.reschedule(loop.time())
            else:
                timer = loop.call_later(_LOOK_S, look)

        try:
            yield limit
        finally:
            timer.cancel()
