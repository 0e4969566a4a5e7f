"""Gemma 4 MoE: a dense MLP in parallel with the experts, and a router that reads the raw residual.

The router has a norm of its own, a learned scale over its input and one for each expert, so its
weights do not sum to 1.  Sliding layers and full layers alternate and differ in heads, head size and
rotary embedding; full layers use the key projection for values as well.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers.activations import ACT2FN

from executor.cache import LayerState
from executor.experts import Activation
from executor.families.common import Family, Layer, Module, Rotary, Turn, kv_cache
from policies.core.types import ModelSpec, UserError


class Gemma4Layer(Layer):
    """One decoder layer, sliding or full."""

    def __init__(self, module: Module, config: Any, index: int) -> None:
        super().__init__(module, config, index)
        self.rotary_key = config.layer_types[index]

    def attend(self, residual: Tensor, rotary: Rotary, turn: Turn) -> Tensor:
        """The residual stream after this layer's attention and its second norm."""
        m = self.module
        out, _ = m.self_attn(
            m.input_layernorm(residual),
            position_embeddings=rotary[self.rotary_key],
            attention_mask=None,
            shared_kv_states={},
            turn=turn,
        )
        return residual + m.post_attention_layernorm(out)

    def expert_input(self, residual: Tensor) -> Tensor:
        """The experts have a norm that the router does not use."""
        return self.module.pre_feedforward_layernorm_2(residual)

    def scores(self, residual: Tensor, x: Tensor) -> Tensor:
        """Softmax over all experts of the router's own view of the raw residual."""
        router = self.module.router
        seen = router.norm(residual) * router.scale * router.scalar_root_size
        return functional.linear(seen, router.proj.weight).softmax(-1, dtype=torch.float32)

    def weights(self, scores: Tensor, chosen: Tensor) -> Tensor:
        """Renormalised, then scaled expert by expert."""
        weights = scores.gather(1, chosen)
        weights = weights / weights.sum(-1, keepdim=True)
        return weights * self.module.router.per_expert_scale.float()[chosen]

    def merge(self, residual: Tensor, x: Tensor, routed: Tensor) -> Tensor:
        """Dense MLP and experts, each behind its norm, then a norm over their sum, then the layer's scale."""
        m = self.module
        dense = m.post_feedforward_layernorm_1(m.mlp(m.pre_feedforward_layernorm(residual)))
        routed = m.post_feedforward_layernorm_2(routed.to(residual.dtype))
        return (residual + m.post_feedforward_layernorm(dense + routed)) * m.layer_scalar

    def new_state(self, slots: int, max_tokens: int, dtype: torch.dtype, device: torch.device) -> LayerState:
        """Keys and values; of sliding layers only the window."""
        return kv_cache(self.module.self_attn, slots, max_tokens, dtype, device)


class Gemma4(Family):
    """Gemma4-26B-A4B and its relatives; of a multimodal checkpoint, the text model."""

    model_types = ("gemma4_text", "gemma4")
    layer = Gemma4Layer

    def check(self, config: Any) -> None:
        """Refuse Gemma 4 models that are not MoE or that use the small models' extra parts."""
        for field, expected in (
            ("enable_moe_block", True),
            ("hidden_size_per_layer_input", 0),
            ("num_kv_shared_layers", 0),
            ("use_bidirectional_attention", None),
        ):
            value = getattr(config, field)
            if value != expected and not (field == "use_bidirectional_attention" and value == "vision"):
                raise UserError(f"this Gemma 4 has {field} {value}, expected {expected}; use the 26B-A4B checkpoint")

    def spec(self, config: Any) -> ModelSpec:
        """The routing shape; note that Gemma calls its top-k ``top_k_experts``."""
        return ModelSpec("gemma4", config.num_hidden_layers, config.num_experts, config.top_k_experts)

    def intermediate(self, config: Any) -> int:
        """Width of one expert."""
        return config.moe_intermediate_size

    def activation(self, config: Any) -> Activation:
        """GELU, tanh form."""
        return ACT2FN[config.hidden_activation]

    def experts_owner(self, layer: Module) -> Module:
        """The decoder layer itself holds router and experts."""
        return layer

    def rotary(self, model: Module, like: Tensor, positions: Tensor) -> Rotary:
        """One rotary embedding for each kind of layer."""
        return {kind: model.model.rotary_emb(like, positions, kind) for kind in sorted(set(model.config.layer_types))}

    def restore_buffers(self, model: Module) -> None:
        """Rotary frequencies and the embedding's scale."""
        super().restore_buffers(model)
        embedding = model.model.embed_tokens
        embedding.embed_scale = torch.tensor(embedding.scalar_embed_scale)

    def logits(self, model: Module, hidden: Tensor) -> Tensor:
        """Final norm, LM head and, where the configuration has it, the soft cap."""
        logits = super().logits(model, hidden)
        cap = model.config.final_logit_softcapping
        return logits if cap is None else torch.tanh(logits / cap) * cap
