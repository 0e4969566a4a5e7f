"""Tiny models on the fast path: their experts as bytes in an arena, and a reader that copies them there."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch
from memory_world import MemoryReader
from tiny_models import DEVICE, make_decoder, tiny_config

from executor.experts import ExpertWeights
from executor.fast.decoder import FastDecoder
from executor.fast.ops import Ops, reference_ops, triton_ops
from executor.geometry import ExpertGeometry
from executor.model import Decoder
from executor.quant import dequantise_views, encode_expert
from policies.core.messages import FetchDone

CUDA = DEVICE.type == "cuda"
FAST_FAMILIES = ("qwen3_5_moe", "gemma4", "qwen3_moe", "mixtral")
WIDTH = {"mixtral": "intermediate_size"}


def fast_config(family: str, **changes: Any) -> Any:
    """A tiny model that Q4_0 and Triton can hold: widths of powers of two."""
    width = {WIDTH.get(family, "moe_intermediate_size"): 32}
    more = {"shared_expert_intermediate_size": 32} if family == "qwen3_5_moe" else {}
    heads = {"head_dim": 16, "global_head_dim": 32} if family == "gemma4" else {"head_dim": 16}
    if family == "qwen3_5_moe":
        more |= {"linear_key_head_dim": 16, "linear_value_head_dim": 16}
    return tiny_config(family, **{"hidden_size": 64, **width, **more, **heads, **changes})


def default_ops() -> Ops:
    return triton_ops() if CUDA else reference_ops()


class World:
    """A model's plain decoder and its experts, stored as ``stored`` says and meaning the same to both paths."""

    def __init__(self, model: Any, stored: str = "f32", dtype: torch.dtype = torch.float32, **options: Any) -> None:
        self.decoder, experts = make_decoder(model, dtype, **options)
        width = experts[0][0].down.shape[1]
        self.geometry = ExpertGeometry(stored, self.decoder.hidden, width)
        self.bytes, self.experts = [], []
        for table in experts:
            self.experts.append({})
            for number, (gate_up, down) in table.items():
                gate, up = gate_up.float().cpu().chunk(2)
                raw = np.zeros(self.geometry.stride_bytes, dtype=np.uint8)
                encode_expert(self.geometry, gate, up, down.float().cpu(), raw[: self.geometry.expert_bytes])
                self.bytes.append(torch.from_numpy(raw).to(DEVICE))
                self.experts[-1][number] = self.matrices(self.bytes[-1])

    def matrices(self, raw: torch.Tensor) -> ExpertWeights:
        views = {
            part.name: raw[part.offset : part.offset + part.n_bytes].view(getattr(torch, part.element)).view(part.shape)
            for part in self.geometry.parts
        }
        return ExpertWeights(*dequantise_views(views, self.decoder.dtype))

    def fast(self, arena: torch.Tensor, ops: Ops | None = None, **options: Any) -> FastDecoder:
        return FastDecoder(self.decoder, arena, self.geometry, ops or default_ops(), **{"graphs": CUDA, **options})

    def full_arena(self) -> torch.Tensor:
        """All experts, expert e in slot e."""
        return torch.cat(self.bytes)

    def twin(self) -> Decoder:
        """Another decoder over the same weights, with requests of its own."""
        d = self.decoder
        return Decoder(d.model, d.max_requests, d.max_tokens, predict=d.predict)


class ByteReader(MemoryReader):
    """Copies an expert's bytes into the arena, after a delay."""

    def __init__(self, world: World, arena: torch.Tensor, done: Any, **options: Any) -> None:
        self._world, self._arena = world, arena
        super().__init__(world.experts, None, done, **options)

    def _serve(self) -> None:
        stride = self._world.geometry.stride_bytes
        while (fetch := self._todo.get()) is not None:
            self.reads += 1
            if self.reads == self._fail_at:
                self._done.put(OSError(5, f"read of expert {fetch.expert} failed"))
                continue
            if self._delay_s:
                time.sleep(self._rng.random() * self._delay_s)
            self._arena[fetch.slot * stride : (fetch.slot + 1) * stride].copy_(self._world.bytes[fetch.expert])
            if CUDA:
                torch.cuda.current_stream().synchronize()
            self._done.put((FetchDone(fetch.fetch), time.perf_counter()))


class ByteCopies:
    """Copies for a reader that is polled; each is told to have ended at the third question after its start."""

    def __init__(self, world: World, arena: torch.Tensor) -> None:
        self._world, self._arena = world, arena
        self._ages: list[int] = []

    def start(self, piece: int, slot: int) -> None:
        stride = self._world.geometry.stride_bytes
        self._arena[slot * stride : (slot + 1) * stride].copy_(self._world.bytes[piece])
        if CUDA:
            torch.cuda.current_stream().synchronize()
        self._ages.append(0)

    def ended(self) -> int:
        self._ages = [age + 1 for age in self._ages]
        count = sum(age >= 3 for age in self._ages)
        del self._ages[:count]
        return count

    def close(self) -> None:
        self._ages.clear()


def fast_step(fast: FastDecoder, requests: list[int]) -> torch.Tensor:
    """One plain step, all experts resident, all requests in one group: logits [n, V]."""
    from policies.core.types import Phase

    slot, spec = fast.slots[0], fast.decoder.spec
    jobs = [(Phase.ENTRY, -1), *((Phase.JOB, layer) for layer in range(spec.n_layers)), (Phase.HEAD, spec.n_layers)]
    logits = torch.empty(0)
    for phase, layer in jobs:
        where = {layer * spec.n_experts + e: layer * spec.n_experts + e for e in range(spec.n_experts)}
        fast.launch(slot, phase, layer, requests, where)
        slot.wait()
        if phase is Phase.HEAD:
            logits = fast.logits(slot).clone()
        fast.collect(slot)
    return logits
