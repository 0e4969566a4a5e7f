"""Why logits of a model of real size differ from transformers': by rounding, or by gates that choose other experts?

    python -m benchmarks.gpu_logits out=DIR [dtype=bfloat16|float32] [layers=N] [steps=4]

Qwen3.6 in full size with random weights, the first steps of 8 empty requests, fed fixed tokens, decoded by

ours          the fast path on experts in Q4_0
batched_mm, grouped_mm, eager   transformers' three ways to run the same experts dequantised
exact         transformers (batched_mm) in float32 on the same weights, widened layer by layer

Pairs of these are compared twice: each with the experts of its own gates, and with the first taking the second's
(``imposed``; mixing weights from its own scores).  What remains then is rounding.  A row is a request's logits in one
step, its difference the size of the difference over the size of the second's logits.

rows.csv      a line a pair and row: difference, free and imposed; gates of this step that chose other experts; the
              request's first gate to do so (all gates before it chose the same, so that until there only rounding
              differs): its step and layer, the gap between the second's last chosen score and the next one, and the
              noise there, the root mean square difference of the two's scores.  ``gap_steps``: the gap in steps of bf16
gates.csv     a line a pair, kind (free or imposed), row and layer: relative difference of the gate's input, noise of
              its scores, gap, experts that the two do not share

float32: experts in float32 too.  Without a GPU: a tiny model, to see that it runs.
"""

from __future__ import annotations

import csv
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from benchmarks.gpu_world import GpuWorld, make_world, their_model
from executor.fast.decoder import FastDecoder
from executor.fast.ops import reference_ops, triton_ops
from policies.core.types import Phase, UserError
from traces.command import parse, run, whole_number

CUDA = torch.cuda.is_available()
REQUESTS = 8
PAIRS = (
    ("ours", "batched_mm"),
    ("grouped_mm", "batched_mm"),
    ("eager", "batched_mm"),
    ("ours", "exact"),
    ("batched_mm", "exact"),
)
CLOSE = 0.015
"""Rows that differ by more are called far."""


@dataclass(frozen=True, slots=True)
class Seen:
    """What one decode showed: ``logits`` [steps, R, V]; of every gate [steps, layers, R, ...] its ``inputs`` (normed),
    ``scores`` (before the softmax) and own choice ``ids``, sorted.
    """

    logits: Tensor
    inputs: Tensor
    scores: Tensor
    ids: Tensor


Decode = Callable[[Tensor | None], Seen]
"""``imposed`` [steps, layers, R, k]: experts to use instead of the gates' own."""


def tokens_of(step: int) -> list[int]:
    """What each request is fed."""
    return [3 + request + max(0, step - 1) for request in range(REQUESTS)]


def kept(values: Tensor) -> Tensor:
    """A copy on the host, as buffers are written again."""
    return values.to("cpu", torch.float32, copy=True)


class Gates:
    """Collects the gates of a decode in their order."""

    def __init__(self, steps: int, layers: int, top_k: int) -> None:
        self._size, self._top_k = (steps, layers), top_k
        self.inputs, self.scores, self.ids, self.logits = ([] for _ in range(4))  # type: list[Tensor], ...

    def add(self, inputs: Tensor, scores: Tensor, ids: Tensor) -> None:
        self.inputs.append(kept(inputs))
        self.scores.append(kept(scores))
        self.ids.append(ids.long().sort(-1).values.cpu())

    def seen(self) -> Seen:
        per_gate = (torch.stack(rows).unflatten(0, self._size) for rows in (self.inputs, self.scores, self.ids))
        return Seen(torch.stack(self.logits), *per_gate)


def ours(world: GpuWorld, fast: FastDecoder, steps: int, imposed: Tensor | None) -> Seen:
    """The fast path, one group."""
    spec, slot, requests = world.decoder.spec, fast.slots[0], range(REQUESTS)
    found = Gates(steps, spec.n_layers, spec.top_k)
    table = {expert: expert for expert in range(spec.n_total)}
    for step in range(steps):
        for request, token in zip(requests, tokens_of(step), strict=True):
            world.decoder.feed(request, token) if step else world.decoder.open(request, token)
        world.decoder.settle()
        for layer in range(-1, spec.n_layers + 1):
            phase = Phase.ENTRY if layer < 0 else Phase.JOB if layer < spec.n_layers else Phase.HEAD
            gated = layer + 1 < spec.n_layers
            given = None
            if imposed is not None and gated:
                given = (imposed[step, layer + 1] + (layer + 1) * spec.n_experts).tolist()
            fast.launch(slot, phase, layer, requests, table, given=given)
            slot.wait()
            if phase is Phase.HEAD:
                found.logits.append(kept(fast.logits(slot)))
            if gated:
                b, rows = slot.buffers, fast.plan.layers[layer + 1].router.weight.shape[0]
                own = torch.from_numpy(slot.ids[:REQUESTS].astype("int64") & 1023)
                found.add(b.x[:REQUESTS], b.logits(rows)[:REQUESTS, : spec.n_experts], own)
            fast.collect(slot)
    for request in requests:
        world.decoder.close(request)
    return found.seen()


