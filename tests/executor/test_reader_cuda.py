"""The copier on a GPU."""

from __future__ import annotations

import queue
import threading
import zlib
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from packs import collect, expert_tensor, fetches, random_store

from executor.copier import CudaCopier, MemoryReader
from executor.copy_stream import CopyStream
from executor.direct import DirectReader
from executor.reader import Completions, ReaderPool
from executor.slots import PinnedArena, SlotArena
from executor.sources import DiskSource, MemorySource
from policies.core.messages import FetchDone

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("staging", [1, 2, 8])
def test_experts_reach_their_device_slots(tmp_path: Path, staging: int) -> None:
    """Many fetches through few staging buffers: no buffer is used again before its copy has ended."""
    store = random_store(tmp_path / "p", "q4_0", layers=4, experts=16)
    completions: Completions = queue.SimpleQueue()
    slots = SlotArena(store, store.n_total, "cuda")
    arena, source = PinnedArena(staging, store.stride), DiskSource(store)
    pool = ReaderPool(source, CudaCopier(slots, arena, completions), completions)
    for round_ in range(20):
        experts = [(5 * e + round_) % store.n_total for e in range(store.n_total)]
        for fetch in fetches(experts):
            pool.submit(fetch)
        collect(completions, len(experts))
        for slot, expert in enumerate(experts):
            assert zlib.crc32(slots.slots[slot].cpu().numpy()) == store.checksum(expert)
    assert pool.alive
    pool.close()
    source.close()
    arena.close()
    assert not [t.name for t in threading.enumerate() if t.name.startswith(("reader-", "copier"))]


def test_from_pinned_memory(tmp_path: Path) -> None:
    store = random_store(tmp_path / "p")
    completions: Completions = queue.SimpleQueue()
    slots = SlotArena(store, store.n_total, "cuda")
    arena = PinnedArena(store.n_total, store.stride)
    source = MemorySource(store, arena.memory)
    reader = MemoryReader(arena, CudaCopier(slots, None, completions))
    for fetch in fetches(range(store.n_total)):
        reader.submit(fetch)
    collect(completions, store.n_total)
    for expert in range(store.n_total):
        assert torch.equal(slots.slots[expert].cpu(), expert_tensor(store, expert))
    reader.close()
    source.close()
    arena.close()


def test_the_driver_copies_from_pinned_memory_itself(tmp_path: Path) -> None:
    """More copies queued than there are events at first, in rounds that overwrite each other's slots."""
    store = random_store(tmp_path / "p", "q4_0", layers=4, experts=16)
    slots = SlotArena(store, store.n_total, "cuda")
    arena = PinnedArena(store.n_total, store.stride)
    source = MemorySource(store, arena.memory)
    reader = DirectReader(CopyStream(arena, slots), store.stride)
    for round_ in range(5):
        experts = [(5 * e + round_) % store.n_total for e in range(store.n_total)]
        orders = fetches(experts)
        for fetch in orders:
            reader.submit(fetch)
        ended: list[object] = []
        while len(ended) < len(orders):
            ended += [item[0] for item in reader.poll() if not isinstance(item, BaseException)]
        assert ended == [FetchDone(fetch.fetch) for fetch in orders]
        for slot, expert in enumerate(experts):
            assert zlib.crc32(slots.slots[slot].cpu().numpy()) == store.checksum(expert)
    reader.close()
    source.close()
    arena.close()


def test_copies_go_on_while_one_waits_until_it_is_due(tmp_path: Path) -> None:
    store = random_store(tmp_path / "p")
    completions: Completions = queue.SimpleQueue()
    slots = SlotArena(store, store.n_total, "cuda")
    arena, released = PinnedArena(store.n_total, store.stride), threading.Event()
    source, copier = MemorySource(store, arena.memory), CudaCopier(slots, None, completions)
    held, *others = fetches(range(store.n_total))

    def due(there_s: float) -> float:
        assert released.wait(10)
        return there_s

    copier.copy(held, arena.pieces[held.expert], due)
    for fetch in others:
        copier.copy(fetch, arena.pieces[fetch.expert])
    assert collect(completions, len(others)) == [fetch.fetch for fetch in others]
    released.set()
    assert collect(completions, 1) == [held.fetch]
    copier.close()
    source.close()
    arena.close()


def test_pinned_memory_is_of_the_exact_size(tmp_path: Path) -> None:
    """torch's own pinned allocator would give 2 MiB for 1 MiB and a page."""
    pages = 257
    arena = PinnedArena(1, pages * 4096)
    assert arena.arena.numel() == pages * 4096
    assert arena.arena.data_ptr() % 4096 == 0
    assert arena.arena.is_pinned()
    arena.close()


def test_closing_while_copies_are_queued(tmp_path: Path) -> None:
    store = random_store(tmp_path / "p")
    completions: Completions = queue.SimpleQueue()
    arena, source = PinnedArena(1, store.stride), DiskSource(store)
    pool = ReaderPool(source, CudaCopier(SlotArena(store, 16, "cuda"), arena, completions), completions)
    for fetch in fetches(range(16)):
        pool.submit(fetch)
    pool.close()
    source.close()
    arena.close()
    assert not [t.name for t in threading.enumerate() if t.name.startswith(("reader-", "copier"))]
