"""Owns the statistics of routing that the synthetic router imitates, as data: one `Preset` a model and workload.

Knows no traces and no files.  ``benchmarks/fit_presets.py`` computes the fitted numbers and prints how they compare.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from policies.core.types import UserError


@dataclass(frozen=True, slots=True)
class Preset:
    """Statistics of one model's routing under one workload.

    A gate's score of an expert is a sum of parts; each number that says "share" is that part's share of the variance,
    so ``popularity`` is the correlation of the scores of two unrelated tokens, and ``popularity + affinity +
    slow * slow_memory**d + fast * fast_memory**d`` that of two tokens of one request ``d`` steps apart.  What the
    shares leave is new with each token.
    """

    name: str
    popularity: float
    """Share: an expert's fixed popularity, the same for all requests."""
    affinity: float
    """Share: what a request likes all its life."""
    slow: float
    """Share: what a request likes for a while (its topic)."""
    slow_memory: float
    """Step-to-step correlation of the slow part."""
    fast: float
    """Share: what it likes for a few tokens."""
    fast_memory: float
    """Step-to-step correlation of the fast part."""
    noise: float
    """Share: independent in every layer and expert.  The rest of what is new is one hidden state for all layers."""
    hidden: int
    """Dimensions of that hidden state: the fewer, the better one layer's experts foretell the next layer's."""
    request_spread: float
    """Standard deviation, between requests, of the log weight of popularity and habit (hard requests miss more)."""
    step_spread: float
    """The same between the steps of a request.  One value for all layers of a step: this makes stragglers."""
    sharpness: float
    """Factor from scores to gate logits: how unequal the routing weights are."""
    popularity_by_depth: tuple[float, ...] = (1.0,)
    """Factor on ``popularity`` at even depths from the first MoE layer to the last."""
    habit_by_depth: tuple[float, ...] = (1.0,)
    """Factor on ``affinity``, ``slow`` and ``fast``."""
    opening_tokens: int = 0
    """First tokens that all requests share (a chat template's fixed words); they fade out over as many again."""
    prediction_quality: float = 0.95
    """Correlation of ``next_scores_1`` with the true scores; its square and cube for distances 2 and 3."""
    source: str = ""
    """Where the numbers come from."""

    def shares(self, n_layers: int) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
        """Per layer [layers]: share of popularity, factor on the three habits, share of the token's news.

        Where the depth profiles ask for more than there is, both are scaled down to leave 2% of news.
        """
        depth = np.linspace(0.0, 1.0, n_layers)

        def profile(knots: tuple[float, ...]) -> NDArray[np.float64]:
            return np.interp(depth, np.linspace(0.0, 1.0, len(knots)), knots)

        popularity = self.popularity * profile(self.popularity_by_depth)
        habit = profile(self.habit_by_depth)
        habits = self.affinity + self.slow + self.fast
        room = max(0.0, 0.98 - self.noise)
        scale = room / np.maximum(popularity + habit * habits, max(room, 1e-9))  # at most 1
        popularity, habit = popularity * scale, habit * scale
        return popularity, habit, 1.0 - self.noise - popularity - habit * habits


# ---------------------------------------------------------------------------- layers that differ
# Correlations read off recorded overlaps, layer by layer, over their mean.  The first layer's gates always depend least
# on anything but the token; popularity can jump from layer to layer.

