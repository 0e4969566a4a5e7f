"""Scheduling: what moves together, what runs together, and what goes first."""

from policies.schedule.batching import Alone, SameLayer
from policies.schedule.order import Fifo, GlobalSrtf, LowestLayerFirst, LowestLayerThenSrtf
from policies.schedule.partition import OneUnit, PerRequest, Sizes

__all__ = [
    "Alone",
    "Fifo",
    "GlobalSrtf",
    "LowestLayerFirst",
    "LowestLayerThenSrtf",
    "OneUnit",
    "PerRequest",
    "SameLayer",
    "Sizes",
]
