"""Cache eviction: which expert leaves.  One policy a file; each subclasses ``EvictionPolicy``."""

from policies.eviction.belady import Belady
from policies.eviction.expected_use import ExpectedUse
from policies.eviction.finemoe import FineMoEScore
from policies.eviction.least_stale import LeastStale
from policies.eviction.lfu import LFU
from policies.eviction.lru import LRU
from policies.eviction.per_layer import PerLayer
from policies.eviction.random import Random

__all__ = ["LFU", "LRU", "Belady", "ExpectedUse", "FineMoEScore", "LeastStale", "PerLayer", "Random"]
