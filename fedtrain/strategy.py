"""Strategy: a round as six questions."""

from dataclasses import dataclass, field, fields

from fedtrain.aggregation.aggregator import Aggregator
from fedtrain.errors import StrategyError
from fedtrain.local.algorithm import Local
from fedtrain.selection.selector import Selector
from fedtrain.server_optimizers.optimizer import Optimizer
from fedtrain.server_optimizers.sgd import sgd
from fedtrain.transforms import Transform, identity


@dataclass(frozen=True)
class Strategy:
    """Six answers that make a round; a value without network, disk or clock.

    Raises:
        StrategyError: a slot holds something that is not its kind of part, or a local algorithm folds every update into
            the server's memory where the aggregator rejects or bounds some.
    """

    select: Selector
    """Who takes part, with which probability?"""
    local: Local
    """What does a client optimise, how much work does it do, and what does the server keep for it?"""
    aggregate: Aggregator
    """How do many deltas become one?"""
    on_client: Transform = field(default_factory=identity)
    """What happens to a delta before it leaves the client?"""
    on_server: Transform = field(default_factory=identity)
    """What happens to the aggregate?"""
    server_optimizer: Optimizer = field(default_factory=sgd)
    """How does the aggregate move the model?"""

    def __post_init__(self) -> None:
        for slot in fields(self):
            require_kind(slot.name, getattr(self, slot.name))
        if self.local.folds_updates and not self.aggregate.uses_all:
            raise StrategyError(
                "strategy slots 'local' and 'aggregate' do not fit together: the local algorithm folds every update "
                "into the server's memory, also those that the aggregator rejects or bounds, so that one client could "
                "still move the model anywhere: choose local=sgd_epochs or proximal with a robust aggregator, or "
                "aggregation=weighted_mean with scaffold or feddyn"
            )


SLOTS: dict[str, type] = {
    "select": Selector,
    "local": Local,
    "aggregate": Aggregator,
    "on_client": Transform,
    "on_server": Transform,
    "server_optimizer": Optimizer,
}
"""What each slot holds."""


def require_kind(slot: str, part: object) -> None:
    """Refuse what is not the kind of part that a slot holds.

    Raises:
        StrategyError: naming both kinds.
    """
    expected = SLOTS[slot]
    if not isinstance(part, expected):
        raise StrategyError(
            f"strategy slot {slot!r} must be a {expected.__name__}, found {type(part).__name__}: "
            f"call the part's function, for example {slot}=part(...)"
        )
