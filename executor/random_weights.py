"""A source of random weights in a model's shapes, for timing.

Owns how noise is made directly in the stored form: fast, seeded, and of the size of trained weights (about
0.014 root mean square), so that activations stay finite.  Such a model says nothing.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from executor.geometry import ExpertGeometry
from executor.naming import family_of, moe_shape
from executor.quant import Bytes
from executor.skeleton import complete_config, shared_shapes

# 2^-9 .. 2^-5 with a random sign: the two low exponent bits and the mantissa of a float are random
_EXPONENT = 118
# fp16 scales 2^-9 .. 2^-8, times a nibble of -8 .. 7
_SCALE_BITS = 6 << 10


class RandomSource:
    """Random weights of a model config; expert ``(layer, index)`` depends on the seed and on nothing else."""

    random = True
    extra_files: tuple[Path, ...] = ()
    expert_types: Mapping[str, int] = {}
    threads = min(8, os.cpu_count() or 1)

    def __init__(self, name: str, config: Mapping[str, Any], seed: int) -> None:
        """``config``: a Hugging Face (text) config with its ``model_type``."""
        self.name = f"{name}-random"
        self.family = family_of(config.get("model_type"))
        self.config = complete_config(self.family, config)
        self.shared = shared_shapes(self.family, self.config)
        self.moe = moe_shape(self.family, self.config)
        self.origin: dict[str, Any] = {"kind": "random", "name": name, "seed": seed}
        self._seed = seed

    def expert(self, layer: int, index: int, geometry: ExpertGeometry, out: Bytes) -> None:
        """Fill ``out`` (``expert_bytes``) with expert ``index`` of MoE layer ``layer``."""
        generator = self._generator(1, layer, index)
        for part in geometry.parts:
            piece = out[part.offset : part.offset + part.n_bytes]
            piece[:] = _noise(generator, part.n_bytes)
            if part.element != "uint8":
                _to_floats(piece, part.element)

    def shared_rows(self, name: str, start: int, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Rows of a shared weight: noise for matrices, the class's own initial value for vectors."""
        shape = self.shared[name]
        if len(shape) == 1:
            return self._vector(name, shape[0]).to(dtype).view(1, -1)
        generator = self._generator(0, list(self.shared).index(name), start)
        element = str(dtype).removeprefix("torch.")
        buffer = _noise(generator, count * shape[-1] * dtype.itemsize)
        _to_floats(buffer, element)
        return torch.from_numpy(buffer).view(dtype).view(count, shape[-1])

    def close(self) -> None:
        """Nothing is open."""

    def _generator(self, *key: int) -> np.random.Generator:
        return np.random.Generator(np.random.SFC64([self._seed, *key]))

    def _vector(self, name: str, length: int) -> torch.Tensor:
        if name.endswith("A_log"):
            generator = self._generator(2, list(self.shared).index(name))
            return torch.from_numpy(np.log(generator.uniform(0.01, 16.0, length)))
        # Qwen3.5's norms multiply by (1 + weight), but for the gated one
        centred = self.family.name == "qwen3_5_moe" and "norm" in name and not name.endswith("linear_attn.norm.weight")
        return torch.zeros(length) if centred or name.endswith(".bias") else torch.ones(length)


def _noise(generator: np.random.Generator, n_bytes: int) -> Bytes:
    words = generator.integers(0, 1 << 64, -(-n_bytes // 8), dtype=np.uint64)  # six times as fast as bytes()
    return words.view(np.uint8)[:n_bytes]


def _to_floats(raw: Bytes, element: str) -> None:
    """Make random bytes, in place, valid numbers of a float type."""
    if element == "float16":
        words = raw.view(np.uint16)
        words &= np.uint16(0x3FF)
        words |= np.uint16(_SCALE_BITS)
    elif element == "bfloat16":
        words = raw.view(np.uint16)
        words &= np.uint16(0x81FF)
        words += np.uint16(_EXPONENT << 7)
    else:
        wide = raw.view(np.uint32)
        wide &= np.uint32(0x81FFFFFF)
        wide += np.uint32(_EXPONENT << 23)
