"""The model families: their names for weights, and the MoE shape in their configs.

Owns which checkpoint tensor is which: an expert's matrix, a shared weight under its canonical name
(``*ForCausalLM`` of transformers 5), or a weight that a text decoder does not use.  Knows no files and no
tensors' values.

Never used, in any family: ``rotary_emb.inv_freq`` (recomputed) and ``lm_head.weight`` where the head is tied to
the embedding.  Each family adds the towers and draft layers that are listed with it below.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from executor.errors import PackError, shown
from executor.geometry import ExpertGeometry
from policies.core.types import ModelSpec


@dataclass(frozen=True, slots=True)
class Family:
    """One family: ``model_types`` as checkpoints write them, ``text_type`` for its text decoder.

    ``skipped``: patterns of weights that the text decoder does not use.
    """

    name: str
    model_types: tuple[str, ...]
    text_type: str
    top_k_key: str
    intermediate_key: str
    skipped: tuple[str, ...] = ()


FAMILIES = (
    Family("qwen3_moe", ("qwen3_moe",), "qwen3_moe", "num_experts_per_tok", "moe_intermediate_size"),
    Family("olmoe", ("olmoe",), "olmoe", "num_experts_per_tok", "intermediate_size"),
    Family("mixtral", ("mixtral",), "mixtral", "num_experts_per_tok", "intermediate_size"),
    Family(
        "qwen3_5_moe",
        ("qwen3_5_moe", "qwen3_5_moe_text"),
        "qwen3_5_moe_text",
        "num_experts_per_tok",
        "moe_intermediate_size",
        # the vision tower; the multi-token-prediction (draft) layers
        skipped=(r"^(model\.)?visual\.", r"^mtp\."),
    ),
    Family(
        "gemma4",
        ("gemma4", "gemma4_text"),
        "gemma4_text",
        "top_k_experts",
        "moe_intermediate_size",
        # the vision and audio towers and their projections
        skipped=(r"^model\.(vision_tower|embed_vision|audio_tower|embed_audio)\.",),
    ),
)

_PREFIXES = (
    (re.compile(r"^model\.language_model\."), "model."),
    (re.compile(r"^language_model\.model\."), "model."),
    (re.compile(r"^language_model\.lm_head\."), "lm_head."),
    (re.compile(r"\.block_sparse_moe\."), ".mlp."),
)
_INV_FREQ = re.compile(r"\.rotary_emb\.inv_freq$")
_ONE = re.compile(r"^model\.layers\.(\d+)\.(?:mlp\.)?experts\.(\d+)\.(gate_proj|up_proj|down_proj|w1|w2|w3)\.weight$")
_STACKED = re.compile(r"^model\.layers\.(\d+)\.(?:mlp\.)?experts\.(gate_up|gate|up|down)_proj(?:\.weight)?$")
_PARTS = {"gate_proj": "gate", "up_proj": "up", "down_proj": "down", "w1": "gate", "w3": "up", "w2": "down"}


@dataclass(frozen=True, slots=True)
class ExpertTensor:
    """A tensor of expert weights: ``expert`` is None where all of a layer's experts are stacked in it.

    ``layer`` is the decoder layer; ``part`` is gate, up, gate_up or down.
    """

    layer: int
    expert: int | None
    part: str


@dataclass(frozen=True, slots=True)
class MoeShape:
    """The MoE shape of a model: ``layers[l]`` is the decoder layer of MoE layer ``l``."""

    layers: tuple[int, ...]
    n_experts: int
    top_k: int
    hidden: int
    intermediate: int

    def spec(self, name: str) -> ModelSpec:
        """What decisions depend on."""
        return ModelSpec(name, len(self.layers), self.n_experts, self.top_k)

    def geometry(self, dtype: str) -> ExpertGeometry:
        """Byte layout of one expert."""
        return ExpertGeometry(dtype, self.hidden, self.intermediate)


def family_of(model_type: object) -> Family:
    """The family of a config's ``model_type``, or a PackError with the known ones."""
    for family in FAMILIES:
        if model_type in family.model_types:
            return family
    known = ", ".join(kind for family in FAMILIES for kind in family.model_types)
    raise PackError(f"model_type {shown(model_type)} is not supported; known: {known}")


def _integer(config: Mapping[str, Any], *keys: str) -> int:
    for key in keys:
        value = config.get(key)
        if isinstance(value, int) and not isinstance(value, bool):
            if 1 <= value <= 1 << 24:
                return value
            raise PackError(f"model config: {key} is {shown(value)}, expected 1 to {1 << 24}")
    raise PackError(f"model config: {keys[0]} is {shown(config.get(keys[0]))}, expected a whole number")


def moe_shape(family: Family, config: Mapping[str, Any]) -> MoeShape:
    """The MoE shape of a text config (a plain dict)."""
    n_layers = _integer(config, "num_hidden_layers")
    if n_layers > 10_000:
        raise PackError(f"model config: num_hidden_layers is {n_layers}, expected at most 10000")
    layers = range(n_layers)
    if family.name == "gemma4" and config.get("enable_moe_block") is not True:
        raise PackError("model config: enable_moe_block is not true, so this Gemma 4 has no experts; use an A4B one")
    if family.name == "qwen3_moe":
        sparse = _integer({"decoder_sparse_step": 1, **config}, "decoder_sparse_step")
        dense = config.get("mlp_only_layers") or ()
        if not isinstance(dense, list | tuple):
            raise PackError(f"model config: mlp_only_layers is {shown(dense)}, expected a list")
        moe = tuple(layer for layer in layers if layer not in dense and (layer + 1) % sparse == 0)
    else:
        moe = tuple(layers)
    if not moe:
        raise PackError("model config: no layer has experts")
    shape = MoeShape(
        layers=moe,
        n_experts=_integer(config, "num_experts", "num_local_experts"),
        top_k=_integer(config, family.top_k_key),
        hidden=_integer(config, "hidden_size"),
        intermediate=_integer(config, family.intermediate_key),
    )
    if shape.top_k > shape.n_experts:
        raise PackError(f"model config: {family.top_k_key} is {shape.top_k}, above its {shape.n_experts} experts")
    return shape


def role(family: Family, name: str, tied: bool) -> ExpertTensor | str | None:
    """What a Hugging Face tensor is: expert weights, a shared weight's canonical name, or None (not used).

    ``tied``: the head is the embedding.
    """
    if any(re.search(pattern, name) for pattern in family.skipped) or _INV_FREQ.search(name):
        return None
    for pattern, replacement in _PREFIXES:
        name = pattern.sub(replacement, name)
    if tied and name == "lm_head.weight":
        return None
    if match := _ONE.match(name):
        return ExpertTensor(int(match[1]), int(match[2]), _PARTS[match[3]])
    if match := _STACKED.match(name):
        return ExpertTensor(int(match[1]), None, match[2])
    return name


def expert_name(family: Family, layer: int, expert: int, part: str) -> str:
    """The canonical per-expert name, for messages."""
    parent = "experts" if family.name == "gemma4" else "mlp.experts"
    return f"model.layers.{layer}.{parent}.{expert}.{part}_proj.weight"
