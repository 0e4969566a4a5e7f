"""The promise: every system at every cache size gives the logits of the plain model, bit for bit."""

import functools
import queue
import sys
import time

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from memory_world import SYSTEMS, FixedSteps, MemoryReader, MemorySlots, Recorder, make_core  # noqa: E402
from tiny_models import FAMILIES, decode_step, make_decoder, prefill, prompts, random_model, tiny_config  # noqa: E402

from executor.backend import SWITCH_INTERVAL_S, TorchBackend  # noqa: E402
from executor.pace import SLACK_S  # noqa: E402
from executor.routing import JournalRouting  # noqa: E402
from policies.core.driver import drive  # noqa: E402
from policies.core.journal import Journal, ReplayBackend, read_journal, refeed  # noqa: E402
from policies.core.messages import Compute, Fetch  # noqa: E402
from policies.core.types import FetchKind, Phase, ProtocolError, UserError  # noqa: E402

STEPS = 4
LENGTHS = [1, 4, 9, 6, 14]


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


@functools.cache
def tiny(family):
    return random_model(tiny_config(family))


@functools.cache
def expected(family, dtype=torch.float32):
    """The plain model's logits of the prompts of all LENGTHS."""
    return plain(tiny(family), prompts(LENGTHS), dtype=dtype)


def plain(model, given, steps=STEPS, dtype=torch.float32):
    """All experts resident, one request at a time: request -> logits [steps, V]."""
    found = {}
    for request, prompt in given.items():
        decoder, experts = make_decoder(model, dtype, max_requests=1)
        with torch.inference_mode():
            prefill(decoder, experts, request, prompt)
            rows = []
            for _ in range(steps):
                rows.append(decode_step(decoder, experts, [request])[0])
                decoder.feed(request, int(rows[-1].argmax()))
        found[request] = torch.stack(rows)
    return found


def offloaded(
    model, given, core, *, steps=STEPS, dtype=torch.float32, journal=None, routing=None, replay=None, **reader
):
    """The same through slots, reader, core and driver; returns logits and the backend."""
    decoder, experts = make_decoder(model, dtype, max_requests=len(given), predict=6)
    with torch.inference_mode():
        for request, prompt in given.items():
            prefill(decoder, experts, request, prompt)
    done, sampler = queue.SimpleQueue(), Recorder()
    slots = MemorySlots(experts[0][0], core.cache.capacity)
    files = MemoryReader(experts, slots, done, **reader)
    try:
        with TorchBackend(decoder, slots, files, done, sampler=sampler, routing=routing) as backend:
            world = ReplayBackend(backend, replay) if replay is not None else backend
            drive(core, FixedSteps(backend, list(given), steps), world, journal=journal, check=True)
    finally:
        files.close()
    return {r: torch.stack(rows) for r, rows in sampler.logits.items()}, backend


def assert_same(found, right):
    assert found.keys() == right.keys()
    for request in right:
        assert torch.equal(found[request], right[request]), f"request {request}"


@pytest.mark.parametrize("system", SYSTEMS)
@pytest.mark.parametrize("fraction", ["least", 0.1, 0.3, 0.5, 1.0])
def test_every_system_and_cache_size_gives_the_plain_models_bits(system, fraction):
    model, given = tiny("qwen3_moe"), prompts(LENGTHS)
    spec = make_decoder(model)[0].spec
    spare = 2 if system == "bevy_prefetch" else 0  # slots that prefetches in flight may hold
    capacity = spec.top_k + spare if fraction == "least" else max(spec.top_k + spare, int(fraction * spec.n_total))
    core = make_core(system, spec, capacity)
    found, backend = offloaded(model, given, core, delay_s=5e-4, seed=capacity)
    assert_same(found, expected("qwen3_moe"))
    assert backend.times.foreign == 0
    fits = len(given) * spec.top_k + spare <= capacity
    assert core.runahead.startswith(("not", "on" if fits else "off")), core.runahead


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_under_runahead(family, dtype):
    model, given = tiny(family), prompts(LENGTHS)
    spec = make_decoder(model)[0].spec
    capacity = max(len(given) * spec.top_k + 2, int(0.3 * spec.n_total))
    for system in ("bevy", "bevy_prefetch") if dtype is torch.float32 else ("bevy_two",):
        core = make_core(system, spec, capacity)
        found, _ = offloaded(model, given, core, dtype=dtype, delay_s=5e-4)
        assert core.runahead == "on"
        assert_same(found, expected(family, dtype))


@pytest.mark.parametrize("n", [1, 2])
def test_few_requests(n):
    model = tiny("olmoe")
    given = prompts(LENGTHS[:n])
    decoder, _ = make_decoder(model)
    for system in ("llama_cpp", "bevy", "bevy_prefetch"):
        found, _ = offloaded(model, given, make_core(system, decoder.spec, 20))
        assert_same(found, {r: expected("olmoe")[r] for r in given})


@pytest.mark.parametrize("runs", [4, pytest.param(50, marks=pytest.mark.slow)])
def test_runs_whose_threads_meet_differently_give_the_same_bits(runs):
    model, given = tiny("qwen3_moe"), prompts(LENGTHS)
    spec = make_decoder(model)[0].spec
    for seed in range(runs):
        found, _ = offloaded(model, given, make_core("bevy_prefetch", spec, 24), delay_s=1e-3, seed=seed)
        assert_same(found, expected("qwen3_moe"))


