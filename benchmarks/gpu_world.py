"""Models of real size with random weights, made on the device: for timing the fast path without a pack.

Shared weights are noise of the size of trained ones, norms are as initialised.  Experts are random bytes that are valid
Q4_0 or bf16, several slots' worth, so that the same job need not find its experts in the L2 cache.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor

from executor.cache import KvCache
from executor.families import build_shared
from executor.fast.decoder import FastDecoder
from executor.fast.ops import Ops
from executor.fast.plan import Attention, Layer
from executor.geometry import ExpertGeometry
from executor.known_models import MODELS
from executor.model import Decoder
from executor.naming import family_of, moe_shape
from executor.quant import dequantise
from executor.skeleton import complete_config, shared_shapes, text_config

TINY = {"hidden_size": 64, "vocab_size": 64, "num_experts": 16, "moe_intermediate_size": 32, "intermediate_size": 32}
"""Overrides for a look at the program where there is no GPU."""


@dataclass(frozen=True, slots=True)
class GpuWorld:
    """A decoder with random weights, and an arena of ``slots`` random experts."""

    decoder: Decoder
    arena: Tensor
    geometry: ExpertGeometry
    slots: int
    config: Any

    def fast(self, ops: Ops, job_slots: int, graphs: bool) -> FastDecoder:
        """The fast path over them."""
        return FastDecoder(self.decoder, self.arena, self.geometry, ops, job_slots=job_slots, graphs=graphs)

    def open_all(self, requests: int, context: int) -> None:
        """Requests 0 and on, each with a random past of ``context`` tokens."""
        for request in range(requests):
            self.decoder.open(request, request + 3, context)
        for state in self.decoder.states:
            for memory in (state.k, state.v) if isinstance(state, KvCache) else (state.conv, state.recurrent):
                memory.normal_(0.0, 1.0 if isinstance(state, KvCache) else 0.1)
        self.decoder.settle()


def make_world(
    name: str,
    *,
    layers: int | None,
    stored: str,
    slots: int | None,
    requests: int,
    tokens: int,
    device: torch.device,
    dtype: torch.dtype = torch.bfloat16,
) -> GpuWorld:
    """``layers``: so many instead of the model's own; ``slots``: None: one an expert; ``dtype``: of shared weights."""
    small = TINY if device.type == "cpu" else {}
    given = {**MODELS[name], **{key: value for key, value in small.items() if key in MODELS[name]}}
    if layers is not None:
        given["num_hidden_layers"] = layers
    family = family_of(given["model_type"])
    config = complete_config(family, given)
    shape = moe_shape(family, config)
    generator = torch.Generator(device).manual_seed(0)
    centred = family.name == "qwen3_5_moe"
    shared = {
        key: random_weight(key, size, centred, generator, device) for key, size in shared_shapes(family, config).items()
    }
    text = text_config(config)
    decoder = Decoder(build_shared(text, shared, dtype, device), requests, tokens)
    geometry = ExpertGeometry(stored, shape.hidden, shape.intermediate)
    slots = decoder.spec.n_total if slots is None else slots
    return GpuWorld(decoder, random_arena(geometry, slots, generator, device), geometry, slots, text)


def random_weight(
    name: str, size: tuple[int, ...], centred: bool, generator: torch.Generator, device: torch.device
) -> Tensor:
    """Noise for matrices; for vectors what their class begins with."""
    if len(size) > 1:
        return torch.randn(size, generator=generator, device=device, dtype=torch.bfloat16).mul_(0.02)
    if name.endswith("A_log"):
        return torch.rand(size, generator=generator, device=device).mul_(16.0).add_(0.01).log_()
    zeros = (centred and "norm" in name and not name.endswith("linear_attn.norm.weight")) or name.endswith(".bias")
    return torch.zeros(size, device=device) if zeros else torch.ones(size, device=device)


