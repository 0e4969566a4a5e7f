"""The demo model: its files, its training script at toy size, its bundled workloads."""

import json
import math
from collections import Counter

import numpy as np
import pytest

from policies.core.types import UserError
from traces.compare import main, measure, recall
from traces.demo import MODEL
from traces.demo.corpus import END, is_held_out, read_domain
from traces.demo.ngram import bits_per_byte
from traces.format import RequestTrace, Trace
from traces.statistics import popularity
from traces.storage import write_trace
from traces.trace_file import TraceFile, read_trace

WORKLOADS = ("chat", "agentic")


@pytest.fixture
def text(tmp_path):
    rng = np.random.default_rng(0)
    for i in range(60):
        folder = tmp_path / "text" / "site-packages" if i % 10 == 9 else tmp_path / "text"
        folder.mkdir(parents=True, exist_ok=True)
        words = rng.choice(["alpha ", "beta ", "gamma\n", "delta "], 120)
        (folder / f"{i}.txt").write_text("".join(words))
    return tmp_path / "text"


def test_the_split_is_by_file_and_leaves_out_what_is_not_source(text):
    domain = read_domain("prose", text)
    names = [f"{i}.txt" for i in range(60) if i % 10 != 9]
    assert domain.files == sum(not is_held_out(name) for name in names)
    assert domain.held_out_files == sum(is_held_out(name) for name in names) > 0
    assert np.count_nonzero(domain.train == END) == domain.files
    assert domain.held_out_bytes == sum((text / name).stat().st_size for name in names if is_held_out(name))


def test_a_folder_without_text_is_one_line(tmp_path):
    with pytest.raises(UserError, match="0 training and 0 held-out files"):
        read_domain("code", tmp_path)


def test_the_order_3_model_is_witten_bell_counted_by_hand():
    rng = np.random.default_rng(1)
    train, held_out = (rng.choice([97, 98, 99, END], n, p=[0.5, 0.3, 0.15, 0.05]).astype(np.int16) for n in (400, 60))

    def followers(context: tuple[int, ...]) -> Counter:
        n = len(context)
        return Counter(int(train[i + n]) for i in range(len(train) - n) if tuple(train[i : i + n].tolist()) == context)

    def smoothed(context: tuple[int, ...], symbol: int) -> float:
        below = smoothed(context[1:], symbol) if context else 1 / 256
        after = followers(context)
        total, kinds = sum(after.values()), len(after)
        return (after[symbol] + kinds * below) / (total + kinds) if total else below

    coded = [(tuple(held_out[i - 3 : i].tolist()), int(held_out[i])) for i in range(3, 60) if held_out[i] != END]
    bits = [-math.log2(smoothed(context, symbol)) for context, symbol in coded]
    assert bits_per_byte(train, held_out) == pytest.approx(np.mean(bits))


def test_the_weights_are_small_and_the_report_is_theirs():
    if not MODEL.is_dir():
        pytest.skip("the demo model is not in this checkout")
    assert sum(file.stat().st_size for file in MODEL.iterdir()) < 24e6
    report = json.loads((MODEL.parent / "report.json").read_text())
    config = json.loads((MODEL / "config.json").read_text())
    assert (config["num_hidden_layers"], config["hidden_size"]) == (report["plan"]["layers"], report["plan"]["hidden"])
    assert report["held_out"]["code"]["bits_per_byte"] < 0.6 * 2.018  # the order-3 byte model of the same text
    assert report["held_out"]["prose"]["bits_per_byte"] < 0.6 * 2.295


@pytest.mark.parametrize("name", WORKLOADS)
def test_the_bundled_workloads_are_the_models_and_neither_collapsed_nor_uniform(name):
    path = MODEL.parent / f"{name}.parquet"
    trace = read_trace(path)
    assert (trace.model.n_layers, trace.model.n_experts, trace.model.top_k) == (12, 32, 4)
    assert [request.n_decode for request in trace.requests] == [160] * 16
    counts = popularity(trace)
    assert (counts > 0).all(), "an expert is dead"
    found = measure(TraceFile(path))
    assert found["recall of gate l + 1"] > 0.5
    # Inside the ranges of large models (the card has the table): popularity and how requests overlap.
    assert 0.45 < found["hottest 30%"] < 0.73
    assert 0.87 < found["entropy / max"] < 0.98
    assert 1.4 < found["another request, in k/E"] < 2.9
    assert found["reuse at lag 1, in k/E"] > 1.5


