"""The client: trainers, and the agent that connects one to a server."""

from typing import TYPE_CHECKING, Any

from fedtrain.client.trainer import Evaluated, Fitted, Trainer, Work

if TYPE_CHECKING:
    from fedtrain.client.agent import Client, ClientStatus

__all__ = ["Client", "ClientStatus", "Evaluated", "Fitted", "Trainer", "Work"]


def __getattr__(name: str) -> Any:
    # The agent brings Flower with it (0.5 s); trainers and simulations do without.
    if name in ("Client", "ClientStatus"):
        from fedtrain.client import agent

        return getattr(agent, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
