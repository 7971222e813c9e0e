"""Client: connects a trainer to a server, does what it is asked, and lives on.

Two threads: one keeps a request open at the server (so that tasks come at once, and either side soon sees that the
other is gone), the other does the tasks. Neither touches signals, argv, the root logger or global state.
"""

import logging
import random
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, TypeVar

from fedtrain.client.capacity import measure_capacity
from fedtrain.client.identity import default_state_dir, require_client_id, take_state_dir
from fedtrain.client.trainer import Trainer
from fedtrain.client.worker import Worker
from fedtrain.errors import Cancelled, ConfigError, ConnectionRefused, FedtrainError, ParamsError
from fedtrain.flower import supernode, wire
from fedtrain.flower.auth import Signer
from fedtrain.flower.supernode import Assignment, Line, Session
from fedtrain.schema import parse_address
from fedtrain.security.keys import load_or_create_key
from fedtrain.security.tls import Trust
from fedtrain.state import start_digest
from fedtrain.types import ClientInfo, Outcome, Partitioning, Start

_log = logging.getLogger("fedtrain.client")

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 5.0

_T = TypeVar("_T")

Tell = Callable[[str, Mapping[str, object]], None]


@dataclass(frozen=True)
class ClientStatus:
    """What a client is doing."""

    phase: Literal["connecting", "idle", "training", "evaluating", "sending", "stopped", "refused"] = "connecting"
    progress: float = 0.0
    """Of the task that is being done, in [0, 1]."""
    rounds: int = 0
    """Training tasks whose update the server has."""
    run_status: str = ""
    """Final status of the run, once it has ended."""
    error: str = ""
    """Why the connection is down, or was refused."""


@dataclass
class _Job:
    assignment: Assignment
    cancelled: threading.Event = field(default_factory=threading.Event)


