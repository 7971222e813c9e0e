"""Evaluation after a round: on the server's held-out data, on the clients, or both."""

from dataclasses import replace
from typing import Literal

from fedtrain.client.trainer import Trainer
from fedtrain.collect import collect
from fedtrain.fleet.fleet import Fleet
from fedtrain.metrics import mean_metrics, metrics_by_client
from fedtrain.observe.events import Report, quiet
from fedtrain.plan import CohortSettings, plan_evaluation
from fedtrain.precision import rounded_start
from fedtrain.rounds import Evaluate
from fedtrain.state import RunState
from fedtrain.types import Start

Where = Literal["server", "clients", "both", "none"]


def evaluation(
    where: Where, *, every: int, rounds: int, trainer: Trainer, settings: CohortSettings, report: Report = quiet
) -> Evaluate:
    """Measure the model every `every` rounds, and after the last of `rounds`.

    Clients measure the model that they receive, which is rounded where there is a ``wire_dtype``; the server its own.
    What the server measures with `trainer` goes before what the clients' mean says, where both have a metric.
    """

    def evaluate(state: RunState, fleet: Fleet) -> RunState:
        if where == "none" or (state.round % every and state.round < rounds):
            return state
        record = state.history[-1]
        if where in ("clients", "both"):
            start = rounded_start(Start(state.params, state.buffers), settings.wire_dtype)
            cohort = plan_evaluation(state, fleet.clients(), settings, start)
            outcomes = list(collect(cohort, fleet, start, report=report))
            for outcome in outcomes:
                fleet.settle(outcome.task, False)
            mean, by_client = mean_metrics(outcomes), metrics_by_client(outcomes)
            report("evaluated", state.round, where="clients", metrics=mean, by_client=by_client)
            record = replace(record, evaluation=mean, evaluation_by_client=by_client)
            state = replace(state, next_task=state.next_task + len(cohort.tasks))
        if where in ("server", "both"):
            found = trainer.evaluate(state.model)
            if found is not None:
                report("evaluated", state.round, where="server", metrics=dict(found.metrics), by_client={})
                record = replace(record, evaluation={**record.evaluation, **found.metrics})
        return replace(state, history=(*state.history[:-1], record))

    return evaluate
