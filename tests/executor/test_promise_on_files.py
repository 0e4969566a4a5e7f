"""The promise with nothing in place of anything: checkpoint, pack, direct reads, slots, core, driver, decoder."""

import contextlib
import queue
import random
import time

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("safetensors")

from memory_world import Recorder, make_core  # noqa: E402
from tiny_models import DEVICE, FAMILIES, prompts, random_model, reference, tiny_config  # noqa: E402

from executor import pack  # noqa: E402
from executor.generate import generate  # noqa: E402
from executor.prefill import scratch_slots  # noqa: E402
from executor.reader import ReaderPool, SlotLanding  # noqa: E402
from executor.slots import SlotArena  # noqa: E402
from executor.sources import DiskSource  # noqa: E402
from executor.store import ExpertStore  # noqa: E402
from executor.weights import SlotWeights, open_decoder  # noqa: E402

NEW = 8
GIVEN = list(prompts([4, 9, 1, 13, 6]).values())
READERS = 3


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


def packed(folder, model, dtype):
    model.save_pretrained(folder / "checkpoint")
    pack.run([f"checkpoint={folder / 'checkpoint'}", f"out={folder / 'pack'}", f"dtype={dtype}"])
    return ExpertStore.open(folder / "pack")


def make_landing(store, arena, done):
    """Where reads go, and what to close after it."""
    if DEVICE.type == "cpu":
        return SlotLanding(arena.buffers, done), contextlib.nullcontext()
    from executor.copier import CudaCopier
    from executor.slots import PinnedArena

    staging = PinnedArena(READERS, store.stride)
    return CudaCopier(arena, staging, done), contextlib.closing(staging)


def run(store, system, capacity, concurrency, *, new=NEW, max_tokens=64):
    decoder = open_decoder(store, concurrency, max_tokens, device=DEVICE, predict=6)
    scratch = scratch_slots(capacity, READERS)
    arena = SlotArena(store, scratch.stop, DEVICE)
    done, sampler = queue.SimpleQueue(), Recorder()
    source = DiskSource(store)
    landing, staging = make_landing(store, arena, done)
    reader = ReaderPool(source, landing, done, readers=READERS, verify=True)
    core = make_core(system, decoder.spec, capacity)
    try:
        slots = SlotWeights(arena, decoder.dtype)
        parts = {"slots": slots, "reader": reader, "done": done, "scratch": scratch}
        found = generate(core, decoder, GIVEN, **parts, max_new_tokens=new, sampler=sampler)
    finally:
        reader.close()
        landing.close()
        with staging:
            source.close()
    return [c.tokens for c in found], sampler.logits


@pytest.mark.parametrize("family", FAMILIES)
def test_float32_packs_give_transformers_tokens(family, tmp_path):
    model = random_model(tiny_config(family))
    store = packed(tmp_path, model, "f32")
    with torch.inference_mode():
        right = [reference(model, prompt, NEW)[1] for prompt in GIVEN]
    first = None
    for system, capacity, concurrency in (("llama_cpp", store.spec.top_k, 2), ("bevy_prefetch", 24, 5)):
        tokens, logits = run(store, system, capacity, concurrency)
        assert tokens == right
        first = first or logits
        for request, rows in logits.items():
            assert all(torch.equal(a, b) for a, b in zip(rows, first[request], strict=True))


@pytest.mark.parametrize("dtype", ["bf16", "q4_0"])
def test_small_dtypes_give_equal_bits_under_every_system(dtype, tmp_path):
    config = tiny_config("qwen3_5_moe", hidden_size=64, moe_intermediate_size=32)
    store = packed(tmp_path, random_model(config), dtype)
    right, first = run(store, "bevy", store.spec.n_total, 1)
    for system, capacity, concurrency in (
        ("llama_cpp_lfu", 12, 5),
        ("bevy", 20, 5),
        ("bevy_two", 32, 3),
        ("auto", 20, 5),
    ):
        tokens, logits = run(store, system, capacity, concurrency)
        assert tokens == right
        for request, rows in logits.items():
            assert all(torch.equal(a, b) for a, b in zip(rows, first[request], strict=True))


@pytest.mark.parametrize("late", ["reads", "compute"])
@pytest.mark.parametrize("steps", [20, pytest.param(200, marks=pytest.mark.slow)])
def test_delays_on_either_side_change_nothing(late, steps, tmp_path, monkeypatch):
    """Steps of forced evictions; one thread, on CUDA its stream, is held up at random: a missing wait would show."""
    store = packed(tmp_path, random_model(tiny_config("qwen3_moe")), "f32")
    right, _ = run(store, "bevy", store.spec.n_total, 5, new=steps, max_tokens=256)
    rng = random.Random(0)

    def held_up(method):
        def wrapped(*args):
            if DEVICE.type == "cuda":
                torch.cuda._sleep(rng.randrange(1_000_000))  # up to half a millisecond of this thread's stream
            else:
                time.sleep(rng.random() * 5e-4)
            return method(*args)

        return wrapped

    owner, name = (SlotWeights, "weights")
    if late == "reads":
        owner, name = (DiskSource, "read")
        if DEVICE.type == "cuda":
            from executor.copier import CudaCopier

            owner, name = (CudaCopier, "_start")
    monkeypatch.setattr(owner, name, held_up(getattr(owner, name)))
    assert run(store, "bevy", 22, 5, new=steps, max_tokens=256)[0] == right
