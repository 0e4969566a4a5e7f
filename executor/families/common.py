"""What a model family must say, and what most of them share.

A family is read from its public configuration.  Norms, projections, rotary embedding and attention
weights are transformers' own modules; the layer loop, the batching of requests of different lengths
and the experts are ours.  ``Layer`` cuts a decoder layer where a job is cut: after the gate.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor
from torch.nn import functional
from transformers.activations import ACT2FN
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from executor.cache import KvCache, LayerState
from executor.experts import Activation
from policies.core.types import ModelSpec

Module = Any
"""A module of transformers, whose parts have no types."""

Rotary = dict[str, tuple[Tensor, Tensor]]
"""Layer type -> (cos, sin), each [rows, tokens, rotary dim]; families with one kind use the key ""."""

ATTENTION = "runahead"
"""The name under which transformers' attention modules find ``attend_through_turn``."""


class Turn(Protocol):
    """Whose rows a layer sees in this call, and where their state lies."""

    def attention(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """Attention of every row over its own past: query [B, heads, S, dim] -> [B, S, heads, dim]."""
        ...


class DecodeTurn:
    """One new token for each request of a tile; the rows after them are padding.

    ``index``: the requests' slots as a tensor; ``padded``: the same filled up to the tile.
    """

    def __init__(
        self,
        states: Sequence[LayerState],
        slots: Sequence[int],
        positions: Sequence[int],
        index: Tensor,
        padded: Tensor,
    ) -> None:
        self.states, self.slots, self.positions, self.index, self.padded = states, slots, positions, index, padded

    def attention(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """Each request by itself, so that the length of one does not show in another."""
        cache, n = self.states[layer], len(self.slots)
        assert isinstance(cache, KvCache)
        cache.append(self.slots, self.index, self.positions, key[:n, :, 0], value[:n, :, 0])
        tile, heads, _, dim = query.shape
        out = query.new_zeros(tile, 1, heads, dim)
        for row, (slot, position) in enumerate(zip(self.slots, self.positions, strict=True)):
            k, v = cache.seen(slot, position)
            # Query heads of one key head are the rows of one product: grouped attention without copies of k and v.
            q = query[row].reshape(1, k.shape[1], -1, dim)
            out[row] = functional.scaled_dot_product_attention(q, k, v, scale=scaling).reshape(1, heads, dim)
        return out


class PromptTurn:
    """All tokens of one request's prompt but the last, from position 0."""

    def __init__(self, states: Sequence[LayerState], slot: int) -> None:
        self.states, self.slot = states, slot

    def attention(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """Causal attention of the prompt over itself."""
        cache = self.states[layer]
        assert isinstance(cache, KvCache)
        cache.fill(self.slot, key[0], value[0])
        tokens, mask = query.shape[2], None
        if cache.reach is not None and tokens > cache.reach:
            ago = torch.arange(tokens, device=query.device)
            ago = ago[:, None] - ago[None, :]
            mask = (ago >= 0) & (ago < cache.reach)
        out = functional.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=mask is None, scale=scaling, enable_gqa=True
        )
        return out.transpose(1, 2)


def attend_through_turn(
    module: Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: object,
    *,
    scaling: float,
    turn: Turn,
    **_: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface, answered by the turn that the layer loop passed down."""
    return turn.attention(module.layer_idx, query, key, value, scaling), None


ALL_ATTENTION_FUNCTIONS.register(ATTENTION, attend_through_turn)


class Layer(ABC):
    """One decoder layer.  Row-wise methods take and give [rows, H]; ``attend`` takes [B, S, H]."""

    def __init__(self, module: Module, config: Any, index: int) -> None:
        self.module, self.index = module, index
        self.rotary_key = ""

    @abstractmethod
    def attend(self, residual: Tensor, rotary: Rotary, turn: Turn) -> Tensor:
        """The residual stream after this layer's attention."""

    @abstractmethod
    def expert_input(self, residual: Tensor) -> Tensor:
        """What the experts read."""

    @abstractmethod
    def scores(self, residual: Tensor, x: Tensor) -> Tensor:
        """The router's probability of every expert, [rows, E] float32."""

    @abstractmethod
    def weights(self, scores: Tensor, chosen: Tensor) -> Tensor:
        """Mixing weights of the ``chosen`` experts [rows, k], float32, whoever chose them."""

    @abstractmethod
    def merge(self, residual: Tensor, x: Tensor, routed: Tensor) -> Tensor:
        """The residual stream after the MoE; ``routed``: the experts' weighted sum, float32."""

    @abstractmethod
    def new_state(self, slots: int, max_tokens: int, dtype: torch.dtype, device: torch.device) -> LayerState:
        """The state that requests keep in this layer."""


class PreNormLayer(Layer):
    """Norm, attention, add; norm, MoE, add: the layout of Mixtral and of most that came after it."""

    renormalise = True
    """Whether the chosen experts' weights are scaled to sum 1."""

    def attend(self, residual: Tensor, rotary: Rotary, turn: Turn) -> Tensor:
        """The residual stream after this layer's attention."""
        m = self.module
        out, _ = m.self_attn(
            m.input_layernorm(residual), position_embeddings=rotary[""], attention_mask=None, turn=turn
        )
        return residual + out

    def expert_input(self, residual: Tensor) -> Tensor:
        """Router and experts read the same normed residual."""
        return self.module.post_attention_layernorm(residual)

    def scores(self, residual: Tensor, x: Tensor) -> Tensor:
        """Softmax over all experts, in float32."""
        return functional.linear(x, self.module.mlp.gate.weight).softmax(-1, dtype=torch.float32)

    def weights(self, scores: Tensor, chosen: Tensor) -> Tensor:
        """The chosen experts' probabilities, renormalised where the family does, rounded as the family does."""
        weights = scores.gather(1, chosen)
        if self.renormalise:
            weights = weights / weights.sum(-1, keepdim=True)
        return self.rounded(weights)

    def rounded(self, weights: Tensor) -> Tensor:
        """Qwen and OLMoE hand the weights on in the model's dtype."""
        return weights.to(self.module.mlp.gate.weight.dtype).float()

    def merge(self, residual: Tensor, x: Tensor, routed: Tensor) -> Tensor:
        """Add the experts' sum to the residual stream."""
        return residual + routed.to(residual.dtype)

    def new_state(self, slots: int, max_tokens: int, dtype: torch.dtype, device: torch.device) -> LayerState:
        """Keys and values; windowed where the model's attention is."""
        return kv_cache(self.module.self_attn, slots, max_tokens, dtype, device)


def kv_cache(attention: Module, slots: int, max_tokens: int, dtype: torch.dtype, device: torch.device) -> KvCache:
    """The cache of one of transformers' attention modules."""
    heads = attention.k_proj.out_features // attention.head_dim
    window = getattr(attention, "sliding_window", None)
    return KvCache(slots, heads, attention.head_dim, max_tokens, window=window, dtype=dtype, device=device)


class Family(ABC):
    """One architecture: where its parts are and what its configuration calls them."""

    model_types: ClassVar[tuple[str, ...]]
    layer: ClassVar[type[Layer]]

    @abstractmethod
    def check(self, config: Any) -> None:
        """Raise UserError if this configuration uses a part of the family that is not built."""

    @abstractmethod
    def spec(self, config: Any) -> ModelSpec:
        """The routing shape."""

    @abstractmethod
    def intermediate(self, config: Any) -> int:
        """Width of one expert."""

    def activation(self, config: Any) -> Activation:
        """The experts' activation function."""
        return ACT2FN[config.hidden_act]

    def experts_owner(self, layer: Module) -> Module:
        """The module that has the ``experts`` of a decoder layer."""
        return layer.mlp

    def rotary(self, model: Module, like: Tensor, positions: Tensor) -> Rotary:
        """cos and sin for ``positions`` [rows, tokens], in the dtype of ``like``."""
        return {"": model.model.rotary_emb(like, positions)}

    def restore_buffers(self, model: Module) -> None:
        """Compute again the buffers that no checkpoint holds, after a build without storage."""
        model.model.rotary_emb = type(model.model.rotary_emb)(model.config)

    def logits(self, model: Module, hidden: Tensor) -> Tensor:
        """Final norm and LM head, [rows, H] -> [rows, V]."""
        return model.lm_head(model.model.norm(hidden))
