"""The fast path through slots, reader, core and driver: every system at every cache size gives the same bits."""

import functools
import queue
import time

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from fast_world import CUDA, FAST_FAMILIES, ByteCopies, ByteReader, World, fast_config, fast_step  # noqa: E402
from memory_world import SYSTEMS, FixedSteps, Recorder, make_core  # noqa: E402
from tiny_models import DEVICE, prefill, prompts, random_model  # noqa: E402

from executor.direct import DirectReader  # noqa: E402
from executor.fast.backend import StreamBackend  # noqa: E402
from executor.routing import JournalRouting  # noqa: E402
from policies.core.driver import drive  # noqa: E402
from policies.core.journal import Journal, ReplayBackend, read_journal  # noqa: E402
from policies.core.messages import Compute, ComputeDone  # noqa: E402
from policies.core.types import Phase, ProtocolError  # noqa: E402

STEPS = 4
LENGTHS = [1, 4, 9, 6, 14]


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


@functools.cache
def tiny(family, seed=0):
    return random_model(fast_config(family), seed)


@functools.cache
def expected(family, stored):
    """All experts resident, each request alone: request -> logits [steps, V]."""
    found = {}
    for request, prompt in prompts(LENGTHS).items():
        world = World(tiny(family), stored, max_requests=1)
        with torch.inference_mode():
            prefill(world.decoder, world.experts, request, prompt)
            if CUDA:
                torch.cuda.synchronize()
            fast, rows = world.fast(world.full_arena()), []
            for _ in range(STEPS):
                rows.append(fast_step(fast, [request])[0])
                world.decoder.feed(request, int(rows[-1].argmax()))
        found[request] = torch.stack(rows)
    return found


def offloaded(
    model, core, *, stored="f32", journal=None, routing=None, replay=None, graphs=CUDA, polled=False, **reader
):
    """The same through slots, reader, core and driver; returns logits and the backend."""
    given = prompts(LENGTHS)
    world = World(model, stored, max_requests=len(given), predict=6)
    with torch.inference_mode():
        for request, prompt in given.items():
            prefill(world.decoder, world.experts, request, prompt)
    stride = world.geometry.stride_bytes
    arena = torch.full((core.cache.capacity * stride,), 255, dtype=torch.uint8, device=DEVICE)  # NaN until it is read
    done, sampler = queue.SimpleQueue(), Recorder()
    direct = DirectReader(ByteCopies(world, arena), stride) if polled else None
    files = direct or ByteReader(world, arena, done, **reader)
    poll = direct.poll if direct else None
    fast = world.fast(arena, job_slots=core._compute_slots, graphs=graphs)
    try:
        with StreamBackend(fast, files, done, sampler=sampler, routing=routing, poll=poll) as backend:
            there = ReplayBackend(backend, replay) if replay is not None else backend
            drive(core, FixedSteps(backend, list(given), STEPS), there, journal=journal, check=True)
    finally:
        files.close()
    return {r: torch.stack(rows) for r, rows in sampler.logits.items()}, backend


def assert_same(found, right):
    assert found.keys() == right.keys()
    for request in right:
        assert torch.equal(found[request], right[request]), f"request {request}"


@pytest.mark.parametrize("system", SYSTEMS)
@pytest.mark.parametrize("fraction", ["least", 0.3, 1.0])
def test_every_system_and_cache_size_gives_the_same_bits(system, fraction):
    """The smallest cache evicts at every layer: no graph may remember where an expert lay."""
    model = tiny("qwen3_moe")
    spec = World(model).decoder.spec
    least = spec.top_k + (2 if system == "bevy_prefetch" else 0)  # slots that prefetches in flight may hold
    capacity = least if fraction == "least" else max(least, int(fraction * spec.n_total))
    found, backend = offloaded(model, make_core(system, spec, capacity), stored="bf16", delay_s=5e-4, seed=capacity)
    assert_same(found, expected("qwen3_moe", "bf16"))
    assert backend.times.foreign == 0
    assert backend.times.batches > STEPS * (spec.n_layers + 1)


@pytest.mark.parametrize("system", ["llama_cpp_lfu", "bevy", "bevy_two", "bevy_prefetch"])
def test_a_reader_that_is_polled_gives_the_same_bits(system):
    """The driver starts copies and asks for their ends itself."""
    model = tiny("qwen3_moe")
    spec = World(model).decoder.spec
    found, _ = offloaded(model, make_core(system, spec, spec.top_k + 2), stored="bf16", polled=True)
    assert_same(found, expected("qwen3_moe", "bf16"))


