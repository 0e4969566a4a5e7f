"""Every family against transformers: requests of different lengths at different layers, logits and arg-max."""

import random

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from tiny_models import DEVICE, FAMILIES, make_decoder, prefill, prompts, random_model, reference, split, tiny_config  # noqa: E402
from transformers import DynamicCache  # noqa: E402

from executor.families import build_shared, family_of  # noqa: E402
from executor.families.common import DecodeTurn  # noqa: E402
from executor.families.qwen3_5_moe import delta_step  # noqa: E402
from policies.core.types import UserError  # noqa: E402

STEPS = 64
BOUND = {"qwen3_5_moe": 1e-4}
"""Of the largest logit; 1e-5 elsewhere.  DeltaNet normalises short vectors of a tiny model, which magnifies rounding:
transformers' own chunked and recurrent forms differ by up to 9e-5 of the largest logit on these models."""

ON_GPU = {"qwen3_5_moe": 5e-4}
"""Against transformers on the CPU, which sums in another order; 1e-4 elsewhere.  On this model transformers' own decode
in float32 is 3.7e-4 from the same in float64."""


@pytest.fixture(autouse=True)
def _inference():
    torch.set_num_threads(1)
    with torch.inference_mode():
        yield


def interleaved_step(decoder, experts, requests, rng):
    """One step in which groups form and overtake each other at random."""
    decoder.entry(requests)
    layer = dict.fromkeys(requests, 0)
    apart = 0
    while layer:
        at = rng.choice(sorted(set(layer.values())))
        here = [r for r in layer if layer[r] == at]
        group = rng.sample(here, rng.randint(1, len(here)))
        decoder.job(at, group, experts[at].__getitem__)
        for request in group:
            layer[request] += 1
            if layer[request] == len(experts):
                del layer[request]
        if layer:
            apart = max(apart, max(layer.values()) - min(layer.values()))
    return decoder.head(requests).cpu(), apart


@pytest.mark.parametrize("family", FAMILIES)
def test_interleaved_decode_equals_transformers(family):
    model = random_model(tiny_config(family))
    given = prompts([1, 5, 19])  # 19: beyond Gemma's window of 6 and its buffer of two windows
    expected = {r: reference(model, p, STEPS) for r, p in given.items()}
    decoder, experts = make_decoder(model)
    for request, prompt in given.items():
        prefill(decoder, experts, request, prompt)
    rng, widest = random.Random(3), 0
    bound = BOUND.get(family, 1e-5) if DEVICE.type == "cpu" else ON_GPU.get(family, 1e-4)
    requests = list(given)
    for step in range(STEPS):
        logits, apart = interleaved_step(decoder, experts, requests, rng)
        widest = max(widest, apart)
        for row, request in zip(logits, requests, strict=True):
            right, tokens = expected[request]
            scale = right[step].abs().max()
            assert (row - right[step]).abs().max() <= bound * scale, f"request {request}, step {step}"
            assert int(row.argmax()) == tokens[step]
            decoder.feed(request, tokens[step])
    assert widest >= 2


