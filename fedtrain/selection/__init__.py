"""Selectors: who takes part in a round, and with which probability."""

from fedtrain.selection.selector import Chosen, Selector
from fedtrain.selection.uniform import uniform

__all__ = ["Chosen", "Selector", "uniform"]
