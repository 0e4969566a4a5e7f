"""OLMoE: norms over whole q and k, optional clipping of q, k and v, weights that sum below 1."""

from __future__ import annotations

from typing import Any

from executor.families.common import Family, Module, PreNormLayer
from policies.core.types import ModelSpec


class OlmoeLayer(PreNormLayer):
    """The published checkpoints do not renormalise: ``norm_topk_prob`` is False."""

    def __init__(self, module: Module, config: Any, index: int) -> None:
        super().__init__(module, config, index)
        self.renormalise = config.norm_topk_prob


class Olmoe(Family):
    """OLMoE-1B-7B and its relatives."""

    model_types = ("olmoe",)
    layer = OlmoeLayer

    def check(self, config: Any) -> None:
        """Every OLMoE layer is a MoE layer."""

    def spec(self, config: Any) -> ModelSpec:
        """The routing shape."""
        return ModelSpec("olmoe", config.num_hidden_layers, config.num_experts, config.num_experts_per_tok)

    def intermediate(self, config: Any) -> int:
        """Width of one expert."""
        return config.intermediate_size