class Client:
    """Takes part in federated training from inside any program.

    Args:
        trainer: The model and its data; it is called from one thread of the client's own.
        server: ``HOST:PORT`` of the server, or several, which are tried in turn.
        client_id: A letter, then letters, digits and ``._-``; same id and same state folder: same client.
        state_dir: Where the client keeps its key; by default a folder of its own under the user's state folder.
        tags: Text by name that the server may select by.
        stay: Wait for the next run when one has ended, instead of stopping.
        ca: PEM file of the authority that signs the server's certificate; None: those that the system trusts. TLS is
            spoken to every address that is not a loopback one, and to those too if this is given.
        insecure: Speak plain text to every address.
        partitioning: How the data was shared out of which the trainer holds a part: a server that shares it out
            otherwise refuses the client. None: the trainer's data is its own.
        tell: Called with a word and details for what happens (connected, task, done, …), off the caller's thread.

    Raises:
        ConfigError: the id, an address, the state folder or the authority can't be used.
    """

    def __init__(
        self,
        trainer: Trainer,
        *,
        server: str | Sequence[str],
        client_id: str,
        state_dir: str | Path | None = None,
        tags: Mapping[str, str] | None = None,
        stay: bool = False,
        ca: str | Path | None = None,
        insecure: bool = False,
        partitioning: Partitioning | None = None,
        tell: Tell = lambda word, details: None,
    ) -> None:
        self.id = require_client_id(client_id)
        self._worker = Worker(trainer)
        self._addresses = [server] if isinstance(server, str) else list(server)
        if not self._addresses:
            raise ConfigError("server.addresses is empty: name at least one HOST:PORT")
        for address in self._addresses:
            parse_address(address)
        self._trust = Trust(ca, insecure=insecure)
        self.state_dir = Path(state_dir) if state_dir else default_state_dir(client_id)
        self._signer = Signer(load_or_create_key(self.state_dir))
        self._tags, self._stay, self._tell = dict(tags or {}), stay, tell
        self._partitioning = partitioning
        self._status = ClientStatus()
        self._session: Session | None = None
        self._run = ""
        self._jobs: deque[_Job] = deque()
        self._awaiting: list[int] = []
        self._lines: set[Line] = set()
        self._work_line: Line | None = None
        self._start_at_hand: tuple[str, Start] | None = None
        self._stopping = threading.Event()
        self._lock = threading.Condition()
        self._threads: list[threading.Thread] = []

    @property
    def status(self) -> ClientStatus:
        """What the client is doing now."""
        return self._status

    def start(self) -> None:
        """Begin to take part; returns at once. A client can be started once.

        Raises:
            ConfigError: another client uses the state folder.
        """
        if self._threads:
            raise FedtrainError("this client was started already: make a new one")
        self._folder_lock = take_state_dir(self.state_dir)  # the work's thread releases it
        self._threads = [
            threading.Thread(target=self._connect, name=f"fedtrain-{self.id}-connection", daemon=True),
            threading.Thread(target=self._work, name=f"fedtrain-{self.id}-work", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until the client has ended (the run is over, or it was stopped or refused); whether it has.

        Called from a callback of the client itself, it does not wait for the thread that it is called in.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        others = [thread for thread in self._threads if thread is not threading.current_thread()]
        for thread in others:
            thread.join(None if deadline is None else max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in others)

    def stop(self, timeout_s: float = 5.0) -> bool:
        """End the client; whether its threads ended in time. Training ends at the next batch."""
        self._end("stopped")
        return self.wait(timeout_s)

    def __enter__(self) -> "Client":
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def _end(self, phase: Literal["stopped", "refused"], error: str = "") -> None:
        with self._lock:
            if not self._stopping.is_set():
                self._show(phase=phase, error=error)
            self._stopping.set()
            for job in self._jobs:
                job.cancelled.set()
            for line in self._lines:
                line.interrupt()
            self._lock.notify_all()

    def _show(self, **changes: object) -> None:
        with self._lock:
            if self._stopping.is_set():  # stopped or refused: that is its last phase
                changes.pop("phase", None)
            self._status = replace(self._status, **changes)  # type: ignore[arg-type]

    def _say(self, word: str, **details: object) -> None:
        try:
            self._tell(word, details)
        except Exception:
            _log.exception("the callback of client %s failed at %r", self.id, word)

    # The connection's thread.

    def _connect(self) -> None:
        failures, address = 0, 0
        told: set[str] = set()
        while not self._stopping.is_set():
            line = self._open(self._addresses[address % len(self._addresses)])
            try:
                self._enrol(line)
                while not self._stopping.is_set():
                    self._hear(supernode.pull(line, *self._position()))
                    failures = 0
                    told.clear()
            except supernode.NotEnrolled:  # the server was restarted: enrol again, soon
                failures += 1
                self._stopping.wait(_pause_s(failures))
            except ConnectionRefused as error:
                self._say("refused", reason=str(error))
                self._end("refused", str(error))
            except Exception as error:  # whatever a server answers, or a network does: try again
                if self._stopping.is_set():
                    return
                if str(error) not in told:  # a new reason: a certificate that has expired is not a server that is away
                    told.add(str(error))
                    self._say("disconnected", reason=str(error))
                self._show(phase="connecting", error=str(error))
                address, failures = address + 1, failures + 1
                self._stopping.wait(_pause_s(failures))
            finally:
                self._close(line)

    def _open(self, address: str) -> Line:
        line = Line(address, self._signer, self._trust)
        with self._lock:
            self._lines.add(line)  # so that `stop` can end a request that waits
            if self._stopping.is_set():
                line.interrupt()
        return line

    def _close(self, line: Line) -> None:
        with self._lock:
            self._lines.discard(line)
        line.close()

    def _enrol(self, line: Line) -> None:
        info = ClientInfo(
            self.id,
            self._worker.num_examples,
            self._tags,
            measure_capacity(),
            self._worker.local_algorithms,
            self._partitioning,
        )
        session = supernode.enrol(line, info)
        with self._lock:
            self._session = session
            if session.run != self._run:  # what was done for another run is nobody's any more
                self._run, self._awaiting, self._start_at_hand = session.run, [], None
                self._show(run_status="")
                self._worker.forget()
                for job in list(self._jobs):
                    self._call_off(job)
            if not self._jobs:
                self._show(phase="idle", error="")
            self._lock.notify_all()
        self._say("connected", server=line.address, run=session.run)

    def _position(self) -> tuple[Session, str, list[int], list[int]]:
        with self._lock:
            if self._session is None:
                raise FedtrainError("not enrolled yet")
            return self._session, self._run, [job.assignment.task.number for job in self._jobs], list(self._awaiting)

    def _hear(self, news: supernode.News) -> None:
        with self._lock:
            for number, counted in news.settled.items():
                if number in self._awaiting:
                    self._awaiting.remove(number)
                    self._worker.settle(number, counted)
                for job in [job for job in self._jobs if job.assignment.task.number == number]:
                    self._call_off(job, counted=counted)
            if news.assignment is not None:
                self._add(news.assignment)
            self._lock.notify_all()
        if news.over:
            if self._status.run_status != news.over:
                self._say("over", status=news.over)
            self._show(run_status=news.over)
            if not self._stay:
                self._end("stopped")
            else:
                raise supernode.Unavailable(f"the run is over ({news.over}); waiting for the next one")

    def _call_off(self, job: _Job, *, counted: bool = False) -> None:
        job.cancelled.set()
        line = self._work_line
        if job is self._jobs[0] and line is not None and not counted:
            line.interrupt()  # what it fetches or uploads is of no more use
        self._jobs.remove(job)

    def _add(self, assignment: Assignment) -> None:
        """Queue a task; one that is at hand already only gets the newest message to reply to."""
        for job in self._jobs:
            if job.assignment.task.number == assignment.task.number:
                job.assignment = assignment
                return
        self._jobs.append(_Job(assignment))

    # The work's thread.

    def _work(self) -> None:
        try:
            self._work_until_stopped()
        finally:
            if self._work_line is not None:
                self._close(self._work_line)
            self._folder_lock.release()

    def _work_until_stopped(self) -> None:
        while (job := self._next_job()) is not None:
            try:
                self._do(job)
            except Cancelled:
                self._say("cancelled", task=job.assignment.task.number, round=job.assignment.task.round)
            except Exception as error:
                # Nothing that one task does may end the client.
                _log.error("client %s: task %d: %s", self.id, job.assignment.task.number, traceback.format_exc())
                self._show(error=str(error))
            with self._lock:
                if job in self._jobs:
                    self._jobs.remove(job)
                if not self._stopping.is_set() and self._status.phase != "connecting":
                    self._show(phase="idle", progress=0.0)

    def _next_job(self) -> _Job | None:
        with self._lock:
            while not self._jobs and not self._stopping.is_set():
                self._lock.wait()
            return None if self._stopping.is_set() else self._jobs[0]

    def _do(self, job: _Job) -> None:
        task = job.assignment.task
        start = self._persist(job, lambda line: self._start(line, job.assignment))
        if start is None:
            return
        self._show(phase="training" if task.kind == "train" else "evaluating", progress=0.0)
        self._say("task", kind=task.kind, round=task.round, task=task.number)
        outcome = self._outcome(job, start)
        if job.cancelled.is_set():
            raise Cancelled
        self._deliver(job, outcome)

    def _outcome(self, job: _Job, start: Start) -> Outcome:
        """What came of a task. Whatever the trainer does, there is one: else the server would ask again."""
        task = job.assignment.task
        try:
            return self._worker.perform(
                task,
                start,
                cancelled=job.cancelled.is_set,
                progress=lambda fraction: self._show(progress=fraction),
                on_error=self._say_error,
            )
        except Cancelled:
            if job.cancelled.is_set():
                raise
            return Outcome(task, "failed", reason="the trainer raised Cancelled for a task that was not called off")
        except BaseException as error:  # `sys.exit` in a trainer ends neither this thread nor the program
            self._say_error(error)
            return Outcome(task, "failed", reason=f"{type(error).__name__}: {error}")

    def _say_error(self, error: BaseException) -> None:
        self._say("error", error="".join(traceback.format_exception(error)))

    def _start(self, line: Line, assignment: Assignment) -> Start | None:
        digest = assignment.task.start
        if self._start_at_hand is not None and self._start_at_hand[0] == digest:
            return self._start_at_hand[1]
        start = supernode.fetch_start(line, assignment)
        if start is not None:
            if start_digest(start) != digest:
                raise ParamsError(
                    "the model that arrived is not the one that the task names: it was damaged on its way"
                )
            self._start_at_hand = digest, start
        return start

    def _deliver(self, job: _Job, outcome: Outcome) -> None:
        self._show(phase="sending")
        try:
            answer = wire.answer_pieces(outcome, job.assignment.run)
        except Exception as error:
            self._say_error(error)
            reason = f"what the trainer returned cannot be sent: {type(error).__name__}: {error}"
            outcome = Outcome(outcome.task, "failed", reason=reason, seconds=outcome.seconds)
            answer = wire.answer_pieces(outcome, job.assignment.run)
        number = outcome.task.number

        def send(line: Line) -> bool:
            with self._lock:
                session = self._session
                if number not in self._awaiting:
                    self._awaiting.append(number)
            return session is not None and supernode.send_answer(line, session, job.assignment, answer)

        taken = self._persist(job, send)
        with self._lock:
            if outcome.update is None or not taken:
                self._awaiting = [waiting for waiting in self._awaiting if waiting != number]
        if taken and outcome.update is not None:
            self._show(rounds=self._status.rounds + 1)
        details = {"reason": outcome.reason, "seconds": outcome.seconds, "metrics": dict(outcome.metrics)}
        self._say(
            "done", kind=outcome.task.kind, round=outcome.task.round, outcome=outcome.kind, taken=taken, **details
        )

    def _persist(self, job: _Job, action: Callable[[Line], _T]) -> _T:
        """Do something with the server until it has worked, the task is called off, or the client stops."""
        failures = 0
        while not job.cancelled.is_set():
            try:
                return action(self._line_for_work())
            except (supernode.Unavailable, supernode.NotEnrolled, ParamsError) as error:
                if self._work_line is not None:
                    self._close(self._work_line)
                    self._work_line = None
                self._show(error=str(error) or "the server does not know this client yet")
                failures += 1
                job.cancelled.wait(_pause_s(failures))
        raise Cancelled

    def _line_for_work(self) -> Line:
        """The work thread's own kept connection, to the server at which the client is enrolled."""
        with self._lock:
            if self._session is None:
                raise supernode.Unavailable("not enrolled yet")
            address = self._session.address
        if self._work_line is not None and (self._work_line.interrupted or self._work_line.address != address):
            self._close(self._work_line)
            self._work_line = None
        if self._work_line is None:
            self._work_line = self._open(address)
        return self._work_line


def _pause_s(failures: int) -> float:
    """Longer with every failure, up to a limit, and spread so that many clients do not come back at once."""
    return min(_FIRST_PAUSE_S * 2.0 ** min(failures - 1, 20), _LONGEST_PAUSE_S) * random.uniform(0.5, 1.0)
