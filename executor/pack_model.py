"""A pack's model in the words of ``conf/model``: the shapes from which tables, metrics and the simulator derive sizes.

Owns the translation of the Hugging Face configs of the known families.  Knows no weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from omegaconf import OmegaConf

from executor.store import ExpertStore
from policies.core.types import UserError


def model_node(store: ExpertStore) -> dict[str, Any]:
    """The mapping that ``conf.models.ModelConfig.from_config`` reads.

    Small parameters (norms, scales of routers) are left at that class's defaults: they weigh nothing here.
    """
    manifest, config = store.manifest, store.manifest.config
    random = manifest.random
    layers = int(config["num_hidden_layers"])
    return {
        "name": str(manifest.source["name"]) if random else manifest.name,
        "label": f"{manifest.name} (random weights)" if random else manifest.name,
        "quantisation": manifest.dtype,
        "hidden": manifest.hidden_size,
        "n_layers": len(manifest.layers),
        "n_experts": manifest.n_experts,
        "top_k": manifest.top_k,
        "expert_intermediate": manifest.intermediate_size,
        "vocabulary": int(config["vocab_size"]),
        "tied_head": bool(config.get("tie_word_embeddings")),
        "shared_intermediate": int(config[_SHARED[manifest.family]]) if manifest.family in _SHARED else 0,
        "shared_gate": manifest.family == "qwen3_5_moe",
        "dense_layers": layers - len(manifest.layers),
        "dense_intermediate": int(config["intermediate_size"]) if layers > len(manifest.layers) else 0,
        "attention": _attention(manifest.family, config),
    }


_SHARED = {"qwen3_5_moe": "shared_expert_intermediate_size", "gemma4": "intermediate_size"}
"""The key of the width of what every token passes beside the experts, by family."""


def _attention(family: str, config: Mapping[str, Any]) -> list[dict[str, Any]]:
    heads, kv_heads = int(config["num_attention_heads"]), int(config["num_key_value_heads"])
    head_dim = int(config.get("head_dim") or config["hidden_size"] // heads)
    full: dict[str, Any] = {"kind": "full", "heads": heads, "kv_heads": kv_heads, "head_dim": head_dim}
    kinds: dict[str, dict[str, Any]] = {"full_attention": full}
    if family == "qwen3_5_moe":
        full["output_gate"] = True
        kinds["linear_attention"] = {
            "kind": "linear",
            "heads": int(config["linear_num_value_heads"]),
            "kv_heads": int(config["linear_num_key_heads"]),
            "head_dim": int(config["linear_value_head_dim"]),
            "conv_width": int(config["linear_conv_kernel_dim"]),
        }
    elif family == "gemma4":
        kinds["sliding_attention"] = {**full, "kind": "sliding", "window_tokens": int(config["sliding_window"])}
        first = list(config["layer_types"]).index("full_attention")
        own: Mapping[str, Any] = next(
            (v for k, v in (config.get("per_layer_config") or {}).items() if int(k) == first), {}
        )
        full["head_dim"] = int(own.get("head_dim") or config.get("global_head_dim") or head_dim)
        full["kv_heads"] = int(own.get("num_key_value_heads") or config.get("num_global_key_value_heads") or kv_heads)
        full["key_is_value"] = bool(config.get("attention_k_eq_v"))
    layers = int(config["num_hidden_layers"])
    types = [t if t in kinds else "full_attention" for t in config.get("layer_types") or ["full_attention"] * layers]
    return [{**kind, "layers": types.count(name)} for name, kind in kinds.items() if name in types]


@lru_cache(maxsize=16)
def _node_of(pack: str) -> dict[str, Any]:
    return model_node(ExpertStore.open(pack))


def register_resolver() -> None:
    """Make ``${of_pack:PATH,key}`` known to the configuration; twice does no harm."""

    def of_pack(pack: str | None, key: str) -> Any:
        if pack is None:
            raise UserError("pack has no value; give pack=DIR, made by python -m executor.pack")
        value = _node_of(str(pack))[key]
        return OmegaConf.create(value) if isinstance(value, list) else value

    OmegaConf.register_new_resolver("of_pack", of_pack, replace=True)
