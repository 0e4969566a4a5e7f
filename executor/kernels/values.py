"""What the kernels and their references agree on: shapes, scratch buffers, mixing rules, the order of Q4_0 inputs.

Knows torch, not triton.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from executor.geometry import BLOCK, ExpertGeometry

Activation = Literal["silu", "gelu_tanh"]

ATTENTION_CHUNK = 256
"""Keys of one program of decode attention; chunks start at fixed places, so a row's bits never depend on its group."""

TAG_BITS = 10
"""A reported expert id is ``id | sequence << TAG_BITS`` in one int32: every word proves of which job it is."""

MAX_TOKENS = 16
"""The largest group."""


@dataclass(frozen=True, slots=True)
class ExpertsShape:
    """What all calls for one model's experts share."""

    geometry: ExpertGeometry
    top_k: int
    activation: Activation

    @property
    def stride_bytes(self) -> int:
        """From one slot of the arena to the next."""
        return self.geometry.stride_bytes

    def scratch(self, n_tokens: int, device: torch.device | str) -> ExpertsScratch:
        """Buffers for groups of up to ``n_tokens``; groups that may run at the same time need their own."""
        pairs, g = n_tokens * self.top_k, self.geometry
        inner = torch.float16 if g.dtype == "q4_0" else torch.float32
        return ExpertsScratch(
            torch.zeros(pairs, g.intermediate, dtype=inner, device=device),
            torch.zeros(pairs, g.hidden, dtype=torch.float32, device=device),
        )


class ExpertsScratch(NamedTuple):
    """``inner`` [pairs, I]: activation(gate) * up, in fp16 planes for Q4_0.  ``partial`` [pairs, H]: pairs' outputs."""

    inner: Tensor
    partial: Tensor


@dataclass(frozen=True, slots=True)
class MixRule:
    """How a family makes mixing weights of the chosen experts' probabilities.

    ``renormalise``: scale them to sum 1.  ``rounding``: the dtype that they pass through, if any.
    """

    renormalise: bool
    rounding: torch.dtype | None = None


class AttentionScratch(NamedTuple):
    """``partial`` [N, heads, chunks, D] and ``log_sum`` [N, heads, chunks], float32."""

    partial: Tensor
    log_sum: Tensor


def attention_scratch(
    n_tokens: int, heads: int, room: int, head_dim: int, device: torch.device | str
) -> AttentionScratch:
    """Buffers for decode attention over caches with ``room`` places."""
    chunks = -(-room // ATTENTION_CHUNK)
    return AttentionScratch(
        torch.zeros(n_tokens, heads, chunks, head_dim, dtype=torch.float32, device=device),
        torch.zeros(n_tokens, heads, chunks, dtype=torch.float32, device=device),
    )


def plane_order(k: int) -> Tensor:
    """Position -> weight index of a vector of length ``k`` in planes, int64 [k].

    A row of split Q4_0 read as int16 has ``k / 4`` words; word v holds as nibble s the weight
    ``32 * (v // 8) + 2 * (v % 8) + s // 2 + 16 * (s % 2)`` (GGUF's order).  Plane s has the inputs that meet nibble s,
    word after word, so that each is a contiguous vector.
    """
    s = torch.arange(4)[:, None]
    v = torch.arange(k // 4)[None, :]
    return (BLOCK * (v // 8) + 2 * (v % 8) + s // 2 + 16 * (s % 2)).reshape(-1)
