"""Reader threads: what arrives, what is counted, and that every fault is heard of within seconds."""

from __future__ import annotations

import errno
import os
import queue
import threading
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch
from packs import Faulty, collect, expert_tensor, fetches, random_store

from executor.errors import FetchError, PackError
from executor.reader import Completions, LandingClosed, ReaderPool, SlotLanding, process_read_bytes
from executor.slots import SlotArena
from executor.sources import (
    BUFFERED,
    DIRECT,
    DROPPED,
    DiskSource,
    IoOps,
    MemorySource,
    ReadMode,
    file_system_of,
    page_aligned,
)
from executor.store import ExpertStore
from policies.core.messages import Fetch
from policies.core.types import UserError


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> ExpertStore:
    """Strides of three pages."""
    return random_store(tmp_path_factory.mktemp("reader") / "pack")


class World:
    """A source, a pool and slots for every expert of a pack."""

    def __init__(self, source: Any, **options: Any) -> None:
        self.source = source
        self.completions: Completions = queue.SimpleQueue()
        self.slots = SlotArena(source.store, source.store.n_total)
        self.pool = ReaderPool(source, SlotLanding(self.slots.buffers, self.completions), self.completions, **options)

    def fetch(self, experts: list[int]) -> list[int]:
        for fetch in fetches(experts):
            self.pool.submit(fetch)
        return collect(self.completions, len(experts))

    def close(self) -> None:
        self.pool.close()
        self.source.close()


@pytest.fixture
def worlds() -> Iterator[Any]:
    """Makes worlds and checks that each leaves no thread behind."""
    made: list[World] = []

    def make(source: Any, **options: Any) -> World:
        made.append(World(source, **options))
        return made[-1]

    yield make
    for world in made:
        world.close()
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("reader-")]


# ---------------------------------------------------------------- what arrives


@pytest.mark.parametrize("readers", [1, 3, 8])
def test_every_expert_arrives_in_its_slot(store: ExpertStore, worlds: Any, readers: int) -> None:
    world = worlds(DiskSource(store), readers=readers)
    experts = list(reversed(range(store.n_total)))
    assert sorted(world.fetch(experts)) == list(range(100, 100 + store.n_total))
    for slot, expert in enumerate(experts):
        assert torch.equal(world.slots.slots[slot], expert_tensor(store, expert))
    counters = world.pool.counters
    assert (counters.fetches, counters.reads) == (store.n_total, store.n_total)
    assert counters.bytes_requested == counters.bytes_read == store.n_total * store.stride


def test_each_byte_is_read_once(store: ExpertStore, worlds: Any) -> None:
    """One read an expert, at its offset, of its stride; nothing is read ahead."""
    calls: list[tuple[int, int]] = []

    def preadv(fd: int, buffers: Any, offset: int) -> int:
        calls.append((offset, len(buffers[0])))
        return os.preadv(fd, buffers, offset)

    world = worlds(DiskSource(store, ops=IoOps(preadv=preadv)), readers=2)
    del calls[:]  # the probe
    world.fetch([3, 1, 4])
    assert sorted(calls) == [(store.offset(e), store.stride) for e in (1, 3, 4)]


def test_from_memory(store: ExpertStore, worlds: Any) -> None:
    source = MemorySource(store, page_aligned(store.n_total * store.stride))
    world = worlds(source, verify=True)
    world.fetch(list(range(store.n_total)))
    for expert in range(store.n_total):
        assert torch.equal(world.slots.slots[expert], expert_tensor(store, expert))
    assert not source.mode.measures_disk
    with pytest.raises(PackError, match="arena of 4096 bytes"):
        MemorySource(store, page_aligned(4096))


def test_the_counter_of_the_kernel_agrees(store: ExpertStore, worlds: Any) -> None:
    source = DiskSource(store)
    before = process_read_bytes()
    if before is None or not source.mode.measures_disk or source.mode.file_system == "overlay":
        source.close()
        pytest.skip(f"no disk to count: {source.mode.describe()}")
    world = worlds(source)
    world.fetch(list(range(store.n_total)))
    after = process_read_bytes()
    assert after is not None
    # other tests' threads are gone; imports may still read a little
    assert after - before >= world.pool.counters.bytes_read


def test_slots_are_page_aligned_views(store: ExpertStore) -> None:
    slots = SlotArena(store, 3)
    assert all(slot.data_ptr() % 4096 == 0 for slot in slots.slots)
    slots.buffers[1][: store.stride] = bytes(expert_tensor(store, 5).numpy())
    for name, expected in store.views(expert_tensor(store, 5)).items():
        assert torch.equal(slots.views[1][name], expected)
        assert slots.views[1][name].untyped_storage().data_ptr() == slots.arena.data_ptr()
    assert SlotArena(store, 0).slots == ()


