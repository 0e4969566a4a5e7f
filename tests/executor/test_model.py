"""The decoder: groups do not show in bits, slots are clean, replay imposes experts, predictions are the next gate."""

import itertools
import random

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from tiny_models import decode_step, make_decoder, prefill, prompts, random_model, tiny_config  # noqa: E402

from policies.core.types import UserError  # noqa: E402


@pytest.fixture(autouse=True)
def _inference():
    torch.set_num_threads(1)
    with torch.inference_mode():
        yield


def wide_config(family, hidden):
    """Few layers and experts, but the widths at which a library's kernels begin to differ by the number of rows."""
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}
    if family == "gemma4":
        kinds = ["sliding_attention", "full_attention"]
        return tiny_config(family, hidden_size=hidden, head_dim=64, global_head_dim=128, layer_types=kinds, **heads)
    if family == "qwen3_5_moe":
        kinds = ["linear_attention", "full_attention"]
        return tiny_config(family, hidden_size=hidden, head_dim=64, layer_types=kinds, **heads)
    return tiny_config(family, hidden_size=hidden, head_dim=64, **heads)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize(("family", "hidden"), [("qwen3_moe", 2048), ("qwen3_5_moe", 2048), ("gemma4", 2880)])
def test_groupings_of_eight_requests_give_equal_bits(family, hidden, dtype):
    model = random_model(wide_config(family, hidden))
    given = prompts([1, 2, 3, 4, 5, 6, 7, 8])
    requests = list(given)
    rng = random.Random(0)

    def run(partitions):
        """Two steps; ``partitions()`` gives the groups of each layer in the order in which they run."""
        decoder, experts = make_decoder(model, dtype, max_requests=8)
        order = requests[:]
        rng.shuffle(order)  # other slots, other rows of the tile
        for request in order:
            prefill(decoder, experts, request, given[request])
        found = []
        for _ in range(2):
            for group in partitions():
                decoder.entry(group)
            for layer, table in enumerate(experts):
                for group in partitions():
                    decoder.job(layer, group, table.__getitem__)
            rows = [decoder.requests[r].slot for r in requests]
            logits = {r: row for group in partitions() for r, row in zip(group, decoder.head(group), strict=True)}
            found += [decoder._residual[rows].clone(), torch.stack([logits[r] for r in requests])]
            for request in requests:
                decoder.feed(request, int(logits[request].argmax()))
        return found

    def scattered():
        order = requests[:]
        rng.shuffle(order)
        cuts = sorted(rng.sample(range(1, 8), rng.randint(1, 6)))
        return [order[a:b] for a, b in itertools.pairwise([0, *cuts, 8])]

    right = run(lambda: [[r] for r in requests])
    for partitions in (lambda: [requests], scattered, scattered, scattered):
        for a, b in zip(run(partitions), right, strict=True):
            assert torch.equal(a, b)


def test_more_requests_than_a_tile():
    model = random_model(tiny_config("qwen3_moe"))
    given = prompts([3] * 11)
    decoder, experts = make_decoder(model, max_requests=11)
    for request, prompt in given.items():
        prefill(decoder, experts, request, prompt)
    together = decode_step(decoder, experts, list(given))
    for i, (request, prompt) in enumerate(given.items()):
        alone, _ = make_decoder(model, max_requests=1)
        prefill(alone, experts, request, prompt)
        assert torch.equal(decode_step(alone, experts, [request])[0], together[i])


@pytest.mark.parametrize("family", ["gemma4", "qwen3_5_moe"])
def test_a_long_request_leaves_nothing_for_the_next(family):
    """Short, long, short in one slot: the third equals the first."""
    decoder, experts = make_decoder(random_model(tiny_config(family)), max_requests=1)
    short, long = prompts([4, 60]).values()
    found = []
    for request, prompt in enumerate((short, long, short)):
        prefill(decoder, experts, request, prompt)
        steps = []
        for _ in range(6):
            steps.append(decode_step(decoder, experts, [request])[0])
            decoder.feed(request, int(steps[-1].argmax()))
        found.append(torch.stack(steps))
        decoder.close(request)
    assert torch.equal(found[0], found[2])
    assert not torch.equal(found[0], found[1])


