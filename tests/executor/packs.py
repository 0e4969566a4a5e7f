"""Tiny checkpoints on disk, packs of them, and ways to break reads."""

from __future__ import annotations

import json
import queue
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tiny_models import random_model, tiny_config

from executor.checkpoint import open_folder
from executor.pack_writer import write_pack
from executor.reader import Completions
from executor.sources import IoOps
from executor.store import ExpertStore
from policies.core.messages import Fetch, FetchDone
from policies.core.types import FetchKind

FAMILIES = ("qwen3_moe", "olmoe", "mixtral", "qwen3_5_moe", "gemma4")


def wide_config(family: str, **changes: Any) -> Any:
    """A tiny model whose experts are wide enough for Q4_0."""
    width = {"mixtral": "intermediate_size", "olmoe": "intermediate_size"}.get(family, "moe_intermediate_size")
    return tiny_config(family, **{"hidden_size": 64, width: 32, **changes})


def save_checkpoint(folder: Path, family: str, stacked: bool = False, dtype: str = "bfloat16", **changes: Any) -> Any:
    """Write a random model as transformers does, per-expert or stacked; returns the model."""
    model = random_model(wide_config(family, **changes)).to(getattr(torch, dtype))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.save_pretrained(folder, save_original_format=not stacked)
    return model


def pack_of(folder: Path, out: Path, dtype: str, **options: Any) -> ExpertStore:
    """Pack a checkpoint folder and open the result."""
    source = open_folder(folder)
    try:
        write_pack(source, out, dtype, **options)
    finally:
        source.close()
    return ExpertStore.open(out)


def random_store(out: Path, dtype: str = "bf16", layers: int = 2, experts: int = 8) -> ExpertStore:
    """A small random pack."""
    from executor.pack import random_source

    overrides = {
        "hidden_size": 64,
        "moe_intermediate_size": 32,
        "num_hidden_layers": layers,
        "num_experts": experts,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "vocab_size": 32,
    }
    write_pack(random_source("demo", 3, overrides), out, dtype)
    return ExpertStore.open(out)


def model_experts(model: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Per layer ``(gate_up [E, 2I, H], down [E, H, I])`` of a transformers model."""
    state = model.state_dict()
    stacks = [name for name in state if name.endswith("experts.gate_up_proj")]
    return [(state[name], state[name.replace("gate_up_proj", "down_proj")]) for name in stacks]


def expert_tensor(store: ExpertStore, expert: int) -> torch.Tensor:
    """An expert's stride as it is in the file."""
    data = bytearray(store.experts_path.read_bytes()[store.offset(expert) :][: store.stride])
    return torch.frombuffer(data, dtype=torch.uint8)


def edit_tensors(folder: Path, edit: Callable[[dict[str, torch.Tensor]], None]) -> None:
    """Change the tensors of ``model.safetensors``."""
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def edit_json(path: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    """Change a JSON file."""
    values = json.loads(path.read_text())
    edit(values)
    path.write_text(json.dumps(values))


def fetches(experts: Sequence[int]) -> list[Fetch]:
    """One fetch per expert, into slots 0, 1, ..."""
    return [Fetch(100 + i, expert, i, FetchKind.DEMAND) for i, expert in enumerate(experts)]


def collect(completions: Completions, n: int) -> list[int]:
    """The fetch numbers of the next ``n`` completions; raises what was posted instead of one, and after 5 s."""
    done: list[int] = []
    while len(done) < n:
        try:
            posted = completions.get(timeout=5.0)
        except queue.Empty:
            raise AssertionError(f"only {len(done)} of {n} completions within 5 s") from None
        if isinstance(posted, BaseException):
            raise posted
        event, _ = posted
        assert isinstance(event, FetchDone)
        done.append(event.fetch)
    return done


class Faulty:
    """``os.preadv`` with a failure at the n-th read (from 1)."""

    def __init__(self, at: int, fail: Callable[[int, list[memoryview], int], int]) -> None:
        self.at, self.fail, self.calls = at, fail, 0
        self._real = IoOps().preadv

    def __call__(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        self.calls += 1
        if self.calls == self.at:
            return self.fail(fd, list(buffers), offset)
        return self._real(fd, buffers, offset)
