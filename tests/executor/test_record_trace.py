"""``record_trace=``: what a live run writes is the capture of the same tokens by hooks on transformers' model."""

import json

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("safetensors")

from packs import pack_of, save_checkpoint  # noqa: E402
from runs_world import LIVE, failing_reads, quick, the_run, tiny_pack  # noqa: E402

from executor import host  # noqa: E402
from executor.__main__ import main  # noqa: E402
from policies.core.types import ModelSpec  # noqa: E402
from traces.capture import Settings, capture  # noqa: E402
from traces.format import NEXT_SCORES, PREFILL  # noqa: E402
from traces.trace_file import read_trace  # noqa: E402
from traces.validate import main as validate  # noqa: E402

TEXTS = ("one", "two words", "and three more", "a fourth one that is the longest of all by far", "five")
ALL = ("token_id", "weights", "scores", *NEXT_SCORES)


@pytest.fixture(autouse=True)
def _times_do_not_matter_here(monkeypatch):
    """A run of a few kilobytes is invalid if a page of some library is read at the same time."""
    monkeypatch.setattr(host, "why_invalid", lambda *_: [])


class Letters:
    """A tokenizer of letters."""

    chat_template = None

    def encode(self, text, add_special_tokens=False):
        return [3 + ord(letter) % 90 for letter in text]


def log_softmax(scores):
    scores = scores.astype(np.float32) - scores.max(-1, keepdims=True).astype(np.float32)
    return scores - np.log(np.exp(scores).sum(-1, keepdims=True))


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "olmoe", "qwen3_5_moe", "gemma4"])
def test_the_trace_is_the_capture_of_the_same_tokens(family, tmp_path, capsys):
    torch.set_num_threads(1)
    model = save_checkpoint(tmp_path / "checkpoint", family, dtype="float32").requires_grad_(False)
    pack = pack_of(tmp_path / "checkpoint", tmp_path / "pack", "f32").path
    (tmp_path / "texts").mkdir()
    for number, text in enumerate(TEXTS):
        (tmp_path / "texts" / f"{number}.txt").write_text(text)
    # A stop would end one of the two a token earlier.
    model.generation_config.eos_token_id = model.config.eos_token_id = None
    manifest = json.loads((pack / "manifest.json").read_text())
    manifest["config"]["eos_token_id"] = None
    (pack / "manifest.json").write_text(json.dumps(manifest))

    asked = Settings("tiny", "text", str(tmp_path / "texts"), str(tmp_path / "captured.parquet"), requests=4, steps=7)
    capture(asked, model, Letters())
    captured = read_trace(tmp_path / "captured.parquet")

    prompts = [r.columns["token_id"][: r.prompt_tokens].tolist() for r in captured.requests]
    (tmp_path / "prompts").write_text("".join(f"{json.dumps(prompt)}\n" for prompt in prompts))
    out = tmp_path / "live.parquet"
    live = [*LIVE, f"prompts={tmp_path / 'prompts'}", f"record_trace={out}", f"record_columns=[{','.join(ALL)}]"]
    # Three at a time: the fourth joins when one has left.  The first of 8 tokens is decoded from the prompt's last.
    more = ["concurrency=3", "steps=8", "system=bevy", "cache.fraction=0.7"]
    assert main(quick(pack, tmp_path / "runs", *live, *more)) == 0
    capsys.readouterr()
    assert validate([str(out)]) == 0
    assert capsys.readouterr().out.startswith("OK")
    recorded = read_trace(out)

    shape = [(m.n_layers, m.n_experts, m.top_k) for m in (captured.model, recorded.model)]
    assert shape[0] == shape[1]
    assert recorded.layer_indices == captured.layer_indices
    assert recorded.columns == ("phase", *ALL)
    completions = (the_run(tmp_path / "runs") / "completions.jsonl").read_text().splitlines()
    for theirs, ours, line in zip(captured.requests, recorded.requests, completions, strict=True):
        np.testing.assert_array_equal(ours.columns["token_id"], theirs.columns["token_id"])
        assert ours.columns["token_id"][ours.prompt_tokens :].tolist() == json.loads(line)["tokens"][:-1]
        assert (ours.prompt_tokens, ours.first_decode) == (theirs.prompt_tokens, theirs.prompt_tokens)
        np.testing.assert_array_equal(ours.columns["phase"], theirs.columns["phase"])
        np.testing.assert_array_equal(ours.experts, theirs.experts)
        np.testing.assert_allclose(ours.columns["weights"], theirs.columns["weights"], atol=2e-3)
        for distance, name in enumerate(("scores", *NEXT_SCORES)):
            mine, other = (r.columns[name][:, : recorded.model.n_layers - distance] for r in (ours, theirs))
            other = np.log(other.astype(np.float32)) if family == "gemma4" else log_softmax(other)
            seen = other > -8  # probabilities in half precision, where Gemma's are
            np.testing.assert_allclose(mine[seen], other[seen], atol=0.03)
            assert not ours.columns[name][:, recorded.model.n_layers - distance :].any()


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return tiny_pack(tmp_path_factory.mktemp("tiny"))


def test_a_prompt_of_one_token_and_the_columns_that_come_unasked(tiny, tmp_path):
    (tmp_path / "prompts").write_text("[1]\n[2, 3]\n")
    out = tmp_path / "new" / "live.parquet"
    assert main(quick(tiny, tmp_path, *LIVE, f"prompts={tmp_path / 'prompts'}", "steps=3", f"record_trace={out}")) == 0
    trace = read_trace(out)
    assert trace.columns == ("phase", "token_id", "weights", "next_scores_1")
    assert [r.n_tokens for r in trace.requests] == [3, 4]
    assert [(r.columns["phase"] == PREFILL).sum() for r in trace.requests] == [1, 2]
    assert trace.model == ModelSpec(trace.model.name, 2, 8, 4)
    summary = json.loads((the_run(tmp_path) / "summary.json").read_text())
    assert f"times include the recording of {out}" in summary["warnings"]
    assert [path.name for path in out.parent.iterdir()] == ["live.parquet"]


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["record_trace=t.parquet"], "is for mode=live: in a replay the routing is given"),
        (["record_columns=[scores]"], "is for record_trace=FILE"),
        ([*LIVE, "record_trace=t.parquet", "record_columns=[hidden]"], "expected a list of some of token_id"),
        ([*LIVE, "record_trace=t.parquet", "record_columns=scores"], "expected a list of some of token_id"),
        ([*LIVE, "record_trace={there}"], "is there already"),
    ],
)
def test_what_cannot_be_recorded_is_one_line(arguments, part, tiny, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    there = tmp_path / "there.parquet"
    there.write_text("mine")
    assert main(quick(tiny, tmp_path / "runs", *(word.format(there=there) for word in arguments))) == 2
    (error,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert part in error
    assert there.read_text() == "mine"
    assert not list(tmp_path.glob("t.parquet*"))


def test_a_broken_run_leaves_no_trace(tiny, tmp_path, monkeypatch, capsys):
    def fail():
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("executor.sources.IoOps", failing_reads(30, fail))
    out = tmp_path / "live.parquet"
    assert main(quick(tiny, tmp_path / "runs", *LIVE, "prompt_tokens=6", f"record_trace={out}")) == 2
    assert "Input/output error" in capsys.readouterr().err
    assert not list(tmp_path.glob("live.parquet*"))
