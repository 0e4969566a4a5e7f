"""Mixtral: few large experts, weights always renormalised and kept in float32."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from executor.cache import LayerState
from executor.families.common import Family, PreNormLayer, kv_cache
from policies.core.types import ModelSpec


class MixtralLayer(PreNormLayer):
    """The window, if any, stands in the configuration, not in the attention module."""

    def rounded(self, weights: Tensor) -> Tensor:
        """Mixtral's mixing weights stay float32."""
        return weights

    def new_state(self, slots: int, max_tokens: int, dtype: torch.dtype, device: torch.device) -> LayerState:
        """Keys and values of a window, if the configuration has one."""
        attention = self.module.self_attn
        attention.sliding_window = attention.config.sliding_window
        return kv_cache(attention, slots, max_tokens, dtype, device)


class Mixtral(Family):
    """Mixtral-8x7B and 8x22B."""

    model_types = ("mixtral",)
    layer = MixtralLayer

    def check(self, config: Any) -> None:
        """Every Mixtral layer is a MoE layer."""

    def spec(self, config: Any) -> ModelSpec:
        """The routing shape."""
        return ModelSpec("mixtral", config.num_hidden_layers, config.num_local_experts, config.num_experts_per_tok)

    def intermediate(self, config: Any) -> int:
        """Width of one expert."""
        return config.intermediate_size
