"""The port: Flower's PullMessages and PushMessages, and fedtrain's own routes, as one plain ASGI application.

Nothing else of Flower's APIs is there. The application stands outside Flower's middlewares: behind those a dropped
connection is never seen, and bodies are read before they are authenticated. Here a request is first authenticated,
then its size is limited, then it is read.

    GET  /healthz                           the process serves
    GET  /readyz                            the run is not over
    GET  /fedtrain/v1/status                what the run does, as JSON
    POST /fedtrain/v1/enrol                 signed: join, or come back
    POST /v1/fleet/pull-messages            signed: the next task; waits for one
    POST /v1/fleet/push-messages            signed: a small answer
    GET  /fedtrain/v1/starts/DIGEST         signed: a model that is too large for a message
    PUT  /fedtrain/v1/updates/RUN/NUMBER    signed: an answer that is too large for a message
"""

import asyncio
import contextlib
import hashlib
import json
import logging
import os
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from typing import Any

from flwr.common.serde import message_from_proto, message_to_proto
from flwr.proto.fleet_pb2 import PullMessagesRequest, PullMessagesResponse, PushMessagesRequest, PushMessagesResponse
from flwr.supercore.date import now
from google.protobuf.message import DecodeError  # type: ignore[import-untyped, unused-ignore]

from fedtrain.client.identity import client_info
from fedtrain.errors import ConnectionRefused, ParamsError
from fedtrain.flower import wire
from fedtrain.flower.auth import NotAuthenticated, authenticate
from fedtrain.flower.connections import Connection
from fedtrain.flower.fleet import FlowerFleet, Member, Receipt
from fedtrain.flower.limits import Limits, paced
from fedtrain.params import Packed, num_bytes
from fedtrain.stored import Stored

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

_log = logging.getLogger(__name__)

_HELD_BUSY_S = 1.0
"""A pull is held this long while the client has work: its silence soon shows that it is stopped."""
_HELD_IDLE_S = 20.0
_MAX_ENROL_BYTES = 64 * 1024
_MAX_MESSAGE_BYTES = wire.INLINE_BYTES + 64 * 1024
_CHUNK = 1 << 18
"""Bytes of a model or answer that are in memory for one client: more are not quicker, and clients are many."""
_PATIENCE_S = 10.0
"""So long an upload waits for its turn."""
_STATUS_OF: dict[Receipt, int] = {"taken": 201, "repeated": 200, "late": 200, "unknown": 404}


class _Gone(Exception):  # noqa: N818
    """The client has closed the connection: nobody is there to answer."""


class _Answer(Exception):  # noqa: N818
    """Ends the handling of a request with this answer."""

    def __init__(self, status: int, body: bytes | str = b"", **headers: str) -> None:
        super().__init__(status)
        self.status, self.headers = status, headers
        self.body = body.encode() if isinstance(body, str) else body


