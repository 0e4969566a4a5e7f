"""Tiny random models of every family, written by transformers, and how to split off their experts."""

from __future__ import annotations

import os
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from executor.experts import ExpertWeights
from executor.families import build_shared
from executor.model import Decoder
from executor.prefill import PromptPass

BASE: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
DEVICE = torch.device(os.environ.get("EXECUTOR_TEST_DEVICE", "cpu"))
"""Where the executor under test runs; the reference is always transformers on the CPU."""

FAMILIES = ("qwen3_moe", "olmoe", "mixtral", "qwen3_5_moe", "gemma4")


def tiny_config(family: str, **changes: Any) -> Any:
    """A configuration that uses every part of the family, at a few kilobytes."""
    t = transformers
    if family == "qwen3_moe":
        more = {"head_dim": 8, "moe_intermediate_size": 16, "num_experts": 16, "num_experts_per_tok": 4}
        return t.Qwen3MoeConfig(**{**BASE, **more, "norm_topk_prob": True, **changes})
    if family == "olmoe":
        more = {"intermediate_size": 16, "num_experts": 16, "num_experts_per_tok": 4, "clip_qkv": 1.5}
        return t.OlmoeConfig(**{**BASE, **more, **changes})
    if family == "mixtral":
        return t.MixtralConfig(**{**BASE, "intermediate_size": 24, "num_local_experts": 8, **changes})
    if family == "qwen3_5_moe":
        more = {
            "head_dim": 8,
            "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 24,
            "num_experts": 16,
            "num_experts_per_tok": 4,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 16,
            "linear_conv_kernel_dim": 4,
        }
        return t.Qwen3_5MoeTextConfig(**{**BASE, **more, **changes})
    more = {
        "num_hidden_layers": 6,
        "head_dim": 8,
        "global_head_dim": 16,
        "num_global_key_value_heads": 1,
        "intermediate_size": 40,
        "enable_moe_block": True,
        "num_experts": 16,
        "top_k_experts": 4,
        "moe_intermediate_size": 12,
        "hidden_size_per_layer_input": 0,
        "attention_k_eq_v": True,
        "sliding_window": 6,
        "final_logit_softcapping": 30.0,
        "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
    }
    return t.Gemma4TextConfig(**{**BASE, **more, **changes})


def random_model(config: Any, seed: int = 0) -> nn.Module:
    """A model whose every weight matters: large enough that a wrong expert or norm shows in the logits."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = transformers.AutoModelForCausalLM.from_config(config).eval()
        model.set_experts_implementation("eager")  # the grouped kernel wants wider experts than these
        generator = torch.Generator().manual_seed(seed)
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if "inv_freq" in name or "embed_scale" in name:
                continue
            noise = torch.randn(tensor.shape, generator=generator)
            if tensor.dim() == 1:
                tensor.data.add_(0.1 * noise)
            else:
                large = "gate.weight" in name or "router" in name or "conv1d" in name
                tensor.data.copy_(noise * (2.0 if large else 0.12))
    model.requires_grad_(False)
    return model


def split(model: nn.Module) -> tuple[dict[str, Tensor], list[list[ExpertWeights]]]:
    """Shared weights by transformers' names, and experts[layer][number]."""
    state = model.state_dict()
    shared = {k: v for k, v in state.items() if ".experts." not in k}
    experts = []
    for layer in range(model.config.num_hidden_layers):
        (gate_up,) = [v for k, v in state.items() if f"layers.{layer}." in k and k.endswith("experts.gate_up_proj")]
        (down,) = [v for k, v in state.items() if f"layers.{layer}." in k and k.endswith("experts.down_proj")]
        experts.append([ExpertWeights(g, d) for g, d in zip(gate_up, down, strict=True)])
    return shared, experts


Experts = list[dict[int, ExpertWeights]]
"""Layer -> expert number -> weights."""


def make_decoder(model: nn.Module, dtype: torch.dtype = torch.float32, **options: Any) -> tuple[Decoder, Experts]:
    """Our decoder over a transformers model's weights, and its experts layer by layer."""
    shared, experts = split(model)
    options = {"max_requests": 4, "max_tokens": 96, **options}
    decoder = Decoder(build_shared(model.config, shared, dtype, DEVICE), **options)
    cast = [{i: ExpertWeights(*(w.to(DEVICE, dtype) for w in e)) for i, e in enumerate(layer)} for layer in experts]
    return decoder, cast


def decode_step(decoder: Decoder, experts: Experts, requests: list[int]) -> Tensor:
    """One plain step, all experts resident, all requests in one group: logits [n, V]."""
    decoder.entry(requests)
    for layer, table in enumerate(experts):
        decoder.job(layer, requests, table.__getitem__)
    return decoder.head(requests)


def prefill(decoder: Decoder, experts: Experts, request: int, prompt: list[int]) -> None:
    """Open ``request`` with all experts resident."""
    slot = decoder.open(request, prompt[-1])
    if len(prompt) == 1:
        return
    work = PromptPass(decoder, slot, prompt[:-1])
    for layer, table in enumerate(experts):
        for number in work.attend(layer):
            work.add(number, table[number])
        work.merge(layer)
    decoder.requests[request].position = len(prompt) - 1


def prompts(lengths: list[int], vocabulary: int = 97, seed: int = 1) -> dict[int, list[int]]:
    """Random prompts; request ids are not row numbers."""
    generator = torch.Generator().manual_seed(seed)
    return {10 + 7 * i: torch.randint(3, vocabulary, (n,), generator=generator).tolist() for i, n in enumerate(lengths)}


def reference(model: nn.Module, prompt: list[int], steps: int) -> tuple[Tensor, list[int]]:
    """transformers' own greedy decode of one request: logits of every step and its tokens."""
    out = model(torch.tensor([prompt]), use_cache=True)
    logits, tokens = [out.logits[0, -1]], []
    for _ in range(steps - 1):
        tokens.append(int(logits[-1].argmax()))
        out = model(torch.tensor([tokens[-1:]]), use_cache=True, cache=out.cache)
        logits.append(out.logits[0, -1])
    return torch.stack(logits), [*tokens, int(logits[-1].argmax())]
