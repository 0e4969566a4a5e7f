"""The fast path against the plain decoder: equal tokens, close logits, and a row's bits whatever its company."""

import functools

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from fast_world import CUDA, FAST_FAMILIES, World, fast_config, fast_step  # noqa: E402
from tiny_models import decode_step, prefill, prompts, random_model, tiny_config  # noqa: E402

from policies.core.types import Phase, UserError  # noqa: E402

STEPS = 6
LENGTHS = [1, 4, 9, 6, 14]
BOUND = {"f32": 5e-4, "bf16": 5e-4, "q4_0": 0.05}
"""Largest difference of logits of the order of 1, computed in float32 by sums in another order; what meets Q4_0 weights
is rounded to fp16 first."""


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


@functools.cache
def tiny(family, seed=0):
    return random_model(fast_config(family), seed)


def decode(world, given, step, steps=STEPS):
    """Greedy tokens and logits of every request, decoded together by ``step``."""
    tokens, logits = {r: [] for r in given}, {r: [] for r in given}
    for _ in range(steps):
        for request, row in zip(given, step(list(given)), strict=True):
            logits[request].append(row)
            tokens[request].append(int(row.argmax()))
            world.decoder.feed(request, tokens[request][-1])
    return tokens, {r: torch.stack(rows) for r, rows in logits.items()}


@pytest.mark.parametrize("stored", ["f32", "bf16", "q4_0"])
@pytest.mark.parametrize("family", FAST_FAMILIES)
def test_tokens_and_logits_are_the_plain_decoders(family, stored):
    given = prompts(LENGTHS)
    found = []
    for kind in ("plain", "fast"):
        world = World(tiny(family), stored, max_requests=len(given))
        with torch.inference_mode():
            for request, prompt in given.items():
                prefill(world.decoder, world.experts, request, prompt)
            if kind == "plain":
                found.append(decode(world, given, functools.partial(decode_step, world.decoder, world.experts)))
            else:
                fast = world.fast(world.full_arena())
                assert fast.check_rows() > 0
                found.append(decode(world, given, functools.partial(fast_step, fast)))
    (tokens, logits), (fast_tokens, fast_logits) = found
    assert fast_tokens == tokens
    for request in given:
        assert (logits[request] - fast_logits[request]).abs().max() <= BOUND[stored], family


@pytest.mark.parametrize("family", FAST_FAMILIES)
def test_a_row_has_the_same_bits_alone_and_in_any_company(family):
    """Alone, in a group of three, in a group of five in another order: tokens of each are fed to itself."""
    given = prompts(LENGTHS)
    right = {}
    for company in ([[r] for r in given], [list(given)[:3], list(given)[3:]], [list(given)[::-1]]):
        world = World(tiny(family), "bf16", max_requests=len(given))
        with torch.inference_mode():
            for request, prompt in given.items():
                prefill(world.decoder, world.experts, request, prompt)
            fast = world.fast(world.full_arena())

            def step(requests, fast=fast, company=company):
                rows = {}
                for group in company:
                    rows.update(zip(group, fast_step(fast, group), strict=True))
                return torch.stack([rows[r] for r in requests])

            _, logits = decode(world, given, step)
        right = right or logits
        for request in given:
            assert torch.equal(logits[request], right[request]), (family, company, request)


@pytest.mark.parametrize("family", FAST_FAMILIES)
def test_what_another_request_says_does_not_show(family):
    """The same request beside two different ones, in one group."""
    found = []
    for seed in (1, 2):
        mine, others = {5: prompts([7])[10]}, {6: prompts([12], seed=seed)[10], 8: prompts([3], seed=seed + 5)[10]}
        world = World(tiny(family), "f32", max_requests=3)
        with torch.inference_mode():
            for request, prompt in (others | mine).items():
                prefill(world.decoder, world.experts, request, prompt)
            _, logits = decode(world, others | mine, functools.partial(fast_step, world.fast(world.full_arena())))
        found.append(logits[5])
    assert torch.equal(*found)