class Routes:
    """The ASGI application.

    Args:
        fleet: Where clients and their tasks are known.
        status: Gives what ``/fedtrain/v1/status`` says.
        limits: Of what a request may take.
    """

    def __init__(self, fleet: FlowerFleet, status: Callable[[], dict[str, Any]], limits: Limits = Limits()) -> None:  # noqa: B008
        self._fleet, self._status, self._limits = fleet, status, limits
        self._closing = False
        self._wakes: set[asyncio.Event] = set()
        self._places = asyncio.Semaphore(limits.max_uploads)
        self._uploads: dict[int, asyncio.Timeout] = {}
        """Uploads that are being received, by task number."""

    def close(self) -> None:
        """Answer all held requests now and in future at once. Call it in the event loop."""
        self._closing = True
        for wake in self._wakes:
            wake.set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] != "http":
            return
        request = _Request(scope, receive, send, self._limits.min_bytes_per_s)
        try:
            await self._route(request)
        except _Gone:
            return
        except _Answer as found:
            answer = found
        except Exception:
            _log.exception("request %s %s failed", scope["method"], scope["path"])
            answer = _Answer(500, "internal error")
        else:
            return
        if self._closing or request.unread:  # what was not read would have to be read before the next request
            answer.headers["connection"] = "close"
        await _send(send, answer)

    async def _route(self, request: "_Request") -> None:
        method, path = request.scope["method"], request.scope["path"]
        match method, path:
            case "GET", "/healthz":
                raise _Answer(200, "ok\n")
            case "GET", "/readyz":
                over = self._status().get("status") in ("completed", "failed", "stopped")
                raise _Answer(503 if over else 200, "over\n" if over else "ready\n")
            case "GET", wire.STATUS_PATH:
                raise _json(200, self._status())
        try:
            key = authenticate(request.headers)
        except NotAuthenticated:
            raise _json(401, {"error": "not signed by a node key with the server's time"}) from None
        if (method, path) == ("POST", wire.ENROL_PATH):
            raise await self._enrol(request, key)
        member = self._fleet.member(key)
        if member is None:
            raise _json(403, {"error": "not enrolled"})
        request.recognise(member)
        if (method, path) == ("POST", wire.PULL_PATH):
            raise await self._pull(request, member)
        if (method, path) == ("POST", wire.PUSH_PATH):
            raise await self._push(request, member)
        if method == "GET" and path.startswith(wire.STARTS_PATH):
            await self._send_start(request, path.removeprefix(wire.STARTS_PATH))
            return
        if method == "PUT" and path.startswith(wire.UPDATES_PATH):
            raise await self._upload(request, member, path.removeprefix(wire.UPDATES_PATH))
        raise _json(404, {"error": "no such route"})

    async def _enrol(self, request: "_Request", key: bytes) -> _Answer:
        body = await request.body(_MAX_ENROL_BYTES)
        try:
            values = json.loads(body)
            if not isinstance(values, dict) or values.get("protocol") != wire.PROTOCOL:
                raise ConnectionRefused(
                    f"this server speaks protocol {wire.PROTOCOL}: use the same release of fedtrain on both sides"
                )
            member = self._fleet.enrol(key, client_info(values))
            request.recognise(member)
        except (ValueError, RecursionError):
            return _json(400, {"error": "the enrolment is not JSON"})
        except ConnectionRefused as error:
            return _json(409, {"error": str(error)})
        return _json(200, {"run": self._fleet.run, "node": member.node, "lost_after_s": self._fleet.lost_after_s})

    async def _pull(self, request: "_Request", member: Member) -> _Answer:
        message = _parse(PullMessagesRequest(), await request.body(_MAX_ENROL_BYTES))
        if message.node.node_id != member.node:
            return _json(403, {"error": "the node is not the one of this key"})
        try:
            poll = json.loads(request.headers.get(wire.POLL_HEADER, "{}"))
            run, holding, awaiting = poll.get("run", ""), poll.get("holding", []), poll.get("awaiting", [])
            if not all(type(number) is int for number in [*holding, *awaiting]):
                raise TypeError
        except (ValueError, TypeError, AttributeError, RecursionError):
            return _json(400, {"error": f"{wire.POLL_HEADER} is not what fedtrain's protocol says"})
        dropped = await self._hold(request, member, lambda: self._news(member, run, holding))
        if dropped:
            raise _Gone
        if not self._fleet.is_member(member):
            return _json(403, {"error": "not enrolled any more"})
        headers = {}
        verdicts = self._fleet.verdicts(member, run, holding, awaiting)
        if verdicts:
            headers[wire.SETTLED_HEADER] = json.dumps(verdicts)
        if over := self._fleet.over(member):
            headers[wire.OVER_HEADER] = over
        found = self._fleet.next_message(member, holding)
        response = PullMessagesResponse(messages_list=[message_to_proto(found)] if found else [])
        return _protobuf(response, headers)

    def _news(self, member: Member, run: str, holding: list[int]) -> bool:
        """Whether a client should hear something at once: a task, that one is called off, that the run is over."""
        fleet = self._fleet
        return bool(
            not fleet.is_member(member)
            or fleet.over(member)
            or fleet.next_number(member, holding) is not None
            or fleet.called_off(member, run, holding)
        )

    async def _hold(self, request: "_Request", member: Member, news: Callable[[], bool]) -> bool:
        """Wait until there is news for a client, or long enough; whether its connection broke meanwhile."""
        if self._closing or news():
            return False
        loop, wake = asyncio.get_running_loop(), asyncio.Event()

        def wake_up() -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended: nothing is held any more
                loop.call_soon_threadsafe(wake.set)

        member.wake = wake_up
        self._wakes.add(wake)
        self._fleet.poll_began(member)
        gone = asyncio.ensure_future(request.disconnected())
        dropped = False
        try:
            until = loop.time() + (_HELD_BUSY_S if self._fleet.has_work(member) else _HELD_IDLE_S)
            while not (self._closing or news() or dropped) and (left := until - loop.time()) > 0:
                woken = asyncio.ensure_future(wake.wait())
                await asyncio.wait({woken, gone}, timeout=left, return_when=asyncio.FIRST_COMPLETED)
                woken.cancel()
                wake.clear()
                dropped = gone.done()
        finally:
            gone.cancel()
            self._wakes.discard(wake)
            self._fleet.poll_ended(member, dropped=dropped)
        return dropped

    async def _push(self, request: "_Request", member: Member) -> _Answer:
        pushed = _parse(PushMessagesRequest(), await request.body(_MAX_MESSAGE_BYTES))
        if pushed.node.node_id != member.node or len(pushed.messages_list) != 1:
            return _json(403, {"error": "one message, from the node of this key, is expected"})
        proto = pushed.messages_list[0]
        if proto.metadata.src_node_id != member.node:
            return _json(403, {"error": "the message is in another node's name"})
        try:
            wire.require_answer(proto)
            message = message_from_proto(proto)
            packed = Packed(wire.read_reply(message), where="the answer")
            head = json.loads(packed.metadata["answer"])
            run, number = head["run"], head["task"]
            if type(run) is not str or type(number) is not int:
                raise TypeError
        except (ParamsError, ValueError, KeyError, TypeError, RecursionError):
            return _json(400, {"error": "the message holds no answer of fedtrain's protocol"})
        receipt = self._fleet.answer_message(member, run, number, message, packed)
        if receipt == "unknown":
            return _json(404, {"error": "no such task of this client"})
        response = PushMessagesResponse(results={proto.metadata.message_id: 0})
        return _protobuf(response, {}, status=_STATUS_OF[receipt])

    async def _send_start(self, request: "_Request", digest: str) -> None:
        pieces = self._fleet.start(digest)
        if pieces is None:
            raise _json(404, {"error": "no open task starts from this"})
        size = str(num_bytes(pieces)).encode()
        headers = [(b"content-type", b"application/octet-stream"), (b"content-length", size)]
        await request.send({"type": "http.response.start", "status": 200, "headers": headers})
        sent = 0
        try:
            async with paced(
                lambda: sent, self._limits.min_bytes_per_s, wanted=lambda: self._fleet.start(digest) is not None
            ):
                for piece in pieces:
                    for begin in range(0, len(piece), _CHUNK):
                        chunk = piece[begin : begin + _CHUNK]
                        await request.send({"type": "http.response.body", "body": chunk, "more_body": True})
                        sent += len(chunk)
                await request.send({"type": "http.response.body"})
        except TimeoutError:  # what is still in buffers may never be read: the connection ends with it
            request.end()

    async def _upload(self, request: "_Request", member: Member, rest: str) -> _Answer:
        run, _, text = rest.partition("/")
        if not (text.isascii() and text.isdigit() and len(text) < 16):
            return _json(404, {"error": "no such task of this client"})
        number = int(text)
        receipt = self._fleet.expects(member, run, number)
        if receipt == "taken":
            receipt = await self._store(request, member, run, number)
        elif receipt == "late":
            receipt = self._fleet.answer(member, run, number, lambda: Packed(b""))
        return _json(_STATUS_OF[receipt], {"receipt": receipt})

    async def _store(self, request: "_Request", member: Member, run: str, number: int) -> Receipt:
        """Stream a body into the spool, and take it as the answer once it is complete and intact."""
        if number in self._uploads:  # its connection is dead, or the client would not begin again
            self._uploads[number].reschedule(0)
        try:
            async with asyncio.timeout(_PATIENCE_S):
                await self._places.acquire()
        except TimeoutError:
            raise _json(503, {"error": "too many uploads at once: send it again"}, **{"retry-after": "5"}) from None
        try:
            async with paced(
                lambda: request.num_bytes,
                self._limits.min_bytes_per_s,
                wanted=lambda: self._fleet.expects(member, run, number) == "taken",
            ) as limit:
                self._uploads[number] = limit
                try:
                    return await self._receive(request, member, run, number)
                finally:
                    if self._uploads.get(number) is limit:
                        del self._uploads[number]
        except TimeoutError:
            raise _json(408, {"error": "the upload was too slow, or is not wanted any more"}) from None
        finally:
            self._places.release()

    async def _receive(self, request: "_Request", member: Member, run: str, number: int) -> Receipt:
        path = self._fleet.upload_path(number)
        temporary = path.with_suffix(f".{id(request):x}.part")
        max_header_bytes = self._fleet.max_header_bytes(number)
        sha = hashlib.sha256()
        try:
            with open(temporary, "wb") as file:

                def keep(chunks: list[bytes]) -> None:
                    for chunk in chunks:
                        sha.update(chunk)
                        file.write(chunk)

                # In a thread, so that what takes time for one client does not hold up the others.
                async for chunks in _grouped(request.chunks(self._fleet.max_answer_bytes(number)), _CHUNK):
                    await asyncio.to_thread(keep, chunks)
            if sha.hexdigest() != request.headers.get(wire.SHA256_HEADER, ""):
                raise _json(400, {"error": f"the body is not the one that {wire.SHA256_HEADER} names: send it again"})

            def read() -> Packed:
                os.replace(temporary, path)
                return Stored(path, max_header_bytes=max_header_bytes)

            return self._fleet.answer(member, run, number, read)
        finally:
            with contextlib.suppress(FileNotFoundError):
                temporary.unlink()


