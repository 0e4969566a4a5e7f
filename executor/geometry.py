"""Where the matrices of one expert lie inside its bytes.

Owns the byte layout of an expert for each weight type.  Knows nothing of files, models or tensors' values.

Matrices are ``[out_features, in_features]``, row-major.  ``gate`` and ``up`` are ``[I, H]`` and adjoin, so
that together they are one matrix ``gate_up [2I, H]``; ``down`` is ``[H, I]``.

``q4_0`` uses the *split* form: all nibbles of gate, up and down, then all their fp16 scales.  Inside a row
the nibbles keep GGUF's order (byte ``j`` of a block of 32 holds weight ``j`` in its low half and weight
``j + 16`` in its high half), so a GGUF block is rearranged without loss.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from executor.errors import PackError, shown

ALIGNMENT_BYTES = 4096
"""Direct reads need aligned offsets, lengths and buffers; a page is enough on every file system seen."""

BLOCK = 32
"""Weights that share a scale in Q4_0."""

BLOCK_BYTES = 18
"""A Q4_0 block as GGUF stores it: an fp16 scale and 16 bytes of nibbles."""

DTYPES = ("q4_0", "bf16", "f32")
"""What an expert's weights can be stored as."""

ELEMENT_BYTES = {"uint8": 1, "float16": 2, "bfloat16": 2, "float32": 4}


def aligned(n_bytes: int) -> int:
    """``n_bytes`` rounded up to a whole number of pages."""
    return -(-n_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


@dataclass(frozen=True, slots=True)
class Part:
    """One matrix inside an expert: ``element`` is the name of a torch dtype."""

    name: str
    offset: int
    shape: tuple[int, int]
    element: str

    @property
    def n_bytes(self) -> int:
        """Bytes of the matrix."""
        return prod(self.shape) * ELEMENT_BYTES[self.element]


@dataclass(frozen=True, slots=True)
class ExpertGeometry:
    """Byte layout of one expert of width ``intermediate`` in a model of width ``hidden``."""

    dtype: str
    hidden: int
    intermediate: int

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise PackError(f"dtype {shown(self.dtype)} is unknown; use one of {', '.join(DTYPES)}")
        if self.hidden < 1 or self.intermediate < 1:
            raise PackError(f"an expert of {self.intermediate} x {self.hidden} weights is empty")
        if self.dtype == "q4_0" and (self.hidden % BLOCK or self.intermediate % BLOCK):
            raise PackError(
                f"q4_0 needs multiples of {BLOCK}, experts here are {self.intermediate} x {self.hidden}; use bf16"
            )

    @property
    def parts(self) -> tuple[Part, ...]:
        """The matrices in the order of their bytes."""
        h, i = self.hidden, self.intermediate
        shapes: tuple[tuple[str, tuple[int, int], str], ...]
        if self.dtype == "q4_0":
            shapes = (
                ("gate_up_nibbles", (2 * i, h // 2), "uint8"),
                ("down_nibbles", (h, i // 2), "uint8"),
                ("gate_up_scales", (2 * i, h // BLOCK), "float16"),
                ("down_scales", (h, i // BLOCK), "float16"),
            )
        else:
            element = "bfloat16" if self.dtype == "bf16" else "float32"
            shapes = (("gate_up", (2 * i, h), element), ("down", (h, i), element))
        parts: list[Part] = []
        offset = 0
        for name, shape, element in shapes:
            parts.append(Part(name, offset, shape, element))
            offset += parts[-1].n_bytes
        return tuple(parts)

    @property
    def expert_bytes(self) -> int:
        """Bytes of one expert's weights, without padding."""
        weights = 3 * self.hidden * self.intermediate
        if self.dtype == "q4_0":
            return weights // BLOCK * BLOCK_BYTES
        return weights * (2 if self.dtype == "bf16" else 4)

    @property
    def stride_bytes(self) -> int:
        """Bytes from one expert to the next: the weights padded to whole pages."""
        return aligned(self.expert_bytes)
