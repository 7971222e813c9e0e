"""The plan of a round: who is asked for what, decided completely before anything is sent."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from fedtrain.errors import ConfigError
from fedtrain.precision import rounded_start
from fedtrain.random import derived_seed, generator
from fedtrain.state import RunState, start_digest
from fedtrain.strategy import Strategy
from fedtrain.types import ClientInfo, Cohort, Start, Task, WireDtype


@dataclass(frozen=True)
class CohortSettings:
    """How many must be there, are asked, must answer; how long each may take, and what they exchange."""

    connected: int = 1
    """Clients that must be connected before a round is planned, >= 1."""
    connect_deadline_s: float = 600.0
    """How long a round waits for them, > 0; after that it is skipped."""
    asked: int | None = None
    """Clients asked in a round, >= 1; None: what the strategy's selector says."""
    answers: int | None = None
    """Usable answers that a round needs, >= 1; None: more than half of those asked."""
    deadline_s: float | None = 600.0
    """Time that a round's clients have to answer, > 0; None: no limit."""
    grace_s: float | None = None
    """Time that the others have once enough have answered, >= 0; None: until the deadline."""
    under_quorum: Literal["skip", "retry"] = "skip"
    """With too few answers: leave the model as it is, or ask the same clients for the same work again."""
    max_update_norm: float | None = None
    """An update whose delta or second payload has a larger L2 norm over its floats is invalid, > 0; None: any may."""
    max_examples: int | None = None
    """An answer that counts more examples is invalid, >= 1; None: up to 2**53."""
    wire_dtype: WireDtype | None = None
    """Model and deltas travel rounded to this dtype, their float32 arrays in half the bytes; None: as they are."""

    def needed(self, strategy: Strategy) -> int:
        """Clients without which planning a round makes no sense."""
        return max(self.connected, self.answers or 1, strategy.aggregate.min_updates)


def require_enough_asked(strategy: Strategy, settings: CohortSettings) -> None:
    """Refuse a run of which no round could ever count.

    Raises:
        ConfigError: fewer clients are asked than the aggregator needs updates.
    """
    least = strategy.aggregate.min_updates
    if settings.asked is not None and settings.asked < least:
        raise ConfigError(
            f"cohort.asked: expected at least {least}, the updates that the strategy's aggregator needs, or null, "
            f"found {settings.asked}"
        )


def start_of(strategy: Strategy, state: RunState, wire_dtype: WireDtype | None = None) -> Start:
    """What the next round's tasks begin at.

    Raises:
        ParamsError: a value of the model is beyond the range of `wire_dtype`.
    """
    return rounded_start(Start(state.params, state.buffers, strategy.local.payload(state.local)), wire_dtype)


def plan(
    strategy: Strategy, state: RunState, eligible: Sequence[ClientInfo], settings: CohortSettings, start: Start
) -> Cohort:
    """Decide the next round: cohort, work, seeds. A function of its arguments alone."""
    round = state.round + 1
    eligible = sorted(eligible, key=lambda client: client.id)
    random = generator(state.seed, "select", round)
    chosen = strategy.select.choose(eligible, state.selection, random, settings.asked) if eligible else ()
    digest = start_digest(start)
    tasks = tuple(
        Task(
            number=state.next_task + index,
            client=client.id,
            round=round,
            start=digest,
            local=strategy.local.task(state.local, client, round),
            on_client=strategy.on_client.spec,
            seed=derived_seed(state.seed, "task", round, client.id),
            deadline_s=settings.deadline_s,
            probability=probability,
            num_examples=client.num_examples,
            wire_dtype=settings.wire_dtype,
        )
        for index, (client, probability) in enumerate(chosen)
    )
    quorum = max(settings.answers or len(tasks) // 2 + 1, strategy.aggregate.min_updates)
    return Cohort(
        round=round,
        tasks=tasks,
        num_eligible=len(eligible),
        eligible_examples=sum(client.num_examples for client in eligible),
        quorum=quorum,
        deadline_s=settings.deadline_s,
        grace_s=settings.grace_s,
        # Asking fewer clients than the quorum again and again would never end.
        retry=settings.under_quorum == "retry" and quorum <= len(tasks),
        entropy=derived_seed(state.seed, "server", round),
        max_update_norm=settings.max_update_norm,
        max_examples=settings.max_examples,
    )


def plan_evaluation(state: RunState, clients: Sequence[ClientInfo], settings: CohortSettings, start: Start) -> Cohort:
    """Ask every connected client to measure the current model; whoever answers in time counts."""
    digest = start_digest(start)
    tasks = tuple(
        Task(
            number=state.next_task + index,
            client=client.id,
            round=state.round,
            start=digest,
            local=("evaluate", {}),
            seed=derived_seed(state.seed, "evaluate", state.round, client.id),
            deadline_s=settings.deadline_s,
            num_examples=client.num_examples,
            kind="evaluate",
            wire_dtype=settings.wire_dtype,
        )
        for index, client in enumerate(sorted(clients, key=lambda client: client.id))
    )
    return Cohort(
        round=state.round,
        tasks=tasks,
        num_eligible=len(tasks),
        eligible_examples=sum(client.num_examples for client in clients),
        quorum=len(tasks) // 2 + 1,  # with 1, the first to answer would start the others' grace
        deadline_s=settings.deadline_s,
        grace_s=settings.grace_s,
        retry=False,
        entropy=0,
        max_examples=settings.max_examples,
    )
