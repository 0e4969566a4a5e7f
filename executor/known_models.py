"""Text configs of known models, for random-weight packs.

Owns the shapes that ``conf/model`` has not: heads, layer patterns, vocabularies, in the words of Hugging Face
configs.  Names are those of ``conf/model``.  Sources: the published config.json files and, for Qwen3.6 and the
Gemma 4 A4B variant, transformers' config class and conversion script.  What only trained weights need (rotary
base, special tokens) is left at the library's default.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

MODELS: Mapping[str, Mapping[str, Any]] = {
    # a stand-in of 1.1 GB in bf16 for machines without a GPU; attention in the proportion of real models
    "demo": {
        "model_type": "qwen3_moe",
        "hidden_size": 768,
        "num_hidden_layers": 24,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "moe_intermediate_size": 320,
        "intermediate_size": 320,
        "num_experts": 32,
        "num_experts_per_tok": 4,
        "norm_topk_prob": True,
        "vocab_size": 4096,
    },
    "qwen3_6_35b_a3b": {
        "model_type": "qwen3_5_moe",
        "hidden_size": 2048,
        "num_hidden_layers": 40,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "vocab_size": 248320,
    },
    "gemma4_26b_a4b": {
        "model_type": "gemma4",
        "enable_moe_block": True,
        "hidden_size": 2816,
        "num_hidden_layers": 30,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "num_global_key_value_heads": 2,
        "head_dim": 256,
        "global_head_dim": 512,
        "attention_k_eq_v": True,
        "sliding_window": 1024,
        "intermediate_size": 2112,
        "moe_intermediate_size": 704,
        "hidden_size_per_layer_input": 0,
        "num_experts": 128,
        "top_k_experts": 8,
        "vocab_size": 262144,
    },
    "mixtral_8x7b": {
        "model_type": "mixtral",
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 14336,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "vocab_size": 32000,
    },
    "qwen3_30b_a3b": {
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "vocab_size": 151936,
    },
    "olmoe_1b_7b": {
        "model_type": "olmoe",
        "hidden_size": 2048,
        "num_hidden_layers": 16,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "intermediate_size": 1024,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "norm_topk_prob": False,
        "vocab_size": 50304,
    },
}
