"""Capture against an independent hook, for every family that transformers routes in the common way."""

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="capture needs torch")
transformers = pytest.importorskip("transformers", reason="capture needs transformers")

from policies.core.types import UserError  # noqa: E402
from traces.capture import Settings, capture, main, read_settings  # noqa: E402
from traces.decode import Request, decode  # noqa: E402
from traces.format import NEXT_NORM_SCORES, NEXT_SCORES  # noqa: E402
from traces.hooks import NORM, RouterHooks, find_moe_layers, norms_differ  # noqa: E402
from traces.trace_file import TraceFile  # noqa: E402

torch.set_num_threads(1)
transformers.logging.set_verbosity_error()
pytestmark = pytest.mark.filterwarnings("ignore")

ALL_COLUMNS = ("token_id", "weights", "scores", *NEXT_SCORES, *NEXT_NORM_SCORES, "hidden")
BASE = {
    "vocab_size": 97,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MOE = {"moe_intermediate_size": 16, "num_experts": 16, "num_experts_per_tok": 4}
LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
}
MLA = {"kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8, "num_key_value_heads": 4}
GROUPS = {"n_routed_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 16, "first_k_dense_replace": 1}
FAMILIES = {
    "Mixtral": {"intermediate_size": 48, "num_local_experts": 8},
    "Qwen2Moe": {**MOE, "intermediate_size": 48, "shared_expert_intermediate_size": 24},
    "Qwen3Moe": {**MOE, "intermediate_size": 48, "head_dim": 8},
    "Qwen3Next": {**MOE, **LINEAR, "intermediate_size": 48, "head_dim": 8, "shared_expert_intermediate_size": 16},
    "Qwen3_5Moe": {**MOE, **LINEAR, "head_dim": 8, "shared_expert_intermediate_size": 16},
    "Gemma4": {
        "num_hidden_layers": 6,
        "head_dim": 8,
        "global_head_dim": 16,
        "num_global_key_value_heads": 1,
        "intermediate_size": 40,
        "enable_moe_block": True,
        "num_experts": 16,
        "top_k_experts": 4,
        "moe_intermediate_size": 12,
        "hidden_size_per_layer_input": 0,
        "attention_k_eq_v": True,
        "sliding_window": 8,
        "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
    },
    "Olmoe": {"intermediate_size": 16, "num_experts": 16, "num_experts_per_tok": 4},
    "DeepseekV2": {**MLA, **GROUPS, "q_lora_rank": None, "intermediate_size": 48, "n_shared_experts": 2},
    "DeepseekV3": {**MLA, **GROUPS, "q_lora_rank": 16, "intermediate_size": 48, "n_shared_experts": 1},
    "Glm4Moe": {**GROUPS, "head_dim": 8, "intermediate_size": 48, "n_shared_experts": 1},
    "GptOss": {
        "head_dim": 8,
        "intermediate_size": 16,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
}
DENSE = {"DeepseekV2": 1, "DeepseekV3": 1, "Glm4Moe": 1}


def tiny(family: str):
    """A random model with decisive gates."""
    texts = {"Qwen3_5Moe", "Gemma4"}
    config_class = getattr(transformers, f"{family}{'Text' if family in texts else ''}Config")
    more = dict(FAMILIES[family])
    if family in ("DeepseekV2", "DeepseekV3"):
        more |= {"n_group": 1, "topk_group": 1}
    config = config_class(**{**BASE, **more})
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
        model.set_experts_implementation("eager")
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            router = ".gate." in name or ".router." in name
            if "inv_freq" in name or "embed_scale" in name or not tensor.is_floating_point():
                continue
            if tensor.dim() == 1:
                tensor.data.add_(0.2 * torch.randn(tensor.shape))
            else:
                tensor.data.copy_((2.0 if router else 0.15) * torch.randn(tensor.shape))
    return model.requires_grad_(False)


def independent(model, tokens):
    """Ids [tokens, MoE layers, k] of one request without cache, batch or padding: hooks by the routers' class names."""
    calls = []
    handles = [
        module.register_forward_hook(lambda m, a, output: calls.append(output[2].clone()))
        for _, module in model.named_modules()
        if type(module).__name__.lower().endswith("router")
    ]
    model(input_ids=torch.tensor([tokens]), use_cache=False)
    for handle in handles:
        handle.remove()
    return torch.stack(calls, 1).numpy()


PROMPTS = ((5, 9, 11, 3, 40), (7,), (8, 90, 33, 21, 60, 61, 62, 63, 64, 65, 66, 67), (50, 51))
STEPS = (1, 20, 7, 3)


@pytest.mark.parametrize("family", FAMILIES)
def test_ids_equal_an_independent_hooks(family):
    model = tiny(family)
    rows: dict[int, list] = {}
    requests = [Request(n, prompt, steps) for n, (prompt, steps) in enumerate(zip(PROMPTS, STEPS, strict=True))]

    def give(number, part):
        rows.setdefault(number, []).append(part)

    columns = [name for name in ALL_COLUMNS if family != "Gemma4" or name not in NEXT_NORM_SCORES]
    norm_distance = 0 if family == "Gemma4" else 3
    with torch.inference_mode(), RouterHooks(model, distance=3, norm_distance=norm_distance, hidden=True) as hooks:
        list(decode(model, hooks, requests, give, columns=columns, prefill=True))
        layers = [layer.index for layer in hooks.layers]
    assert layers == list(range(DENSE.get(family, 0), model.config.num_hidden_layers))
    for number, (prompt, steps) in enumerate(zip(PROMPTS, STEPS, strict=True)):
        got = {name: np.concatenate([part[name] for part in rows[number]]) for name in rows[number][0]}
        tokens = got["token_id"].tolist()
        with torch.inference_mode():
            ids = independent(model, tokens)
        assert got["experts"].shape == ids.shape == (len(prompt) + steps, len(layers), ids.shape[-1])
        assert tokens[: len(prompt)] == list(prompt)
        assert got["phase"].tolist() == [0] * len(prompt) + [1] * steps
        np.testing.assert_array_equal(np.sort(got["experts"], -1), np.sort(ids, -1))
        ranked = np.take_along_axis(got["scores"], got["experts"].astype(int), -1)
        assert (np.diff(ranked, axis=-1) <= 0).all(), "not best first"
        for name in {"scores", *NEXT_SCORES, *NEXT_NORM_SCORES} & {*columns}:
            assert got[name].shape[:2] == ids.shape[:2]
        assert got["hidden"].shape == (len(tokens), len(layers) + 1, 32)


@pytest.mark.parametrize("family", ["Qwen3Moe", "DeepseekV3", "Gemma4"])
def test_next_scores_are_the_later_gates_on_this_layers_input(family):
    """Both norms in one forward: this layer's gate input, and the residual behind it in the later layer's own norm."""
    model = tiny(family)
    layers = find_moe_layers(model)
    assert norms_differ(layers) == (family != "Gemma4")
    read, residual = {}, {}
    for at, layer in enumerate(layers):
        layer.router.register_forward_pre_hook(lambda m, a, at=at: read.__setitem__(at, a[0].clone()))
        getattr(layer.block, NORM).register_forward_pre_hook(lambda m, a, at=at: residual.__setitem__(at, a[0].clone()))
    tokens = torch.randint(3, 97, (1, 9), generator=torch.Generator().manual_seed(0))
    norm_distance = 3 if norms_differ(layers) else 0
    with torch.inference_mode(), RouterHooks(model, distance=3, norm_distance=norm_distance) as hooks:
        model(input_ids=tokens, use_cache=False)
        gates = hooks.take()
        inputs, behind = dict(read), dict(residual)
        assert (len(gates.ahead), len(gates.ahead_in_norm)) == (3, norm_distance)
        for at in range(len(layers)):
            for own_norm, found in enumerate((gates.ahead, gates.ahead_in_norm)):
                for distance, scores in enumerate(found, 1):
                    ahead = scores[:, at]
                    if at + distance >= len(layers):
                        assert not ahead.any()
                        continue
                    later = layers[at + distance]
                    x = inputs[at]
                    if own_norm:
                        x = getattr(later.block, NORM).forward(behind[at]).reshape(x.shape)
                    _, _, ids = later.router.forward(x)
                    best = ahead.topk(ids.shape[-1]).indices
                    assert torch.equal(best.sort(-1).values, ids.sort(-1).values)
        if norm_distance:
            assert not torch.allclose(gates.ahead[0][:, 0], gates.ahead_in_norm[0][:, 0])


def test_hidden_states_are_those_of_transformers():
    model = tiny("Qwen3Moe")
    tokens = torch.tensor([[5, 6, 7, 8]])
    with torch.inference_mode(), RouterHooks(model, hidden=True) as hooks:
        expected = model(input_ids=tokens, use_cache=False, output_hidden_states=True).hidden_states
        hidden = hooks.take().hidden
        for at in range(4):
            torch.testing.assert_close(hidden[:, at], expected[at][0])
        torch.testing.assert_close(model.model.norm(hidden[:, 4]), expected[4][0])


def test_a_model_without_experts_and_a_router_that_is_bypassed():
    config = transformers.Qwen3Config(**{**BASE, "head_dim": 8, "intermediate_size": 32})
    with pytest.raises(UserError, match="has no MoE layer"):
        find_moe_layers(transformers.Qwen3ForCausalLM(config))
    with RouterHooks(tiny("Qwen3Moe")) as hooks, pytest.raises(UserError, match=r"layers\.0\.mlp\.gate was not called"):
        hooks.take()


def test_sampling_depends_on_the_request_not_on_its_neighbours():
    model = tiny("Qwen3Moe")

    def tokens(numbers):
        rows = {n: [] for n in numbers}
        requests = [Request(n, (5, 6, 7 + n), 12, seed=3, temperature=1.0) for n in numbers]
        with torch.inference_mode(), RouterHooks(model) as hooks:
            give = lambda n, r: rows[n].extend(r["token_id"].tolist())  # noqa: E731
            list(decode(model, hooks, requests, give, columns=("token_id",), prefill=False))
        return rows

    together = tokens([0, 1, 2])
    assert tokens([1])[1] == together[1] != together[0]


# ---------------------------------------------------------------------------- the command


class Letters:
    """A tokenizer of letters."""

    chat_template = None

    def encode(self, text, add_special_tokens=False):
        return [3 + ord(c) % 90 for c in text]


@pytest.fixture
def texts(tmp_path):
    for i in range(6):
        (tmp_path / "texts").mkdir(exist_ok=True)
        (tmp_path / "texts" / f"{i}.txt").write_text("some words " * (i + 1))
    return tmp_path / "texts"


def settings(texts, out, **more) -> Settings:
    few = {"requests": 5, "steps": 20, "batch": 2, "lengths": "full"}
    return Settings("tiny", "text", str(texts), str(out), **{**few, **more})


@pytest.mark.parametrize("prefill", [True, False])
def test_a_capture_is_a_valid_trace_and_the_same_again(texts, tmp_path, prefill):
    from traces.validate import problems

    model = tiny("DeepseekV3")
    outs = [tmp_path / f"{i}.parquet" for i in range(2)]
    for out in outs:
        capture(settings(texts, out, prefill=prefill, columns=ALL_COLUMNS, temperature=0.7), model, Letters())
    assert outs[0].read_bytes() == outs[1].read_bytes()
    trace = problems(str(outs[0]))
    assert not isinstance(trace, list), trace
    assert trace.layer_indices == (1, 2, 3)
    assert [r.n_decode for r in trace.requests] == [20] * 5
    assert [r.first_decode for r in trace.requests] == [r.prompt_tokens if prefill else 0 for r in trace.requests]
    assert trace.notes["scores"] == "sigmoid plus bias"
    assert not list(tmp_path.glob("*.parts"))


def test_a_router_with_its_own_norm_has_one_variant(texts, tmp_path):
    model = tiny("Gemma4")
    said = capture(settings(texts, tmp_path / "g.parquet", columns=ALL_COLUMNS), model, Letters())
    assert any("left out next_norm_scores_1 to 3" in line for line in said)
    assert TraceFile(tmp_path / "g.parquet").columns == (
        "phase",
        "token_id",
        "weights",
        "scores",
        *NEXT_SCORES,
        "hidden",
    )


def test_a_broken_off_capture_goes_on(texts, tmp_path, monkeypatch):
    model = tiny("Qwen3Moe")
    capture(settings(texts, tmp_path / "whole.parquet"), model, Letters())
    out = tmp_path / "broken.parquet"
    started = []

    def fail_at_the_second_batch(self, number):
        started.append(number)
        if number == 3:
            raise KeyboardInterrupt

    from traces.spool import Spool

    begin = Spool.begin
    monkeypatch.setattr(Spool, "begin", fail_at_the_second_batch)
    with pytest.raises(KeyboardInterrupt):
        capture(settings(texts, out), model, Letters())
    assert not out.exists()
    started.clear()
    monkeypatch.setattr(Spool, "begin", lambda self, number: (started.append(number), begin(self, number)))
    with pytest.raises(UserError, match="unfinished capture with other settings"):
        capture(settings(texts, out, steps=21), model, Letters())
    capture(settings(texts, out), model, Letters())
    assert started == [2, 3, 4]
    assert out.read_bytes() == (tmp_path / "whole.parquet").read_bytes()


def test_lengths_come_from_the_model_or_a_file(texts, tmp_path):
    model = tiny("Qwen3Moe")
    model.generation_config.eos_token_id = list(range(40))
    capture(settings(texts, tmp_path / "a.parquet", lengths="model"), model, Letters())
    file = TraceFile(tmp_path / "a.parquet")
    assert min(r.tokens - r.prompt_tokens for r in file.requests) < 20
    lengths = tmp_path / "l.jsonl"
    row = '{{"input_toks": 4, "output_toks": {0}, "arrival_time_ns": {0}e9}}'
    lengths.write_text("\n".join(row.format(n) for n in range(1, 6)))
    capture(settings(texts, tmp_path / "b.parquet", lengths=str(lengths)), model, Letters())
    stored = TraceFile(tmp_path / "b.parquet").requests
    assert [(r.prompt_tokens, r.tokens - 4, r.arrival_s) for r in stored] == [(4, n, float(n)) for n in range(1, 6)]


def test_capture_takes_memory_for_a_batch_not_for_all_steps(texts, tmp_path):
    """Rows are given on every few steps, however many there are."""
    model = tiny("Qwen3Moe")
    most = 0

    def give(number, rows):
        nonlocal most
        most = max(most, len(rows["experts"]))

    with torch.inference_mode(), RouterHooks(model) as hooks:
        list(decode(model, hooks, [Request(0, (5,), 90)], give, columns=("weights",), prefill=False))
    assert most == 16


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({}, "model= is missing"),
        ({"dataset": "wiki"}, "dataset is wiki, expected sharegpt or swe_agent or text"),
        ({"requests": "0"}, "requests is 0, expected a number from 1"),
        ({"temperature": "-1"}, "temperature is -1"),
        ({"prefill": "yes"}, "prefill is yes, expected true or false"),
        ({"columns": "weights,entropy"}, "columns has entropy"),
        ({"lengths": "short"}, "lengths is short"),
    ],
)
def test_bad_arguments_are_one_line(words, message):
    given = {"model": "m", "dataset": "text", "path": "p", "out": "o", **words} if words else {}
    with pytest.raises(UserError, match=message) as error:
        read_settings(given)
    assert "\n" not in str(error.value)


def test_missing_files_are_one_line(tmp_path, monkeypatch):
    where = [f"out={tmp_path / 'o.parquet'}", "dataset=text"]
    with pytest.raises(UserError, match="is not there"):
        main(["model=demo", f"path={tmp_path / 'none'}", *where])
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(UserError, match="cannot load"):
        main([f"model={tmp_path}", f"path={tmp_path}", *where])
