"""How a kernel is started, and in which mode: compiled where there is a GPU, interpreted on CPU tensors elsewhere.

Import this before a kernel is defined: triton reads the mode when a kernel is decorated.
"""

from __future__ import annotations

import os
from typing import Any

import torch
import triton
import triton.language as tl
from triton.runtime.jit import JITFunction

if "TRITON_INTERPRET" not in os.environ:
    triton.knobs.runtime.interpret = not torch.cuda.is_available()

INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))
"""The interpreter can neither run inline assembly nor compute in bf16; kernels then take a readable path."""


def _interpret_library() -> None:
    """Make triton's own functions, such as ``tl.sum``, callable by the interpreter.

    They were decorated when triton was first imported, perhaps by another library and before the mode was known.
    """
    from triton.runtime.interpreter import InterpretedFunction  # noqa: PLC0415 - needed in this mode only

    for module in (tl, tl.standard):
        for name, value in list(vars(module).items()):
            if isinstance(value, JITFunction):
                setattr(module, name, InterpretedFunction(value.fn))


if INTERPRETED.value:
    _interpret_library()


def launch(
    kernel: Any,
    grid: tuple[int, ...],
    *arguments: Any,
    warps: int = 4,
    early: bool = False,
    registers: int | None = None,
) -> None:
    """Start ``kernel`` on the current stream.

    ``early``: it may begin while the kernel before it still runs (programmatic dependent launch); it then waits
    for the other's results by itself.  Fusion of multiply and add is asked for by name, because triton 3.10
    changes the default.
    """
    options: dict[str, Any] = {"num_warps": warps, "enable_fp_fusion": True}
    if registers is not None:
        options["maxnreg"] = registers
    if early and not INTERPRETED.value:
        options["launch_pdl"] = True
    kernel[grid](*arguments, **options)
