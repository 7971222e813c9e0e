"""Server optimizers: how the aggregated delta moves the model."""

from fedtrain.server_optimizers.adagrad import adagrad
from fedtrain.server_optimizers.adam import adam
from fedtrain.server_optimizers.optimizer import Optimizer
from fedtrain.server_optimizers.sgd import sgd
from fedtrain.server_optimizers.yogi import yogi

__all__ = ["Optimizer", "adagrad", "adam", "sgd", "yogi"]
