"""From transformers' modules to plans: which of a family's weights go where.

Owns the translation.  Weights that are multiplied with one input are merged, and the modules' own parameters become
views of the merged ones, so that nothing lies in memory twice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from executor.cache import DeltaState, KvCache
from executor.families.common import Module
from executor.fast.plan import Attention, Delta, Dense, Layer, Plan, Router
from executor.kernels.values import MixRule
from executor.model import Decoder
from policies.core.types import UserError

ROW_ALIGNMENT = 16
"""Libraries are slow on products whose width is no multiple of this."""


def plan_of(decoder: Decoder) -> Plan:
    """The plan of a decoder's model.  Raises UserError if its family is not built here."""
    model, config = decoder.model, decoder.model.config
    name = decoder.spec.name
    check_family(name)
    build = _LAYERS[name]
    tables = _rotary_tables(decoder)
    layers = tuple(
        build(layer.module, config, state, tables) for layer, state in zip(decoder.layers, decoder.states, strict=True)
    )
    embedding = model.model.embed_tokens
    scale = getattr(embedding, "embed_scale", None)
    return Plan(
        embedding=embedding.weight,
        embedding_scale=1.0 if scale is None else float(scale.to(decoder.dtype)),
        layers=layers,
        norm=_norm(model.model.norm, centred=name == "qwen3_5_moe"),
        head=model.lm_head.weight,
        cap=getattr(config, "final_logit_softcapping", None),
        activation="gelu_tanh" if name == "gemma4" else "silu",
        eps=config.rms_norm_eps,
        top_k=decoder.spec.top_k,
        n_experts=decoder.spec.n_experts,
        predict=decoder.predict,
        router_reads_stream=name == "gemma4",
    )


def check_family(name: str) -> None:
    """Raise UserError if the fast path is not built for a family."""
    if name not in _LAYERS:
        raise UserError(f"kernels=triton is not built for {name}, only for {', '.join(_LAYERS)}; set kernels=torch")


Tables = Mapping[str, tuple[Tensor, Tensor]]


def _rotary_tables(decoder: Decoder) -> Tables:
    """cos and sin of every position, as the model's own module rounds them: kind -> ([positions, dim], the same)."""
    like = torch.zeros(1, 1, dtype=decoder.dtype, device=decoder.device)
    positions = torch.arange(decoder.max_tokens, device=decoder.device)[None]
    rotary = decoder.family.rotary(decoder.model, like, positions)
    return {kind: (cos[0].contiguous(), sin[0].contiguous()) for kind, (cos, sin) in rotary.items()}


