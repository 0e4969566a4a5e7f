"""What a request leaves behind in a layer: keys and values, or the state of a linear attention.

One place for each request slot, allocated once.  Owns the tensors and which position lies where.
Does not know how attention is computed.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class KvCache:
    """Keys and values of one attention layer, ``[slots, kv heads, positions, head dim]``.

    With a ``window`` only the last ``window`` positions are kept: the buffer holds two windows, and
    a slot that reaches its end is moved down, which costs one copy every ``window`` tokens.
    """

    def __init__(
        self,
        slots: int,
        heads: int,
        head_dim: int,
        max_tokens: int,
        *,
        window: int | None,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.window = window if window is not None and 2 * window < max_tokens else None
        self.reach = window
        room = 2 * window if self.window is not None and window is not None else max_tokens
        self.k = torch.zeros(slots, heads, room, head_dim, dtype=dtype, device=device)
        self.v = torch.zeros_like(self.k)
        self._first = [0] * slots  # the position that lies at index 0

    def reset(self, slot: int, position: int = 0) -> None:
        """A new request begins in ``slot``, with zeros as its past before ``position``."""
        self._first[slot] = max(0, position - self.window) if self.window is not None else 0
        self.k[slot, :, : position - self._first[slot]] = 0
        self.v[slot, :, : position - self._first[slot]] = 0

    def fill(self, slot: int, k: Tensor, v: Tensor) -> None:
        """A prompt's keys and values, [heads, tokens, head dim], positions 0 and on."""
        tokens = k.shape[1]
        first = max(0, tokens - self.window) if self.window is not None else 0
        self._first[slot] = first
        self.k[slot, :, : tokens - first] = k[:, first:]
        self.v[slot, :, : tokens - first] = v[:, first:]

    def append(self, slots: Sequence[int], index: Tensor, positions: Sequence[int], k: Tensor, v: Tensor) -> None:
        """One new token for each slot: k, v [n, heads, head dim]; ``index`` is ``slots`` as a tensor."""
        at = torch.tensor(self.places(slots, positions)[0]).to(index.device, non_blocking=True)
        self.k[index, :, at] = k
        self.v[index, :, at] = v

    def places(self, slots: Sequence[int], positions: Sequence[int]) -> tuple[Sequence[int], list[int], list[int]]:
        """Make room for a new token of each slot: the indices they go to, and first and end of what they attend to."""
        at = positions
        if self.window is not None:
            for slot, position in zip(slots, positions, strict=True):
                if position - self._first[slot] == self.k.shape[2]:
                    self._move_down(slot)
            at = [p - self._first[s] for s, p in zip(slots, positions, strict=True)]
        end = [i + 1 for i in at]
        first = [0] * len(end) if self.reach is None else [max(0, i - self.reach) for i in end]
        return at, first, end

    def _move_down(self, slot: int) -> None:
        assert self.window is not None
        for buffer in (self.k, self.v):
            buffer[slot, :, : self.window] = buffer[slot, :, self.window :].clone()
        self._first[slot] += self.window

    def seen(self, slot: int, position: int) -> tuple[Tensor, Tensor]:
        """Keys and values that the token at ``position`` attends to, [1, heads, tokens, head dim]."""
        last = position + 1 - self._first[slot]
        first = max(0, last - self.reach) if self.reach is not None else 0
        return self.k[slot, None, :, first:last], self.v[slot, None, :, first:last]


class DeltaState:
    """State of one Gated DeltaNet layer: the convolution's last inputs and the recurrent matrix.

    ``conv``: [slots + 1, channels, kernel - 1], the last slot being the padding row's.
    ``recurrent``: [slots, value heads, key dim, value dim], float32.
    """

    def __init__(
        self,
        slots: int,
        channels: int,
        kernel: int,
        shape: tuple[int, int, int],
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.conv = torch.zeros(slots + 1, channels, kernel - 1, dtype=dtype, device=device)
        self.recurrent = torch.zeros(slots, *shape, dtype=torch.float32, device=device)

    def reset(self, slot: int, position: int = 0) -> None:
        """A new request begins in ``slot``; its state is zero wherever it begins."""
        self.conv[slot].zero_()
        self.recurrent[slot].zero_()


LayerState = KvCache | DeltaState
