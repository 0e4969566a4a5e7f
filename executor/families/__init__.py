"""The model families that the executor can run, and how a model of one is put together.

Only the shared weights are built here; experts are left out and come from the expert pack.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from executor.families.common import ATTENTION, Family, Module
from executor.families.gemma4 import Gemma4
from executor.families.mixtral import Mixtral
from executor.families.olmoe import Olmoe
from executor.families.qwen3_5_moe import Qwen35Moe
from executor.families.qwen3_moe import Qwen3Moe
from policies.core.types import UserError

FAMILIES: tuple[Family, ...] = (Qwen35Moe(), Gemma4(), Qwen3Moe(), Olmoe(), Mixtral())


def family_of(config: Any) -> Family:
    """The family of a text configuration, checked.  Raises UserError with the list of known ones."""
    for family in FAMILIES:
        if config.model_type in family.model_types:
            family.check(config)
            return family
    known = ", ".join(name for family in FAMILIES for name in family.model_types)
    raise UserError(
        f"model_type {config.model_type!r} is not a family that the executor knows; expected one of {known}"
    )


def build_shared(config: Any, weights: Mapping[str, Tensor], dtype: torch.dtype, device: torch.device) -> Module:
    """A causal LM without experts, filled with ``weights`` (transformers' names for the text model).

    Raises UserError naming every weight that is missing or left over.
    """
    family = family_of(config)
    config = copy.deepcopy(config)  # the model writes the name of its attention into it
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION)
    for layer in model.model.layers:
        del family.experts_owner(layer).experts
    filled = {name: w.to(device, dtype if w.is_floating_point() else w.dtype) for name, w in weights.items()}
    missing, left_over = model.load_state_dict(filled, strict=False, assign=True)
    if config.tie_word_embeddings and "lm_head.weight" in missing:
        model.lm_head.weight = model.model.embed_tokens.weight
        missing.remove("lm_head.weight")
    if missing or left_over:
        raise UserError(
            f"the shared weights do not fit this model: missing {missing}, left over {left_over}; pack it again"
        )
    family.restore_buffers(model)
    return model.to(device).eval().requires_grad_(False)
