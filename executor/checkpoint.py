"""A checkpoint as the packer reads it: every tensor has exactly one use.

Owns the assignment of tensors to uses and the source made of it.  Knows no byte of a file's format
(``executor.tensor_file``, ``executor.gguf_file``) and nothing of packs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from executor.errors import PackError, shown
from executor.geometry import ExpertGeometry
from executor.naming import ExpertTensor, Family, MoeShape, expert_name, family_of, moe_shape, role
from executor.quant import Bytes, as_floats, encode_expert
from executor.tensor_file import RowReader, Rows, TensorEntry, folder_entries, read_json


@dataclass(slots=True)
class Assignment:
    """Every tensor of a checkpoint and its one use.

    ``experts[layer, expert, part]``: decoder layer, index, gate | up | down.  ``skipped``: names not used.
    """

    shared: dict[str, TensorEntry] = field(default_factory=dict)
    experts: dict[tuple[int, int, str], Rows] = field(default_factory=dict)
    skipped: list[str] = field(default_factory=list)


def assign(
    family: Family,
    moe: MoeShape,
    shared: Mapping[str, tuple[int, ...]],
    entries: Mapping[str, TensorEntry],
    role_of: Callable[[str], ExpertTensor | str | None],
) -> Assignment:
    """Give every tensor its use and check that every weight of the model is there once, in its shape.

    Raises:
        PackError: a weight is missing, is there twice, has another shape, or is not known; it is named.
    """
    result = Assignment()
    unknown: list[str] = []
    for name, entry in entries.items():
        use = role_of(name)
        if use is None:
            result.skipped.append(name)
        elif isinstance(use, ExpertTensor) and use.layer in moe.layers and (use.expert or 0) < moe.n_experts:
            _add_experts(result, moe, entry, use)
        elif isinstance(use, str) and use in shared:
            _add_shared(result, shared[use], entry, use)
        else:
            unknown.append(name)
    missing = [name for name in shared if name not in result.shared]
    missing += [
        expert_name(family, layer, expert, part)
        for layer in moe.layers
        for expert in range(moe.n_experts)
        for part in ("gate", "up", "down")
        if (layer, expert, part) not in result.experts
    ]
    problems = [
        f"{len(names)} {what}, first {shown(names[0], 120)}"
        for what, names in (("missing", missing), ("not known to this family", unknown))
        if names
    ]
    if problems:
        raise PackError(f"checkpoint does not match {family.name}: weights {'; '.join(problems)}")
    return result


def _add_shared(result: Assignment, shape: tuple[int, ...], entry: TensorEntry, use: str) -> None:
    if use in result.shared:
        raise PackError(f"{use} is there twice: {result.shared[use].name} and {entry.name}")
    if entry.shape != shape:
        raise PackError(f"{entry.name} has shape {entry.shape}, but the config asks for {shape}")
    result.shared[use] = entry


def _add_experts(result: Assignment, moe: MoeShape, entry: TensorEntry, use: ExpertTensor) -> None:
    h, i = moe.hidden, moe.intermediate
    matrix = {"gate": (i, h), "up": (i, h), "gate_up": (2 * i, h), "down": (h, i)}[use.part]
    expected = matrix if use.expert is not None else (moe.n_experts, *matrix)
    if entry.shape != expected:
        raise PackError(f"{entry.name} has shape {entry.shape}, but the config asks for {expected}")
    experts = range(moe.n_experts) if use.expert is None else (use.expert,)
    for position, expert in enumerate(experts):
        start = position * matrix[0]
        pieces = {use.part: Rows(entry, start, matrix[0])}
        if use.part == "gate_up":
            pieces = {"gate": Rows(entry, start, i), "up": Rows(entry, start + i, i)}
        for part, rows in pieces.items():
            key = (use.layer, expert, part)
            if key in result.experts:
                raise PackError(f"expert weights are there twice: {result.experts[key].entry.name} and {entry.name}")
            result.experts[key] = rows


class CheckpointSource:
    """A checkpoint as the packer reads it: one expert, or some rows of one shared weight, at a time."""

    random = False
    threads = 1

    def __init__(
        self,
        *,
        name: str,
        family: Family,
        config: dict[str, Any],
        shared: dict[str, tuple[int, ...]],
        assignment: Assignment,
        origin: dict[str, Any],
        extra_files: tuple[Path, ...] = (),
    ) -> None:
        """``shared``: names and shapes in the order of writing; ``extra_files``: copied beside the weights."""
        self.name = name
        self.family = family
        self.config = config
        self.shared = shared
        self.moe = moe_shape(family, config)
        self.expert_types: Mapping[str, int] = dict(
            sorted(Counter(rows.entry.kind for rows in assignment.experts.values()).items())
        )
        self.origin = {**origin, "expert_types": self.expert_types, "not_used": sorted(assignment.skipped)}
        self.extra_files = extra_files
        self._assignment = assignment
        self._reader = RowReader()

    def expert(self, layer: int, index: int, geometry: ExpertGeometry, out: Bytes) -> None:
        """Write expert ``index`` of MoE layer ``layer`` into ``out`` (``expert_bytes``)."""
        decoder_layer = self.moe.layers[layer]
        gate, up, down = (
            self._reader.read(self._assignment.experts[decoder_layer, index, part]) for part in ("gate", "up", "down")
        )
        encode_expert(geometry, gate, up, down, out)

    def shared_rows(self, name: str, start: int, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Rows of a shared weight, ``[count, last dimension]``, of a float type."""
        return as_floats(self._reader.read(Rows(self._assignment.shared[name], start, count)), dtype)

    def close(self) -> None:
        """Close the checkpoint's files."""
        self._reader.close()


EXTRA_FILES = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
)
"""What a decoder needs besides weights; copied if it is there."""


def open_folder(folder: Path) -> CheckpointSource:
    """A Hugging Face checkpoint folder as a source.

    Raises:
        PackError: an unknown family, a quantised checkpoint, or weights that do not fit the config.
    """
    config = read_json(folder / "config.json")
    family = family_of(config.get("model_type"))
    for part in (config, config.get("text_config") or {}):
        if isinstance(part, dict) and (quantised := part.get("quantization_config")):
            method = quantised.get("quant_method", "unknown") if isinstance(quantised, dict) else quantised
            raise PackError(f"{folder} is quantised with {shown(method)}; use its bf16, f16 or f32 form or a GGUF")
    entries = folder_entries(folder)
    from executor.skeleton import complete_config, shared_shapes  # noqa: PLC0415 - seconds; refusals come first

    complete = complete_config(family, config)
    shared = shared_shapes(family, complete)
    tied = bool(complete.get("tie_word_embeddings"))
    assignment = assign(family, moe_shape(family, complete), shared, entries, lambda name: role(family, name, tied))
    origin = {"kind": "safetensors", "name": folder.resolve().name}
    extra = tuple(folder / name for name in EXTRA_FILES if (folder / name).is_file())
    return CheckpointSource(
        name=folder.resolve().name,
        family=family,
        config=complete,
        shared=shared,
        assignment=assignment,
        origin=origin,
        extra_files=extra,
    )
