"""Train the demo model: a small Mixture-of-Experts language model on code and prose, byte by byte.

usage: python -m traces.demo.train code=DIR prose=DIR out=DIR [key=value ...]

  code=DIR prose=DIR  folders of text files (.py, .txt), one a domain; one file in twenty is held out
  out=DIR             the Hugging Face folder to write: model, tokenizer, loss.csv, report.json
  steps=N             optimiser steps                                     (default 3800)
  batch=N             sequences a step                                    (default 64)
  length=N            tokens a sequence, and the model's longest context  (default 1024)
  layers=N hidden=N experts=N top_k=N intermediate=N     the model's shape (default 12, 128, 32, 4, 64)
  rate=X              largest learning rate                               (default 0.004)
  balance=X           weight of the load-balancing loss                   (default 0.0002)
  seed=N              of initial weights and of the order of the text     (default 0)
  device=NAME         cuda or cpu                                         (default: cuda if there is one)
  compile=BOOL        through torch.compile                               (default: true on cuda)
  evaluate=N          steps between evaluations, which also save the model (default 1900)
  held_out=N          bytes of each domain that an evaluation reads        (default 400000)

Reduced for two CPU cores, about four minutes: steps=300 batch=8 length=256 layers=8 hidden=96 intermediate=32
"""

from __future__ import annotations

import csv
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from tqdm import tqdm

from policies.core.types import UserError
from traces.command import parse, run
from traces.demo.corpus import END, Domain, read_domain
from traces.demo.tokenizer import save_tokenizer

VOCABULARY = 264  # 256 bytes, the end of a document, and a multiple of 8
WARMUP_STEPS, LAST_RATE = 200, 0.05
SHARD_BYTES = "10MB"
KINDS: dict[str, Callable[[str], Any]] = {"int": int, "float": float, "str": str}
PATHS = ("code", "prose", "out")


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything that decides the weights, beside the text."""

    steps: int = 3800
    batch: int = 64
    length: int = 1024
    layers: int = 12
    hidden: int = 128
    experts: int = 32
    top_k: int = 4
    intermediate: int = 64
    rate: float = 0.004
    balance: float = 0.0002
    seed: int = 0
    device: str = ""
    compile: str = ""
    evaluate: int = 1900
    held_out: int = 400_000


def main(argv: Sequence[str]) -> int:
    """Run the command; returns its exit code."""
    arguments = parse(argv, (*PATHS, *(field.name for field in fields(Plan))))
    if missing := [key for key in PATHS if key not in arguments]:
        raise UserError(f"{missing[0]}= is missing; usage: python -m traces.demo.train code=DIR prose=DIR out=DIR")
    plan = read_plan({key: value for key, value in arguments.items() if key not in PATHS})
    domains = [read_domain("code", arguments["code"]), read_domain("prose", arguments["prose"])]
    report = train(plan, domains, Path(arguments["out"]))
    print(json.dumps(report, indent=2))
    return 0


def read_plan(arguments: Mapping[str, str]) -> Plan:
    """The plan of the command's words.  Raises UserError for a word that is no number."""
    values: dict[str, Any] = {}
    for field in fields(Plan):
        if field.name in arguments:
            try:
                values[field.name] = KINDS[str(field.type)](arguments[field.name])
            except ValueError:
                raise UserError(f"{field.name} is {arguments[field.name]}, expected a number") from None
    cuda = torch.cuda.is_available()
    plan = Plan(**{**values, "device": values.get("device") or ("cuda" if cuda else "cpu")})
    if plan.device == "cuda" and not cuda:
        raise UserError("device is cuda, but torch sees no CUDA device; use device=cpu")
    for name in ("steps", "batch", "length", "layers", "hidden", "experts", "top_k", "intermediate", "evaluate"):
        if getattr(plan, name) < 1:
            raise UserError(f"{name} is {getattr(plan, name)}, expected at least 1")
    return plan


