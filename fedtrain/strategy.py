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
        StrategyError: a slot holds something that is not its kind of part.
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
            expected, found = SLOTS[slot.name], getattr(self, slot.name)
            if not isinstance(found, expected):
                raise StrategyError(
                    f"strategy slot {slot.name!r} must be a {expected.__name__}, found {type(found).__name__}: "
                    f"call the part's function, for example {slot.name}=part(...)"
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
