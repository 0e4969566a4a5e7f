"""Prefetching: predictors (outside the core) and the policies that act on what they say (inside it)."""

from policies.prefetch.oracle import OraclePredictor
from policies.prefetch.predictor import Observation, Predictor
from policies.prefetch.ranked import Ranked

__all__ = ["Observation", "OraclePredictor", "Predictor", "Ranked"]