_SMOOTH_POPULARITY = (0.45, 0.75, 0.9, 1.0, 1.05, 1.1, 1.1, 1.1, 1.05)
_SMOOTH_HABIT = (0.35, 0.85, 1.05, 1.1, 1.1, 1.08, 1.05, 1.0, 0.95)
"""The common shape of the recorded ones below."""
_GPT_OSS_POPULARITY = (
    0.44, 0.59, 0.85, 1.10, 0.75, 0.54, 0.69, 0.71, 0.87, 0.76, 1.24, 1.39,
    1.30, 1.57, 1.26, 0.90, 1.30, 1.08, 0.93, 0.92, 0.72, 1.13, 1.25, 1.69,
)  # fmt: skip
_GPT_OSS_HABIT = (
    0.29, 0.64, 0.93, 1.04, 1.23, 1.19, 1.00, 0.78, 1.00, 1.23, 1.27, 1.23,
    1.28, 1.19, 0.93, 0.89, 0.96, 1.09, 0.89, 1.01, 0.87, 1.04, 0.96, 1.07,
)  # fmt: skip
_DEEPSEEK_POPULARITY = (
    0.34, 0.25, 0.39, 0.59, 0.54, 0.77, 0.97, 1.16, 1.09, 0.99, 1.05, 1.52, 1.39,
    0.91, 1.62, 0.89, 1.11, 0.96, 1.65, 0.95, 0.71, 0.79, 1.42, 1.87, 1.43, 0.62,
)  # fmt: skip
_DEEPSEEK_HABIT = (
    0.46, 0.64, 0.81, 1.02, 1.20, 1.13, 1.15, 1.19, 1.20, 1.15, 1.29, 0.99, 1.01,
    1.12, 0.99, 1.21, 0.86, 1.13, 0.94, 1.05, 1.07, 0.86, 0.92, 0.84, 0.88, 0.88,
)  # fmt: skip
_GEMMA4_POPULARITY = (
    0.99, 0.48, 0.68, 0.74, 1.85, 0.57, 0.98, 0.59, 0.52, 0.53, 0.64, 0.74, 0.86, 1.13, 1.16,
    0.85, 1.03, 1.12, 1.51, 1.28, 1.36, 1.34, 1.07, 0.87, 0.90, 0.95, 1.36, 1.00, 1.60, 1.32,
)  # fmt: skip
_GEMMA4_HABIT = (
    0.29, 1.00, 1.38, 1.29, 0.32, 1.42, 1.20, 1.26, 1.53, 1.56, 1.69, 1.47, 1.33, 1.14, 1.15,
    1.09, 1.05, 1.02, 0.62, 0.89, 0.75, 0.72, 0.97, 1.13, 1.00, 0.89, 0.51, 0.58, 0.34, 0.45,
)  # fmt: skip
_GEMMA4_ONE_DOMAIN_POPULARITY = (
    0.84, 0.46, 0.77, 0.80, 1.44, 0.67, 0.68, 0.68, 0.64, 0.58, 0.73, 0.82, 0.80, 1.28, 1.10,
    0.97, 1.26, 1.13, 1.42, 1.48, 1.30, 1.37, 1.11, 0.89, 0.92, 0.96, 1.34, 0.91, 1.46, 1.19,
)  # fmt: skip
_GEMMA4_ONE_DOMAIN_HABIT = (
    0.32, 1.15, 1.58, 1.41, 0.32, 1.52, 1.51, 1.39, 1.54, 1.73, 1.81, 1.54, 1.44, 0.98, 1.11,
    0.96, 0.78, 0.97, 0.60, 0.58, 0.66, 0.67, 0.84, 1.18, 0.95, 0.84, 0.36, 0.49, 0.26, 0.50,
)  # fmt: skip
_QWEN3_NEXT_POPULARITY = (
    0.36, 0.82, 0.39, 1.03, 1.09, 0.77, 0.60, 0.66, 0.92, 1.45, 1.31, 1.18, 1.34, 1.26, 1.04, 0.87,
    1.03, 0.74, 0.62, 0.67, 0.94, 1.43, 1.33, 1.12, 1.29, 1.29, 1.09, 1.01, 1.08, 0.85, 0.70, 0.72,
    0.94, 1.31, 1.22, 1.04, 1.22, 1.17, 1.02, 0.92, 0.92, 0.91, 0.98, 1.06, 1.05, 1.06, 1.15, 0.99,
)  # fmt: skip

# ---------------------------------------------------------------------------- models that were recorded