@pytest.mark.parametrize("family", FAMILIES)
def test_what_the_neighbours_say_does_not_show(family):
    """The same request in the same group: beside other prompts its logits keep every bit."""
    model, spec = tiny(family), make_decoder(tiny(family))[0].spec
    (request, prompt), *_ = prompts(LENGTHS).items()
    found = []
    for seed in (1, 7):
        given = {**prompts(LENGTHS, seed=seed), request: prompt}
        found.append(offloaded(model, given, make_core("llama_cpp", spec, 24))[0])
    others = [r for r in found[0] if r != request]
    assert torch.equal(found[0][request], found[1][request])
    assert not any(torch.equal(found[0][other], found[1][other]) for other in others)


def test_prefetches_really_happen():
    model = tiny("qwen3_moe")
    given = prompts(LENGTHS[:2])
    decoder, _ = make_decoder(model)
    kinds = []

    class Watch:
        def record(self, t_s, events, commands):
            kinds.extend(c.kind for c in commands if isinstance(c, Fetch))

    offloaded(model, given, make_core("bevy_prefetch", decoder.spec, 24), journal=Watch(), delay_s=1e-3)
    assert FetchKind.PREFETCH in kinds
    assert FetchKind.DEMAND in kinds


@pytest.mark.parametrize("system", ["llama_cpp_lfu", "bevy", "bevy_prefetch"])
def test_a_journal_replayed_gives_the_same_commands_and_logits(system, tmp_path):
    """Written by one run, imposed on another whose reads finish in another order."""
    model = tiny("gemma4")
    given = prompts(LENGTHS)
    decoder, _ = make_decoder(model)
    first, second = tmp_path / "first.jsonl.gz", tmp_path / "second.jsonl.gz"
    with Journal(first, {}) as journal:
        right, _ = offloaded(model, given, make_core(system, decoder.spec, 24), journal=journal, delay_s=2e-3)
    _, records = read_journal(first)
    records = list(records)
    assert refeed(make_core(system, decoder.spec, 24), records) == len(records)
    with Journal(second, {}) as journal:
        core, routing = make_core(system, decoder.spec, 24), JournalRouting(records)
        world = {"routing": routing, "replay": records, "seed": 9, "delay_s": 2e-3}
        found, backend = offloaded(model, given, core, journal=journal, **world)
    assert_same(found, right)
    assert backend.times.foreign == 0
    _, again = read_journal(second)
    assert [(r.events, r.commands) for r in again] == [(r.events, r.commands) for r in records]


def test_replay_counts_what_the_model_would_not_have_chosen(tmp_path):
    """Another model's routing imposed: tokens differ, decisions do not."""
    given = prompts(LENGTHS[:3])
    path = tmp_path / "journal.jsonl.gz"
    model = tiny("qwen3_moe")
    decoder, _ = make_decoder(model)
    with Journal(path, {}) as journal:
        offloaded(model, given, make_core("bevy", decoder.spec, 24), journal=journal)
    records = list(read_journal(path)[1])
    core = make_core("bevy", decoder.spec, 24)
    other = random_model(tiny_config("qwen3_moe"), seed=5)
    _, backend = offloaded(other, given, core, routing=JournalRouting(records), replay=records)
    assert backend.times.foreign > 0
    with pytest.raises(UserError, match="no gates of layer"):
        JournalRouting(records).gates(99, (0,), 0)


def test_a_batch_is_paced_to_the_device_it_stands_in_for():
    model = tiny("mixtral")
    decoder, experts = make_decoder(model, max_requests=1)
    decoder.open(0, 5)
    done = queue.SimpleQueue()
    slots = MemorySlots(experts[0][0], 4)
    files = MemoryReader(experts, slots, done)
    with TorchBackend(decoder, slots, files, done, sampler=Recorder(), paced_s=lambda c: 0.25) as backend:
        begun = time.perf_counter()
        backend.submit(Compute(1, Phase.ENTRY, -1, (0,)))
        backend.wait()
        assert time.perf_counter() - begun >= 0.25 - SLACK_S
        assert backend.times.compute_s < 0.25
    files.close()


@pytest.mark.parametrize("fault", [{"fail_at": 7}, {"silent_at": 7, "threads": 1}])
def test_a_failing_reader_ends_the_run_soon(fault):
    model = tiny("qwen3_moe")
    decoder, _ = make_decoder(model)
    begun = time.perf_counter()
    with pytest.raises((OSError, RuntimeError), match=r"failed|reader thread has ended"):
        offloaded(model, prompts(LENGTHS), make_core("bevy", decoder.spec, 24), **fault)
    assert time.perf_counter() - begun < 10


def test_a_failing_compute_thread_ends_the_run_soon():
    model = tiny("qwen3_moe")
    decoder, experts = make_decoder(model)
    decoder.open(0, 5)
    done = queue.SimpleQueue()
    slots = MemorySlots(experts[0][0], 8)
    files = MemoryReader(experts, slots, done)
    interval = sys.getswitchinterval()
    with TorchBackend(decoder, slots, files, done, sampler=Recorder()) as backend:
        assert sys.getswitchinterval() == pytest.approx(SWITCH_INTERVAL_S)
        backend.submit(Compute(1, Phase.ENTRY, -1, (0,)))
        assert len(backend.wait()) == 1
        backend.submit(Compute(2, Phase.JOB, 0, (0,)))  # no experts were given to it
        with pytest.raises(KeyError):
            backend.wait()
    assert sys.getswitchinterval() == interval
    files.close()


def test_only_compute_and_fetch_are_commands():
    decoder, experts = make_decoder(tiny("mixtral"))
    done = queue.SimpleQueue()
    slots = MemorySlots(experts[0][0], 2)
    files = MemoryReader(experts, slots, done)
    with (
        TorchBackend(decoder, slots, files, done, sampler=Recorder()) as backend,
        pytest.raises(ProtocolError, match="carries out"),
    ):
        backend.submit("stop")
    files.close()
