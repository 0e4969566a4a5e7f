"""Packing GGUF files: Q4_0 experts without loss, all else dequantised, the rest refused by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("gguf")

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType, quants
from packs import wide_config
from safetensors.torch import load_file
from tiny_models import random_model

from executor.errors import PackError
from executor.gguf_file import open_gguf
from executor.pack_writer import write_pack
from executor.quant import dequantise_views, join_blocks
from executor.store import ExpertStore

Kind = GGMLQuantizationType
ARCHITECTURES = {"qwen3_moe": gguf.MODEL_ARCH.QWEN3MOE, "olmoe": gguf.MODEL_ARCH.OLMOE}
MATRICES = {Kind.F16: np.float16, Kind.F32: np.float32}


def encoded(weights: np.ndarray, kind: GGMLQuantizationType) -> np.ndarray:
    return weights.astype(MATRICES[kind]) if kind in MATRICES else quants.quantize(weights, kind)


def write_gguf(
    path: Path,
    family: str,
    kind_of: Callable[[str], GGMLQuantizationType],
    change: Callable[[dict[str, np.ndarray]], None] | None = None,
    metadata: dict[str, Any] | None = None,
    **changes: Any,
) -> dict[str, tuple[GGMLQuantizationType, np.ndarray]]:
    """Write a random model as llama.cpp's converter names it; returns what was stored under GGUF's names."""
    config = wide_config(family, **changes)
    model = random_model(config)
    architecture = ARCHITECTURES[family]
    names = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
    tensors: dict[str, np.ndarray] = {}
    for name, tensor in model.state_dict().items():
        if name.endswith("experts.gate_up_proj"):
            block = f"blk.{name.split('.')[2]}"
            gate, up = tensor.float().numpy().reshape(config.num_experts, 2, -1, config.hidden_size).swapaxes(0, 1)
            tensors |= {f"{block}.ffn_gate_exps.weight": gate, f"{block}.ffn_up_exps.weight": up}
        elif name.endswith("experts.down_proj"):
            tensors[f"blk.{name.split('.')[2]}.ffn_down_exps.weight"] = tensor.float().numpy()
        else:
            tensors[names.get_name(name, try_suffixes=(".weight",))] = tensor.float().numpy()
    if change:
        change(tensors)
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[architecture])
    writer.add_block_count(config.num_hidden_layers)
    writer.add_embedding_length(config.hidden_size)
    writer.add_context_length(256)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(12345.0)
    writer.add_expert_count(config.num_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    writer.add_token_list(["a", "b"])
    writer.add_eos_token_id(2)
    if family == "qwen3_moe":
        writer.add_key_length(config.head_dim)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    else:
        writer.add_feed_forward_length(config.intermediate_size)
        writer.add_clamp_kqv(config.clip_qkv)
    for key, value in (metadata or {}).items():
        writer.add_string(key, value)
    stored: dict[str, tuple[GGMLQuantizationType, np.ndarray]] = {}
    for name, weights in tensors.items():
        kind = kind_of(name) if weights.ndim > 1 else Kind.F32
        data = encoded(np.ascontiguousarray(weights), kind)
        stored[name] = (kind, data)
        writer.add_tensor(name, data, raw_dtype=None if kind in MATRICES else kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return stored


def llama_like(name: str) -> GGMLQuantizationType:
    """Q4_0, with the head and a few others in other types as llama.cpp's quantiser leaves them."""
    if "ffn_gate_inp" in name:
        return Kind.F32
    return {"output.weight": Kind.Q8_0, "token_embd.weight": Kind.F16}.get(name, Kind.Q4_0)


def floats(stored: tuple[GGMLQuantizationType, np.ndarray]) -> np.ndarray:
    kind, data = stored
    return data.astype(np.float32) if kind in MATRICES else quants.dequantize(data, kind)


def packed(path: Path, out: Path, dtype: str, **options: Any) -> ExpertStore:
    source = open_gguf(path)
    write_pack(source, out, dtype, **options)
    source.close()
    return ExpertStore.open(out)


def views_of(store: ExpertStore, expert: int) -> dict[str, torch.Tensor]:
    with store.experts_path.open("rb") as file:
        file.seek(store.offset(expert))
        return store.views(torch.frombuffer(bytearray(file.read(store.stride)), dtype=torch.uint8))