def train(plan: Plan, domains: Sequence[Domain], out: Path) -> dict[str, Any]:
    """Train, evaluate and save; returns what ``report.json`` holds.  Each evaluation leaves a whole model behind."""
    torch.manual_seed(plan.seed)
    torch.backends.cuda.matmul.allow_tf32 = True
    model = new_model(plan).to(plan.device)
    balance = Balance(model, plan.top_k)
    optimiser = torch.optim.AdamW(
        parameter_groups(model), lr=plan.rate, betas=(0.9, 0.95), eps=1e-8, fused=plan.device == "cuda"
    )
    compiled = (plan.compile or str(plan.device == "cuda").lower()) == "true"
    loss_of = torch.compile(losses) if compiled else losses
    save_tokenizer(out, plan.length)
    history: list[dict[str, float]] = []
    report: dict[str, Any] = {}
    began = time.perf_counter()
    texts = batches(plan, domains)
    for step in tqdm(range(plan.steps), disable=None):
        for group in optimiser.param_groups:
            group["lr"] = plan.rate * rate_at(step, plan.steps)
        text = torch.from_numpy(next(texts)).to(plan.device, non_blocking=True).long()
        with torch.autocast(plan.device, torch.bfloat16, enabled=plan.device == "cuda"):
            language, uneven = loss_of(model, balance, text)
        torch.autograd.backward([language + plan.balance * uneven])
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)
        if step % 20 == 0 or step + 1 == plan.steps:
            row = {"step": step, "bits": language.item() / math.log(2), "balance": uneven.item(), "norm": norm.item()}
            history.append(row)
        if (step + 1) % plan.evaluate == 0 or step + 1 == plan.steps:
            found = {domain.name: evaluate(model, balance, domain, plan) for domain in domains}
            history[-1] |= {f"held_out_{name}": value["bits_per_byte"] for name, value in found.items()}
            report = {
                "plan": {field.name: getattr(plan, field.name) for field in fields(Plan)},
                "parameters": sum(p.numel() for p in model.parameters()),
                "step": step + 1,
                "tokens": (step + 1) * plan.batch * plan.length,
                "seconds": round(time.perf_counter() - began, 1),
                "held_out": found,
                "train_bits_per_byte": history[-1]["bits"],
                "text": {
                    d.name: {
                        "files": d.files,
                        "train_tokens": len(d.train),
                        "held_out_files": d.held_out_files,
                        "held_out_bytes": d.held_out_bytes,
                    }
                    for d in domains
                },
                "torch": torch.__version__,
            }
            save(model, out, report, history)
            tqdm.write(f"step {step + 1}: {report['seconds']} s, train {history[-1]['bits']:.3f}, held out {found}")
    return report


# ---------------------------------------------------------------------------- model