GPT_OSS_20B = Preset(
    name="gpt_oss_20b chat",
    popularity=0.145,
    affinity=0.248,
    slow=0.086,
    slow_memory=0.993,
    fast=0.247,
    fast_memory=0.55,
    noise=0.03,
    hidden=12,
    request_spread=0.15,
    step_spread=0.15,
    sharpness=0.8,
    popularity_by_depth=_GPT_OSS_POPULARITY,
    habit_by_depth=_GPT_OSS_HABIT,
    opening_tokens=6,
    source=(
        "overlaps of 215,438 decode steps (AmanPriyanshu/GPT-OSS-MoE-ExpertFingerprinting); depth profile and opening "
        "of 32 of its requests; hidden by co-occurrence recall; spreads by the correlation of misses across layers"
    ),
)
DEEPSEEK_V2_LITE = Preset(
    name="deepseek_v2_lite chat",
    popularity=0.039,
    affinity=0.089,
    slow=0.108,
    slow_memory=0.985,
    fast=0.513,
    fast_memory=0.35,
    noise=0.03,
    hidden=12,
    request_spread=0.15,
    step_spread=0.15,
    sharpness=1.4,
    popularity_by_depth=_DEEPSEEK_POPULARITY,
    habit_by_depth=_DEEPSEEK_HABIT,
    opening_tokens=11,
    source=(
        "overlaps of 33,279 tokens of 213 texts, teacher-forced (deepseek-ai/ESFT); depth profile and opening of 16 of "
        "them; hidden by co-occurrence recall; spreads by the correlation of misses across layers"
    ),
)
GEMMA4_CHAT = Preset(
    name="gemma4_26b_a4b chat",
    popularity=0.297,
    affinity=0.193,
    slow=0.116,
    slow_memory=0.85,
    fast=0.175,
    fast_memory=0.45,
    noise=0.03,
    hidden=12,
    request_spread=0.15,
    step_spread=0.15,
    sharpness=1.1,
    popularity_by_depth=_GEMMA4_POPULARITY,
    habit_by_depth=_GEMMA4_HABIT,
    source=(
        "popularity counts and adjacent-token reuse of 21,858 tokens in four workloads (crankysmh47/Expertflow), "
        "overlaps at longer lags from one top-6 request (Helldez/BigMoeOnEdge); spreads as for gpt-oss-20b"
    ),
)
GEMMA4_AGENTIC = replace(
    GEMMA4_CHAT,
    name="gemma4_26b_a4b agentic",
    popularity=0.432,
    affinity=0.11,
    slow=0.09,
    slow_memory=0.90,
    fast=0.20,
    fast_memory=0.37,
    step_spread=0.25,
    popularity_by_depth=_GEMMA4_ONE_DOMAIN_POPULARITY,
    habit_by_depth=_GEMMA4_ONE_DOMAIN_HABIT,
    source=(
        "popularity fitted to 235 demand fetches a step (Bevy, Fig. 10b: 8 requests, 30% cache, LFU with kept counts); "
        "one workload of the Gemma-4 counts alone (heldout_ppl) has .43; step spread by the range in Fig. 4b; "
        "lag-1 reuse .40 as measured (crankysmh47/Expertflow)"
    ),
)
QWEN3_6_CHAT = Preset(
    name="qwen3_6_35b_a3b chat",
    popularity=0.055,
    affinity=0.0,
    slow=0.54,
    slow_memory=0.965,
    fast=0.26,
    fast_memory=0.65,
    noise=0.03,
    hidden=56,
    request_spread=0.2,
    step_spread=0.2,
    sharpness=1.3,
    popularity_by_depth=_QWEN3_NEXT_POPULARITY,
    habit_by_depth=_SMOOTH_HABIT,
    source=(
        "popularity fitted to 54.1% of needed experts cached (Bevy, Sec. 2.4: 8 requests, 30% cache; here LFU with "
        "kept counts); reuse as near to 32 short requests (crogers2287/jlens) as that allows; depth profile of "
        "Qwen3-Next-80B-A3B (doramirdor/mbolt)"
    ),
)
QWEN3_6_AGENTIC = replace(
    QWEN3_6_CHAT,
    name="qwen3_6_35b_a3b agentic",
    popularity=0.21,
    affinity=0.05,
    slow=0.32,
    fast=0.20,
    fast_memory=0.65,
    hidden=24,
    source=(
        "assumed: overlaps of 32 short requests of mixed content (crogers2287/jlens; popularity .15), raised by "
        "the ratio of Gemma-4's one-domain and mixed counts"
    ),
)