@pytest.mark.parametrize("family", ["qwen3_moe", "olmoe"])
def test_q4_0_experts_are_rearranged_without_loss(family: str, tmp_path: Path) -> None:
    stored = write_gguf(tmp_path / "m.gguf", family, llama_like, tie_word_embeddings=False)
    store = packed(tmp_path / "m.gguf", tmp_path / "p", "q4_0", shared_dtype="f32")
    for expert in range(store.n_total):
        layer, index = store.spec.split(expert)
        views = views_of(store, expert)
        gate_up, down = dequantise_views(views, torch.float32)
        gate, up = gate_up.chunk(2)
        for matrix, part in ((gate, "gate"), (up, "up"), (down, "down")):
            kind, blocks = stored[f"blk.{layer}.ffn_{part}_exps.weight"]
            assert kind == Kind.Q4_0
            expected = quants.dequantize(blocks[index], Kind.Q4_0)
            np.testing.assert_array_equal(matrix.numpy().view(np.uint32), expected.view(np.uint32))
        down_blocks = join_blocks(views["down_nibbles"].numpy(), views["down_scales"].numpy())
        np.testing.assert_array_equal(down_blocks, stored[f"blk.{layer}.ffn_down_exps.weight"][1][index])
    shared = load_file(store.shared_path)
    for ours, theirs in (
        ("model.embed_tokens.weight", "token_embd.weight"),
        ("lm_head.weight", "output.weight"),
        ("model.norm.weight", "output_norm.weight"),
        ("model.layers.2.mlp.gate.weight", "blk.2.ffn_gate_inp.weight"),
        ("model.layers.1.self_attn.q_proj.weight", "blk.1.attn_q.weight"),
        ("model.layers.1.self_attn.k_norm.weight", "blk.1.attn_k_norm.weight"),
        ("model.layers.3.post_attention_layernorm.weight", "blk.3.ffn_norm.weight"),
    ):
        np.testing.assert_array_equal(shared[ours].numpy(), floats(stored[theirs]))
    assert store.manifest.source["expert_types"] == {"Q4_0": 3 * store.n_total}
    assert store.manifest.source["requantised"] == {}


def test_the_config_is_the_metadata(tmp_path: Path) -> None:
    write_gguf(tmp_path / "q.gguf", "qwen3_moe", llama_like)
    config = open_gguf(tmp_path / "q.gguf").config
    assert (config["head_dim"], config["moe_intermediate_size"], config["norm_topk_prob"]) == (8, 32, True)
    assert config["rope_parameters"]["rope_theta"] == 12345.0
    assert (config["vocab_size"], config["eos_token_id"], config["tie_word_embeddings"]) == (97, 2, False)
    write_gguf(tmp_path / "o.gguf", "olmoe", llama_like)
    config = open_gguf(tmp_path / "o.gguf").config
    assert (config["intermediate_size"], config["norm_topk_prob"], config["clip_qkv"]) == (32, False, 1.5)


def test_a_tied_head(tmp_path: Path) -> None:
    def untie(tensors: dict[str, np.ndarray]) -> None:
        del tensors["output.weight"]

    write_gguf(tmp_path / "m.gguf", "qwen3_moe", llama_like, untie)
    store = packed(tmp_path / "m.gguf", tmp_path / "p", "q4_0")
    assert store.manifest.config["tie_word_embeddings"] is True
    assert "lm_head.weight" not in load_file(store.shared_path)


@pytest.mark.parametrize("kind", [Kind.Q4_0, Kind.Q8_0, Kind.F16])
def test_experts_dequantised_to_floats(kind: GGMLQuantizationType, tmp_path: Path) -> None:
    stored = write_gguf(tmp_path / "m.gguf", "qwen3_moe", lambda _: kind)
    store = packed(tmp_path / "m.gguf", tmp_path / "p", "f32")
    for expert in (0, store.n_total - 1):
        layer, index = store.spec.split(expert)
        kinds = stored[f"blk.{layer}.ffn_up_exps.weight"]
        np.testing.assert_array_equal(views_of(store, expert)["gate_up"][32:].numpy(), floats(kinds)[index])