def test_recall_counts_by_hand(make_trace):
    trace = make_trace((6,))
    (request,) = trace.requests
    perfect = np.zeros((6, 3, 8), np.float16)
    np.put_along_axis(perfect[:, :-1], request.experts[:, 1:].astype(int), 1.0, axis=-1)
    half = perfect.copy()
    np.put_along_axis(half[:, :-1], request.experts[:, 1:, :1].astype(int), -1.0, axis=-1)
    for scores, expected in ((perfect, 1.0), (half, 0.5), (-perfect, 0.0)):
        guessed = RequestTrace(0, request.experts, {"next_scores_1": scores})
        np.testing.assert_allclose(recall(Trace(trace.model, (guessed,)), "next_scores_1", 1), expected)


def test_the_table_shows_both_norms_and_what_the_columns_allow(make_trace, tmp_path, capsys):
    whole = make_trace((9, 9, 9, 9))
    perfect = [np.zeros((9, 3, 8), np.float16) for _ in whole.requests]
    for scores, request in zip(perfect, whole.requests, strict=True):
        np.put_along_axis(scores[:, :-1], request.experts[:, 1:].astype(int), 1.0, axis=-1)
    requests = tuple(
        RequestTrace(i, request.experts, {"next_scores_1": -scores, "next_norm_scores_1": scores})
        for i, (scores, request) in enumerate(zip(perfect, whole.requests, strict=True))
    )
    write_trace(tmp_path / "both.parquet", Trace(whole.model, requests))
    write_trace(
        tmp_path / "few.parquet", Trace(whole.model, tuple(RequestTrace(i, r.experts) for i, r in [(0, requests[0])]))
    )
    assert main([str(tmp_path / "both.parquet"), str(tmp_path / "few.parquet")]) == 0
    rows = {line[:36].strip(): line.split()[-2:] for line in capsys.readouterr().out.splitlines()}
    assert rows["recall of gate l + 1"] == ["0.000", "-"]
    assert rows["recall of gate l + 1, own norm"] == ["1.000", "-"]
    assert rows["misses of lower, upper layers, r"][1] == "-"


# ---------------------------------------------------------------------------- with torch

torch_needed = pytest.mark.filterwarnings("ignore")


@torch_needed
def test_the_experts_all_at_once_are_those_of_transformers():
    torch = pytest.importorskip("torch", reason="training needs torch")
    pytest.importorskip("transformers", reason="training needs transformers")
    from traces.demo.train import Plan, new_model

    torch.manual_seed(0)
    model = new_model(Plan(layers=2, hidden=32, experts=8, top_k=2, intermediate=32, length=16))
    tokens = torch.randint(0, 256, (2, 9))
    ours = model(input_ids=tokens, use_cache=False).logits
    model.set_experts_implementation("eager")
    torch.testing.assert_close(ours, model(input_ids=tokens, use_cache=False).logits, atol=1e-5, rtol=1e-4)


@torch_needed
def test_training_at_toy_size_learns_and_leaves_a_model(text, tmp_path):
    torch = pytest.importorskip("torch", reason="training needs torch")
    transformers = pytest.importorskip("transformers", reason="training needs transformers")
    torch.set_num_threads(1)
    from traces.demo.train import main as train

    words = "steps=30 batch=4 length=32 layers=2 hidden=32 experts=8 top_k=2 intermediate=32 evaluate=15 held_out=640"
    out = tmp_path / "model"
    assert train([f"code={text}", f"prose={text}", f"out={out}", "device=cpu", "compile=false", *words.split()]) == 0
    report = json.loads((out / "report.json").read_text())
    assert report["step"] == 30
    assert report["held_out"]["prose"]["bits_per_byte"] < 6
    model = transformers.AutoModelForCausalLM.from_pretrained(out)
    assert model.config.model_type == "qwen3_moe"
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    sentence = "def f(x):\r\n\treturn 'é😀' "
    assert tokenizer.encode(sentence) == list(sentence.encode())
    assert tokenizer.decode(tokenizer.encode(sentence)) == sentence


@torch_needed
def test_the_demo_model_decodes_what_it_was_evaluated_on():
    torch = pytest.importorskip("torch", reason="decoding needs torch")
    transformers = pytest.importorskip("transformers", reason="decoding needs transformers")
    torch.set_num_threads(1)
    model = transformers.AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    text = "In the beginning God created the heaven and the earth. And the "
    tokens = torch.tensor([[END, *text.encode()]])
    with torch.inference_mode():
        logits = model(input_ids=tokens[:, :-1], use_cache=False).logits
    loss = torch.nn.functional.cross_entropy(logits[0], tokens[0, 1:]) / math.log(2)
    assert loss < 2.5
