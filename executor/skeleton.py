"""What parameters a model has, asked of transformers without allocating any.

Owns the text config in its complete form and the names and shapes of every weight that is not an expert's.
Knows no checkpoint.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from executor.errors import PackError, shown
from executor.naming import Family, moe_shape


def text_config(config: Mapping[str, Any]) -> PretrainedConfig:
    """The transformers config of a text config given as a dict with its ``model_type`` (a pack's manifest)."""
    values = dict(config)
    try:
        return AutoConfig.for_model(values.pop("model_type"), **values)
    except Exception as error:  # the library validates with many error types
        raise PackError(f"transformers refuses the model config: {shown(str(error), 200)}") from error


def complete_config(family: Family, config: Mapping[str, Any]) -> dict[str, Any]:
    """The text part of a checkpoint's config with every default written out, as plain JSON values.

    Written out, because defaults may change with the library's version.
    """
    nested = config.get("text_config")
    text = dict(nested) if isinstance(nested, Mapping) else dict(config)
    if isinstance(nested, Mapping) and "tie_word_embeddings" in config:
        text["tie_word_embeddings"] = config["tie_word_embeddings"]
    text["model_type"] = family.text_type
    complete: dict[str, Any] = json.loads(text_config(text).to_json_string(use_diff=False))
    return complete


def shared_shapes(family: Family, config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Canonical name -> shape of every weight but the experts', in the model's own order.

    A head tied to the embedding is not listed.

    Raises:
        PackError: the library's experts have another shape than ``moe_shape`` reads from the config.
    """
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(text_config(config))  # type: ignore[no-untyped-call]
    shape = moe_shape(family, config)
    expected = {
        "gate_up_proj": (shape.n_experts, 2 * shape.intermediate, shape.hidden),
        "down_proj": (shape.n_experts, shape.hidden, shape.intermediate),
    }
    shared: dict[str, tuple[int, ...]] = {}
    n_stacks = 0
    for name, tensor in model.state_dict().items():
        parent, _, leaf = name.rpartition(".")
        if parent.endswith(".experts"):
            n_stacks += 1
            got = tuple(tensor.shape)
            if got != expected.get(leaf):
                raise PackError(f"{name} has shape {got} in transformers, expected {expected.get(leaf)}")
        elif not (name == "lm_head.weight" and config.get("tie_word_embeddings")):
            shared[name] = tuple(tensor.shape)
    if n_stacks != 2 * len(shape.layers):
        raise PackError(f"transformers gives {n_stacks // 2} layers with experts, the config {len(shape.layers)}")
    return shared