def test_too_many_slots_are_refused(store: ExpertStore) -> None:
    with pytest.raises(PackError, match="more than is free"):
        SlotArena(store, 1 << 45)


# ---------------------------------------------------------------- direct or not


def refuse_direct(at_open: bool) -> IoOps:
    """A file system that has no direct reads, and says so at open or only at the read."""
    direct: set[int] = set()

    def open_(path: Path, flags: int) -> int:
        if flags & os.O_DIRECT and at_open:
            raise OSError(errno.EINVAL, "Invalid argument")
        fd = os.open(path, flags & ~os.O_DIRECT)
        (direct.add if flags & os.O_DIRECT else direct.discard)(fd)
        return fd

    def preadv(fd: int, buffers: Any, offset: int) -> int:
        if fd in direct:
            raise OSError(errno.EINVAL, "Invalid argument")
        return os.preadv(fd, buffers, offset)

    return IoOps(open_, preadv)


@pytest.mark.skipif(not hasattr(os, "O_DIRECT"), reason="this platform has no direct reads")
@pytest.mark.parametrize("at_open", [True, False])
def test_direct_reads_are_probed_by_reading(store: ExpertStore, worlds: Any, at_open: bool) -> None:
    world = worlds(DiskSource(store, ops=refuse_direct(at_open)))
    mode = world.source.mode
    assert (mode.requested, mode.effective) == (DIRECT, DROPPED)
    assert mode.reason == ("open" if at_open else "read") + ": Invalid argument"
    assert not mode.measures_disk
    assert mode.describe()["reason"] == mode.reason
    world.fetch([0, 5])
    assert torch.equal(world.slots.slots[1], expert_tensor(store, 5))


def test_buffered_on_request(store: ExpertStore, worlds: Any) -> None:
    world = worlds(DiskSource(store, buffered=True), verify=True)
    assert world.source.mode.requested == BUFFERED
    assert world.source.mode.reason == "asked for"
    world.fetch(list(range(store.n_total)))


def test_a_file_that_cannot_be_read_at_all(store: ExpertStore) -> None:
    def preadv(fd: int, buffers: Any, offset: int) -> int:
        raise OSError(errno.EIO, "Input/output error")

    with pytest.raises(PackError, match="cannot be read: read: Input/output error"):
        DiskSource(store, ops=IoOps(preadv=preadv))


@pytest.mark.parametrize(
    ("effective", "file_system", "expected"),
    [(DIRECT, "ext4", True), (DIRECT, "tmpfs", False), (DROPPED, "ext4", False), (BUFFERED, "xfs", False)],
)
def test_what_measures_a_disk(effective: str, file_system: str, expected: bool) -> None:
    assert ReadMode(DIRECT, effective, "", file_system).measures_disk is expected


def test_the_file_system_is_known(tmp_path: Path) -> None:
    assert file_system_of(tmp_path)
    assert file_system_of(tmp_path / "nowhere") == "unknown"


# ---------------------------------------------------------------- faults


def broken(store: ExpertStore, fail: Any, at: int = 3) -> DiskSource:
    """A source whose ``at``-th read after the probe fails."""
    faulty = Faulty(1 << 30, fail)
    source = DiskSource(store, ops=IoOps(preadv=faulty))
    faulty.calls, faulty.at = 0, at
    return source


def eio(fd: int, buffers: list[memoryview], offset: int) -> int:
    raise OSError(errno.EIO, "Input/output error")


def end_of_file(fd: int, buffers: list[memoryview], offset: int) -> int:
    return 0


def killed(fd: int, buffers: list[memoryview], offset: int) -> int:
    raise SystemExit


def flipped(fd: int, buffers: list[memoryview], offset: int) -> int:
    got = os.preadv(fd, buffers, offset)
    buffers[0][100] ^= 1
    return got


@pytest.mark.parametrize(
    ("fail", "reason"),
    [
        (eio, "Input/output error at byte 0"),
        (end_of_file, "short read, 0 of 12288 bytes; run python -m executor.verify"),
        (killed, "the reader ended with SystemExit"),
        (flipped, "its checksum differs; run python -m executor.verify"),
    ],
)
def test_a_fault_names_the_expert_and_the_offset(store: ExpertStore, worlds: Any, fail: Any, reason: str) -> None:
    world = worlds(broken(store, fail), readers=1, verify=True)
    with pytest.raises(FetchError) as caught:
        world.fetch([0, 1, 11, 2])
    error = caught.value
    assert str(error).startswith(f"expert 1:3 at offset {11 * store.stride} of experts.bin: {reason}")
    assert len(str(error).splitlines()) == 1
    assert (error.expert, error.label, error.offset) == (11, "1:3", store.offset(11))
    assert isinstance(error, UserError)
    if fail is killed:
        world.pool._threads[0].join(5)
        assert not world.pool.alive
    else:
        assert collect(world.completions, 1) == [103]  # the others go on
        assert world.pool.alive


