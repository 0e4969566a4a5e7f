"""Generation: tokens of transformers, requests that come and go, stop tokens, streaming, latencies."""

import queue

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from memory_world import MemoryReader, MemorySlots, make_core  # noqa: E402
from tiny_models import make_decoder, prompts, random_model, reference, tiny_config  # noqa: E402

from executor.backend import TorchBackend  # noqa: E402
from executor.generate import Generation, generate, resident_in  # noqa: E402
from executor.prefill import Prefill  # noqa: E402
from executor.sampling import Greedy, Seeded  # noqa: E402
from policies.core.driver import drive  # noqa: E402
from policies.core.types import UserError  # noqa: E402

NEW = 10


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def model():
    return random_model(tiny_config("qwen3_moe"))


GIVEN = list(prompts([4, 1, 9, 6, 13, 3]).values())


@pytest.fixture(scope="module")
def expected(model):
    """transformers' own greedy tokens, one request at a time."""
    with torch.inference_mode():
        return [reference(model, prompt, NEW)[1] for prompt in GIVEN]


def world(model, *, system="bevy", capacity=24, concurrency=3, scratch=2, delay_s=0.0, max_tokens=64):
    decoder, experts = make_decoder(model, max_requests=concurrency, max_tokens=max_tokens)
    done = queue.SimpleQueue()
    slots = MemorySlots(experts[0][0], capacity + scratch)
    reader = MemoryReader(experts, slots, done, delay_s=delay_s)
    core = make_core(system, decoder.spec, capacity)
    return decoder, slots, reader, done, core, range(capacity, capacity + scratch)


def run(model, given=GIVEN, *, options=None, **kwargs):
    decoder, slots, reader, done, core, scratch = world(model, **(options or {}))
    kwargs = {"max_new_tokens": NEW, **kwargs}
    try:
        return generate(core, decoder, given, slots=slots, reader=reader, done=done, scratch=scratch, **kwargs)
    finally:
        reader.close()


@pytest.mark.parametrize("system", ["llama_cpp", "bevy"])
def test_tokens_equal_transformers_while_requests_come_and_go(model, expected, system):
    """Six requests, three at a time, experts read into two scratch slots while others lie in the cache."""
    found = run(model, options={"system": system, "delay_s": 1e-3})
    assert [c.tokens for c in found] == expected
    assert [c.ended for c in found] == ["length"] * 6
    assert [c.prompt_tokens for c in found] == [len(p) for p in GIVEN]


def test_a_stop_token_ends_a_request_and_another_joins(model, expected):
    stop = expected[2][3]
    found = run(model, stop=[stop])
    for completion, tokens in zip(found, expected, strict=True):
        cut = tokens[: tokens.index(stop) + 1] if stop in tokens else tokens
        assert completion.tokens == cut
        assert completion.ended == ("stop" if stop in tokens else "length")


def test_tokens_are_streamed_in_step_order(model, expected):
    heard = []
    found = run(model, on_token=lambda request, token: heard.append((request, token)))
    assert heard[:3] == [(0, expected[0][0]), (1, expected[1][0]), (2, expected[2][0])]
    assert sorted(heard) == sorted((c.request, t) for c in found for t in c.tokens)


def test_latencies_are_recorded(model):
    found = run(model, options={"concurrency": 2})
    for completion in found:
        assert 0 <= completion.admitted_s <= completion.prefilled_s < completion.first_token_s
        assert len(completion.inter_token_s) == NEW - 1
        assert min(completion.inter_token_s) > 0
    assert found[5].first_token_s > found[0].first_token_s  # it waited


def test_a_seed_fixes_the_tokens_under_any_schedule(model):
    draws = []
    for seed, system, n in ((1, "bevy", 3), (1, "llama_cpp", 6), (1, "bevy", 1), (2, "bevy", 3)):
        sampler = Seeded(temperature=2.0, seed=seed)
        found = run(model, sampler=sampler, options={"system": system, "concurrency": n})
        draws.append([c.tokens for c in found])
    assert draws[0] == draws[1] == draws[2]
    assert draws[0] != draws[3]


def test_a_request_stops_where_its_slot_is_full(model, expected):
    found = run(model, options={"max_tokens": 16})
    for completion, tokens in zip(found, expected, strict=True):
        room = 16 - completion.prompt_tokens
        assert completion.tokens == tokens[: min(NEW, room)]
        assert completion.ended == "length"


def test_a_cancelled_request_leaves_and_the_others_do_not_notice(model, expected):
    decoder, slots, reader, done, core, scratch = world(model, delay_s=1e-3)
    with TorchBackend(decoder, slots, reader, done, sampler=Greedy()) as backend:
        prefill = Prefill(backend, slots, scratch, resident_in(core))
        work = Generation(backend, prefill, GIVEN, max_new_tokens=NEW)

        def at_step(begin, now_s):
            if begin.step == 2:
                work.cancel(1)
                work.cancel(5)  # still waiting

        drive(core, work, backend, check=True, on_step=at_step)
    reader.close()
    assert work.completions[1].tokens == expected[1][:3]
    assert work.completions[5].tokens == []
    assert [work.completions[i].ended for i in (1, 5)] == ["cancelled"] * 2
    for i in (0, 2, 3, 4):
        assert work.completions[i].tokens == expected[i]
    assert not decoder.requests
    assert not any(entry.refs for entry in core.cache.entries.values())


def test_prefill_uses_residents_and_reads_only_the_rest(model):
    decoder, slots, reader, done, core, scratch = world(model, capacity=64, concurrency=1)
    with TorchBackend(decoder, slots, reader, done, sampler=Greedy()) as backend:
        prefill = Prefill(backend, slots, scratch, resident_in(core))
        prefill.open({0: GIVEN[4]})
        cold = prefill.experts_read
        assert 4 * 4 <= cold <= 64  # at least the top-4 of every layer, each expert once
        before = reader.reads
        held = dict.fromkeys(range(64))
        for expert in held:  # all 64 experts are made resident, as the core would
            core.cache.reserve(expert, 1).started = True
            slot = core.cache.entries[expert].slot
            backend.read({expert: slot})
            backend.landed(expert)
            core.cache.fill(expert)
        assert reader.reads == before + 64
        decoder.close(0)
        prefill.open({0: GIVEN[4]})
        assert prefill.experts_read == cold
    reader.close()


def test_prompts_that_are_opened_together_share_reads_and_nothing_else(model):
    reads, pasts = [], []
    for groups in ([{0: GIVEN[4], 1: GIVEN[0]}], [{0: GIVEN[4]}, {1: GIVEN[0]}], [{0: GIVEN[0]}]):
        decoder, slots, reader, done, core, scratch = world(model, concurrency=2)
        with TorchBackend(decoder, slots, reader, done, sampler=Greedy()) as backend:
            prefill = Prefill(backend, slots, scratch, resident_in(core))
            for prompts in groups:
                prefill.open(prompts)
            reads.append(prefill.experts_read)
        reader.close()
        pasts.append([(state.k, state.v) for state in decoder.states])
    together, apart, alone = reads
    assert alone <= together < apart
    for one, other in zip(pasts[0], pasts[1], strict=True):
        assert torch.equal(one[0], other[0])
        assert torch.equal(one[1], other[1])


def test_what_cannot_be_decoded_is_refused(model):
    for bad, message in (([], "prompt of 0 tokens"), ([3] * 64, "prompt of 64 tokens"), ([3, 97], "vocabulary of 97")):
        with pytest.raises(UserError, match=message):
            run(model, [bad])
    with pytest.raises(UserError, match="max_new_tokens is 0"):
        run(model, max_new_tokens=0)
