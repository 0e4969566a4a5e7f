"""Random operands of the kernels, on the GPU where there is one and otherwise for triton's interpreter."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from executor.geometry import ExpertGeometry
from executor.kernels.values import ExpertsScratch, ExpertsShape, plane_order
from executor.quant import encode_expert

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
NAN = float("nan")


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(*shape: int, seed: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape, generator=seeded(seed)) * scale).to(dtype).to(DEVICE)


def integers(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def relative(got: Tensor, expected: Tensor) -> float:
    """Size of the error over the size of the value; NaN never passes a comparison."""
    return float((got.double() - expected.double()).norm() / expected.double().norm())


def poisoned(*tensors: Tensor) -> None:
    for tensor in tensors:
        tensor.fill_(NAN)


def poisoned_scratch(shape: ExpertsShape, n: int) -> ExpertsScratch:
    scratch = shape.scratch(n, DEVICE)
    poisoned(*scratch)
    return scratch


def random_arena(geometry: ExpertGeometry, n_slots: int, seed: int) -> Tensor:
    """Slots of random experts as the pack stores them, the padding between them full of ones."""
    rng = np.random.default_rng(seed)
    h, i = geometry.hidden, geometry.intermediate
    arena = np.full(n_slots * geometry.stride_bytes, 255, dtype=np.uint8)
    for slot in range(n_slots):
        gate, up, down = (
            torch.from_numpy(rng.standard_normal(size, dtype=np.float32) * size[1] ** -0.5)
            for size in ((i, h), (i, h), (h, i))
        )
        start = slot * geometry.stride_bytes
        encode_expert(geometry, gate, up, down, arena[start : start + geometry.expert_bytes])
    return torch.from_numpy(arena).to(DEVICE)


class Group(NamedTuple):
    """One call's operands; ``x`` is in planes for Q4_0."""

    x: Tensor
    slots: Tensor
    rows: Tensor
    mix: Tensor


def random_group(shape: ExpertsShape, slots: list[list[int]], rows: list[int], seed: int) -> Group:
    """Inputs for tokens with these slots and request rows."""
    g = shape.geometry
    x = normal(len(slots), g.hidden, seed=seed)
    if g.dtype == "q4_0":
        x = x[:, plane_order(g.hidden).to(DEVICE)].half()
    elif g.dtype == "bf16":
        x = x.bfloat16()
    mix = torch.rand(max(rows) + 1, shape.top_k, generator=seeded(seed + 1)).to(DEVICE)
    return Group(x, integers(slots), integers(rows), mix)
