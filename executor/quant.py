"""Q4_0 in its two forms, and the bytes of one expert.

Owns the rearrangement between GGUF's 18-byte blocks and the split form (``executor.geometry``), and what
weights mean in either.  Quantising itself is the gguf package's.  Knows nothing of files.

A Q4_0 weight is ``(nibble - 8) * scale`` in float32, one fp16 scale for 32 weights of a row.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from executor.geometry import BLOCK, BLOCK_BYTES, ExpertGeometry

Bytes = npt.NDArray[np.uint8]
Halves = npt.NDArray[np.float16]

Matrix = torch.Tensor
"""``[N, K]`` of a float type, or ``[N, K / 32 * 18]`` of uint8: Q4_0 blocks as GGUF stores them."""


def quantise(weights: npt.NDArray[np.float32]) -> Bytes:
    """Q4_0 blocks ``[N, K / 32 * 18]`` of float32 weights ``[N, K]``, by the gguf package."""
    import gguf  # noqa: PLC0415 - decoding needs only torch and numpy
    from gguf import quants  # noqa: PLC0415

    return np.asarray(quants.quantize(weights, gguf.GGMLQuantizationType.Q4_0), dtype=np.uint8)


def split_blocks(blocks: Bytes) -> tuple[Bytes, Halves]:
    """``(nibbles [N, K / 2], scales [N, K / 32])`` of Q4_0 blocks ``[N, K / 32 * 18]``; loses nothing."""
    rows = blocks.shape[0]
    each = blocks.reshape(rows, -1, BLOCK_BYTES)
    scales = np.ascontiguousarray(each[:, :, :2]).view(np.float16).reshape(rows, -1)
    return np.ascontiguousarray(each[:, :, 2:]).reshape(rows, -1), scales


def join_blocks(nibbles: Bytes, scales: Halves) -> Bytes:
    """The inverse of :func:`split_blocks`."""
    rows, n_blocks = scales.shape
    blocks = np.empty((rows, n_blocks, BLOCK_BYTES), dtype=np.uint8)
    blocks[:, :, :2] = np.ascontiguousarray(scales).view(np.uint8).reshape(rows, n_blocks, 2)
    blocks[:, :, 2:] = nibbles.reshape(rows, n_blocks, BLOCK // 2)
    return blocks.reshape(rows, -1)


def dequantise_numpy(nibbles: Bytes, scales: Halves) -> npt.NDArray[np.float32]:
    """Float32 weights ``[N, K]`` of the split form."""
    rows, n_blocks = scales.shape
    each = nibbles.reshape(rows, n_blocks, BLOCK // 2)
    codes = np.concatenate([each & 15, each >> 4], axis=2).astype(np.int8) - np.int8(8)
    return (codes.astype(np.float32) * scales.astype(np.float32)[:, :, None]).reshape(rows, -1)


def dequantise(nibbles: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Weights ``[N, K]`` of the split form ``(uint8 [N, K / 2], fp16 [N, K / 32])`` on their own device.

    Computed in float32, the same bits as the gguf package's, then rounded once to ``dtype``.
    """
    rows, n_blocks = scales.shape
    each = nibbles.view(rows, n_blocks, BLOCK // 2)
    codes = torch.cat([each & 15, each >> 4], dim=2).to(torch.float32).sub_(8)
    return codes.mul_(scales.to(torch.float32).unsqueeze(2)).view(rows, -1).to(dtype)


def dequantise_views(views: Mapping[str, torch.Tensor], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """``(gate_up [2I, H], down [H, I])`` of one expert's views (``ExpertStore.views``) of any weight type."""
    if "gate_up" in views:
        return views["gate_up"].to(dtype), views["down"].to(dtype)
    return (
        dequantise(views["gate_up_nibbles"], views["gate_up_scales"], dtype),
        dequantise(views["down_nibbles"], views["down_scales"], dtype),
    )


def raw(tensor: torch.Tensor) -> Bytes:
    """The bytes of a CPU tensor, flat."""
    flat: Any = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
    return np.asarray(flat, dtype=np.uint8)


def _as_blocks(matrix: Matrix) -> Bytes:
    if matrix.dtype == torch.uint8:
        return np.asarray(matrix.numpy(), dtype=np.uint8)
    return quantise(matrix.to(torch.float32).numpy())


def as_floats(matrix: Matrix, dtype: torch.dtype) -> torch.Tensor:
    """Weights ``[N, K]`` of a matrix in either form."""
    if matrix.dtype == torch.uint8:
        nibbles, scales = split_blocks(matrix.numpy())
        return dequantise(torch.from_numpy(nibbles), torch.from_numpy(scales), dtype)
    return matrix.to(dtype)


def encode_expert(geometry: ExpertGeometry, gate: Matrix, up: Matrix, down: Matrix, out: Bytes) -> None:
    """Write one expert's weights into ``out`` (``expert_bytes`` long).

    Q4_0 blocks that stay Q4_0 are only rearranged; other weights are converted once, from their own type.
    """
    if geometry.dtype == "q4_0":
        split = [split_blocks(_as_blocks(matrix)) for matrix in (gate, up, down)]
        pieces = [nibbles.reshape(-1) for nibbles, _ in split]
        pieces += [scales.reshape(-1).view(np.uint8) for _, scales in split]
    else:
        dtype = torch.bfloat16 if geometry.dtype == "bf16" else torch.float32
        pieces = [raw(as_floats(matrix, dtype)) for matrix in (gate, up, down)]
    np.concatenate(pieces, out=out)
