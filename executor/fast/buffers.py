"""The memory that one job in flight needs: everything between its first kernel and its last.

Owns the tensors.  Two jobs in flight have two of these; nothing here outlives a job.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from executor.fast.descriptor import Descriptor
from executor.fast.plan import Attention, Delta, Plan
from executor.kernels.values import AttentionScratch, ExpertsShape, attention_scratch


class Buffers:
    """Buffers for groups of up to ``tile`` tokens; rows of products are always ``tile``, whatever the group."""

    def __init__(self, plan: Plan, experts: ExpertsShape, tile: int, device: torch.device) -> None:
        self.tile, self.device, self._dtype = tile, device, plan.embedding.dtype
        self._side = torch.cuda.Stream(device) if device.type == "cuda" else None
        hidden = plan.embedding.shape[1]
        self.descriptor = Descriptor(tile, plan.top_k, device)
        cuda = device.type == "cuda"
        self.ids = torch.zeros(tile, plan.top_k, dtype=torch.int32, pin_memory=cuda)
        self.ahead_ids = torch.zeros(tile, plan.predict, dtype=torch.int32, pin_memory=cuda)
        self.ahead_scores = torch.zeros(tile, plan.predict, dtype=torch.float32, pin_memory=cuda)
        self.every = torch.arange(tile, dtype=torch.int32, device=device)
        self.x, self.dense_x, self.ahead_x, self.attended = (self._rows(hidden) for _ in range(4))
        self.planes = self._rows(hidden, torch.float16) if experts.geometry.dtype == "q4_0" else None
        self.routed = self._rows(hidden, torch.float32)
        self.experts = experts.scratch(tile, device)
        denses = [layer.dense for layer in plan.layers if layer.dense is not None]
        self._gate_up = self._rows(_most(d.gate_up.shape[0] for d in denses))
        self._inner = self._rows(_most(d.width for d in denses))
        self.dense = self._rows(hidden)
        attentions = [layer.attention for layer in plan.layers]
        projections = [a.qkv if isinstance(a, Attention) else a.projection for a in attentions]
        self._projected = self._rows(_most(p.shape[0] for p in projections))
        self._heads = self._rows(_most(a.out.shape[1] for a in attentions))
        self._queries = torch.zeros_like(self._heads)
        self._mixed = self._rows(_most(a.conv.shape[0] for a in attentions if isinstance(a, Delta)), torch.float32)
        self._logits = self._rows(_most(layer.router.weight.shape[0] for layer in plan.layers))
        self.vocabulary = self._rows(plan.head.shape[0])
        softmax = [a for a in attentions if isinstance(a, Attention)]
        self._scratch = {
            shape: attention_scratch(tile, *shape, device=device)
            for shape in dict.fromkeys((a.heads, a.cache.k.shape[2], a.head_dim) for a in softmax)
        }

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Launch beside what the current stream does next, until ``join``; without a GPU, before it."""
        if self._side is None:
            yield
            return
        self._side.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._side):
            yield

    def join(self) -> None:
        """What the current stream does next comes after all that was launched ``aside``."""
        if self._side is not None:
            torch.cuda.current_stream(self.device).wait_stream(self._side)

    def _rows(self, width: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.zeros(self.tile, width, dtype=dtype or self._dtype, device=self.device)

    def _cut(self, buffer: Tensor, width: int) -> Tensor:
        """[tile, width], contiguous, as products want it."""
        return buffer.view(-1)[: self.tile * width].view(self.tile, width)

    def gate_up(self, width: int) -> Tensor:
        """Of the dense MLP."""
        return self._cut(self._gate_up, width)

    def inner(self, width: int) -> Tensor:
        """Of the dense MLP, after its activation."""
        return self._cut(self._inner, width)

    def projected(self, width: int) -> Tensor:
        """The attention's input, of either kind."""
        return self._cut(self._projected, width)

    def heads(self, width: int) -> Tensor:
        """The attention's result before its output projection."""
        return self._cut(self._heads, width)

    def queries(self, heads: int, dim: int) -> Tensor:
        """[tile, heads, dim], normed and rotated."""
        return self._cut(self._queries, heads * dim).view(self.tile, heads, dim)

    def mixed(self, channels: int) -> Tensor:
        """Scratch of a DeltaNet step."""
        return self._cut(self._mixed, channels)

    def logits(self, width: int) -> Tensor:
        """Of the router."""
        return self._cut(self._logits, width)

    def scratch(self, attention: Attention) -> AttentionScratch:
        """Of decode attention."""
        return self._scratch[attention.heads, attention.cache.k.shape[2], attention.head_dim]


def _most(widths: Iterable[int]) -> int:
    return max(widths, default=0)
