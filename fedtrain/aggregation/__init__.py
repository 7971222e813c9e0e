"""Aggregators: how many deltas become one."""

from fedtrain.aggregation.aggregator import Aggregator, Weight, by_examples, equally
from fedtrain.aggregation.discrete import DiscreteMean
from fedtrain.aggregation.normalised_mean import normalised_mean
from fedtrain.aggregation.weighted_mean import weighted_mean

__all__ = ["Aggregator", "DiscreteMean", "Weight", "by_examples", "equally", "normalised_mean", "weighted_mean"]
