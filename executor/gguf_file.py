"""Reading a GGUF file: its tensors as ``executor.tensor_file`` entries, its metadata as a model config.

Owns the mapping from GGUF's names, types and metadata.  The gguf package parses the file and dequantises.
Knows nothing of packs.

Supported: the architectures whose weights GGUF stores unchanged (no permutation, no folded constants), which
are ``qwen3moe`` and ``olmoe``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import quants

from executor.checkpoint import CheckpointSource, assign
from executor.errors import PackError, shown
from executor.naming import ExpertTensor, family_of, moe_shape
from executor.quant import Bytes, Matrix
from executor.tensor_file import Decode, TensorEntry, decode_as

_FAMILY = {"qwen3moe": "qwen3_moe", "olmoe": "olmoe"}
_ARCHITECTURE = {"qwen3moe": gguf.MODEL_ARCH.QWEN3MOE, "olmoe": gguf.MODEL_ARCH.OLMOE}
_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_EXPERTS = re.compile(r"^blk\.(\d+)\.ffn_(gate|up|down)_exps\.weight$")
_SPLIT = re.compile(r"-\d{5}-of-(\d{5})\.gguf$")
# rotary frequencies: recomputed by the decoder
_NOT_USED = re.compile(r"^rope_freqs\.weight$")


def _decoder(kind: gguf.GGMLQuantizationType, where: str) -> Decode:
    """How rows of this type become ``[rows, K]``; Q4_0 blocks stay as they are."""
    if kind.name in _FLOATS:
        return decode_as(_FLOATS[kind.name])
    if kind == gguf.GGMLQuantizationType.Q4_0:
        return lambda raw, _: torch.from_numpy(raw)
    _, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    try:  # the package supports a type if it can dequantise one block of zeros
        quants.dequantize(np.zeros((1, block_bytes), dtype=np.uint8), kind)
    except (NotImplementedError, KeyError) as error:
        raise PackError(f"{where} has type {kind.name}, which the gguf package cannot dequantise") from error

    def decode(raw: Bytes, _: int) -> Matrix:
        return torch.from_numpy(np.asarray(quants.dequantize(raw, kind), dtype=np.float32))

    return decode


def _open(path: Path) -> gguf.GGUFReader:
    try:
        return gguf.GGUFReader(path)
    except Exception as error:  # the parser fails in many ways on a broken file
        raise PackError(f"{path}: not a readable GGUF file: {shown(str(error), 120)}") from error


def _entries(path: Path, reader: gguf.GGUFReader) -> dict[str, TensorEntry]:
    entries: dict[str, TensorEntry] = {}
    file_bytes = path.stat().st_size
    for tensor in reader.tensors:
        where = f"{path.name}: tensor {shown(tensor.name, 120)}"
        shape = tuple(int(n) for n in reversed(tensor.shape))
        block, block_bytes = gguf.GGML_QUANT_SIZES[tensor.tensor_type]
        row_bytes, left = divmod(shape[-1] * block_bytes, block)
        if left or not row_bytes:
            raise PackError(f"{where} has rows of {shape[-1]} weights, not a multiple of the block of {block}")
        offset, n_bytes = int(tensor.data_offset), int(tensor.n_bytes)
        if offset + n_bytes > file_bytes or n_bytes != int(np.prod(shape[:-1], dtype=np.int64)) * row_bytes:
            raise PackError(f"{where}: {n_bytes} bytes at {offset} do not fit shape {shape} in a file of {file_bytes}")
        decode = _decoder(tensor.tensor_type, where)
        entries[tensor.name] = TensorEntry(tensor.name, tensor.tensor_type.name, shape, path, offset, row_bytes, decode)
    return entries


def _metadata(reader: gguf.GGUFReader) -> dict[str, Any]:
    """All but the vocabulary, which is long."""
    return {
        name: field.contents()
        for name, field in reader.fields.items()
        if not name.startswith("tokenizer.") or name.endswith("_token_id")
    }


def _config(
    architecture: str, meta: Mapping[str, Any], entries: Mapping[str, TensorEntry], path: Path
) -> dict[str, Any]:
    """The Hugging Face text config that the metadata means."""

    def value(key: str, default: Any = None) -> Any:
        found = meta.get(f"{architecture}.{key}", default)
        if found is None:
            raise PackError(f"{path}: metadata {architecture}.{key} is missing")
        return found

    scaling = meta.get(f"{architecture}.rope.scaling.type", "none")
    if scaling != "none":
        raise PackError(f"{path}: rope scaling {shown(scaling)} is not supported; use a file without it")
    if "token_embd.weight" not in entries:
        raise PackError(f"{path}: tensor token_embd.weight is missing")
    heads = value("attention.head_count")
    config: dict[str, Any] = {
        "vocab_size": entries["token_embd.weight"].shape[0],
        "hidden_size": value("embedding_length"),
        "num_hidden_layers": value("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": value("attention.head_count_kv", heads),
        "max_position_embeddings": value("context_length"),
        "rms_norm_eps": value("attention.layer_norm_rms_epsilon"),
        "rope_parameters": {"rope_type": "default", "rope_theta": value("rope.freq_base", 10000.0)},
        "num_experts": value("expert_count"),
        "num_experts_per_tok": value("expert_used_count"),
        "tie_word_embeddings": "output.weight" not in entries,
        # GGUF has no such flag: its runtime renormalises for Qwen3-MoE and not for OLMoE
        "norm_topk_prob": architecture == "qwen3moe",
        "bos_token_id": meta.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": meta.get("tokenizer.ggml.eos_token_id"),
        "pad_token_id": meta.get("tokenizer.ggml.padding_token_id"),
    }
    if architecture == "qwen3moe":
        config["head_dim"] = value("attention.key_length", config["hidden_size"] // heads)
        config["moe_intermediate_size"] = value("expert_feed_forward_length")
        config["intermediate_size"] = value("feed_forward_length", config["moe_intermediate_size"])
    else:
        config["intermediate_size"] = value("feed_forward_length")
        config["clip_qkv"] = meta.get(f"{architecture}.attention.clamp_kqv")
    return config


def _shards(path: Path) -> list[Path]:
    """The file, or all files of a split one."""
    match = _SPLIT.search(path.name)
    if not match:
        return [path]
    stem = path.name[: match.start()]
    shards = [path.with_name(f"{stem}-{n:05d}-of-{match[1]}.gguf") for n in range(1, int(match[1]) + 1)]
    for shard in shards:
        if not shard.is_file():
            raise PackError(f"{shard} is missing; download all {len(shards)} parts")
    return shards


def open_gguf(path: Path) -> CheckpointSource:
    """A GGUF file (or the first of its parts) as a source.

    Raises:
        PackError: unreadable, an unknown architecture, a type that cannot be dequantised, or weights that do not
            fit the metadata.
    """
    if not path.is_file():
        raise PackError(f"{path} is missing; expected a .gguf file")
    entries: dict[str, TensorEntry] = {}
    meta: dict[str, Any] = {}
    architecture = ""
    for shard in _shards(path):
        reader = _open(shard)
        meta = {**_metadata(reader), **meta}
        architecture = str(meta.get("general.architecture"))
        if architecture not in _FAMILY:
            raise PackError(f"{path}: architecture {shown(architecture)} is not supported; known: {', '.join(_FAMILY)}")
        for name, entry in _entries(shard, reader).items():
            if name in entries:
                raise PackError(f"tensor {name} is both in {entries[name].path.name} and in {shard.name}")
            entries[name] = entry
    family = family_of(_FAMILY[architecture])
    from executor.skeleton import complete_config, shared_shapes  # noqa: PLC0415 - seconds; refusals come first

    config = complete_config(family, _config(architecture, meta, entries, path))
    shared = shared_shapes(family, config)
    names = gguf.get_tensor_name_map(_ARCHITECTURE[architecture], config["num_hidden_layers"])
    canonical = {names.get_name(name, try_suffixes=(".weight", ".bias")): name for name in shared}

    def role_of(name: str) -> ExpertTensor | str | None:
        if match := _EXPERTS.match(name):
            return ExpertTensor(int(match[1]), None, match[2])
        return None if _NOT_USED.match(name) else canonical.get(name, name)

    assignment = assign(family, moe_shape(family, config), shared, entries, role_of)
    origin = {"kind": "gguf", "name": path.name}
    return CheckpointSource(
        name=path.stem, family=family, config=config, shared=shared, assignment=assignment, origin=origin
    )