class _Request:
    """A request whose body is read only when it is asked for, and never beyond a limit."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, min_bytes_per_s: float) -> None:
        self.scope, self._receive, self.send = scope, receive, send
        self._min_bytes_per_s = min_bytes_per_s
        self._connection: Connection | None = scope.get("state", {}).get("connection")
        self.num_bytes = 0
        """Of the body, so far."""
        self.headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        self.finished = False

    @property
    def unread(self) -> bool:
        """Whether some of the body was not read."""
        has_body = self.headers.get("content-length", "0") != "0" or "transfer-encoding" in self.headers
        return has_body and not self.finished

    def recognise(self, member: Member) -> None:
        """Tell the connection that it is this client's."""
        if self._connection is not None:
            self._connection.recognise(member.info.id)

    def end(self) -> None:
        """Close the connection, whatever was not sent yet."""
        if self._connection is not None:
            self._connection.end()

    async def chunks(self, limit: int) -> Any:
        """The body in pieces; 413 as soon as it is, or says it will be, longer than `limit` bytes."""
        too_long = _json(413, {"error": f"the body may have {limit} bytes at most"})
        declared = self.headers.get("content-length", "0")
        if not declared.isdigit() or int(declared) > limit:
            raise too_long
        while not self.finished:
            event = await self._receive()
            if event["type"] == "http.disconnect":
                raise _Gone
            chunk = event.get("body", b"")
            self.num_bytes += len(chunk)
            if self.num_bytes > limit:
                raise too_long
            self.finished = not event.get("more_body", False)
            yield chunk

    async def body(self, limit: int) -> bytes:
        """The whole body, of `limit` bytes at most; 408 if it comes too slowly."""
        try:
            async with paced(lambda: self.num_bytes, self._min_bytes_per_s):
                return b"".join([chunk async for chunk in self.chunks(limit)])
        except TimeoutError:
            raise _json(408, {"error": "the body came too slowly"}) from None

    async def disconnected(self) -> None:
        """Return when the client closes the connection. The body has been read before."""
        while (await self._receive())["type"] != "http.disconnect":
            pass