def random_arena(geometry: ExpertGeometry, slots: int, generator: torch.Generator, device: torch.device) -> Tensor:
    """Experts of about 0.014 root mean square, written part by part."""
    arena = torch.empty(slots * geometry.stride_bytes, dtype=torch.uint8, device=device)
    for part in geometry.parts:
        place = part_of(arena, geometry, part.name)
        for first in range(0, slots, 256):
            some = place[first : first + 256]
            if part.element == "uint8":
                some.copy_(torch.randint(0, 256, some.shape, generator=generator, device=device, dtype=torch.uint8))
            elif part.element == "float16":
                some.copy_(torch.rand(some.shape, generator=generator, device=device).mul_(0.002).add_(0.002))
            else:
                some.copy_(torch.randn(some.shape, generator=generator, device=device).mul_(0.014))
    return arena


def part_of(arena: Tensor, geometry: ExpertGeometry, name: str) -> Tensor:
    """[slots, *shape] of one part of every slot."""
    part = next(part for part in geometry.parts if part.name == name)
    dtype = getattr(torch, part.element)
    words, stride = arena.view(dtype), geometry.stride_bytes // dtype.itemsize
    slots = arena.numel() // geometry.stride_bytes
    return words.as_strided((slots, *part.shape), (stride, part.shape[1], 1), part.offset // dtype.itemsize)


def dequantised(world: GpuWorld, layer: int) -> tuple[Tensor, Tensor]:
    """``gate_up`` [E, 2I, H] and ``down`` [E, H, I] of a layer whose expert e lies in slot ``layer * E + e``, in the
    dtype of the shared weights.
    """
    e, dtype = world.decoder.spec.n_experts, world.decoder.dtype
    here, found = slice(layer * e, (layer + 1) * e), []
    for name in ("gate_up", "down"):
        if world.geometry.dtype != "q4_0":
            found.append(part_of(world.arena, world.geometry, name)[here].to(dtype))
            continue
        nibbles, scales = (
            part_of(world.arena, world.geometry, f"{name}_{kind}")[here] for kind in ("nibbles", "scales")
        )
        rows = dequantise(nibbles.reshape(-1, nibbles.shape[-1]), scales.reshape(-1, scales.shape[-1]), dtype)
        found.append(rows.view(e, nibbles.shape[1], -1))
    return found[0], found[1]


def their_model(world: GpuWorld) -> Any:
    """transformers' model over our shared weights and dequantised copies of the experts."""
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(world.config, attn_implementation="sdpa")
    state = dict(world.decoder.model.state_dict())
    model.load_state_dict(state, strict=False, assign=True)
    for index, layer in enumerate(model.model.layers):
        experts = layer.mlp.experts
        gate_up, down = dequantised(world, index)
        experts.gate_up_proj = torch.nn.Parameter(gate_up, requires_grad=False)
        experts.down_proj = torch.nn.Parameter(down, requires_grad=False)
    world.decoder.family.restore_buffers(model)
    model = model.to(world.arena.device).eval().requires_grad_(False)
    assert not any(p.is_meta for p in model.parameters())
    return model


def layer_bytes(layer: Layer) -> tuple[int, int]:
    """Bytes of the weights that attention and router of a layer read, and that its dense MLP reads."""
    a = layer.attention
    projection = a.qkv if isinstance(a, Attention) else a.projection
    attention = sum(w.numel() * w.element_size() for w in (projection, a.out, layer.router.weight))
    dense = [] if layer.dense is None else [layer.dense.gate_up, layer.dense.down]
    return attention, sum(w.numel() * w.element_size() for w in dense)


def state_bytes(layer: Layer, context: int) -> int:
    """Bytes of one request's state that a token reads, and for DeltaNet writes."""
    a = layer.attention
    if isinstance(a, Attention):
        seen = context if a.cache.reach is None else min(context, a.cache.reach)
        return 2 * seen * a.kv_heads * a.head_dim * a.cache.k.element_size()
    return 2 * (a.state.recurrent[0].numel() * 4 + a.state.conv[0].numel() * a.state.conv.element_size())
