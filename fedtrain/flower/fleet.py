"""FlowerFleet: the clients that are connected to this process's own SuperLink.

Called from two sides: the round loop (`Fleet`) in its thread, and the routes in the event loop's thread. One lock
guards everything; whatever the loop may wait for is announced on its condition.
"""

import contextlib
import json
import os
import secrets
import struct
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from flwr.app import Message
from flwr.supercore.date import now

from fedtrain.errors import ConfigError, ConnectionRefused, ParamsError
from fedtrain.flower import wire
from fedtrain.flower.broker import Broker
from fedtrain.observe.events import Report, quiet
from fedtrain.params import Packed, num_bytes, sync_folder
from fedtrain.security.allow import AllowList
from fedtrain.stored import Stored
from fedtrain.types import ClientInfo, Outcome, Partitioning, Start, Task

Receipt = Literal["taken", "repeated", "late", "unknown"]
"""What became of an answer: new, had already, after its round closed, or to a task that this client was not given."""

_MAX_REFUSALS = 1000
"""As many refused clients are reported, until the list of clients changes: a stranger must not fill the disk."""

_MAX_NEWS, _NEWS_PER_S = 20.0, 0.1
"""So often at once, and then per second, it is reported that one client came or went: else it could fill the disk."""

_MAX_EARLY_BYTES = 64 * 2**20
"""Small answers that wait in memory together for their turn; more of them wait in files."""


@dataclass
class Given:
    """A task that was given and not settled yet."""

    task: Task
    given_at: float
    answered: bool = False
    wanted: bool = True
    """To be delivered to its client; not any more once it counts as lost, until it is given again."""
    away: bool = False
    """It was reported that its client is gone; not again before the client has come back for it."""
    attempt: int = 0
    message: str = ""
    """Id of the Flower message of the last attempt; empty before the first."""


@dataclass
class Member:
    """A client that has enrolled."""

    info: ClientInfo
    key: bytes
    node: int
    contact: float
    """When it was last heard of, on the monotonic clock."""
    polls: int = 0
    """Requests of it that are being held open."""
    here: bool = True
    told_over: bool = False
    verdicts: dict[int, bool] = field(default_factory=dict)
    news: float = _MAX_NEWS
    """How often it may still be reported that it came or went."""
    news_at: float = 0.0
    wake: Callable[[], None] = lambda: None
    """Wakes the request that is held open; safe to call from any thread."""