def test_fifty_runs_give_the_same_bits():
    decoder, experts = make_decoder(random_model(tiny_config("qwen3_moe")))
    given = prompts([3, 8])
    first = None
    for _ in range(50):
        for request, prompt in given.items():
            prefill(decoder, experts, request, prompt)
        logits = decode_step(decoder, experts, list(given))
        first = logits if first is None else first
        assert torch.equal(logits, first)
        for request in given:
            decoder.close(request)


def test_imposed_experts_are_used_and_disagreement_is_counted():
    decoder, experts = make_decoder(random_model(tiny_config("qwen3_moe")))
    decoder.open(0, 5)
    own = decoder.entry([0])
    assert own.foreign == 0
    decoder.close(0)
    decoder.open(0, 5)
    others = [e for e in range(16) if e not in own.chosen[0]][:2]
    given = [own.chosen[0][:2] + others]
    routing = decoder.entry([0], given)
    assert routing.chosen == given
    assert routing.foreign == 2
    slot = decoder.requests[0].slot
    mix = decoder._mix[slot]
    assert sorted(mix.nonzero().flatten().tolist()) == sorted(given[0])
    assert float(mix.sum()) == pytest.approx(1.0)  # weights are renormalised over the imposed experts
    decoder.job(0, [0], experts[0].__getitem__, [[0, 1, 2, 3]])
    assert decoder.requests[0].chosen == [0, 1, 2, 3]


def test_imposing_the_models_own_choice_changes_no_bit():
    model = random_model(tiny_config("gemma4"))
    (request, prompt) = next(iter(prompts([5]).items()))
    free, experts = make_decoder(model)
    forced, _ = make_decoder(model)
    prefill(free, experts, request, prompt)
    prefill(forced, experts, request, prompt)
    a = free.entry([request])
    b = forced.entry([request], a.chosen)
    for layer, table in enumerate(experts):
        a = free.job(layer, [request], table.__getitem__)
        b = forced.job(layer, [request], table.__getitem__, None if a is None else a.chosen)
        assert (a is None and b is None) or (a.chosen == b.chosen and b.foreign == 0)
    assert torch.equal(free.head([request]), forced.head([request]))


@pytest.mark.parametrize("family", ["qwen3_moe", "gemma4"])
def test_predictions_are_the_next_gate_on_this_input(family):
    model = random_model(tiny_config(family))
    decoder, _ = make_decoder(model, predict=6)
    decoder.open(3, 9)
    routing = decoder.entry([3])
    slot = decoder.requests[3].slot
    scores = decoder.layers[1].scores(decoder._residual[slot, None], decoder._x[slot, None])[0]
    expected = scores.topk(6)
    experts, values = zip(*routing.predicted[0], strict=True)
    assert [e - 16 for e in experts] == expected.indices.tolist()
    assert values == pytest.approx(expected.values.tolist(), rel=1e-5)


def test_full_slots_and_the_last_position_are_errors():
    decoder, _ = make_decoder(random_model(tiny_config("mixtral")), max_requests=1, max_tokens=3)
    decoder.open(0, 5)
    with pytest.raises(UserError, match="slots are taken"):
        decoder.open(1, 5)
    decoder.feed(0, 5)
    decoder.feed(0, 5)
    with pytest.raises(UserError, match="max_tokens 3"):
        decoder.feed(0, 5)


def test_the_row_check_covers_every_product():
    decoder, _ = make_decoder(random_model(tiny_config("qwen3_5_moe")))
    names = [name for name, _ in decoder.products()]
    for part in ("in_proj_qkv", "out_proj", "q_proj", "o_proj", "gate", "shared_expert.down_proj", "lm_head"):
        assert any(name.endswith(part) for name in names), part
    assert {"expert gate_up", "expert down"} <= set(names)
    assert decoder.check_rows() > 8
