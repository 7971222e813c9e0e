"""Server optimizers: how the aggregated delta moves the model."""

from fedtrain.server_optimizers.optimizer import Optimizer
from fedtrain.server_optimizers.sgd import sgd

__all__ = ["Optimizer", "sgd"]
