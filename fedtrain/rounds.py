"""The loop: `run`, and the pure step at its centre."""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from fedtrain import params as arrays
from fedtrain.aggregation.discrete import DiscreteMean
from fedtrain.collect import collect
from fedtrain.errors import AggregationError, ParamsError
from fedtrain.fleet.fleet import Fleet
from fedtrain.metrics import mean_metrics
from fedtrain.observe.events import Report, quiet
from fedtrain.plan import CohortSettings, plan, require_enough_asked, start_of
from fedtrain.random import generator
from fedtrain.state import RoundRecord, RunState
from fedtrain.strategy import Strategy
from fedtrain.types import ClientInfo, Cohort, Outcome, Params, Start, Update

Evaluate = Callable[[RunState, Fleet], RunState]
"""Measures the model after a round and adds what it found to the history."""


def run(
    strategy: Strategy,
    fleet: Fleet,
    state: RunState,
    *,
    rounds: int,
    settings: CohortSettings,
    evaluate: Evaluate = lambda state, fleet: state,
    save: Callable[[RunState], None] = lambda state: None,
    report: Report = quiet,
) -> RunState:
    """Train until `rounds` rounds are finished, counting those that `state` already has.

    `save` is called when a round is finished, and again once it is evaluated.

    Raises:
        ConfigError: fewer clients are asked than the strategy's aggregator needs updates.
    """
    require_enough_asked(strategy, settings)
    needed = settings.needed(strategy)
    while state.round < rounds:
        eligible = wait_for_clients(fleet, needed, settings.connect_deadline_s, state.round + 1, report)
        start = start_of(strategy, state, settings.wire_dtype)
        cohort = plan(strategy, state, eligible, settings, start)  # who, what, seeds: decided before sending
        report_selected(cohort, report)
        began, seen = time.monotonic(), list[Outcome]()
        outcomes = collect(cohort, fleet, start, extra=strategy.local.extra(start), report=report)
        state = step(strategy, state, cohort, remembered(outcomes, seen))
        save(state)
        settle(fleet, state.history[-1], seen)
        report_round(state.history[-1], time.monotonic() - began, report)
        state = evaluate(state, fleet)
        save(state)
    return state


def step(strategy: Strategy, state: RunState, cohort: Cohort, outcomes: Iterable[Outcome]) -> RunState:
    """The state after a round, from its outcomes in cohort order. Touches no network, disk or clock.

    With fewer usable updates than `cohort.quorum`, no weight, or a combined update that is not finite, the model and
    the memory of all parts but the selector stay as they are, and the round's record says why.
    """
    outcomes, seen = iter(outcomes), list[Outcome]()
    discrete = DiscreteMean(state.buffers)
    local_acc = None

    def updates() -> Iterator[Update]:
        nonlocal local_acc
        for outcome in remembered(outcomes, seen):
            if outcome.update is not None:
                discrete.add(outcome.update.delta, strategy.aggregate.weight(outcome.update, cohort))
                local_acc = strategy.local.fold(local_acc, outcome.update)
                yield outcome.update

    delta: Params = {}
    moved, skipped = state, ""
    try:
        delta = strategy.aggregate(updates(), cohort)
    except AggregationError as error:
        skipped = str(error)
    for _ in remembered(outcomes, seen):  # what a rule that gave up has not read are outcomes all the same
        pass
    num_ok = sum(outcome.kind == "ok" for outcome in seen)
    skipped = shortage(cohort, num_ok) or skipped
    if not skipped:
        try:
            moved = moved_by(strategy, state, cohort, delta, discrete.result(), local_acc)
        except AggregationError as error:
            skipped = str(error)
    record = RoundRecord(cohort.round, num_ok, len(cohort.tasks), skipped, mean_metrics(seen))
    return replace(
        moved,
        round=cohort.round,
        next_task=state.next_task + len(cohort.tasks),
        selection=strategy.select.observe(state.selection, seen),
        history=(*state.history, record),
    )