def test_imposed_experts_are_used_and_counted():
    """Given its own choice a gate gives the same bits; given others it counts them and mixes those."""
    world = World(tiny("qwen3_moe"), max_requests=2)
    experts = world.decoder.spec.n_experts
    with torch.inference_mode():
        fast, slot = world.fast(world.full_arena()), None
        slot = fast.slots[0]
        seen = []
        for whose in ("gate", "own", "others"):
            world.decoder.open(1, 7)
            world.decoder.open(2, 9)
            world.decoder.settle()
            given = None
            if whose == "own":
                given = seen[0][0].experts
            elif whose == "others":
                given = [[e for e in range(experts) if e not in chosen][:4] for chosen in seen[0][0].experts]
            fast.launch(slot, Phase.ENTRY, -1, [1, 2], {}, given=given)
            slot.wait()
            routing = fast.collect(slot)
            fast.launch(slot, Phase.JOB, 0, [1, 2], {e: e for e in range(experts)})
            slot.wait()
            after = fast.collect(slot)
            seen.append((routing, after))
            assert [world.decoder.requests[r].chosen for r in (1, 2)] == after.experts
            world.decoder.close(1)
            world.decoder.close(2)
    own, same, others = (routing for routing, _ in seen)
    assert (own.foreign, same.foreign, others.foreign) == (0, 0, 8)
    assert own.experts == same.experts
    assert seen[0][1].experts == seen[1][1].experts


def test_what_is_not_built_is_refused_in_one_line():
    small = fast_config("qwen3_moe")
    with pytest.raises(UserError, match=r"at most (8|16) requests"):
        World(random_model(small), max_requests=17).fast(torch.zeros(0, dtype=torch.uint8))
    with pytest.raises(UserError, match=r"not built for olmoe.*kernels=torch"):
        World(random_model(tiny_config("olmoe"))).fast(torch.zeros(0, dtype=torch.uint8))


@pytest.mark.parametrize("family", FAST_FAMILIES)
def test_predictions_are_the_plain_decoders(family):
    """What the next layer's gate would choose on this layer's input, best first, and how likely."""
    world = World(tiny(family), max_requests=2, predict=6)
    table = {e: e for e in range(world.decoder.spec.n_experts)}
    found = []
    with torch.inference_mode():
        fast = world.fast(world.full_arena())
        for kind in ("plain", "fast"):
            for request in (1, 2):
                world.decoder.open(request, 5 + request)
            world.decoder.settle()
            if kind == "plain":
                routings = [
                    world.decoder.entry([1, 2]),
                    world.decoder.job(0, [1, 2], world.experts[0].__getitem__),
                ]
            else:
                routings = []
                for phase, layer in ((Phase.ENTRY, -1), (Phase.JOB, 0)):
                    fast.launch(fast.slots[0], phase, layer, [1, 2], table)
                    fast.slots[0].wait()
                    routings.append(fast.collect(fast.slots[0]))
            found.append([rows for routing in routings for rows in routing.predicted])
            for request in (1, 2):
                world.decoder.close(request)
    for right, got in zip(*found, strict=True):
        assert [expert for expert, _ in got] == [expert for expert, _ in right]
        assert [score for _, score in got] == pytest.approx([score for _, score in right], rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAST_FAMILIES)
def test_triton_kernels_take_the_place_of_plain_torch(family):
    """A step of three requests in Q4_0, with the kernels (interpreted where there is no GPU) and without."""
    pytest.importorskip("triton")
    from executor.fast.ops import reference_ops, triton_ops

    given, found = prompts(LENGTHS[:3]), []
    for ops in (reference_ops(), triton_ops()):
        world = World(tiny(family), "q4_0", max_requests=3)
        with torch.inference_mode():
            for request, prompt in given.items():
                prefill(world.decoder, world.experts, request, prompt)
            fast = world.fast(world.full_arena(), ops, graphs=False)
            found.append(decode(world, given, functools.partial(fast_step, fast), steps=2))
    (tokens, logits), (kernel_tokens, kernel_logits) = found
    assert kernel_tokens == tokens
    for request in given:
        assert (logits[request] - kernel_logits[request]).abs().max() <= BOUND["q4_0"]


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="EXECUTOR_TEST_DEVICE=cuda runs it")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("family", FAST_FAMILIES)
def test_graphs_give_the_bits_of_the_launches_they_hold(family, dtype):
    given = prompts(LENGTHS)
    found = []
    for graphs in (False, True):
        world = World(tiny(family), "bf16", dtype, max_requests=len(given))
        with torch.inference_mode():
            for request, prompt in given.items():
                prefill(world.decoder, world.experts, request, prompt)
            torch.cuda.synchronize()
            fast = world.fast(world.full_arena(), graphs=graphs)
            assert (fast.describe()["graphs"] > 0) == graphs
            found.append(decode(world, given, functools.partial(fast_step, fast))[1])
    for request in given:
        assert torch.equal(found[0][request], found[1][request])
