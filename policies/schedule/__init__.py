"""Scheduling: what moves together, what runs together, and what goes first."""

from policies.schedule.auto import Auto
from policies.schedule.batching import Alone, SameLayer
from policies.schedule.co_execution import EarlierEnd
from policies.schedule.order import Fifo, GlobalSrtf, LowestLayerFirst, LowestLayerThenSrtf
from policies.schedule.partition import OneUnit, PerRequest, Sizes

__all__ = [
    "Alone",
    "Auto",
    "EarlierEnd",
    "Fifo",
    "GlobalSrtf",
    "LowestLayerFirst",
    "LowestLayerThenSrtf",
    "OneUnit",
    "PerRequest",
    "SameLayer",
    "Sizes",
]
