"""Fleets: where clients are. Nothing else differs between a simulation and a deployment."""

from fedtrain.fleet.fleet import Fleet
from fedtrain.fleet.memory import MemoryFleet

__all__ = ["Fleet", "MemoryFleet"]