@pytest.mark.parametrize("sizes", [(4096,), (8192, 4096), (5000, 100, 4096)])
def test_short_reads_are_continued(store: ExpertStore, worlds: Any, sizes: tuple[int, ...]) -> None:
    """A direct read that stops at an odd place goes on from the page before it."""
    left = list(sizes)

    def short(fd: int, buffers: Any, offset: int) -> int:
        if not left or offset < store.stride:
            return os.preadv(fd, buffers, offset)
        return os.preadv(fd, [buffers[0][:8192]], offset) and left.pop(0)

    source = DiskSource(store)
    source._ops = IoOps(preadv=short)
    world = worlds(source, readers=1, verify=True)
    world.fetch([5])
    assert torch.equal(world.slots.slots[0], expert_tensor(store, 5))
    assert world.pool.counters.bytes_read >= store.stride


def test_reads_that_never_get_on_end(store: ExpertStore, worlds: Any) -> None:
    source = DiskSource(store)
    if source.mode.effective != DIRECT:
        source.close()
        pytest.skip("no direct reads here")
    source._ops = IoOps(preadv=lambda fd, buffers, offset: 100)
    world = worlds(source, readers=1)
    with pytest.raises(FetchError, match="short read, 100 of 12288"):
        world.fetch([0])


def test_a_pack_that_is_cut_while_it_is_open(store: ExpertStore, worlds: Any, tmp_path: Path) -> None:
    copy = tmp_path / "pack"
    copy.mkdir()
    for file in store.path.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    opened = ExpertStore.open(copy)
    world = worlds(DiskSource(opened))
    os.truncate(opened.experts_path, opened.offset(15) + 4096)
    with pytest.raises(FetchError, match=rf"expert 1:7 at offset {15 * opened.stride} .*short read, 4096 of 12288"):
        world.fetch([0, 15])


def test_closing_with_fetches_queued_leaves_no_thread(store: ExpertStore, worlds: Any) -> None:
    entered, leave = threading.Event(), threading.Event()

    def slow(fd: int, buffers: Any, offset: int) -> int:
        entered.set()
        assert leave.wait(5)
        return os.preadv(fd, buffers, offset)

    source = DiskSource(store)
    source._ops = IoOps(preadv=slow)
    world = worlds(source, readers=2)
    for fetch in fetches(list(range(16))):
        world.pool.submit(fetch)
    assert entered.wait(5)
    threading.Timer(0.05, leave.set).start()
    world.pool.close()
    assert world.pool.counters.reads <= 2  # the rest was dropped
    world.pool.close()


class BlockedLanding(SlotLanding):
    """A landing without a free buffer, as a copier whose copies do not end."""

    def __init__(self, completions: Completions) -> None:
        super().__init__((), completions)
        self.released = threading.Event()
        self.waiting = threading.Event()

    def acquire(self, fetch: Fetch) -> memoryview:
        self.waiting.set()
        assert self.released.wait(5)
        raise LandingClosed

    def unblock(self) -> None:
        self.released.set()


def test_closing_wakes_readers_that_wait_for_a_buffer(store: ExpertStore) -> None:
    completions: Completions = queue.SimpleQueue()
    source, landing = DiskSource(store), BlockedLanding(completions)
    pool = ReaderPool(source, landing, completions, readers=2)
    pool.submit(fetches([0])[0])
    assert landing.waiting.wait(5)
    pool.close()
    source.close()
    assert completions.empty()
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("reader-")]


def test_no_readers(store: ExpertStore) -> None:
    source = DiskSource(store)
    with pytest.raises(UserError, match="readers is 0"):
        ReaderPool(source, SlotLanding((), queue.SimpleQueue()), queue.SimpleQueue(), readers=0)
    source.close()


def test_many_reads_into_few_slots_are_always_whole(store: ExpertStore, worlds: Any) -> None:
    """600 fetches through 16 slots: each slot holds its last expert, by checksum."""
    world = worlds(DiskSource(store), readers=8, verify=True)
    for round_ in range(600 // store.n_total):
        experts = [(e * 7 + round_) % store.n_total for e in range(store.n_total)]
        world.fetch(experts)
        for slot, expert in enumerate(experts):
            assert zlib.crc32(world.slots.buffers[slot]) == store.checksum(expert)
