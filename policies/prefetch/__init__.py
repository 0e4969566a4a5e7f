"""Prefetching: predictors (outside the core) and the policies that act on what they say (inside it)."""

from policies.prefetch.by_layer import ByLayer
from policies.prefetch.cooccurrence import Cooccurrence
from policies.prefetch.finemoe import FineMoE
from policies.prefetch.latest import Latest
from policies.prefetch.learned_linear import LearnedLinear
from policies.prefetch.moe_infinity import MoEInfinity
from policies.prefetch.next_gate import NextGate
from policies.prefetch.oracle import OraclePredictor
from policies.prefetch.popularity import Popularity
from policies.prefetch.predictor import Observation, Predictor
from policies.prefetch.previous_token import PreviousToken
from policies.prefetch.promoe import ProMoE
from policies.prefetch.ranked import Ranked

__all__ = [
    "ByLayer",
    "Cooccurrence",
    "FineMoE",
    "Latest",
    "LearnedLinear",
    "MoEInfinity",
    "NextGate",
    "Observation",
    "OraclePredictor",
    "Popularity",
    "Predictor",
    "PreviousToken",
    "ProMoE",
    "Ranked",
]