def moved_by(
    strategy: Strategy, state: RunState, cohort: Cohort, delta: Params, discrete: Params, local_acc: Any
) -> RunState:
    """Model and memories after a combined delta, the combined values of integers and bools, and what was folded."""
    delta, on_server = strategy.on_server.apply(delta, state.on_server, generator(cohort.entropy, "on_server"))
    trainable = {name: delta[name] for name in state.params}
    move, server_optimizer = strategy.server_optimizer.apply(trainable, state.server_optimizer)
    local = strategy.local.finish(state.local, local_acc, cohort)
    move = strategy.local.adjust(local, move)
    rest = {**{name: delta[name] for name in delta if name not in state.params}, **discrete}
    moved = replace(state, params=arrays.add(state.params, move), buffers=arrays.add(state.buffers, rest))
    require_finite(moved, state)
    return replace(moved, local=local, on_server=on_server, server_optimizer=server_optimizer)


def shortage(cohort: Cohort, num_ok: int) -> str:
    """Why a round has too few usable answers, in words; empty if it has enough."""
    if num_ok >= cohort.quorum:
        return ""
    if cohort.tasks:
        return f"{num_ok} usable answers of {len(cohort.tasks)} asked, {cohort.quorum} are needed"
    if cohort.num_eligible:
        return f"nobody was asked: the selector chose none of {cohort.num_eligible} clients"
    return "nobody was asked: too few clients were connected in time"


def first_state(strategy: Strategy, start: Start, seed: int) -> RunState:
    """The state before the first round of a run that begins with this model.

    Raises:
        ParamsError: an array is both a parameter and a buffer.
    """
    for name in start.params:
        if name in start.buffers:
            raise ParamsError(f"the model's {name!r} is both a parameter and a buffer: give each array once")
    return RunState(
        round=0,
        next_task=0,
        seed=seed,
        params=start.params,
        buffers=start.buffers,
        selection=strategy.select.init(),
        local=strategy.local.init(start.params),
        on_server=strategy.on_server.init({**start.params, **start.buffers}),
        server_optimizer=strategy.server_optimizer.init(start.params),
    )


def wait_for_clients(fleet: Fleet, needed: int, deadline_s: float, round: int, report: Report) -> Sequence[ClientInfo]:
    """The connected clients, as soon as there are enough of them or the time for connecting is over."""
    deadline, told = time.monotonic() + deadline_s, -1
    while True:
        clients, left = fleet.clients(), deadline - time.monotonic()
        if len(clients) >= needed:
            return clients
        if left <= 0:
            return ()
        if len(clients) != told:
            told = len(clients)
            report("waiting", round, connected=told, needed=needed)
        fleet.wait(left)


def remembered(outcomes: Iterable[Outcome], seen: list[Outcome]) -> Iterator[Outcome]:
    """Pass outcomes on, and note each without its arrays."""
    for outcome in outcomes:
        seen.append(replace(outcome, update=None))
        yield outcome


def require_finite(after: RunState, before: RunState) -> None:
    """Refuse a model that has NaN or infinity where it had none before."""
    old: Params = before.model
    for name, array in after.model.items():
        if not arrays.all_finite(array) and bool((~np.isfinite(array) & np.isfinite(old[name])).any()):
            raise AggregationError(f"the combined update would make {name!r} infinite or NaN")


def settle(fleet: Fleet, record: RoundRecord, seen: Sequence[Outcome]) -> None:
    """Tell every asked client whether its update was counted."""
    for outcome in seen:
        fleet.settle(outcome.task, outcome.kind == "ok" and not record.skipped)


def report_selected(cohort: Cohort, report: Report) -> None:
    """Say who is asked, and for what."""
    chosen = [
        {"client": task.client, "probability": task.probability, "work": {"local": task.local[0], **task.local[1]}}
        for task in cohort.tasks
    ]
    report("selected", cohort.round, eligible=cohort.num_eligible, quorum=cohort.quorum, chosen=chosen)


def report_round(record: RoundRecord, seconds: float, report: Report) -> None:
    """Say how a round ended."""
    report(
        "round_finished",
        record.round,
        counted=0 if record.skipped else record.num_ok,
        asked=record.num_asked,
        skipped=record.skipped,
        seconds=round(seconds, 6),
        metrics=dict(record.metrics),
    )
