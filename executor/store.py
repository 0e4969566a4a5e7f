"""The expert pack: experts that are read one by one, and what is needed to trust them.

Owns the pack's format and its validation.  Knows neither how a pack is written (``executor.pack``) nor how an
expert is read (``executor.reader``).

A pack is a directory::

    manifest.json        format version, model config, sizes, hashes, source
    experts.bin          expert after expert (MoE layer by MoE layer), each padded to a fixed stride of whole pages
    experts.crc          one little-endian CRC-32 per expert, over its whole stride
    shared.safetensors   every other weight, under the names of transformers' ``*ForCausalLM``
    tokenizer files      copied from the checkpoint, if it had them
"""

from __future__ import annotations

import dataclasses
import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from executor.errors import PackError, shown
from executor.geometry import ExpertGeometry
from executor.naming import MoeShape, family_of, moe_shape
from policies.core.types import ExpertId, ModelSpec

if TYPE_CHECKING:
    import torch

FORMAT = "runahead-expert-pack"
VERSION = 1
MANIFEST = "manifest.json"
EXPERTS = "experts.bin"
CHECKSUMS = "experts.crc"
SHARED = "shared.safetensors"
SHARED_DTYPES = {"bf16": "bfloat16", "f32": "float32"}

_MAX_MANIFEST_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Manifest:
    """``manifest.json``.

    ``random``: the weights are noise for timing.  ``config``: the Hugging Face text config, complete.
    ``layers[l]``: the decoder layer of MoE layer ``l``.  ``crc32``: of every file but ``experts.bin`` and the
    manifest.  ``source``: where the weights come from.
    """

    name: str
    family: str
    dtype: str
    shared_dtype: str
    random: bool
    layers: tuple[int, ...]
    n_experts: int
    top_k: int
    hidden_size: int
    intermediate_size: int
    expert_bytes: int
    stride_bytes: int
    experts_file_bytes: int
    shared_file_bytes: int
    crc32: Mapping[str, int]
    source: Mapping[str, Any]
    config: Mapping[str, Any]

    def to_json(self) -> str:
        """The file's text."""
        return json.dumps({"format": FORMAT, "version": VERSION, **dataclasses.asdict(self)}, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Manifest:
        """Read and validate the file's text.

        Raises:
            PackError: anything but a manifest whose every number follows from its config and weight type.
        """
        try:
            values = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise PackError(f"{MANIFEST} is not JSON: {shown(str(error))}") from error
        if not isinstance(values, dict) or values.pop("format", None) != FORMAT:
            raise PackError(f"{MANIFEST} is not of the format {FORMAT}; make the pack with python -m executor.pack")
        version = values.pop("version", None)
        if version != VERSION or isinstance(version, bool):
            raise PackError(f"{MANIFEST} has version {shown(version)}, expected {VERSION}; make the pack again")
        kinds: dict[str, type] = {"name": str, "family": str, "dtype": str, "shared_dtype": str, "random": bool}
        kinds |= {"layers": list, "crc32": dict, "source": dict, "config": dict}
        fields = [field.name for field in dataclasses.fields(cls)]
        if set(values) != set(fields):
            odd = sorted(set(values) ^ set(fields))
            raise PackError(f"{MANIFEST}: key {shown(odd[0])} is {'unknown' if odd[0] in values else 'missing'}")
        for field in fields:
            kind = kinds.get(field, int)
            if not isinstance(values[field], kind) or (kind is int and isinstance(values[field], bool)):
                raise PackError(f"{MANIFEST}: {field} is {shown(values[field])}, expected {kind.__name__}")
        manifest = cls(**{**values, "layers": tuple(values["layers"])})
        manifest._check()
        return manifest

    def _check(self) -> None:
        shape = self.shape
        family = family_of(self.config.get("model_type")).name
        if self.family != family:
            raise PackError(f"{MANIFEST}: family is {shown(self.family)}, but its config is of {family}")
        geometry = shape.geometry(self.dtype)
        n_total = len(shape.layers) * shape.n_experts
        expected: dict[str, object] = {
            "layers": shape.layers,
            "n_experts": shape.n_experts,
            "top_k": shape.top_k,
            "hidden_size": shape.hidden,
            "intermediate_size": shape.intermediate,
            "expert_bytes": geometry.expert_bytes,
            "stride_bytes": geometry.stride_bytes,
            "experts_file_bytes": geometry.stride_bytes * n_total,
        }
        for field, value in expected.items():
            if getattr(self, field) != value:
                got = shown(getattr(self, field))
                raise PackError(f"{MANIFEST}: {field} is {got}, but its config and dtype give {shown(value)}")
        if self.shared_dtype not in SHARED_DTYPES:
            raise PackError(f"{MANIFEST}: shared_dtype is {shown(self.shared_dtype)}, expected bf16 or f32")
        for name, value in self.crc32.items():
            if "/" in name or name in {"", ".", ".."} or isinstance(value, bool) or not isinstance(value, int):
                raise PackError(f"{MANIFEST}: crc32 of {shown(name)} is {shown(value)}, expected a file's checksum")
        for name in (CHECKSUMS, SHARED):
            if name not in self.crc32:
                raise PackError(f"{MANIFEST}: crc32 lacks {name}")

    @property
    def shape(self) -> MoeShape:
        """The MoE shape that the config gives."""
        return moe_shape(family_of(self.config.get("model_type")), self.config)


class ExpertStore:
    """An opened pack: where each expert lies, how its bytes become matrices, and its checksum.

    Holds no open file.
    """

    def __init__(self, path: Path, manifest: Manifest, checksums: np.ndarray[Any, np.dtype[np.uint32]]) -> None:
        """Use :meth:`open`."""
        self.path = path
        self.manifest = manifest
        self.geometry: ExpertGeometry = manifest.shape.geometry(manifest.dtype)
        self.expert_bytes = self.geometry.expert_bytes
        self.stride = self.geometry.stride_bytes
        self.spec: ModelSpec = manifest.shape.spec(manifest.name)
        self.n_total = self.spec.n_total
        self._checksums = checksums

    @classmethod
    def open(cls, path: str | Path) -> ExpertStore:
        """Open and validate a pack: version, counts, and the size of every file.

        Contents are checked by ``python -m executor.verify`` and by reads with ``verify=true``.

        Raises:
            PackError: not a pack, or one that contradicts itself.
        """
        folder = Path(path)
        try:
            file = folder / MANIFEST
            if file.stat().st_size > _MAX_MANIFEST_BYTES:
                raise PackError(f"{file}: larger than {_MAX_MANIFEST_BYTES} bytes; not a manifest")
            text = file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
            raise PackError(f"{shown(str(folder), 200)} is not an expert pack: {MANIFEST}: {reason}") from error
        manifest = Manifest.from_json(text)
        n_total = manifest.experts_file_bytes // manifest.stride_bytes
        sizes = {EXPERTS: manifest.experts_file_bytes, SHARED: manifest.shared_file_bytes, CHECKSUMS: 4 * n_total}
        for name, expected in sizes.items():
            try:
                got = (folder / name).stat().st_size
            except OSError as error:
                raise PackError(f"{folder / name}: {error.strerror}; copy or make the pack again") from error
            if got != expected:
                raise PackError(f"{folder / name} has {got} bytes, expected {expected}; copy or make the pack again")
        table = (folder / CHECKSUMS).read_bytes()
        if zlib.crc32(table) != manifest.crc32[CHECKSUMS]:
            raise PackError(f"{folder / CHECKSUMS} is damaged: its checksum differs; copy or make the pack again")
        return cls(folder, manifest, np.frombuffer(table, dtype="<u4"))

    @property
    def experts_path(self) -> Path:
        """``experts.bin``."""
        return self.path / EXPERTS

    @property
    def shared_path(self) -> Path:
        """``shared.safetensors``."""
        return self.path / SHARED

    def offset(self, expert: ExpertId) -> int:
        """First byte of an expert in ``experts.bin``."""
        if not 0 <= expert < self.n_total:
            raise IndexError(f"expert {expert} of a pack with {self.n_total}")
        return expert * self.stride

    def checksum(self, expert: ExpertId) -> int:
        """CRC-32 of an expert's whole stride."""
        return int(self._checksums[expert])

    def label(self, expert: ExpertId) -> str:
        """``layer:index`` for messages."""
        layer, index = self.spec.split(expert)
        return f"{layer}:{index}"

    def views(self, buffer: torch.Tensor) -> dict[str, torch.Tensor]:
        """The matrices of one expert inside its bytes, without a copy, on the buffer's device.

        ``buffer``: uint8, at least ``expert_bytes`` long, 16-byte aligned.  bf16 and f32: ``gate_up [2I, H]`` and
        ``down [H, I]``.  q4_0: ``gate_up_nibbles [2I, H / 2]``, ``down_nibbles [H, I / 2]`` (uint8) and
        ``gate_up_scales [2I, H / 32]``, ``down_scales [H, I / 32]`` (fp16); ``executor.quant.dequantise`` reads them.
        """
        import torch  # noqa: PLC0415 - seconds, and the manifest needs none of it

        views: dict[str, torch.Tensor] = {}
        for part in self.geometry.parts:
            flat = buffer[part.offset : part.offset + part.n_bytes]
            views[part.name] = flat.view(getattr(torch, part.element)).view(part.shape)
        return views
