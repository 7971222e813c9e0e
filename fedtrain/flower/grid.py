"""GridFleet: the clients behind any Flower `Grid`, such as that of a ServerApp started with ``flwr run``.

A grid knows nodes only by number and is polled. So a node that is new is asked who it is, and polls come quickly after
something happened and ever more slowly while nothing does.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Literal

import httpx
from flwr.app import ArrayRecord, Message, MessageType, RecordDict
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid

from fedtrain.errors import ConnectionRefused
from fedtrain.flower.records import read_answer, read_enrolment, start_records, task_content
from fedtrain.flower.wire import MAX_VERDICTS
from fedtrain.observe.events import Report, quiet
from fedtrain.types import ClientInfo, Outcome, Start, Task

_FIRST_POLL_S = 0.05
_POLL_GROWTH = 1.5
_ASK_AGAIN_S = 30.0
"""Pause before a node that was refused is asked again who it is."""
_UNANSWERED_S = 180.0
"""When a node that has not answered is asked again: its process may have been started anew, without the question."""
_TTL_S = 7 * 86_400.0
"""Deadlines are the round's business: a message outlives every reasonable one. Flower counts by the wall clock."""
_MAX_CLOSED = 1000
"""As many messages are still looked for after their task was settled, so that late answers are known as such; few at a
time, since some are never answered."""
_CLOSED_AT_ONCE = 16
_MESSAGES_AT_ONCE = 16
"""Messages sent in one request."""
_UNREACHED = (ErrorCode.MESSAGE_UNAVAILABLE, ErrorCode.REPLY_MESSAGE_UNAVAILABLE, ErrorCode.NODE_UNAVAILABLE)


@dataclass
class _Given:
    """A task that is not settled yet."""

    task: Task
    given_at: float
    phase: Literal["wanted", "sent", "answered", "lost"] = "wanted"
    """``wanted``: to be sent as soon as its client is there; ``answered`` and ``lost``: until it is given again."""