async def _grouped(chunks: AsyncIterator[bytes], size: int) -> AsyncIterator[list[bytes]]:
    """Some of the chunks at a time, with `size` bytes together or a little more; the last have what is left."""
    group, length = list[bytes](), 0
    async for chunk in chunks:
        group.append(chunk)
        length += len(chunk)
        if length >= size:
            yield group
            group, length = [], 0
    yield group


def _parse(message: Any, body: bytes) -> Any:
    try:
        message.ParseFromString(body)
    except DecodeError:
        raise _json(400, {"error": f"the body is not a {type(message).__name__}"}) from None
    return message


def _json(status: int, values: dict[str, Any], **headers: str) -> _Answer:
    return _Answer(status, json.dumps(values), **{"content-type": "application/json", **headers})


def _protobuf(message: Any, headers: dict[str, str], status: int = 200) -> _Answer:
    return _Answer(status, message.SerializeToString(), **{"content-type": "application/protobuf", **headers})


async def _send(send: Send, answer: _Answer) -> None:
    headers = {"content-length": str(len(answer.body)), wire.TIME_HEADER: now().isoformat(), **answer.headers}
    pairs = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
    with contextlib.suppress(Exception):  # the client may be gone
        await send({"type": "http.response.start", "status": answer.status, "headers": pairs})
        await send({"type": "http.response.body", "body": answer.body})