# ---------------------------------------------------------------------------- all others

GENERIC = Preset(
    name="generic chat",
    popularity=0.18,
    affinity=0.20,
    slow=0.12,
    slow_memory=0.97,
    fast=0.30,
    fast_memory=0.35,
    noise=0.03,
    hidden=16,
    request_spread=0.15,
    step_spread=0.15,
    sharpness=1.0,
    popularity_by_depth=_SMOOTH_POPULARITY,
    habit_by_depth=_SMOOTH_HABIT,
    source="assumed: between the recorded models",
)
ONE_DOMAIN = 1.4
"""Popularity of one domain over that of mixed conversations: Gemma-4's counts, .43 to .50 against .31 to .35."""

CHAT = {
    "deepseek_v2_lite": DEEPSEEK_V2_LITE,
    "gemma4_26b_a4b": GEMMA4_CHAT,
    "gpt_oss_20b": GPT_OSS_20B,
    "qwen3_6_35b_a3b": QWEN3_6_CHAT,
    "qwen3_30b_a3b": replace(
        GENERIC,
        name="qwen3_30b_a3b chat",
        popularity=0.24,
        affinity=0.25,
        slow=0.09,
        slow_memory=0.985,
        fast=0.26,
        fast_memory=0.45,
        sharpness=0.9,
        source="counts of 75,773 tokens (doramirdor/mbolt), overlaps of one top-6 request (Helldez/BigMoeOnEdge)",
    ),
    "gpt_oss_120b": replace(
        GPT_OSS_20B,
        name="gpt_oss_120b chat",
        affinity=0.22,
        slow=0.08,
        fast=0.20,
        source="overlaps of one top-2 request (Helldez/BigMoeOnEdge); popularity and depth profile of gpt-oss-20b",
    ),
    "glm_4_5_air": replace(
        GENERIC,
        name="glm_4_5_air chat",
        popularity=0.16,
        source="popularity of GLM-5.2 (doramirdor/mbolt); the rest assumed",
    ),
    "olmoe_1b_7b": replace(
        GENERIC,
        name="olmoe_1b_7b chat",
        popularity=0.05,
        source="popularity of web text, 208,896 tokens (allenai/OLMoE); the rest assumed",
    ),
    "mixtral_8x7b": replace(
        GENERIC,
        name="mixtral_8x7b chat",
        popularity=0.01,
        affinity=0.08,
        slow=0.06,
        fast=0.25,
        source="popularity of 208,896 tokens (allenai/OLMoE); reuse of neighbouring tokens assumed",
    ),
}
AGENTIC = {
    "gemma4_26b_a4b": GEMMA4_AGENTIC,
    "qwen3_6_35b_a3b": QWEN3_6_AGENTIC,
    "olmoe_1b_7b": replace(
        CHAT["olmoe_1b_7b"],
        name="olmoe_1b_7b agentic",
        popularity=0.30,
        source="popularity of code, 208,896 tokens (allenai/OLMoE); the rest assumed",
    ),
}
WORKLOADS = ("agentic", "chat")


def preset_for(model_name: str, workload: str) -> Preset:
    """The preset of a model (its config name) under a workload, ``agentic`` or ``chat``.

    A model without recorded routing gets the generic one; a model recorded under mixed conversations only gets, for
    agents, ``ONE_DOMAIN`` times their popularity.

    Raises:
        UserError: an unknown workload.
    """
    if workload not in WORKLOADS:
        raise UserError(f"there is no synthetic workload {workload}; expected {' or '.join(WORKLOADS)}")
    chat = CHAT.get(model_name, replace(GENERIC, name=f"{model_name} chat"))
    if workload == "chat":
        return chat
    popularity = min(0.6, round(ONE_DOMAIN * chat.popularity, 3))
    source = f"assumed: popularity {ONE_DOMAIN} times that of mixed conversations; those: {chat.source}"
    return AGENTIC.get(model_name, replace(chat, name=f"{model_name} agentic", popularity=popularity, source=source))