def theirs(model: Any, way: str, world: GpuWorld, steps: int, imposed: Tensor | None) -> Seen:
    """transformers' modules and cache."""
    spec = world.decoder.spec
    found, cache = Gates(steps, spec.n_layers, spec.top_k), transformers.DynamicCache(config=world.config)
    model.set_experts_implementation("batched_mm" if way == "exact" else way)

    def gate(step: int, layer: int, module: nn.Module, given: tuple[Tensor, ...], result: tuple[Tensor, ...]) -> Any:
        scores, weights, ids = result
        found.add(given[0].view(REQUESTS, -1), scores, ids)
        if imposed is None:
            return None
        ids = imposed[step, layer].to(ids.device)
        chosen = scores.softmax(-1, dtype=torch.float).gather(1, ids)
        return scores, (chosen / chosen.sum(-1, keepdim=True)).to(weights.dtype), ids

    for step in range(steps):
        with ExitStack() as stack:
            if way == "exact":
                stack.enter_context(widened([model.model.embed_tokens, *model.model.layers, model.model.norm]))
                stack.enter_context(widened([model.lm_head]))
            for layer, module in enumerate(model.model.layers):
                stack.callback(module.mlp.gate.register_forward_hook(partial(gate, step, layer)).remove)
            fed = torch.tensor(tokens_of(step), device=world.arena.device)[:, None]
            found.logits.append(kept(model(fed, cache=cache, use_cache=True).logits[:, -1]))
    return found.seen()