def test_a_second_quantisation_is_recorded(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", "qwen3_moe", lambda name: Kind.Q8_0 if "down_exps" in name else Kind.Q4_0)
    store = packed(tmp_path / "m.gguf", tmp_path / "p", "q4_0")
    assert store.manifest.source["requantised"] == {"Q8_0": store.n_total}


def test_a_split_file(tmp_path: Path) -> None:
    first, second = tmp_path / "m-00001-of-00002.gguf", tmp_path / "m-00002-of-00002.gguf"

    def keep(layers: str, rest: bool) -> Callable[[dict[str, np.ndarray]], None]:
        def change(tensors: dict[str, np.ndarray]) -> None:
            for name in list(tensors):
                if (name[4] not in layers) if name.startswith("blk.") else not rest:
                    del tensors[name]

        return change

    write_gguf(first, "qwen3_moe", llama_like, keep("01", rest=True))
    with pytest.raises(PackError, match="00002-of-00002"):
        open_gguf(first)
    write_gguf(second, "qwen3_moe", llama_like, keep("23", rest=False))
    assert packed(first, tmp_path / "p", "q4_0").spec.n_layers == 4


def test_an_unsupported_type_is_named_with_its_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each type that the gguf package cannot dequantise raises; here Q8_0 plays one."""
    write_gguf(tmp_path / "m.gguf", "qwen3_moe", lambda _: Kind.Q8_0)

    def refuse(data: np.ndarray, kind: GGMLQuantizationType) -> np.ndarray:
        raise NotImplementedError(kind.name)

    monkeypatch.setattr(quants, "dequantize", refuse)
    with pytest.raises(PackError, match=r"tensor 'blk|tensor 'token_embd.*Q8_0"):
        open_gguf(tmp_path / "m.gguf")


def test_every_type_of_the_format_is_read_or_refused() -> None:
    """No type falls through to uninitialised memory."""
    from executor.gguf_file import _decoder

    refused: dict[str, str] = {}
    for kind in GGMLQuantizationType:
        block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        try:
            decode = _decoder(kind, "tensor x")
        except PackError as error:
            refused[kind.name] = str(error)
            continue
        if kind != Kind.Q4_0:
            assert decode(np.zeros((2, 4 * block_bytes), dtype=np.uint8), 4 * block).shape == (2, 4 * block)
    assert all(f"type {name}," in message for name, message in refused.items())
    assert "Q8_K" in refused
    assert not {"Q4_0", "Q6_K", "Q8_0", "BF16"} & set(refused)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("blk.1.ffn_up_exps.weight") is None, r"missing, first .*layers\.1\..*up_proj"),
        (lambda t: t.pop("blk.1.attn_q_norm.weight") is None, r"missing, first .*layers\.1\.self_attn\.q_norm"),
        (lambda t: t.pop("token_embd.weight") is None, r"token_embd\.weight is missing"),
        (lambda t: t.update({"blk.0.mystery.weight": np.zeros((2, 32), np.float32)}), r"not known.*mystery"),
        (lambda t: t.update({"blk.0.ffn_up_exps.weight": t["blk.0.ffn_up_exps.weight"][:8]}), r"ffn_up_exps.*\(8, 32"),
    ],
)
def test_a_wrong_tensor_is_named(change: Any, message: str, tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", "qwen3_moe", llama_like, change)
    with pytest.raises(PackError, match=message):
        open_gguf(tmp_path / "m.gguf")


def test_other_files(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    with pytest.raises(PackError, match="missing"):
        open_gguf(path)
    path.write_bytes(b"GGUF" + bytes(100))
    with pytest.raises(PackError, match="not a readable GGUF"):
        open_gguf(path)
    writer = gguf.GGUFWriter(path, "llama")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(PackError, match=r"'llama' is not supported; known: qwen3moe, olmoe"):
        open_gguf(path)


def test_a_cut_file(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(path, "qwen3_moe", llama_like)
    data = path.read_bytes()
    for size in (len(data) - 100, len(data) // 2, 1000, 10):
        path.write_bytes(data[:size])
        with pytest.raises(PackError):
            open_gguf(path)


def test_rope_scaling_is_not_dropped_silently(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", "qwen3_moe", llama_like, metadata={"qwen3moe.rope.scaling.type": "yarn"})
    with pytest.raises(PackError, match="yarn"):
        open_gguf(tmp_path / "m.gguf")
