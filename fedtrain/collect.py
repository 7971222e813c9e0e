"""Collecting a round's answers: arrival order in, cohort order out, and always an end."""

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

from fedtrain.check import checked
from fedtrain.fleet.fleet import Fleet
from fedtrain.observe.events import Report, quiet
from fedtrain.stored import rest
from fedtrain.types import Cohort, Outcome, Params, Start, Task

_RETRY_PAUSES_S = (1.0, 2.0, 5.0, 10.0, 30.0)
"""Pauses before clients that failed or declined are asked again; the last one repeats."""


def collect(
    cohort: Cohort,
    fleet: Fleet,
    start: Start,
    *,
    extra: Params | None = None,
    report: Report = quiet,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[Outcome]:
    """Give a cohort its tasks and yield one outcome per task, in cohort order, each as soon as it may be.

    The round closes when all have answered, at the deadline, or `grace_s` after the quorum was reached; who has not
    answered by then is late. An answer that comes before its turn waits here. With `cohort.retry` and too few usable
    answers, the same tasks are given again to those who have none, until the quorum is reached. Only a task's first
    usable answer counts; an answer to anything but this cohort's tasks is reported as late. For `extra`, see
    `fedtrain.check.problem_of`.
    """
    return _Collection(cohort, fleet, start, extra, report, clock).outcomes()


class _Collection:
    def __init__(
        self,
        cohort: Cohort,
        fleet: Fleet,
        start: Start,
        extra: Params | None,
        report: Report,
        clock: Callable[[], float],
    ) -> None:
        self.cohort, self.fleet, self.start, self.extra = cohort, fleet, start, extra
        self.report, self.clock = report, clock
        self.tasks = {task.number: task for task in cohort.tasks}
        self.waiting = set(self.tasks)
        """Numbers of the tasks that are given and not answered."""
        self.unusable: dict[int, Outcome] = {}
        """Outcomes that a retry may replace. A lost client's task is still waiting: it may come back."""
        self.final: dict[int, Outcome] = {}
        self.num_ok = 0
        self.attempt = 0
        self.opened = self.quorum_at = math.inf

    def outcomes(self) -> Iterator[Outcome]:
        self.give(self.cohort.tasks)
        for task in self.cohort.tasks:
            while task.number not in self.final:
                self.receive()
            yield self.final.pop(task.number)

    def give(self, tasks: tuple[Task, ...]) -> None:
        self.opened = self.clock()
        self.fleet.give(tasks, self.start)

    def may_retry(self) -> bool:
        return self.cohort.retry and self.num_ok < self.cohort.quorum

    def closes_at(self) -> float:
        deadline, grace = self.cohort.deadline_s, self.cohort.grace_s
        closes = self.opened + (math.inf if deadline is None else deadline)
        return closes if grace is None else min(closes, self.quorum_at + grace)

    def receive(self) -> None:
        left = self.closes_at() - self.clock()
        outcome = self.fleet.receive(min(max(left, 0.0), 3600.0))
        if outcome is not None:
            self.take(outcome)
        over = outcome is None and self.clock() >= self.closes_at()
        if over or not self.waiting or (not self.may_retry() and self.waiting <= self.unusable.keys()):
            self.close()

    def take(self, outcome: Outcome) -> None:
        number = outcome.task.number
        planned = self.tasks.get(number)
        if planned is None or _key(outcome.task) != _key(planned):
            self.tell(replace(outcome, kind="late", update=None, reason="answered after its round had closed"))
            return
        if number not in self.waiting and number not in self.unusable:
            return  # a repeated answer
        outcome = checked(outcome, self.start, self.cohort, self.extra)
        if outcome.update is not None:  # its turn may come much later
            rest(outcome.update.delta, outcome.update.extra)
        self.tell(outcome)
        if outcome.kind == "lost" and self.may_retry():
            self.unusable[number] = outcome
            self.fleet.give((planned,), self.start)  # waits for the client to come back
            return
        self.waiting.discard(number)
        self.unusable[number] = outcome
        if outcome.kind == "ok":
            self.final[number] = self.unusable.pop(number)
            self.num_ok += 1
            if self.num_ok == self.cohort.quorum:
                self.quorum_at = self.clock()
        if not self.may_retry():
            for answered in self.unusable.keys() - self.waiting:
                self.final[answered] = self.unusable.pop(answered)

    def close(self) -> None:
        """All have answered or the time is over: ask again, or make what is there final."""
        if self.may_retry():
            self.ask_again()
            return
        seconds = self.clock() - self.opened
        for number, task in self.tasks.items():
            if number in self.waiting and number not in self.unusable:
                late = Outcome(task, "late", reason=f"no answer within {round(seconds, 2):g} s", seconds=seconds)
                self.tell(late)
                self.final[number] = late
        self.final.update(self.unusable)
        self.waiting.clear()
        self.unusable.clear()

    def ask_again(self) -> None:
        self.attempt += 1
        if self.unusable.keys() - self.waiting:  # whoever failed or declined would do so again at once
            self.pause(_RETRY_PAUSES_S[min(self.attempt, len(_RETRY_PAUSES_S)) - 1])
        if not self.may_retry():
            return  # enough have answered during the pause
        self.waiting |= self.unusable.keys()
        missing = tuple(task for task in self.cohort.tasks if task.number in self.waiting)
        self.unusable = {number: outcome for number, outcome in self.unusable.items() if outcome.kind == "lost"}
        self.report("retry", self.cohort.round, missing=[task.client for task in missing], attempt=self.attempt)
        self.give(missing)

    def pause(self, seconds: float) -> None:
        until = self.clock() + seconds
        while (left := until - self.clock()) > 0 and self.may_retry():
            outcome = self.fleet.receive(left)
            if outcome is not None:
                self.take(outcome)

    def tell(self, outcome: Outcome) -> None:
        self.report(
            "outcome",
            outcome.task.round,
            client=outcome.task.client,
            outcome=outcome.kind,
            reason=outcome.reason,
            seconds=round(outcome.seconds, 6),
            task=outcome.task.number,
            kind=outcome.task.kind,
            num_examples=outcome.num_examples,
            metrics=dict(outcome.metrics),
        )


def _key(task: Task) -> tuple[int, str, str]:
    return task.number, task.client, task.start