@pytest.mark.parametrize("stored", ["f32", "q4_0"])
@pytest.mark.parametrize("family", FAST_FAMILIES)
def test_every_family_with_two_jobs_in_flight(family, stored):
    model = tiny(family)
    spec = World(model).decoder.spec
    core = make_core("bevy_two", spec, max(len(LENGTHS) * spec.top_k + 2, int(0.3 * spec.n_total)))
    found, _ = offloaded(model, core, stored=stored, delay_s=5e-4)
    assert core.runahead == "on"
    assert_same(found, expected(family, stored))


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="EXECUTOR_TEST_DEVICE=cuda runs it")
@pytest.mark.parametrize("family", FAST_FAMILIES)
def test_forced_evictions_with_and_without_graphs(family):
    model = tiny(family)
    spec = World(model).decoder.spec
    for system in ("llama_cpp", "bevy_two"):
        runs = [
            offloaded(model, make_core(system, spec, spec.top_k), stored="q4_0", graphs=graphs)[0]
            for graphs in (False, True)
        ]
        assert_same(runs[1], runs[0])
        assert_same(runs[1], expected(family, "q4_0"))


@pytest.mark.parametrize("system", ["llama_cpp_lfu", "bevy_two"])
def test_a_journal_replayed_gives_the_same_commands_and_logits(system, tmp_path):
    """Written by one run, imposed on another whose reads finish in another order."""
    model = tiny("gemma4")
    spec = World(model).decoder.spec
    first, second = tmp_path / "first.jsonl.gz", tmp_path / "second.jsonl.gz"
    with Journal(first, {}) as journal:
        right, _ = offloaded(model, make_core(system, spec, 24), journal=journal, delay_s=2e-3)
    records = list(read_journal(first)[1])
    with Journal(second, {}) as journal:
        world = {"routing": JournalRouting(records), "replay": records, "seed": 9, "delay_s": 2e-3}
        found, backend = offloaded(model, make_core(system, spec, 24), journal=journal, **world)
    assert_same(found, right)
    assert backend.times.foreign == 0
    again = list(read_journal(second)[1])
    assert [(r.events, r.commands) for r in again] == [(r.events, r.commands) for r in records]


def test_another_models_routing_is_imposed_and_counted(tmp_path):
    path, spec = tmp_path / "journal.jsonl.gz", World(tiny("qwen3_moe")).decoder.spec
    with Journal(path, {}) as journal:
        offloaded(tiny("qwen3_moe"), make_core("bevy", spec, 24), journal=journal)
    records = list(read_journal(path)[1])
    core = make_core("bevy", spec, 24)
    _, backend = offloaded(tiny("qwen3_moe", 5), core, routing=JournalRouting(records), replay=records)
    assert backend.times.foreign > 0


def one_request(job_slots=1, **options):
    """A backend with one request and an empty arena."""
    world = World(tiny("mixtral"), max_requests=1)
    world.decoder.open(0, 5)
    done, arena = queue.SimpleQueue(), torch.zeros(0, dtype=torch.uint8, device=DEVICE)
    files = ByteReader(world, arena, done)
    fast = world.fast(arena, graphs=False, job_slots=job_slots)
    return files, StreamBackend(fast, files, done, sampler=Recorder(), **options)


def test_batches_are_paced_one_after_the_other():
    files, backend = one_request(job_slots=2, paced_s=lambda command: 0.15)
    with backend:
        begun_s = time.perf_counter()
        backend.submit(Compute(1, Phase.ENTRY, -1, (0,)))
        backend.submit(Compute(2, Phase.ENTRY, -1, (0,)))
        assert [event.batch for event in backend.wait()] == [1]
        assert time.perf_counter() - begun_s >= 0.15
        assert [event.batch for event in backend.wait()] == [2]
        assert time.perf_counter() - begun_s >= 0.3
    files.close()


def test_more_batches_than_job_slots_and_strange_commands_are_refused():
    files, backend = one_request()
    with backend:
        backend.submit(Compute(1, Phase.ENTRY, -1, (0,)))
        with pytest.raises(ProtocolError, match="one more in flight"):
            backend.submit(Compute(2, Phase.ENTRY, -1, (0,)))
        with pytest.raises(ProtocolError, match="carries out"):
            backend.submit("stop")
        (event,) = backend.wait()
        assert isinstance(event, ComputeDone)
        assert len(event.gates) == 1
    files.close()


@pytest.mark.parametrize("fault", [{"fail_at": 7}])
def test_a_failing_reader_ends_the_run_soon(fault):
    spec = World(tiny("qwen3_moe")).decoder.spec
    begun_s = time.perf_counter()
    with pytest.raises(OSError, match="failed"):
        offloaded(tiny("qwen3_moe"), make_core("bevy", spec, 24), **fault)
    assert time.perf_counter() - begun_s < 10
