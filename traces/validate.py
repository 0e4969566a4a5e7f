"""Check a trace file and say all that is wrong with it.

usage: python -m traces.validate FILE

Prints OK and the shapes (exit code 0), or one line for each problem (exit code 2).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import numpy as np

from policies.core.types import UserError
from traces.command import parse, run
from traces.convert import layer_range
from traces.format import Trace, TraceError
from traces.storage import KEYS
from traces.trace_file import TraceFile


def main(argv: Sequence[str]) -> int:
    """Run the command; returns its exit code."""
    arguments = parse(argv, (), positional="file")
    if "file" not in arguments:
        raise UserError("which file? usage: python -m traces.validate FILE")
    found = problems(arguments["file"])
    if isinstance(found, Trace):
        decode = sum(request.n_decode for request in found.requests)
        print(
            f"OK: {found.model.name}, {len(found.requests)} requests, {decode} decode and {found.n_tokens - decode} "
            f"prefill tokens, {found.model.n_layers} MoE layers (layers {layer_range(found)}) x "
            f"{found.model.n_experts} experts, top-{found.model.top_k}, columns: {', '.join(found.columns) or 'none'}, "
            f"digest {found.digest[:16]}"
        )
        return 0
    for problem in found:
        print(f"error: {problem}", file=sys.stderr)
    return 2


def problems(path: str) -> Trace | list[str]:
    """The trace if all is well with it, or what is wrong: of each request its first fault."""
    try:
        file = TraceFile(path)
        found = [] if _in_order(file) else [f"{path}: rows are not sorted by request, token, layer as the header says"]
        try:
            trace = file.read()
        except TraceError as error:
            found.append(str(error))
        else:
            return found or trace
    except TraceError as error:
        return [str(error)]
    for stored in file.requests:
        try:
            file.read(requests=[stored.request])
        except TraceError as error:
            if str(error) not in found:
                found.append(str(error))
    return found


def _in_order(file: TraceFile) -> bool:
    keys = file.keys()
    tokens = [stored.tokens for stored in file.requests]
    layers = file.model.n_layers
    expected = (
        np.repeat([stored.request for stored in file.requests], np.multiply(tokens, layers)),
        np.repeat(np.concatenate([np.arange(count) for count in tokens]), layers),
        np.tile(np.arange(layers), sum(tokens)),
    )
    return all(np.array_equal(keys[name], want) for name, want in zip(KEYS, expected, strict=True))


if __name__ == "__main__":
    raise SystemExit(run(main, __doc__))