class FlowerFleet:
    """A `Fleet` of real clients.

    Args:
        run: Id of the run; answers to another one are never counted.
        folder: For this run's files: ``clients.json`` (which key holds which client id), ``spool/`` (uploads).
        lost_after_s: A client that is silent for longer counts as lost, > 0.
        report: Told who comes and goes, and who is refused.
        allow: The clients that may join; None: anyone, and an id belongs to the key that used it first.
        max_clients: As many different ones may join, >= 1; then others are refused.
        partitioning: How clients share out the data; one that does it otherwise is refused. None: anyhow.
    """

    def __init__(
        self,
        run: str,
        folder: Path,
        *,
        lost_after_s: float = 5.0,
        report: Report = quiet,
        allow: AllowList | None = None,
        max_clients: int = 10_000,
        partitioning: Partitioning | None = None,
    ) -> None:
        self.run, self.lost_after_s, self.report, self.allow = run, lost_after_s, report, allow
        self.broker = Broker()
        self.spool = folder / "spool"
        self.spool.mkdir(parents=True, exist_ok=True)
        for left in self.spool.glob("task-*"):  # uploads to a run that ended with its process
            left.unlink(missing_ok=True)
        self._report, self._max_clients, self._partitioning = report, max_clients, partitioning
        self._refused: set[tuple[str, bytes]] = set()
        """Ids and keys whose refusal was reported."""
        self._ids_path = folder / "clients.json"
        self._ids = _read_ids(self._ids_path)
        self._members: dict[str, Member] = {}
        self._by_key: dict[bytes, Member] = {}
        self._given: dict[int, Given] = {}
        self._closed: dict[int, str] = {}
        """Settled tasks that may still be answered, and their clients."""
        self._starts: dict[str, list[memoryview]] = {}
        self._outcomes: deque[Outcome] = deque()
        self._early_bytes = 0
        """Of small answers that are in memory."""
        self._folded: deque[int] = deque()
        """Sizes of those that nobody needs any more."""
        self._changes = self._changes_seen = 0
        self._over = ""
        self._lock = threading.Condition(threading.RLock())

    # The round loop's side: `Fleet`.

    def clients(self) -> Sequence[ClientInfo]:
        """Clients that are connected now, in the order of their ids."""
        with self._lock:
            self._notice_silence()
            self._changes_seen = self._changes
            return [self._members[client].info for client in sorted(self._members) if self._members[client].here]

    def wait(self, timeout_s: float) -> None:
        """Return when a client came or went since `clients` was called, or after `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        with self._lock:
            while self._changes == self._changes_seen and (left := deadline - time.monotonic()) > 0:
                self._lock.wait(min(left, 0.5))
                self._notice_silence()
            self._changes_seen = self._changes

    def give(self, tasks: Sequence[Task], start: Start) -> None:
        """Send tasks to their clients. See `Fleet.give`."""
        if not tasks:
            return
        digest = tasks[0].start
        if digest not in self._starts:
            self._starts[digest] = wire.start_pieces(start, tasks[0].wire_dtype)
        current = time.monotonic()
        with self._lock:
            for task in tasks:
                given = self._given.setdefault(task.number, Given(task, current))
                if given.answered:  # with something unusable: this asks again
                    self.broker.drop(given.message)
                    given.answered, given.message = False, ""
                given.given_at, given.wanted = current, True
                member = self._members.get(task.client)
                if member is not None:
                    member.wake()

    def receive(self, timeout_s: float) -> Outcome | None:
        """The next outcome in order of arrival; None if there is none within `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        with self._lock:
            while not self._outcomes:
                self._notice_silence()
                left = deadline - time.monotonic()
                if self._outcomes or left <= 0:
                    break
                self._lock.wait(min(left, 0.25))
            return self._outcomes.popleft() if self._outcomes else None

    def settle(self, task: Task, counted: bool) -> None:
        """The server is done with a task; its client hears so with its next request."""
        with self._lock:
            given = self._given.pop(task.number, None)
            if given is None:
                return
            if given.message:
                self.broker.drop(given.message)
            if not given.answered:
                self._closed[task.number] = task.client
                while len(self._closed) > 100_000:
                    del self._closed[next(iter(self._closed))]
            if not any(other.task.start == task.start for other in self._given.values()):
                self._starts.pop(task.start, None)
            with contextlib.suppress(FileNotFoundError):
                self.upload_path(task.number).unlink()
            member = self._members.get(task.client)
            if member is not None:
                member.verdicts[task.number] = counted
                while len(member.verdicts) > wire.MAX_VERDICTS:
                    del member.verdicts[next(iter(member.verdicts))]
                if not given.answered:
                    member.wake()  # it may stop working

    def finish(self, status: str, timeout_s: float) -> None:
        """Tell all connected clients that the run has ended; return when they have heard it, or after `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        with self._lock:
            self._over = status
            for member in self._members.values():
                member.wake()
            while any(member.here and not member.told_over for member in self._members.values()):
                left = deadline - time.monotonic()
                if left <= 0:
                    return
                self._lock.wait(min(left, 0.25))
                self._notice_silence()

    # The routes' side.

    def enrol(self, key: bytes, info: ClientInfo) -> Member:
        """A client joins or comes back.

        Raises:
            ConnectionRefused: its id belongs to another key, its key to another id, it is not allowed to join, its
                part of the data is of another split, or there are too many.
        """
        with self._lock:
            self._revoke()
            public = key.decode()
            refusal = self.allow.refusal(info.id, key) if self.allow else self._taken(info.id, public)
            refusal = refusal or self._splits_otherwise(info.partitioning)
            if not refusal and info.id not in self._ids and len(self._ids) >= self._max_clients:
                refusal = f"{self._max_clients} clients have joined, which is all that server.max_clients allows"
            if refusal:
                self._note_refusal(info.id, key, refusal)
                raise ConnectionRefused(refusal)
            if self._ids.get(info.id) != public:
                self._ids = {id: holder for id, holder in self._ids.items() if holder != public} | {info.id: public}
                self._save_ids()
            known = self._members.get(info.id)
            member = Member(info, key, self.broker.node(key), time.monotonic())
            if known is not None:
                member.verdicts, member.news, member.news_at = known.verdicts, known.news, known.news_at
            self._members[info.id] = self._by_key[key] = member
            if known is None:
                self._tell(member, "client_connected", num_examples=info.num_examples, tags=dict(info.tags))
            else:
                self._tell(member, "client_returned")
            self._changed()
            return member

    def is_member(self, member: Member) -> bool:
        """Whether a client that was one when its request began still is: it may have been revoked since."""
        with self._lock:
            self._revoke()
            return member.key in self._by_key

    def member(self, key: bytes) -> Member | None:
        """The client that holds a key, and that it was heard of now."""
        with self._lock:
            self._revoke()
            member = self._by_key.get(key)
            if member is not None:
                member.contact = time.monotonic()
                if not member.here:
                    member.here = True
                    self._tell(member, "client_returned")
                    self._changed()
            return member

    def poll_began(self, member: Member) -> None:
        """A request of this client is held open: as long as it is, the client is there."""
        with self._lock:
            member.polls += 1

    def poll_ended(self, member: Member, *, dropped: bool) -> None:
        """The held request was answered, or its connection broke."""
        with self._lock:
            member.polls -= 1
            member.contact = time.monotonic()
            if dropped and member.polls == 0 and self._members.get(member.info.id) is member and member.here:
                self._gone(member, "its connection closed")

    def next_number(self, member: Member, holding: Sequence[int]) -> int | None:
        """The number of the next task for a client, which says what it is working on."""
        with self._lock:
            for number, given in self._given.items():
                if given.task.client != member.info.id or not given.wanted or given.answered:
                    continue
                if number not in holding:
                    return number
                given.away = False  # it is being worked on: if the client goes away now, that is news again
            return None

    def next_message(self, member: Member, holding: Sequence[int]) -> Message | None:
        """The next task for a client; again, with a higher attempt number, if an earlier delivery was lost."""
        with self._lock:
            number = self.next_number(member, holding)
            if number is None:
                return None
            given = self._given[number]
            if given.message:  # it was delivered once, and the client does not have it
                self.broker.drop(given.message)
            given.attempt, given.away = given.attempt + 1, False
            pieces = self._starts[given.task.start]
            message = wire.task_message(
                given.task,
                run=self.run,
                flower_run=self.broker.run,
                node=member.node,
                attempt=given.attempt,
                now=now().timestamp(),
                start=b"".join(pieces) if num_bytes(pieces) <= wire.INLINE_BYTES else None,
            )
            given.message = message.metadata.message_id
            self.broker.put(message)
            return self.broker.take(member.node)

    def verdicts(self, member: Member, run: str, holding: Sequence[int], awaiting: Sequence[int]) -> dict[int, bool]:
        """A client's last verdicts, and those on the tasks that it names; another run's were never counted."""
        with self._lock:
            asked = {*holding, *awaiting}
            if run != self.run:
                return dict.fromkeys(asked, False)
            return {**dict.fromkeys(asked - self._given.keys(), False), **member.verdicts}

    def called_off(self, member: Member, run: str, holding: Sequence[int]) -> bool:
        """Whether a task that a client is working on is settled: it should hear so at once."""
        with self._lock:
            return run != self.run or any(number not in self._given for number in holding)

    def start(self, digest: str) -> list[memoryview] | None:
        """What tasks start from, in pieces, by its digest, as long as one of them is open."""
        with self._lock:
            return self._starts.get(digest)

    def has_work(self, member: Member) -> bool:
        """Whether the client has a task that it has not answered."""
        with self._lock:
            return any(given.task.client == member.info.id and not given.answered for given in self._given.values())

    def over(self, member: Member) -> str:
        """The run's final status if it has ended, and note that this client hears so."""
        with self._lock:
            if self._over:
                member.told_over = True
                self._lock.notify_all()
            return self._over

    def expects(self, member: Member, run: str, number: int) -> Receipt:
        """What an answer to a task would be, before it is read; "taken" means that it is wanted."""
        with self._lock:
            given = self._given.get(number)
            if run != self.run or not self.is_member(member):
                return "unknown"
            if given is None:
                return "late" if self._closed.get(number) == member.info.id else "unknown"
            if given.task.client != member.info.id:
                return "unknown"
            return "repeated" if given.answered else "taken"

    def max_answer_bytes(self, number: int) -> int:
        """The size that an answer to a task may have: twice what it started from, and some for its head."""
        with self._lock:
            given = self._given.get(number)  # none if its round has closed a moment ago
            start = [] if given is None else self._starts[given.task.start]
            return 2 * num_bytes(start) + 2 * wire.INLINE_BYTES

    def max_header_bytes(self, number: int) -> int:
        """The size that the header of an uploaded answer may have: parsed, it takes many times that."""
        with self._lock:
            given = self._given.get(number)
            start = memoryview(bytes(8)) if given is None else self._starts[given.task.start][0]
            (size,) = struct.unpack_from("<Q", start)
            return 4 * int(size) + 256 * 1024

    def upload_path(self, number: int) -> Path:
        """The file that an upload for a task becomes."""
        return self.spool / f"task-{number:09d}.safetensors"

    def answer(self, member: Member, run: str, number: int, read: Callable[[], Packed]) -> Receipt:
        """Take an answer to a task. `read` gives its content, and is called only if it is wanted."""
        with self._lock:
            receipt = self.expects(member, run, number)
            if receipt == "late":
                del self._closed[number]
                self._outcomes.append(self._late(member, number))
            elif receipt == "taken":
                given = self._given[number]
                seconds = time.monotonic() - given.given_at
                try:
                    outcome = wire.read_answer(read(), given.task, run, seconds)
                except ParamsError as error:
                    outcome = Outcome(given.task, "invalid", reason=str(error), seconds=seconds)
                given.answered = True  # only now: if reading it failed, the client sends it again
                self._outcomes.append(outcome)
            self._lock.notify_all()
            return receipt

    def answer_message(self, member: Member, run: str, number: int, message: Message, packed: Packed) -> Receipt:
        """Take an answer that came inside a Flower message."""
        with self._lock:
            if self.expects(member, run, number) == "taken":
                given = self._given[number].message
                if message.metadata.reply_to_message_id != given or not self.broker.accept(message):
                    self.broker.drop(given)  # it replies to an earlier attempt: as good as the last
            return self.answer(member, run, number, lambda: self._kept(number, wire.read_reply(message), packed))

    def _kept(self, number: int, answer: bytes, packed: Packed) -> Packed:
        """A small answer in memory, or in a file where many wait already: the first of a cohort may come last."""
        while self._folded:
            self._early_bytes -= self._folded.popleft()
        if self._early_bytes + len(answer) > _MAX_EARLY_BYTES:
            path = self.upload_path(number)
            path.write_bytes(answer)
            return Stored(path, max_header_bytes=len(answer))
        self._early_bytes += len(answer)
        weakref.finalize(packed, self._folded.append, len(answer))  # takes no lock: it may be called anywhere
        return packed

    def _late(self, member: Member, number: int) -> Outcome:
        task = Task(number=number, client=member.info.id, round=0, start="", local=("", {}))
        return Outcome(task, "late")

    def _taken(self, client: str, public: str) -> str:
        """Why an id can't be this key's where the first one to use an id keeps it; empty if it can."""
        if self._ids.get(client, public) != public:
            return f"client id {client!r} belongs to another key: use that client's state folder, or another client.id"
        other = next((id for id, holder in self._ids.items() if holder == public and id != client), None)
        return f"this key belongs to the client id {other!r}: use that id, or another state folder" if other else ""

    def _splits_otherwise(self, its: Partitioning | None) -> str:
        """Why a client's part of the data may overlap with others'; empty if it does not."""
        ours = self._partitioning
        if ours is None or its is None or its.data != ours.data or its == ours:
            return ""
        return (
            f"it splits the data with seed={its.seed} data.num_partitions={its.num_partitions}, and its part would "
            f"overlap with others: set seed={ours.seed} data.num_partitions={ours.num_partitions}, as the server has"
        )

    def _note_refusal(self, client: str, key: bytes, reason: str) -> None:
        if (client, key) not in self._refused and len(self._refused) < _MAX_REFUSALS:
            self._refused.add((client, key))
            self._report("client_refused", client=client, reason=reason)

    def _revoke(self) -> None:
        """Part from the clients that a changed list does not have any more."""
        if self.allow is None or not self.allow.refresh(self._report):
            return
        self._refused.clear()
        for member in list(self._by_key.values()):
            if self.allow.refusal(member.info.id, member.key):
                del self._by_key[member.key]
                if member.here:
                    self._gone(member, f"revoked: its id and key are not in {self.allow.path} any more")
                member.wake()

    def _notice_silence(self) -> None:
        self._revoke()
        current = time.monotonic()
        for member in self._members.values():
            if member.here and not member.polls and current - member.contact > self.lost_after_s:
                self._gone(member, f"silent for {self.lost_after_s:g} s")
        for given in self._given.values():
            member_of = self._members.get(given.task.client)
            if given.answered or given.away or member_of is None or member_of.here:
                continue
            if current - max(member_of.contact, given.given_at) > self.lost_after_s:
                given.away, given.wanted = True, False
                seconds = current - given.given_at
                reason = f"disconnected, and not back within {self.lost_after_s:g} s"
                self._outcomes.append(Outcome(given.task, "lost", reason=reason, seconds=seconds))

    def _gone(self, member: Member, reason: str) -> None:
        member.here = False
        self._tell(member, "client_lost", reason=reason)
        self._changed()

    def _tell(self, member: Member, event: str, **fields: object) -> None:
        """Report that a client came or went, unless it does nothing else."""
        current = time.monotonic()
        member.news = min(_MAX_NEWS, member.news + (current - member.news_at) * _NEWS_PER_S)
        member.news_at = current
        if member.news >= 1:
            member.news -= 1
            self._report(event, 0, client=member.info.id, **fields)

    def _changed(self) -> None:
        self._changes += 1
        self._lock.notify_all()

    def _save_ids(self) -> None:
        temporary = self._ids_path.with_suffix(".tmp")
        with open(temporary, "w") as file:
            json.dump(self._ids, file, indent=1, sort_keys=True)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, self._ids_path)
        sync_folder(self._ids_path.parent)


def _read_ids(path: Path) -> dict[str, str]:
    try:
        ids = json.loads(path.read_text())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        found = f"a file that cannot be read ({error})"
    else:
        if isinstance(ids, dict) and all(isinstance(key, str) for key in ids.values()):
            return ids
        found = "something else"
    raise ConfigError(
        f"{path}: expected JSON that says which key holds which client id, found {found}: restore it, or delete it, "
        "and an id belongs to the key that claims it next"
    )


def new_run_id() -> str:
    """A new run's id: 16 random hex digits."""
    return secrets.token_hex(8)
