"""What a job is told: one small block of int32, written on the host and copied to the device as the job's first act.

Owns the layout.  Whatever differs from job to job stands here, so that a graph holds no address that depends on data.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

SEQUENCE_LIMIT = 1 << 20
"""Sequence numbers begin again here: with an expert's id below they must fit into an int32."""

_FIELD = 16
"""Every field begins at a multiple of this, so that kernels may load it in wide words."""


class Descriptor:
    """``tile`` tokens of ``top_k`` experts each.  On the device, by name (``tokens`` n gives the first n of each):

    ``rows`` request row or -1; ``tokens`` to embed; ``positions``; ``at`` place in the cache for this token; ``first``
    and ``end`` the places that it attends to; ``slots`` [n, top_k] of its experts; ``given`` [n, top_k] imposed experts
    or -1; ``sequence`` [1] the job's number.
    """

    def __init__(self, tile: int, top_k: int, device: torch.device) -> None:
        self.tile, self.top_k = tile, top_k
        line = -(-tile // _FIELD) * _FIELD
        table = -(-tile * top_k // _FIELD) * _FIELD
        self._start = {name: _FIELD + i * line for i, name in enumerate(("rows", "tokens", "positions", "at"))}
        self._start |= {"first": _FIELD + 4 * line, "end": _FIELD + 5 * line}
        self._start |= {"slots": _FIELD + 6 * line, "given": _FIELD + 6 * line + table}
        words = _FIELD + 6 * line + 2 * table
        self.host = torch.full((words,), -1, dtype=torch.int32, pin_memory=device.type == "cuda")
        self.device = torch.full((words,), -1, dtype=torch.int32, device=device)
        self._bytes = memoryview(self.host.numpy()).cast("B")
        self._nothing = (-1,) * tile
        # From the beginning to the end of `slots`, for each padded size.
        lines = [6 * f"{n}i{4 * (line - n)}x" for n in range(tile + 1)]
        self._layouts = [struct.Struct(f"=i{4 * (_FIELD - 1)}x{lines[n]}{n * top_k}i") for n in range(tile + 1)]
        self._imposed = False

    def copy(self) -> None:
        """Host to device, on the current stream."""
        self.device.copy_(self.host, non_blocking=True)

    def field(self, name: str, n: int) -> Tensor:
        """The first ``n`` tokens of a field, on the device."""
        if name == "sequence":
            return self.device[:1]
        start = self._start[name]
        if name in {"slots", "given"}:
            return self.device[start : start + n * self.top_k].view(n, self.top_k)
        return self.device[start : start + n]

    def tell(  # noqa: PLR0917 - the fields, in their order
        self,
        sequence: int,
        padded: int,
        rows: Sequence[int],
        tokens: Sequence[int] = (),
        positions: Sequence[int] = (),
        at: Sequence[int] = (),
        first: Sequence[int] = (),
        end: Sequence[int] = (),
        slots: Sequence[int] = (),
    ) -> None:
        """Fill the host's side; the job that it told before must have run.

        Fields hold a value for each token (``slots``: ``top_k``) or none.  What is missing up to ``padded`` tokens is
        -1: padding has no row, and none of its pairs has a slot.
        """
        values = [sequence]
        for line in (rows, tokens, positions, at, first, end):
            values += line
            if (missing := padded - len(line)) > 0:
                values += self._nothing[:missing]
        values += slots
        if (missing := padded * self.top_k - len(slots)) > 0:
            values += [-1] * missing
        self._layouts[padded].pack_into(self._bytes, 0, *values)  # at one time: a call for each field takes longer

    def impose(self, given: Sequence[int] | None) -> None:
        """The experts to use instead of the gate's own, ``top_k`` for each token, or None."""
        if given is not None:
            self._put_given(given)
        elif self._imposed:
            self._put_given([-1] * (self.tile * self.top_k))
        self._imposed = given is not None

    def _put_given(self, values: Sequence[int]) -> None:
        ints(len(values)).pack_into(self._bytes, 4 * self._start["given"], *values)


@lru_cache(maxsize=1024)
def ints(count: int) -> struct.Struct:
    """So many int32 in a row."""
    return struct.Struct(f"={count}i")