def merge(*modules: Module) -> Tensor:
    """One weight [rows, H] of several modules, with zeros up to a multiple of ROW_ALIGNMENT; theirs become views of it.

    Merged once, however many decoders share the model.
    """
    weights: list[Tensor] = [module.weight for module in modules]
    if any(getattr(module, "bias", None) is not None for module in modules):
        raise UserError("kernels=triton is not built for projections with a bias; set kernels=torch")
    columns, counts = weights[0].shape[1], [weight.shape[0] for weight in weights]
    rows = -(-sum(counts) // ROW_ALIGNMENT) * ROW_ALIGNMENT
    whole = weights[0].untyped_storage()
    places = [weight.data_ptr() - whole.data_ptr() for weight in weights]
    row_bytes = columns * weights[0].element_size()
    if whole.nbytes() == rows * row_bytes and places == [sum(counts[:i]) * row_bytes for i in range(len(counts))]:
        return weights[0].as_strided((rows, columns), (columns, 1))
    merged = weights[0].new_zeros(rows, columns)
    for module, part, weight in zip(modules, merged.split([*counts, rows - sum(counts)]), weights, strict=False):
        part.copy_(weight)
        module.weight = nn.Parameter(part, requires_grad=False)
    return merged


def _norm(module: Module, *, centred: bool = False) -> Tensor:
    """The factors of an RMS norm; ``centred``: the module stores them less 1."""
    weight: Tensor = module.weight.float()
    return weight + 1.0 if centred else weight.clone()


def _pre_norm(
    module: Module,
    config: Any,
    state: KvCache | DeltaState,
    tables: Tables,
    *,
    renormalise: Callable[[Any], bool],
    rounds: bool,
) -> Layer:
    """Qwen3-MoE and Mixtral."""
    attention, gate = module.self_attn, module.mlp.gate
    assert isinstance(state, KvCache)
    return Layer(
        attention=_attention(
            attention,
            state,
            tables[""],
            q_norm=_norm(attention.q_norm) if hasattr(attention, "q_norm") else None,
            k_norm=_norm(attention.k_norm) if hasattr(attention, "k_norm") else None,
        ),
        attention_norm=_norm(module.input_layernorm),
        router=Router(
            _norm(module.post_attention_layernorm),
            merge(gate),
            MixRule(renormalise(config), gate.weight.dtype if rounds else None),
        ),
        expert_norm=_norm(module.post_attention_layernorm),
    )


def _attention(module: Module, cache: KvCache, table: tuple[Tensor, Tensor], **more: Any) -> Attention:
    """Queries, keys and values of plain grouped attention, one after the other."""
    heads, kv_heads, dim = module.q_proj.out_features // module.head_dim, cache.k.shape[1], module.head_dim
    return Attention(
        cache=cache,
        qkv=merge(module.q_proj, module.k_proj, module.v_proj),
        out=module.o_proj.weight,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=dim,
        q_stride=dim,
        k_at=heads * dim,
        v_at=(heads + kv_heads) * dim,
        scaling=module.scaling,
        cos=table[0],
        sin=table[1],
        **more,
    )


def _qwen35(module: Module, config: Any, state: KvCache | DeltaState, tables: Tables) -> Layer:
    mlp = module.mlp
    shared = mlp.shared_expert
    width = shared.gate_proj.out_features
    gate_up = merge(shared.gate_proj, shared.up_proj, mlp.shared_expert_gate)
    norm = _norm(module.post_attention_layernorm, centred=True)
    return Layer(
        attention=_delta(module.linear_attn, state)
        if isinstance(state, DeltaState)
        else _gated_attention(module.self_attn, state, tables[""]),
        attention_norm=_norm(module.input_layernorm, centred=True),
        router=Router(norm, merge(mlp.gate), MixRule(renormalise=True, rounding=mlp.gate.weight.dtype)),
        expert_norm=norm,
        dense=Dense(gate_up, shared.down_proj.weight, width, gated=True),
    )


def _gated_attention(module: Module, cache: KvCache, table: tuple[Tensor, Tensor]) -> Attention:
    """Qwen3.5's full attention: behind each query head its output gate."""
    dim, kv_heads = module.head_dim, cache.k.shape[1]
    heads = module.q_proj.out_features // (2 * dim)
    return Attention(
        cache=cache,
        qkv=merge(module.q_proj, module.k_proj, module.v_proj),
        out=module.o_proj.weight,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=dim,
        q_stride=2 * dim,
        k_at=2 * heads * dim,
        v_at=(2 * heads + kv_heads) * dim,
        scaling=module.scaling,
        cos=table[0],
        sin=table[1],
        gated=True,
        q_norm=_norm(module.q_norm, centred=True),
        k_norm=_norm(module.k_norm, centred=True),
    )


def _delta(net: Module, state: DeltaState) -> Delta:
    if net.conv1d.bias is not None:
        raise UserError("kernels=triton is not built for a DeltaNet convolution with a bias; set kernels=torch")
    return Delta(
        state=state,
        projection=merge(net.in_proj_qkv, net.in_proj_z, net.in_proj_b, net.in_proj_a),
        out=net.out_proj.weight,
        key_heads=net.num_k_heads,
        value_heads=net.num_v_heads,
        key_dim=net.head_k_dim,
        value_dim=net.head_v_dim,
        conv=net.conv1d.weight[:, 0].float().contiguous(),
        a_log=net.A_log.float(),
        dt_bias=net.dt_bias.float(),
        norm=net.norm.weight.float(),
        norm_eps=net.norm.variance_epsilon,
    )


def _gemma4(module: Module, config: Any, state: KvCache | DeltaState, tables: Tables) -> Layer:
    attention, mlp, router = module.self_attn, module.mlp, module.router
    assert isinstance(state, KvCache)
    dim, kv_heads = attention.head_dim, state.k.shape[1]
    heads = attention.q_proj.out_features // dim
    shares = attention.v_proj is None  # values are the keys before norm and rotation
    parts = (attention.q_proj, attention.k_proj) if shares else (attention.q_proj, attention.k_proj, attention.v_proj)
    cos, sin = tables[attention.layer_type]
    return Layer(
        attention=Attention(
            cache=state,
            qkv=merge(*parts),
            out=attention.o_proj.weight,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=dim,
            q_stride=dim,
            k_at=heads * dim,
            v_at=(heads if shares else heads + kv_heads) * dim,
            scaling=attention.scaling,
            cos=cos,
            sin=sin,
            q_norm=_norm(attention.q_norm),
            k_norm=_norm(attention.k_norm),
            v_norm=True,
        ),
        attention_norm=_norm(module.input_layernorm),
        router=Router(
            norm=router.scale.float() * router.scalar_root_size,
            weight=merge(router.proj),
            rule=MixRule(renormalise=True),
            expert_scale=router.per_expert_scale.float(),
        ),
        expert_norm=_norm(module.pre_feedforward_layernorm_2),
        dense=Dense(
            merge(mlp.gate_proj, mlp.up_proj),
            mlp.down_proj.weight,
            mlp.gate_proj.out_features,
            norm=_norm(module.pre_feedforward_layernorm),
        ),
        after_attention=_norm(module.post_attention_layernorm),
        routed_norm=_norm(module.post_feedforward_layernorm_2),
        dense_norm=_norm(module.post_feedforward_layernorm_1),
        merged_norm=_norm(module.post_feedforward_layernorm),
        scale=float(module.layer_scalar),
    )


_LAYERS: dict[str, Callable[..., Layer]] = {
    "qwen3_5_moe": _qwen35,
    "gemma4": _gemma4,
    "qwen3_moe": partial(_pre_norm, renormalise=lambda config: config.norm_topk_prob, rounds=True),
    "mixtral": partial(_pre_norm, renormalise=lambda config: True, rounds=False),
}
