"""Make a trace of a routing record that another program wrote.

usage: python -m traces.convert source=FILE out=FILE [key=value ...]

  source=FILE      BigMoeOnEdge route_trace CSV, npz or npy of expert ids, routed_experts in JSON or JSON lines,
                   or JSON lines with one object a (token, layer)
  out=FILE         the trace (Parquet)
  format=NAME      bigmoe | arrays | routed_json | layer_rows   (default: told from the content)
  key=NAME         the array of ids in an npz that has several
  model=NAME       name of the model                            (default: what the source says, or its file name)
  n_experts=N      experts a layer, where the source does not say it
  top_k=N          keep only the N highest-ranked experts of each gate
  overwrite=true   replace an existing trace
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from policies.core.types import UserError
from traces.command import flag, parse, run, whole_number
from traces.format import Trace
from traces.readers import read
from traces.readers.common import Options, Report
from traces.storage import write_trace

KEYS = ("source", "out", "format", "key", "model", "n_experts", "top_k", "overwrite")


def main(argv: Sequence[str]) -> int:
    """Run the command; returns its exit code."""
    arguments = parse(argv, KEYS)
    if missing := [key for key in ("source", "out") if key not in arguments]:
        raise UserError(f"{missing[0]}= is missing; usage: python -m traces.convert source=FILE out=FILE")
    overwrite = flag(arguments, "overwrite")
    out = Path(arguments["out"])
    if out.exists() and not overwrite:
        raise UserError(f"{out} exists; choose another out= or add overwrite=true")
    options = Options(
        n_experts=whole_number(arguments, "n_experts"),
        model=arguments.get("model"),
        key=arguments.get("key"),
        top_k=whole_number(arguments, "top_k"),
    )
    trace, report = read(arguments["source"], options, arguments.get("format"))
    write_trace(out, trace)
    print(describe(trace, report))
    print(f"wrote    {out} ({out.stat().st_size:,} bytes)")
    return 0


def describe(trace: Trace, report: Report) -> str:
    """What was read, kept and dropped."""
    decode = sum(request.n_decode for request in trace.requests)
    layers = (
        "" if trace.layer_indices[-1] == trace.model.n_layers - 1 else f" (layers {layer_range(trace)} of the model)"
    )
    columns = ", ".join(trace.columns) or "none"
    lines = [
        f"read     {trace.source} as {report.format}",
        f"model    {trace.model.name}: {trace.model.n_layers} MoE layers{layers} x {trace.model.n_experts} experts, "
        f"top-{trace.model.top_k}",
        f"kept     {len(trace.requests)} requests, {decode} decode and {trace.n_tokens - decode} prefill tokens; "
        f"columns beside the ids: {columns}",
        f"dropped  {', '.join(f'{count} {reason}' for reason, count in report.dropped.items()) or 'nothing'}",
        *(f"changed  {count} {what}" for what, count in report.changed.items()),
        *(f"note     {note}" for note in report.notes),
        f"digest   {trace.digest}",
    ]
    return "\n".join(lines)


def layer_range(trace: Trace) -> str:
    """Layers of the original model: a range where they are contiguous, else all of them."""
    indices = trace.layer_indices
    if indices[-1] - indices[0] == len(indices) - 1:
        return f"{indices[0]} to {indices[-1]}"
    return ", ".join(map(str, indices))


if __name__ == "__main__":
    raise SystemExit(run(main, __doc__))