class GridFleet:
    """A `Fleet` of the nodes that are connected to a Flower SuperLink.

    A client's id is what its node says at first sight: who may connect is the SuperLink's business. Two nodes with the
    same id: the first keeps it as long as it is connected. What the SuperLink does not tell can't be known here: it
    counts a dead node as connected for up to a minute.

    Args:
        grid: Flower's, inside a ServerApp.
        run: Id of the run; answers to another one are never counted.
        lost_after_s: A client that is gone for longer has lost its tasks, >= 0.
        max_poll_s: The longest time between two looks for answers, > 0.
        report: Told who comes and goes, and who is refused.
        clock: Monotonic time in seconds.
        sleep: Waits that many seconds.
    """

    def __init__(
        self,
        grid: Grid,
        *,
        run: str,
        lost_after_s: float = 10.0,
        max_poll_s: float = 1.0,
        report: Report = quiet,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.run = run
        self._grid, self._lost_after_s, self._max_poll_s, self._report = grid, lost_after_s, max_poll_s, report
        self._clock, self._sleep = clock, sleep
        self._nodes: dict[int, float] = {}
        """Connected nodes, and when each may be asked who it is."""
        self._queries: dict[str, int] = {}
        """Messages that ask a node who it is."""
        self._members: dict[str, tuple[int, ClientInfo]] = {}
        self._gone_at: dict[str, float] = {}
        self._given: dict[int, _Given] = {}
        self._sent: dict[str, int] = {}
        """Messages with a task that is not settled; a task that was sent again has several."""
        self._closed: dict[str, Task] = {}
        """Messages whose task was settled without an answer."""
        self._starts: dict[str, dict[str, ArrayRecord]] = {}
        self._verdicts: dict[str, dict[int, bool]] = {}
        self._outcomes: deque[Outcome] = deque()
        self._changes = 0
        self._pause, self._next_poll = _FIRST_POLL_S, 0.0

    def clients(self) -> Sequence[ClientInfo]:
        """Clients that are connected now, in the order of their ids."""
        self._poll_if_due()
        return [self._members[client][1] for client in sorted(self._members)]

    def wait(self, timeout_s: float) -> None:
        """Return when a client came or went, or after `timeout_s`."""
        before = self._changes
        self._poll_until(lambda: self._changes != before, timeout_s)

    def give(self, tasks: Sequence[Task], start: Start) -> None:
        """Send tasks to their clients. See `Fleet.give`."""
        now = self._clock()
        for task in tasks:
            given = self._given.setdefault(task.number, _Given(task, now))
            given.given_at = now
            if given.phase in ("answered", "lost"):
                given.phase = "wanted"
            if task.start not in self._starts:
                self._starts[task.start] = start_records(start)
        self._deliver()
        self._hurry()

    def receive(self, timeout_s: float) -> Outcome | None:
        """The next outcome in order of arrival; None if there is none within `timeout_s`."""
        self._poll_until(lambda: bool(self._outcomes), timeout_s)
        return self._outcomes.popleft() if self._outcomes else None

    def settle(self, task: Task, counted: bool) -> None:
        """The server is done with a task; its client hears so with its next one."""
        given = self._given.pop(task.number, None)
        if given is None:
            return
        for message in [message for message, number in self._sent.items() if number == task.number]:
            del self._sent[message]
            if given.phase != "answered":
                self._closed[message] = task
        while len(self._closed) > _MAX_CLOSED:
            del self._closed[next(iter(self._closed))]
        if not any(other.task.start == task.start for other in self._given.values()):
            self._starts.pop(task.start, None)
        verdicts = self._verdicts.setdefault(task.client, {})
        verdicts[task.number] = counted
        while len(verdicts) > MAX_VERDICTS:
            del verdicts[next(iter(verdicts))]

    # Polling

    def _poll_until(self, done: Callable[[], bool], timeout_s: float) -> None:
        deadline = self._clock() + timeout_s
        while not done():
            self._poll_if_due()
            left = deadline - self._clock()
            if done() or left <= 0:
                return
            self._sleep(min(left, max(self._next_poll - self._clock(), 0.0)))

    def _poll_if_due(self) -> None:
        began = self._clock()
        if began < self._next_poll:
            return
        news = self._look_for_nodes()
        self._ask_who_they_are()
        self._deliver()
        news = self._pull() or news
        self._notice_lost()
        self._pause = _FIRST_POLL_S if news else min(self._pause * _POLL_GROWTH, self._max_poll_s)
        took = self._clock() - began
        self._next_poll = began + took + max(self._pause, took)  # with many clients a look takes long itself

    def _hurry(self) -> None:
        self._pause, self._next_poll = _FIRST_POLL_S, min(self._next_poll, self._clock() + _FIRST_POLL_S)

    def _pull(self) -> bool:
        """Take all replies that are there; whether there were any.

        One message per request: a reply whose content can't be read makes Flower raise, and would take along the others
        that came with it; and no more than one update is held before it is asked for.
        """
        news = False
        closed = list(islice(self._closed, _CLOSED_AT_ONCE))
        for message in closed:  # to the end: next time it is the others' turn
            self._closed[message] = self._closed.pop(message)
        for message in [*self._queries, *self._sent, *closed]:
            try:
                replies = list(self._grid.pull_messages([message]))
            except httpx.HTTPError:  # the SuperLink can't be reached: nobody's reply is to blame
                raise
            except Exception as error:
                self._unreadable(message, f"{type(error).__name__}: {error}")
                news = True
                continue
            for reply in replies:
                self._take(reply)
                news = True
        return news

    def _push(self, messages: list[Message]) -> list[str | None]:
        """Ids of the messages as sent; None for one that the SuperLink did not take."""
        ids: list[str | None] = []
        for first in range(0, len(messages), _MESSAGES_AT_ONCE):
            some = messages[first : first + _MESSAGES_AT_ONCE]
            pushed = [message_id or None for message_id in self._grid.push_messages(some)]
            ids += pushed or [None] * len(some)  # a request that was too large gives no ids at all
        return ids

    # Who is there

    def _look_for_nodes(self) -> bool:
        online = set(self._grid.get_node_ids())
        if online == self._nodes.keys():
            return False
        for node in self._nodes.keys() - online:
            del self._nodes[node]
            self._queries = {message: asked for message, asked in self._queries.items() if asked != node}
            for client in [client for client, (its, _) in self._members.items() if its == node]:
                del self._members[client]
                self._gone_at[client] = self._clock()
                self._changes += 1
                self._report("client_lost", client=client, reason=f"Flower's node {node} is not connected any more")
        for node in sorted(online - self._nodes.keys()):
            self._nodes[node] = self._clock()
        return True

    def _ask_who_they_are(self) -> None:
        known, now = {node for node, _ in self._members.values()}, self._clock()
        asked = [node for node, ask_at in self._nodes.items() if node not in known and ask_at <= now]
        messages = [Message(RecordDict(), node, MessageType.QUERY) for node in asked]
        for node, message in zip(asked, self._push(messages), strict=True):
            self._nodes[node] = now + (_ASK_AGAIN_S if message is None else _UNANSWERED_S)
            if message is not None:
                self._queries[message] = node

    def _enrol(self, node: int, reply: Message) -> None:
        if any(its == node for its, _ in self._members.values()):  # it was asked twice, and has answered before
            return
        try:
            if reply.has_error():
                raise ConnectionRefused(_error_text(reply))
            info = read_enrolment(reply.content)
            if info.id in self._members:
                raise ConnectionRefused(f"client id {info.id!r} is that of another node: give each its own client-id")
        except ConnectionRefused as error:
            self._refuse(node, str(error))
            return
        self._members[info.id] = (node, info)
        self._changes += 1
        if self._gone_at.pop(info.id, None) is None:
            self._report("client_connected", client=info.id, num_examples=info.num_examples, tags=dict(info.tags))
        else:
            self._report("client_returned", client=info.id)
        for given in self._given.values():
            # A node that was away may have lost its task, and Flower does not send a message twice.
            if given.task.client == info.id and given.phase == "sent":
                given.phase = "wanted"

    def _refuse(self, node: int, reason: str) -> None:
        self._nodes[node] = self._clock() + _ASK_AGAIN_S
        self._report("client_refused", node=str(node), reason=reason)

    # Tasks and their answers

    def _deliver(self) -> None:
        wanted = [
            given for given in self._given.values() if given.phase == "wanted" and given.task.client in self._members
        ]
        messages = [self._message(given.task) for given in wanted]
        for given, message in zip(wanted, self._push(messages), strict=True):
            if message is None:
                self._end(given, "lost", "the SuperLink did not take the message: the node may have just left")
            else:
                given.phase = "sent"
                self._sent[message] = given.task.number

    def _message(self, task: Task) -> Message:
        verdicts = self._verdicts.get(task.client, {})
        content = task_content(task, self.run, self._starts[task.start], verdicts)
        node, _ = self._members[task.client]
        return Message(content, node, task.kind, ttl=max(_TTL_S, 2 * (task.deadline_s or 0)), group_id=str(task.round))

    def _take(self, reply: Message) -> None:
        message = reply.metadata.reply_to_message_id
        if message in self._queries:
            self._enrol(self._queries.pop(message), reply)
        elif message in self._sent:
            self._answer(self._given[self._sent.pop(message)], reply)
        elif message in self._closed:
            task = self._closed.pop(message)
            if not reply.has_error():
                self._closed = {other: its for other, its in self._closed.items() if its.number != task.number}
                self._outcomes.append(Outcome(task, "late"))

    def _answer(self, given: _Given, reply: Message) -> None:
        if given.phase == "answered":  # to an earlier or later sending of the same task
            return
        if reply.has_error():
            sent_again = given.task.number in self._sent.values()
            if given.phase == "sent" and not sent_again:
                self._end(given, "lost" if reply.error.code in _UNREACHED else "failed", _error_text(reply))
            return
        given.phase = "answered"
        self._outcomes.append(read_answer(reply.content, given.task, self.run, self._clock() - given.given_at))

    def _unreadable(self, message: str, error: str) -> None:
        self._closed.pop(message, None)
        if (node := self._queries.pop(message, None)) is not None:
            self._refuse(node, f"its enrolment cannot be read: {error}")
        if (number := self._sent.pop(message, None)) is not None and self._given[number].phase == "sent":
            self._end(self._given[number], "invalid", f"the reply cannot be read: {error}"[:2000])

    def _notice_lost(self) -> None:
        now = self._clock()
        for given in self._given.values():
            if given.phase not in ("wanted", "sent") or given.task.client in self._members:
                continue
            since = max(self._gone_at.get(given.task.client, given.given_at), given.given_at)
            if now - since >= self._lost_after_s:
                self._end(given, "lost", f"disconnected, and not back within {self._lost_after_s:g} s")

    def _end(self, given: _Given, kind: Literal["lost", "failed", "invalid"], reason: str) -> None:
        given.phase = "lost" if kind == "lost" else "answered"
        self._outcomes.append(Outcome(given.task, kind, reason=reason, seconds=self._clock() - given.given_at))


def _error_text(reply: Message) -> str:
    """Flower's account of what went wrong on the node, as one line."""
    reason = " ".join((reply.error.reason or "no reason given").split())
    return f"{reason[:2000]} (Flower's error {reply.error.code})"
