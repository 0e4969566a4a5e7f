"""``pack=demo``: the demo model's pack is made once, and its prompts decode."""

import json

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("safetensors")

from runs_world import the_run  # noqa: E402

from executor import host  # noqa: E402
from executor.__main__ import main  # noqa: E402
from executor.shipped import with_shipped_pack  # noqa: E402
from executor.store import ExpertStore  # noqa: E402
from traces.demo import MODEL  # noqa: E402


def test_the_pack_is_made_once(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["system=bevy", "pack=demo", "runs=here"]
    system, pack, runs = with_shipped_pack(words)
    assert (system, runs) == ("system=bevy", "runs=here")
    (made,) = (tmp_path / "here" / "packs").iterdir()
    assert pack == f"pack=here/packs/{made.name}"
    store = ExpertStore.open(made)
    assert (store.manifest.name, store.manifest.dtype, store.n_total) == ("demo", "bf16", 12 * 32)
    before = (made / "manifest.json").stat().st_mtime_ns
    assert with_shipped_pack(words)[1] == pack
    assert (made / "manifest.json").stat().st_mtime_ns == before
    assert with_shipped_pack(["pack=other"]) == ["pack=other"]
    (tmp_path / "demo").mkdir()
    assert with_shipped_pack(words) == words, "a folder of that name is the user's"


def test_the_shipped_prompts_decode_from_any_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(host, "why_invalid", lambda *_: [])
    prompts = f"prompts={MODEL.parent / 'prompts.txt'}"
    quick = ["concurrency=8", "steps=3", "warmup=1", "system=bevy", "threads=1", "allow_buffered=true", "study=t"]
    assert main(["pack=demo", "mode=live", prompts, *quick, "progress=false"]) == 0
    lines = [json.loads(line) for line in (the_run(tmp_path / "runs") / "completions.jsonl").read_text().splitlines()]
    assert [len(line["tokens"]) for line in lines] == [3] * 8
    assert all(line["text"] for line in lines)
