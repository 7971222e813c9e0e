from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from fakes import Events, Given, ScriptedFleet, ok

from fedtrain.collect import collect
from fedtrain.testing import cohort_of, task_of
from fedtrain.types import Cohort, Outcome, Start, Task

START = Start({"w": np.zeros(1)}, {})
DELTA = {"w": np.ones(1)}


def answer(task: Task, kind: str = "ok", reason: str = "") -> Outcome:
    return ok(task, DELTA) if kind == "ok" else Outcome(task, kind, reason=reason)  # type: ignore[arg-type]


def script(cohort: Cohort, *answers: tuple[float, int, str]) -> list[tuple[float, Outcome]]:
    """(time, index of the task, kind) as a script."""
    return [(time_s, answer(cohort.tasks[index], kind, f"it was {kind}")) for time_s, index, kind in answers]


def opened(cohort: Cohort, fleet: ScriptedFleet, report: Any = None) -> Iterator[Outcome]:
    return collect(cohort, fleet, START, clock=fleet.clock, **({"report": report} if report else {}))


def kinds(outcomes: Iterable[Outcome]) -> list[str]:
    return [outcome.kind for outcome in outcomes]


# Order


@pytest.mark.parametrize("arrival", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_outcomes_come_out_in_cohort_order_whatever_the_order_of_arrival(arrival: tuple[int, ...]) -> None:
    cohort = cohort_of(3)
    fleet = ScriptedFleet(script(cohort, *((time_s, index, "ok") for time_s, index in enumerate(arrival))))
    assert [outcome.task.client for outcome in opened(cohort, fleet)] == ["c00", "c01", "c02"]
    assert fleet.now == 2


def test_an_outcome_is_released_as_soon_as_it_is_its_turn() -> None:
    cohort = cohort_of(4)
    fleet = ScriptedFleet(script(cohort, (1, 0, "ok"), (2, 2, "failed"), (3, 1, "ok"), (9, 3, "ok")))
    outcomes = opened(cohort, fleet)
    released = [(next(outcomes).task.client, fleet.now) for _ in range(4)]
    assert released == [("c00", 1), ("c01", 3), ("c02", 3), ("c03", 9)]


def test_nothing_is_given_before_the_first_outcome_is_asked_for() -> None:
    cohort = cohort_of(2)
    fleet = ScriptedFleet(script(cohort, (1, 0, "ok"), (1, 1, "ok")))
    outcomes = opened(cohort, fleet)
    assert fleet.given == []
    next(outcomes)
    assert fleet.given == [Given(0, (0, 1))]
    assert fleet.starts == [START]


def test_a_cohort_without_tasks_ends_at_once() -> None:
    fleet = ScriptedFleet()
    assert list(opened(cohort_of(0), fleet)) == []
    assert fleet.now == 0


# Deadline, quorum, grace


def test_who_has_not_answered_at_the_deadline_is_late_with_the_reason() -> None:
    cohort = cohort_of(3, deadline_s=10.0)
    fleet, events = ScriptedFleet(script(cohort, (4, 2, "ok"))), Events()
    outcomes = list(opened(cohort, fleet, events))
    assert kinds(outcomes) == ["late", "late", "ok"]
    assert [outcome.reason for outcome in outcomes] == ["no answer within 10 s", "no answer within 10 s", ""]
    assert [outcome.seconds for outcome in outcomes[:2]] == [10, 10]
    assert fleet.now == 10
    assert events.outcomes() == [("c02", "ok"), ("c00", "late"), ("c01", "late")]


def test_an_answer_at_the_very_deadline_counts_and_one_after_it_does_not() -> None:
    cohort = cohort_of(2, deadline_s=10.0)
    fleet = ScriptedFleet(script(cohort, (10, 0, "ok"), (10.001, 1, "ok")))
    assert kinds(opened(cohort, fleet)) == ["ok", "late"]


def test_the_deadline_counts_from_giving_and_not_from_the_last_answer() -> None:
    cohort = cohort_of(3, deadline_s=10.0)
    fleet = ScriptedFleet(script(cohort, (6, 0, "ok"), (12, 1, "ok"), (18, 2, "ok")))
    assert kinds(opened(cohort, fleet)) == ["ok", "late", "late"]
    assert fleet.now == 10


def test_the_grace_begins_when_the_quorum_has_answered() -> None:
    cohort = cohort_of(4, quorum=2, deadline_s=100.0, grace_s=5.0)
    fleet = ScriptedFleet(script(cohort, (1, 0, "ok"), (20, 1, "failed"), (30, 2, "ok"), (36, 3, "ok")))
    outcomes = list(opened(cohort, fleet))
    assert kinds(outcomes) == ["ok", "failed", "ok", "late"]
    assert outcomes[3].reason == "no answer within 35 s"
    assert fleet.now == 35


def test_who_answers_within_the_grace_counts_and_does_not_prolong_it() -> None:
    cohort = cohort_of(4, quorum=1, deadline_s=100.0, grace_s=5.0)
    fleet = ScriptedFleet(script(cohort, (10, 0, "ok"), (14, 1, "ok"), (18, 2, "ok")))
    assert kinds(opened(cohort, fleet)) == ["ok", "ok", "late", "late"]
    assert fleet.now == 15


def test_a_grace_of_zero_closes_the_round_with_the_quorum() -> None:
    cohort = cohort_of(3, quorum=2, deadline_s=100.0, grace_s=0.0)
    fleet = ScriptedFleet(script(cohort, (1, 2, "ok"), (2, 0, "ok"), (3, 1, "ok")))
    assert kinds(opened(cohort, fleet)) == ["ok", "late", "ok"]
    assert fleet.now == 2


def test_the_deadline_ends_a_grace_that_would_last_longer() -> None:
    cohort = cohort_of(2, quorum=1, deadline_s=10.0, grace_s=60.0)
    fleet = ScriptedFleet(script(cohort, (1, 0, "ok")))
    assert kinds(opened(cohort, fleet)) == ["ok", "late"]
    assert fleet.now == 10


def test_without_a_grace_the_round_waits_until_the_deadline() -> None:
    cohort = cohort_of(3, quorum=1, deadline_s=100.0)
    fleet = ScriptedFleet(script(cohort, (1, 0, "ok"), (99, 1, "ok")))
    assert kinds(opened(cohort, fleet)) == ["ok", "ok", "late"]
    assert fleet.now == 100


def test_without_a_deadline_the_round_waits_as_long_as_it_takes() -> None:
    cohort = cohort_of(2, quorum=1)
    week = 7 * 86400.0
    fleet = ScriptedFleet(script(cohort, (1, 0, "ok"), (week, 1, "ok")))
    assert kinds(opened(cohort, fleet)) == ["ok", "ok"]
    assert fleet.now == week


def test_the_round_ends_with_the_last_answer_and_not_with_the_deadline() -> None:
    cohort = cohort_of(2, quorum=2, deadline_s=100.0)
    fleet = ScriptedFleet(script(cohort, (3, 1, "declined"), (4, 0, "lost")))
    assert kinds(opened(cohort, fleet)) == ["lost", "declined"]
    assert fleet.now == 4


# What is not counted


def test_every_kind_of_outcome_keeps_its_reason() -> None:
    cohort = cohort_of(3, quorum=3)
    fleet, events = ScriptedFleet(script(cohort, (1, 0, "failed"), (2, 1, "declined"), (3, 2, "lost"))), Events()
    outcomes = list(opened(cohort, fleet, events))
    assert [outcome.reason for outcome in outcomes] == ["it was failed", "it was declined", "it was lost"]
    assert [fields["reason"] for fields in events.of("outcome")] == ["it was failed", "it was declined", "it was lost"]


@pytest.mark.parametrize(
    "stranger",
    [
        task_of(100, "c00"),  # unknown
        task_of(1, "c00", round=1, start="earlier"),  # another start
        task_of(1, "c01", round=1),  # another client's
    ],
)
def test_an_answer_to_another_task_is_reported_as_late_and_not_counted(stranger: Task) -> None:
    cohort = cohort_of(1)
    cohort = replace(cohort, tasks=(task_of(1, "c00"),))
    foreign = ok(stranger, {"w": np.full(1, 1e6)})
    fleet, events = ScriptedFleet([(1, foreign), *script(cohort, (2, 0, "ok"))]), Events()
    (outcome,) = opened(cohort, fleet, events)
    assert outcome.update is not None
    assert outcome.update.delta == DELTA
    assert events.outcomes() == [(stranger.client, "late"), ("c00", "ok")]


def test_an_answer_of_an_earlier_round_is_reported_with_its_round_and_the_reason() -> None:
    cohort = replace(cohort_of(1, round=2), tasks=(task_of(7, "c00", round=2),))
    fleet, events = ScriptedFleet([(1, ok(task_of(3, "c05", round=1), DELTA)), *script(cohort, (2, 0, "ok"))]), Events()
    assert kinds(opened(cohort, fleet, events)) == ["ok"]
    assert [(event, round, fields["outcome"]) for event, round, fields in events.all] == [
        ("outcome", 1, "late"),
        ("outcome", 2, "ok"),
    ]
    assert events.of("outcome")[0]["reason"] == "answered after its round had closed"


def test_answers_to_other_tasks_do_not_keep_a_round_open() -> None:
    cohort = cohort_of(1, deadline_s=10.0)
    fleet = ScriptedFleet((time_s, ok(task_of(50 + time_s, "x"), DELTA)) for time_s in range(30))
    assert kinds(opened(cohort, fleet)) == ["late"]
    assert fleet.now == 10


def test_a_repeated_answer_is_counted_once_and_not_reported_again() -> None:
    cohort = cohort_of(2, quorum=2, deadline_s=100.0, grace_s=0.0)
    fleet, events = ScriptedFleet(script(cohort, (1, 0, "ok"), (2, 0, "ok"), (3, 0, "failed"), (4, 1, "ok"))), Events()
    assert kinds(opened(cohort, fleet, events)) == ["ok", "ok"]
    assert fleet.now == 4  # the second answer of one client makes no quorum of two
    assert events.outcomes() == [("c00", "ok"), ("c01", "ok")]


def test_an_answer_that_cannot_be_used_is_invalid_and_does_not_make_the_quorum() -> None:
    cohort = cohort_of(2, quorum=1, deadline_s=100.0, grace_s=0.0)
    bad = ok(cohort.tasks[0], {"w": np.array([np.nan])})
    fleet, events = ScriptedFleet([(1, bad), *script(cohort, (2, 1, "ok"))]), Events()
    outcomes = list(opened(cohort, fleet, events))
    assert kinds(outcomes) == ["invalid", "ok"]
    assert outcomes[0].update is None
    assert "'w' holds NaN or infinity" in outcomes[0].reason
    assert events.outcomes() == [("c00", "invalid"), ("c01", "ok")]


# Asking again


def answering(*attempts: dict[int, tuple[float, str]]) -> ScriptedFleet:
    """A fleet in which the n-th asking of a task has the n-th answer: seconds and kind, by task number."""

    def answers(task: Task, attempt: int) -> Iterator[tuple[float, Outcome]]:
        if attempt < len(attempts) and task.number in attempts[attempt]:
            after_s, kind = attempts[attempt][task.number]
            good = answer(task, "ok" if kind == "invalid" else kind, f"it was {kind}")
            yield after_s, ok(task, {"w": np.array([np.inf])}) if kind == "invalid" else good

    return ScriptedFleet(answers=answers)


@pytest.mark.parametrize("kind", ["failed", "declined", "invalid"])
def test_a_retry_asks_the_missing_clients_again_for_the_same_task(kind: str) -> None:
    cohort = cohort_of(3, quorum=3, retry=True, deadline_s=100.0)
    fleet, events = answering({0: (1, "ok"), 1: (2, kind), 2: (3, "ok")}, {1: (1, "ok")}), Events()
    assert kinds(opened(cohort, fleet, events)) == ["ok", "ok", "ok"]
    assert [given.numbers for given in fleet.given] == [(0, 1, 2), (1,)]
    assert fleet.tasks[3] is cohort.tasks[1]
    assert fleet.given[1].time_s == 4  # after a pause of 1 s: it would fail again at once
    assert events.of("retry") == [{"missing": ["c01"], "attempt": 1}]
    assert events.outcomes() == [("c00", "ok"), ("c01", kind), ("c02", "ok"), ("c01", "ok")]


def test_a_retry_asks_again_at_the_deadline_who_was_late() -> None:
    cohort = cohort_of(2, quorum=2, retry=True, deadline_s=10.0)
    fleet, events = answering({0: (1, "ok")}, {1: (3, "ok")}), Events()
    assert kinds(opened(cohort, fleet, events)) == ["ok", "ok"]
    assert fleet.given == [Given(0, (0, 1)), Given(10, (1,))]
    assert fleet.now == 13
    assert events.of("retry") == [{"missing": ["c01"], "attempt": 1}]


def test_an_answer_to_the_first_asking_is_as_good_as_one_to_the_second() -> None:
    cohort = cohort_of(2, quorum=2, retry=True, deadline_s=10.0)
    fleet = answering({0: (1, "ok"), 1: (12, "ok")}, {1: (10, "ok")})
    assert kinds(opened(cohort, fleet)) == ["ok", "ok"]
    assert fleet.now == 12


def test_a_client_that_is_lost_is_asked_again_at_once_and_the_round_goes_on() -> None:
    cohort = cohort_of(2, quorum=2, retry=True, deadline_s=100.0)
    fleet, events = answering({0: (1, "lost"), 1: (2, "ok")}, {0: (30, "ok")}), Events()
    assert kinds(opened(cohort, fleet, events)) == ["ok", "ok"]
    assert fleet.given == [Given(0, (0, 1)), Given(1, (0,))]
    assert fleet.now == 31
    assert events.outcomes() == [("c00", "lost"), ("c01", "ok"), ("c00", "ok")]
    assert events.of("retry") == []


def test_a_round_with_its_quorum_does_not_wait_for_a_client_that_is_lost() -> None:
    cohort = cohort_of(3, quorum=2, retry=True)
    fleet, events = answering({0: (1, "lost"), 1: (2, "ok"), 2: (3, "ok")}), Events()
    outcomes = list(opened(cohort, fleet, events))
    assert kinds(outcomes) == ["lost", "ok", "ok"]
    assert outcomes[0].reason == "it was lost"
    assert fleet.now == 3
    assert events.outcomes() == [("c00", "lost"), ("c01", "ok"), ("c02", "ok")]


def test_a_client_that_is_lost_and_not_back_at_the_deadline_stays_lost_and_is_not_called_late() -> None:
    cohort = cohort_of(3, quorum=1, retry=True, deadline_s=10.0)
    fleet = answering({0: (1, "lost"), 1: (2, "ok")})
    assert kinds(opened(cohort, fleet)) == ["lost", "ok", "late"]
    assert fleet.now == 10


def test_a_client_that_was_lost_before_others_were_asked_again_is_not_waited_for_after_it() -> None:
    cohort = cohort_of(2, quorum=1, retry=True, deadline_s=10.0)
    fleet = answering({0: (1, "lost")}, {1: (3, "ok")})
    outcomes = list(opened(cohort, fleet))
    assert kinds(outcomes) == ["lost", "ok"]
    assert outcomes[0].reason == "it was lost"
    assert fleet.given == [Given(0, (0, 1)), Given(1, (0,)), Given(10, (0, 1))]
    assert fleet.now == 13


def test_who_was_asked_again_is_waited_for_like_anybody_else() -> None:
    cohort = cohort_of(3, quorum=2, retry=True, deadline_s=100.0)
    fleet = answering({0: (1, "failed"), 1: (2, "ok"), 2: (3, "failed")}, {2: (1, "ok"), 0: (5, "ok")})
    assert kinds(opened(cohort, fleet)) == ["ok", "ok", "ok"]


def test_with_its_quorum_a_retrying_round_accepts_that_others_failed() -> None:
    cohort = cohort_of(3, quorum=2, retry=True, deadline_s=100.0)
    fleet = answering({0: (1, "failed"), 1: (2, "ok"), 2: (3, "ok")})
    assert kinds(opened(cohort, fleet)) == ["failed", "ok", "ok"]
    assert [given.numbers for given in fleet.given] == [(0, 1, 2)]
    assert fleet.now == 3


def test_what_a_retry_could_have_replaced_is_released_once_the_quorum_is_reached() -> None:
    cohort = cohort_of(4, quorum=1, retry=True, deadline_s=100.0)
    fleet = answering({0: (1, "failed"), 1: (2, "ok"), 2: (3, "failed"), 3: (50, "ok")})
    outcomes = opened(cohort, fleet)
    assert [(next(outcomes).kind, fleet.now) for _ in range(4)] == [
        ("failed", 2),
        ("ok", 2),
        ("failed", 3),
        ("ok", 50),
    ]


def test_clients_that_keep_failing_are_asked_after_longer_and_longer_pauses() -> None:
    cohort = cohort_of(1, quorum=1, retry=True, deadline_s=1000.0)
    fleet = answering(*({0: (0, "failed")} for _ in range(7)), {0: (0, "ok")})
    assert kinds(opened(cohort, fleet)) == ["ok"]
    assert [given.time_s for given in fleet.given] == [0, 1, 3, 8, 18, 48, 78, 108]


def test_a_client_that_answers_during_the_pause_is_not_asked_again_nor_counted_twice() -> None:
    # c01 is late at 10 s, c00 failed: both are missing. c01's answer arrives in the pause before they are asked again.
    cohort = cohort_of(3, quorum=3, retry=True, deadline_s=10.0)
    fleet = answering({0: (1, "failed"), 1: (10.5, "ok"), 2: (2, "ok")}, {0: (5, "ok"), 1: (0, "ok")})
    assert kinds(opened(cohort, fleet)) == ["ok", "ok", "ok"]
    assert [given.numbers for given in fleet.given] == [(0, 1, 2), (0,)]


def test_a_quorum_that_is_reached_during_the_pause_ends_the_asking() -> None:
    cohort = cohort_of(3, quorum=2, retry=True, deadline_s=10.0)
    fleet = answering({0: (1, "failed"), 1: (10.5, "ok"), 2: (2, "ok")})
    assert kinds(opened(cohort, fleet)) == ["failed", "ok", "ok"]
    assert [given.numbers for given in fleet.given] == [(0, 1, 2)]


def test_an_interruption_passes_through() -> None:
    class Interrupted(ScriptedFleet):
        def receive(self, timeout_s: float) -> Outcome | None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        next(opened(cohort_of(1), Interrupted()))
