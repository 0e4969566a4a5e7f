"""Compile for a GPU that is not here every kernel that the calls of ``kernel_calls`` start; print their names.

    python compile_ahead.py CAPABILITY

Runs in a process of its own, because a test's process may have the kernels in the interpreter's mode.
"""

from __future__ import annotations

import os
import sys

os.environ["TRITON_INTERPRET"] = "0"

from typing import Any

import kernel_calls
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

_TYPES = {torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.int32: "*i32"}
_TYPES |= {torch.int16: "*i16"}


def _type(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return _TYPES[value.dtype]
    return "fp32" if isinstance(value, float) else "i32"


def compiled(kernel: Any, arguments: tuple[Any, ...], capability: int, options: dict[str, Any]) -> Any:
    """The kernel as a call with these arguments on a GPU of this capability would compile it."""
    signature: dict[str, str] = {}
    constants: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], list[list[Any]]] = {}
    for i, (parameter, value) in enumerate(zip(kernel.params, arguments, strict=True)):
        if parameter.is_constexpr:
            signature[parameter.name] = "constexpr"
            constants[i,] = value
        else:
            signature[parameter.name] = _type(value)
            if isinstance(value, torch.Tensor) or (isinstance(value, int) and value % 16 == 0):
                attributes[i,] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constants, attributes)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def main() -> None:
    capability = int(sys.argv[1])
    done: set[Any] = set()

    def start(kernel: Any, grid: Any, *arguments: Any, warps: int = 4, early: bool = False, **_: Any) -> None:
        name = f"{kernel.fn.__module__.rpartition('.')[2]}.{kernel.fn.__name__}"
        shown = tuple(_type(a) if isinstance(a, torch.Tensor) else a for a in arguments)
        if (name, warps, early, *shown) not in done:
            done.add((name, warps, early, *shown))
            options = {"num_warps": warps, "enable_fp_fusion": True, "launch_pdl": early}
            compiled(kernel, arguments, capability, options)
            print(name, flush=True)

    kernel_calls.bind(start)
    for call in kernel_calls.CALLS:
        call()


if __name__ == "__main__":
    main()
