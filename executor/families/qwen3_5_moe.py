"""Qwen3.5 and Qwen3.6 MoE: Gated DeltaNet in most layers, gated full attention in the others.

Beside the routed experts each layer has a shared expert behind a sigmoid gate of its own.  The two
generations share this code; only their sizes and weights differ.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers.activations import ACT2FN

from executor.cache import DeltaState, LayerState
from executor.families.common import DecodeTurn, Family, Module, PreNormLayer, PromptTurn, Rotary, Turn
from policies.core.types import ModelSpec


class Qwen35Layer(PreNormLayer):
    """A DeltaNet layer or a full attention layer, by the configuration's ``layer_types``."""

    def __init__(self, module: Module, config: Any, index: int) -> None:
        super().__init__(module, config, index)
        self.linear = config.layer_types[index] == "linear_attention"

    def attend(self, residual: Tensor, rotary: Rotary, turn: Turn) -> Tensor:
        """The residual stream after this layer's attention, of either kind."""
        if not self.linear:
            return super().attend(residual, rotary, turn)
        x = self.module.input_layernorm(residual)
        if isinstance(turn, DecodeTurn):
            return residual + delta_step(self.module.linear_attn, x[:, 0], turn, self.index)[:, None]
        assert isinstance(turn, PromptTurn)
        return residual + delta_prompt(self.module.linear_attn, x, turn, self.index)

    def merge(self, residual: Tensor, x: Tensor, routed: Tensor) -> Tensor:
        """Add the routed experts and the gated shared expert."""
        mlp = self.module.mlp
        shared = torch.sigmoid(mlp.shared_expert_gate(x)) * mlp.shared_expert(x)
        return residual + (routed.to(residual.dtype) + shared)

    def new_state(self, slots: int, max_tokens: int, dtype: torch.dtype, device: torch.device) -> LayerState:
        """A recurrent state of fixed size, or keys and values."""
        if not self.linear:
            return super().new_state(slots, max_tokens, dtype, device)
        net = self.module.linear_attn
        shape = (net.num_v_heads, net.head_k_dim, net.head_v_dim)
        return DeltaState(slots, net.conv_dim, net.conv_kernel_size, shape, dtype=dtype, device=device)


def delta_step(net: Module, x: Tensor, turn: DecodeTurn, layer: int) -> Tensor:
    """One token of the gated delta rule (Yang et al., 2024, arXiv:2412.06464) for each row of a tile.

    x: [tile, H] -> [tile, H].  Projections run on the tile; the recurrence runs request by request,
    in place on its own state, which is read and written once whatever the group is.
    """
    state = turn.states[layer]
    assert isinstance(state, DeltaState)
    n, tile = len(turn.slots), x.shape[0]
    recent = torch.cat([state.conv.index_select(0, turn.padded), net.in_proj_qkv(x)[:, :, None]], dim=-1)
    state.conv.index_copy_(0, turn.index, recent[:n, :, 1:])
    mixed = (recent.float() * net.conv1d.weight[:, 0].float()).sum(-1).to(x.dtype)
    mixed = ACT2FN[net.activation](mixed)
    query, key, value = mixed.split([net.key_dim, net.key_dim, net.value_dim], dim=-1)
    shared_by = net.num_v_heads // net.num_k_heads
    query, key = (
        unit(part.view(tile, net.num_k_heads, net.head_k_dim).float()).repeat_interleave(shared_by, dim=1)
        for part in (query, key)
    )
    query = query / net.head_k_dim**0.5
    value = value.view(tile, net.num_v_heads, 1, net.head_v_dim).float()
    beta = net.in_proj_b(x).sigmoid().float()[:, :, None, None]
    decay = (-net.A_log.float().exp() * functional.softplus(net.in_proj_a(x).float() + net.dt_bias)).exp()
    out = x.new_zeros(tile, net.num_v_heads, net.head_v_dim)
    for row, slot in enumerate(turn.slots):
        memory, k = state.recurrent[slot], key[row]  # [heads, key dim, value dim], [heads, key dim]
        memory.mul_(decay[row, :, None, None])
        delta = (value[row] - torch.bmm(k[:, None], memory)) * beta[row]
        memory.addcmul_(k[:, :, None], delta)
        out[row] = torch.bmm(query[row, :, None], memory)[:, 0]
    z = net.in_proj_z(x).view(-1, net.head_v_dim)
    return net.out_proj(net.norm(out.view(-1, net.head_v_dim), z).view(tile, -1))


def unit(x: Tensor) -> Tensor:
    """Vectors of length 1 along the last dimension."""
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)


def delta_prompt(net: Module, x: Tensor, turn: PromptTurn, layer: int) -> Tensor:
    """A whole prompt through transformers' own chunked form; its final state goes into the slot."""
    state = turn.states[layer]
    assert isinstance(state, DeltaState)
    state.reset(turn.slot)
    return net(x, cache=_FreshDelta(state, turn.slot))


class _FreshDelta:
    """The part of transformers' cache that DeltaNet uses, for a request without a past."""

    def __init__(self, state: DeltaState, slot: int) -> None:
        self.state, self.slot = state, slot

    def get_conv_state(self, layer: int, state_idx: int = 0) -> None:
        """Nothing came before."""

    def get_recurrent_state(self, layer: int, state_idx: int = 0) -> None:
        """Nothing came before."""

    def update_conv_state(self, inputs: Tensor, layer: int, **_: object) -> Tensor:
        """Keep the last inputs [1, channels, tokens] of the convolution."""
        conv = self.state.conv[self.slot]
        last = inputs[0, :, -conv.shape[1] :]
        conv[:, conv.shape[1] - last.shape[1] :] = last
        return inputs

    def update_recurrent_state(self, recurrent: Tensor, layer: int) -> None:
        """Keep the matrix after the last token."""
        self.state.recurrent[self.slot] = recurrent[0]


class Qwen35Moe(Family):
    """Qwen3.5-35B-A3B, Qwen3.6-35B-A3B and their relatives; of a multimodal checkpoint, the text model."""

    model_types = ("qwen3_5_moe_text", "qwen3_5_moe")
    layer = Qwen35Layer

    def check(self, config: Any) -> None:
        """Every layer is a MoE layer."""

    def spec(self, config: Any) -> ModelSpec:
        """The routing shape."""
        return ModelSpec("qwen3_5_moe", config.num_hidden_layers, config.num_experts, config.num_experts_per_tok)

    def intermediate(self, config: Any) -> int:
        """Width of one routed expert."""
        return config.moe_intermediate_size

    def rotary(self, model: Module, like: Tensor, positions: Tensor) -> Rotary:
        """Text has the same position on all three axes of the multimodal rotary embedding."""
        return {"": model.model.rotary_emb(like, positions[None])}