def test_one_deltanet_layer_equals_transformers():
    """Alone, without the layers that magnify it, the step agrees to float32 rounding."""
    model = random_model(tiny_config("qwen3_5_moe"))
    decoder, _ = make_decoder(model)
    x = torch.randn(1, 12, 32, generator=torch.Generator().manual_seed(0))
    net, cache = model.model.layers[0].linear_attn, DynamicCache(config=model.config)
    right = [net(x[:, i : i + 1], cache=cache)[0, 0] for i in range(12)]
    slots, index = [2], torch.tensor([2], device=DEVICE)
    decoder.states[0].reset(2)
    for i in range(12):
        padded = torch.tensor([2] + [4] * 7, device=DEVICE)
        tile = torch.cat([x[0, i : i + 1], torch.zeros(7, 32)]).to(DEVICE)
        turn = DecodeTurn(decoder.states, slots, [i], index, padded)
        ours = delta_step(decoder.model.model.layers[0].linear_attn, tile, turn, 0)[0].cpu()
        torch.testing.assert_close(ours, right[i], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("family", ["qwen3_moe", "olmoe"])
@pytest.mark.parametrize("renormalise", [True, False])
def test_norm_topk_prob_is_obeyed(family, renormalise):
    model = random_model(tiny_config(family, norm_topk_prob=renormalise))
    ((request, prompt),) = prompts([7]).items()
    right, _ = reference(model, prompt, 1)
    decoder, experts = make_decoder(model)
    prefill(decoder, experts, request, prompt)
    logits, _ = interleaved_step(decoder, experts, [request], random.Random(0))
    torch.testing.assert_close(logits, right, rtol=0, atol=1e-5)


def test_mixtral_with_a_sliding_window():
    model = random_model(tiny_config("mixtral", sliding_window=5))
    given = prompts([3, 17])
    expected = {r: reference(model, p, 12) for r, p in given.items()}
    decoder, experts = make_decoder(model)
    for request, prompt in given.items():
        prefill(decoder, experts, request, prompt)
    for step in range(12):
        logits, _ = interleaved_step(decoder, experts, list(given), random.Random(step))
        for row, request in zip(logits, given, strict=True):
            right, tokens = expected[request]
            torch.testing.assert_close(row, right[step], rtol=0, atol=2e-5)
            decoder.feed(request, tokens[step])


@pytest.mark.parametrize("family", FAMILIES)
def test_an_expert_without_a_token_is_not_touched(family):
    """Its weights may be missing altogether."""
    model = random_model(tiny_config(family))
    ((request, prompt),) = prompts([3]).items()
    right, tokens = reference(model, prompt, 2)

    def run(experts_of):
        decoder, experts = make_decoder(model)
        experts = experts_of(experts)
        prefill(decoder, experts, request, prompt)
        first, _ = interleaved_step(decoder, experts, [request], random.Random(0))
        decoder.feed(request, tokens[0])
        return torch.cat([first, interleaved_step(decoder, experts, [request], random.Random(0))[0]])

    class Watched(dict):
        def __getitem__(self, number):
            used.add((id(self), number))
            return super().__getitem__(number)

    used = set()
    watched = []
    whole = run(lambda experts: watched.extend(Watched(table) for table in experts) or watched)
    unused = [[number for number in table if (id(table), number) not in used] for table in watched]
    assert any(unused)
    for table, numbers in zip(watched, unused, strict=True):
        for number in numbers:
            del table[number]
    assert torch.equal(run(lambda _: watched), whole)
    torch.testing.assert_close(whole, right, rtol=0, atol=2e-5)


@pytest.mark.parametrize("change", ["negative", "ties", "dominant"])
@pytest.mark.parametrize("family", FAMILIES)
def test_router_edge_cases(family, change):
    """All logits negative; experts in exact ties; one expert that takes almost all the weight."""
    model = random_model(tiny_config(family))
    n_experts = make_decoder(model)[0].spec.n_experts
    for name, weight in model.named_parameters():
        if name.endswith(("gate.weight", "router.proj.weight")) and weight.shape[0] == n_experts:
            if change == "ties":
                weight[1::2] = weight[::2]
            elif change == "dominant":
                weight[5] *= 20
            else:
                weight.copy_(-weight.abs() * 3)
    ((request, prompt),) = prompts([6]).items()
    right, _ = reference(model, prompt, 1)
    decoder, experts = make_decoder(model)
    prefill(decoder, experts, request, prompt)
    logits, _ = interleaved_step(decoder, experts, [request], random.Random(0))
    torch.testing.assert_close(logits, right, rtol=0, atol=2e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_bf16_follows_transformers(family):
    """In bf16 the sums differ in order; the bound says that nothing else does."""
    config = tiny_config(family)
    model = random_model(config)
    ((request, prompt),) = prompts([9]).items()
    exact, _ = reference(model, prompt, 1)
    theirs, _ = reference(random_model(config).to(torch.bfloat16), prompt, 1)
    decoder, experts = make_decoder(model, torch.bfloat16)
    prefill(decoder, experts, request, prompt)
    ours, _ = interleaved_step(decoder, experts, [request], random.Random(0))
    error, bound = (ours.float() - exact).abs().max(), (theirs.float() - exact).abs().max()
    assert error <= 2 * bound + 0.02 * exact.abs().max()


def test_an_unknown_family_is_named_with_the_known_ones():
    config = tiny_config("olmoe")
    config.model_type = "gpt2"
    with pytest.raises(UserError, match=r"gpt2.*qwen3_5_moe.*gemma4.*olmoe"):
        family_of(config)


def test_parts_that_are_not_built_are_refused():
    with pytest.raises(UserError, match="dense layers"):
        family_of(tiny_config("qwen3_moe", mlp_only_layers=[0]))
    with pytest.raises(UserError, match="hidden_size_per_layer_input 8"):
        family_of(tiny_config("gemma4", hidden_size_per_layer_input=8))


def test_a_missing_or_strange_weight_is_named():
    model = random_model(tiny_config("mixtral"))
    shared, _ = split(model)
    del shared["model.norm.weight"]
    shared["model.strange"] = torch.zeros(1)
    with pytest.raises(UserError, match=r"missing \['model.norm.weight'\], left over \['model.strange'\]"):
        build_shared(model.config, shared, torch.float32, torch.device("cpu"))


def test_a_tied_head_is_the_embedding():
    model = random_model(tiny_config("olmoe", tie_word_embeddings=True))
    shared, _ = split(model)
    shared.pop("lm_head.weight")
    built = build_shared(model.config, shared, torch.float32, torch.device("cpu"))
    assert built.lm_head.weight is built.model.embed_tokens.weight