def new_model(plan: Plan) -> Any:
    """A Qwen3-MoE model of the plan's shape with new weights."""
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig  # noqa: PLC0415
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS  # noqa: PLC0415

    heads = max(1, plan.hidden // 32)
    config_class: Any = Qwen3MoeConfig
    auto: Any = AutoModelForCausalLM
    config = config_class(
        vocab_size=VOCABULARY,
        hidden_size=plan.hidden,
        num_hidden_layers=plan.layers,
        num_attention_heads=heads,
        num_key_value_heads=max(1, heads // 2),
        head_dim=32,
        num_experts=plan.experts,
        num_experts_per_tok=plan.top_k,
        moe_intermediate_size=plan.intermediate,
        intermediate_size=plan.intermediate * plan.top_k,
        norm_topk_prob=True,
        max_position_embeddings=plan.length,
        router_aux_loss_coef=plan.balance,
        bos_token_id=None,
        eos_token_id=END,
        pad_token_id=END,
    )
    ALL_EXPERTS_FUNCTIONS.register("all_at_once", all_at_once)
    model = auto.from_config(config, dtype=torch.float32)
    model.set_experts_implementation("all_at_once")
    for name, weight in model.named_parameters():
        if name.endswith("gate.weight"):
            nn.init.normal_(weight, std=0.02)  # nearly alike at first, so that every expert learns
        elif weight.dim() > 1:
            depth = math.sqrt(2 * plan.layers) if name.endswith(("o_proj.weight", "down_proj")) else 1.0
            nn.init.normal_(weight, std=weight.shape[-1] ** -0.5 / depth)
    return model


def all_at_once(experts: Any, hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """Every expert for every token, as two products: at this size faster than sorting tokens by expert."""
    mix = torch.zeros(len(hidden), experts.num_experts, dtype=weights.dtype, device=weights.device)
    mix = mix.scatter(1, ids, weights)
    both = functional.linear(hidden, experts.gate_up_proj.flatten(0, 1))
    gate, up = both.view(len(hidden), experts.num_experts, 2, experts.intermediate_dim).unbind(2)
    inner = functional.silu(gate) * up * mix[..., None]
    return functional.linear(inner.flatten(1), experts.down_proj.transpose(0, 1).flatten(1)).to(hidden.dtype)


class Balance:
    """The load-balancing loss of Switch Transformers (Fedus et al. 2021, eq. 4), layer by layer over the whole batch.

    For each layer E times the sum over experts of (share of tokens that chose it) x (mean probability); ``top_k`` if
    all are alike.  The whole batch, so that a layer may give experts to one domain.
    """

    def __init__(self, model: Any, top_k: int) -> None:
        self._calls: list[tuple[Tensor, Tensor]] = []
        self._top_k = top_k
        for layer in model.model.layers:
            layer.mlp.gate.register_forward_hook(self._remember)

    def _remember(self, gate: nn.Module, inputs: object, output: tuple[Tensor, Tensor, Tensor]) -> None:
        self._calls.append((output[0], output[2]))

    def start(self) -> None:
        """Forget the gates of the forward before."""
        self._calls.clear()

    def uses(self) -> Tensor:
        """How often the last forward chose each expert, [layers, E]."""
        chosen = [torch.zeros_like(logits, dtype=torch.float32).scatter(1, ids, 1.0) for logits, ids in self._calls]
        return torch.stack(chosen).sum(1)

    def loss(self) -> Tensor:
        """Mean over the layers of the last forward."""
        found = []
        for logits, ids in self._calls:
            chosen = torch.zeros_like(logits).scatter(1, ids, 1.0).mean(0)
            found.append(logits.shape[-1] * (chosen * logits.float().softmax(-1).mean(0)).sum())
        return torch.stack(found).mean()


def losses(model: Any, balance: Balance, text: Tensor) -> tuple[Tensor, Tensor]:
    """Mean cross entropy of every next token in nats, and the load-balancing loss.  ``text``: [batch, length + 1]."""
    balance.start()
    logits = model(input_ids=text[:, :-1], use_cache=False).logits
    language = functional.cross_entropy(logits.float().flatten(0, 1), text[:, 1:].flatten())
    return language, balance.loss()


def parameter_groups(model: Any) -> list[dict[str, Any]]:
    """Weight decay for matrices, none for norms."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    return [
        {"params": matrices, "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]


def rate_at(step: int, steps: int) -> float:
    """Share of the largest learning rate: linear warm-up, then half a cosine down to ``LAST_RATE``."""
    warmup = min(WARMUP_STEPS, steps // 10 + 1)
    if step < warmup:
        return (step + 1) / warmup
    done = (step - warmup) / max(1, steps - warmup)
    return LAST_RATE + (1 - LAST_RATE) * 0.5 * (1 + math.cos(math.pi * done))


def batches(plan: Plan, domains: Sequence[Domain]) -> Iterator[np.ndarray[Any, Any]]:
    """Random windows, int16 [batch, length + 1]: as many of one domain as of the other."""
    rng = np.random.default_rng(plan.seed)
    window = np.arange(plan.length + 1)
    while True:
        rows = []
        for row in range(plan.batch):
            stream = domains[row % len(domains)].train
            start = rng.integers(max(1, len(stream) - plan.length - 1))
            rows.append(stream[(start + window) % len(stream)])
        yield np.stack(rows)


# ---------------------------------------------------------------------------- evaluation


def evaluate(model: Any, balance: Balance, domain: Domain, plan: Plan) -> dict[str, float]:
    """Bits per byte of the held-out text, each window from an empty context (``END`` tokens are not counted).

    ``hottest_30``: share of a layer's selections that go to the hottest 30% of its experts, mean over the layers.
    """
    model.eval()
    stream = np.append(np.int16(END), domain.held_out)
    rows = min(len(stream) - 1, plan.held_out) // plan.length
    if rows < 1:
        raise UserError(
            f"{domain.name} holds out {len(stream) - 1} bytes, less than length {plan.length}; lower length"
        )
    starts = np.linspace(0, len(stream) - 1 - plan.length, rows).astype(int)
    nats, counted = 0.0, 0
    uses = torch.zeros(plan.layers, plan.experts, device=plan.device)
    for first in range(0, rows, plan.batch):
        text = np.stack([stream[start : start + plan.length + 1] for start in starts[first : first + plan.batch]])
        tokens = torch.from_numpy(text).to(plan.device).long()
        balance.start()
        with torch.no_grad(), torch.autocast(plan.device, torch.bfloat16, enabled=plan.device == "cuda"):
            logits = model(input_ids=tokens[:, :-1], use_cache=False).logits
        target = tokens[:, 1:].flatten()
        loss = functional.cross_entropy(logits.float().flatten(0, 1), target, reduction="none")
        nats += loss[target != END].sum().item()
        counted += int((target != END).sum())
        uses += balance.uses()
    model.train()
    hottest = uses.sort(descending=True).values[:, : math.ceil(0.3 * plan.experts)].sum(-1) / uses.sum(-1)
    return {"bits_per_byte": nats / counted / math.log(2), "hottest_30": hottest.mean().item()}


def save(model: Any, out: Path, report: Mapping[str, Any], history: Sequence[Mapping[str, float]]) -> None:
    """The weights in bfloat16, the report and the loss curve."""
    from transformers import AutoModelForCausalLM  # noqa: PLC0415

    auto: Any = AutoModelForCausalLM
    copy = auto.from_config(model.config, dtype=torch.bfloat16)
    copy.load_state_dict(model.state_dict())
    copy.save_pretrained(out, max_shard_size=SHARD_BYTES)
    (out / "report.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    names = list(dict.fromkeys(name for row in history for name in row))
    with (out / "loss.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, names)
        writer.writeheader()
        writer.writerows({name: round(value, 5) for name, value in row.items()} for row in history)


if __name__ == "__main__":
    raise SystemExit(run(main, __doc__))
