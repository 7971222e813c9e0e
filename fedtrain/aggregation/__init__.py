"""Aggregators: how many deltas become one."""

from fedtrain.aggregation.aggregator import Aggregator, Weight, by_examples, equally
from fedtrain.aggregation.bucketing import bucketing
from fedtrain.aggregation.bulyan import bulyan
from fedtrain.aggregation.centred_clipping import centred_clipping
from fedtrain.aggregation.discrete import DiscreteMean
from fedtrain.aggregation.geometric_median import geometric_median
from fedtrain.aggregation.krum import krum, multi_krum
from fedtrain.aggregation.median import median
from fedtrain.aggregation.mixing import nearest_neighbour_mixing
from fedtrain.aggregation.norm_bounding import norm_bounding
from fedtrain.aggregation.normalised_mean import normalised_mean
from fedtrain.aggregation.trimmed_mean import trimmed_mean
from fedtrain.aggregation.weighted_mean import weighted_mean

__all__ = [
    "Aggregator",
    "DiscreteMean",
    "Weight",
    "bucketing",
    "bulyan",
    "by_examples",
    "centred_clipping",
    "equally",
    "geometric_median",
    "krum",
    "median",
    "multi_krum",
    "nearest_neighbour_mixing",
    "norm_bounding",
    "normalised_mean",
    "trimmed_mean",
    "weighted_mean",
]