@contextmanager
def widened(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Weights in float32 while their module runs, one module at a time."""
    narrow_of: dict[nn.Module, list[Tensor]] = {}

    def widen(module: nn.Module, _: Any) -> None:
        narrow_of[module] = [weight.data for weight in module.parameters()]
        for weight in module.parameters():
            weight.data = weight.data.float()

    def narrow(module: nn.Module, *_: Any) -> None:
        for weight, data in zip(module.parameters(), narrow_of.pop(module), strict=True):
            weight.data = data

    hooks = [module.register_forward_pre_hook(widen) for module in modules]
    hooks += [module.register_forward_hook(narrow) for module in modules]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def relative(a: Tensor, b: Tensor) -> Tensor:
    """Size of the difference over the size of ``b``, along the last dimension."""
    return (a - b).norm(dim=-1) / b.norm(dim=-1)


@dataclass(frozen=True, slots=True)
class Gap:
    """Two decodes gate by gate, [steps, layers, R]: see the module."""

    apart: Tensor  # experts that the two do not share
    inputs: Tensor
    noise: Tensor
    gap: Tensor
    last: Tensor  # the last chosen score

    @classmethod
    def between(cls, a: Seen, b: Seen) -> Gap:
        k = b.ids.shape[-1]
        best = b.scores.topk(k + 1, dim=-1).values
        shared = (a.ids[..., :, None] == b.ids[..., None, :]).sum((-1, -2))
        noise = (a.scores - b.scores).square().mean(-1).sqrt()
        return cls(k - shared, relative(a.inputs, b.inputs), noise, best[..., k - 1] - best[..., k], best[..., k - 1])

    def first(self, request: int) -> tuple[int, int] | None:
        """Step and layer of the request's first gate that chose other experts."""
        where = self.apart[:, :, request].nonzero()
        return None if not len(where) else (int(where[0, 0]), int(where[0, 1]))


def compare(pair: tuple[str, str], a: Seen, forced: Seen, b: Seen) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The lines of rows.csv and gates.csv for a pair."""
    name = " against ".join(pair)
    free, imposed = Gap.between(a, b), Gap.between(forced, b)
    rows, gates = [], []
    differences = [relative(seen.logits, b.logits) for seen in (a, forced)]
    same = [seen.logits.argmax(-1) == b.logits.argmax(-1) for seen in (a, forced)]
    steps, layers, requests = free.apart.shape
    for step in range(steps):
        for request in range(requests):
            at = free.first(request)
            row = {
                "pair": name,
                "step": step,
                "request": request,
                "free": float(differences[0][step, request]),
                "imposed": float(differences[1][step, request]),
                "same_likeliest": int(same[0][step, request]),
                "same_likeliest_imposed": int(same[1][step, request]),
                "gates_apart": int((free.apart[step, :, request] > 0).sum()),
                "gates_apart_imposed": int((imposed.apart[step, :, request] > 0).sum()),
            }
            if at is not None and at[0] <= step:
                here = (*at, request)
                row |= {"first_step": at[0], "first_layer": at[1], "gap": float(free.gap[here])}
                row |= {"noise": float(free.noise[here])}
                row |= {"gap_steps": row["gap"] / 2.0 ** (math.floor(math.log2(abs(float(free.last[here])))) - 7)}
            rows.append(row)
            for kind, found in (("free", free), ("imposed", imposed)):
                for layer in range(layers):
                    here = (step, layer, request)
                    line = {"pair": name, "kind": kind, "step": step, "request": request, "layer": layer}
                    line |= {"input_difference": float(found.inputs[here]), "noise": float(found.noise[here])}
                    gates.append(line | {"gap": float(found.gap[here]), "experts_apart": int(found.apart[here])})
    return rows, gates


def report(rows: Sequence[dict[str, Any]], gates: Sequence[dict[str, Any]]) -> None:
    """One pair: a summary, its farthest rows, and how the difference grows through their layers."""
    print(f"\n{rows[0]['pair']}: {len(rows)} rows")
    for kind, likeliest in (("free", "same_likeliest"), ("imposed", "same_likeliest_imposed")):
        values = sorted(row[kind] for row in rows)
        far = sum(value > CLOSE for value in values)
        print(
            f"  {kind:8} difference: least {values[0]:.2%}, median {values[len(values) // 2]:.2%}, most "
            f"{values[-1]:.2%}, {far} far; likeliest token the same in {sum(row[likeliest] for row in rows)}"
        )
    free = [gate for gate in gates if gate["kind"] == "free"]
    apart, gaps = sum(gate["experts_apart"] > 0 for gate in free), sorted(gate["gap"] for gate in free)
    print(f"  gates: {apart} of {len(free)} chose other experts; gap of all, median {gaps[len(gaps) // 2]:.4f}")
    firsts = {row["request"]: row for row in rows if "first_layer" in row}
    for request, row in sorted(firsts.items()):
        ratio = row["gap"] / row["noise"] if row["noise"] else float("nan")
        print(
            f"  request {request} first apart at step {row['first_step']}, layer {row['first_layer']:2}: gap "
            f"{row['gap']:.5f} = {row['gap_steps']:.1f} steps of bf16, {ratio:.2f} of the noise"
        )
    print("  step request    free  imposed  gates apart")
    for row in sorted(rows, key=lambda row: -row["free"])[:10]:
        print(
            f"  {row['step']:4} {row['request']:7} {row['free']:7.2%}  {row['imposed']:7.2%}  {row['gates_apart']:11}"
            + ("" if row["same_likeliest"] else "  another likeliest")
        )
    print("  % difference of the gates' inputs, layer by layer (* another expert), in the three rows that differ most")
    for row in sorted(rows, key=lambda row: -row["free"])[:3]:
        for kind in ("free", "imposed"):
            line = [g for g in gates if g["kind"] == kind and all(g[key] == row[key] for key in ("step", "request"))]
            cells = " ".join(f"{100 * g['input_difference']:.2f}" + "*" * min(2, g["experts_apart"]) for g in line)
            print(f"    step {row['step']}, request {row['request']}, {kind}: {cells}")


def write_csv(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    keys = list(dict.fromkeys(key for row in rows for key in row))
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, keys)
        writer.writeheader()
        writer.writerows(
            {key: f"{value:.6g}" if isinstance(value, float) else value for key, value in row.items()} for row in rows
        )


def main(argv: Sequence[str]) -> int:
    given = parse(argv, ("out", "dtype", "layers", "steps"))
    kind = given.get("dtype", "bfloat16")
    if kind not in {"bfloat16", "float32"}:
        raise UserError(f"dtype is {kind}, expected bfloat16 or float32")
    steps, layers = whole_number(given, "steps") or 4, whole_number(given, "layers")
    out = Path(given.get("out", "runs/gpu_logits"))
    out.mkdir(parents=True, exist_ok=True)
    torch.backends.cudnn.allow_tf32 = False
    device = torch.device("cuda" if CUDA else "cpu")
    stored = "q4_0" if kind == "bfloat16" else "f32"
    sizes: dict[str, Any] = {"layers": layers or (None if CUDA else 8), "requests": REQUESTS, "tokens": steps + 64}
    with torch.inference_mode():
        world = make_world(
            "qwen3_6_35b_a3b", stored=stored, slots=None, device=device, dtype=getattr(torch, kind), **sizes
        )
        fast = world.fast(triton_ops() if CUDA else reference_ops(), 1, graphs=False)
        model = their_model(world)
        decodes: dict[str, Decode] = {
            way: partial(theirs, model, way, world, steps) for way in ("batched_mm", "grouped_mm", "eager", "exact")
        }
        decodes["ours"] = partial(ours, world, fast, steps)
        seen: dict[str, Seen] = {}
        for name, decode in decodes.items():
            try:
                seen[name] = decode(None)
            except Exception as error:  # a way that this card or version lacks is a finding, too
                print(f"{name}: {type(error).__name__}: {str(error).splitlines()[0][:200]}")
        all_rows, all_gates = [], []
        for pair in PAIRS:
            if not set(pair) <= set(seen):
                continue
            a, b = (seen[name] for name in pair)
            rows, gates = compare(pair, a, decodes[pair[0]](b.ids), b)
            report(rows, gates)
            all_rows += rows
            all_gates += gates
            write_csv(out / "rows.csv", all_rows)
            write_csv(out / "gates.csv", all_gates)
    return 0


if __name__ == "__main__":
    sys.exit(run(main, __doc__))
