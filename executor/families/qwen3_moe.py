"""Qwen3-MoE: q and k norms, softmax router, weights renormalised if ``norm_topk_prob`` says so."""

from __future__ import annotations

from typing import Any

from executor.families.common import Family, Module, PreNormLayer
from policies.core.types import ModelSpec, UserError


class Qwen3MoeLayer(PreNormLayer):
    """As the configuration's flag says; the class default (False) is not the published checkpoints' (True)."""

    def __init__(self, module: Module, config: Any, index: int) -> None:
        super().__init__(module, config, index)
        self.renormalise = config.norm_topk_prob


class Qwen3Moe(Family):
    """Qwen3-30B-A3B and its relatives."""

    model_types = ("qwen3_moe",)
    layer = Qwen3MoeLayer

    def check(self, config: Any) -> None:
        """Every layer must be a MoE layer."""
        if config.mlp_only_layers or config.decoder_sparse_step != 1:
            raise UserError(
                f"this Qwen3-MoE has dense layers (mlp_only_layers {config.mlp_only_layers}, decoder_sparse_step "
                f"{config.decoder_sparse_step}); expected a MoE in every layer; use another checkpoint"
            )

    def spec(self, config: Any) -> ModelSpec:
        """The routing shape."""
        return ModelSpec("qwen3_moe", config.num_hidden_layers, config.num_experts, config.num_experts_per_tok)

    def intermediate(self, config: Any) -> int:
        """Width of one expert."""
        return config.moe_intermediate_size
