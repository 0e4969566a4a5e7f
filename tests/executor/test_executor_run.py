"""Runs through the command, on a tiny pack with real files: what is written, what is refused, how they break."""

import gzip
import json
import time

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("safetensors")

from packs import edit_json, save_checkpoint  # noqa: E402
from runs_world import LIVE, failing_reads, quick, the_run, tiny_pack  # noqa: E402

from analysis.runs import find_runs  # noqa: E402
from analysis.validate import compare_runs  # noqa: E402
from conf.cells import recorded  # noqa: E402
from executor import host, pack  # noqa: E402
from executor.__main__ import main  # noqa: E402
from executor.compose import settings_of  # noqa: E402
from executor.machine import OwnClock  # noqa: E402
from executor.pack_model import model_node  # noqa: E402
from executor.run import OpenRun  # noqa: E402
from executor.store import ExpertStore  # noqa: E402
from policies.build import build_core  # noqa: E402
from policies.core.journal import read_journal, refeed  # noqa: E402
from policies.core.messages import Fetch  # noqa: E402
from policies.core.types import ModelSpec, UserError  # noqa: E402


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return tiny_pack(tmp_path_factory.mktemp("tiny"))


def summary_of(runs):
    return json.loads((the_run(runs) / "summary.json").read_text())


def test_a_replay_of_generated_routing_writes_a_run_directory_that_refeeds(tiny, tmp_path, capsys):
    assert main(quick(tiny, tmp_path, "system=bevy")) == 0
    assert "Bevy" in capsys.readouterr().out
    run, summary = the_run(tmp_path), summary_of(tmp_path)
    assert {path.name for path in run.iterdir()} == {
        "config.yaml",
        "environment.json",
        "journal.jsonl.gz",
        "steps.parquet",
        "summary.json",
    }
    assert summary["backend"] == "executor"
    assert summary["link"] == "raw"
    assert summary["steps"] == 8
    assert summary["read_over_needed"] == 1
    assert summary["pack"]["random"]
    assert any("random weights" in line for line in summary["warnings"])
    header, records = read_journal(run / "journal.jsonl.gz")
    records = list(records)
    core = build_core(header["config"], ModelSpec(**header["model"]), 2)
    assert refeed(core, records) == len(records)
    # Bytes are the fetches that really ran: those of the warm-up at time zero were decided, not read.
    stride = ExpertStore.open(tiny).stride
    fetched = sum(isinstance(c, Fetch) for r in records if r.t_s > 0 for c in r.commands)
    assert summary["bytes_read"] == fetched * stride


def test_a_finished_cell_is_kept_and_a_comparison_reads_it(tiny, tmp_path, capsys):
    arguments = quick(tiny, tmp_path, "system=llama_cpp_lfu,bevy")
    assert main(arguments) == 0
    assert main(arguments) == 0
    assert "already there: 2" in capsys.readouterr().err
    assert {run.summary["system"] for run in find_runs([tmp_path / "t"])} == {"llama_cpp_lfu", "bevy"}


def test_live_tokens_do_not_depend_on_the_system(tiny, tmp_path):
    tokens = []
    for number, system in enumerate(
        (
            ["system=llama_cpp_lfu"],
            ["system=bevy_prefetch"],
            ["system=static_3_1"],
            ["system=bevy", "prefetch=previous_token"],
        )
    ):
        runs = tmp_path / str(number)
        assert main(quick(tiny, runs, *LIVE, *system, "prompt_tokens=6")) == 0
        lines = (the_run(runs) / "completions.jsonl").read_text().splitlines()
        tokens.append([json.loads(line)["tokens"] for line in lines])
        summary = summary_of(runs)
        assert summary["mode"] == "live"
        assert summary["workload"] == "prompts"
        for row in summary["requests"]:
            assert row["tokens"] == 8
            assert row["ended"] == "length"
            assert row["first_token_s"] > 0
            assert 0 < row["inter_token_s_p50"] <= row["inter_token_s_max"]
    assert tokens[0] == tokens[1] == tokens[2] == tokens[3]
    assert [len(row) for row in tokens[0]] == [8] * 4


def test_a_live_run_refuses_a_predictor_that_needs_the_future(tiny, tmp_path, capsys):
    assert main(quick(tiny, tmp_path, *LIVE, "system=bevy", "prefetch=oracle", "prompt_tokens=6")) == 2
    assert "needs the future" in capsys.readouterr().err


def test_prompts_come_from_a_file(tiny, tmp_path, capsys):
    (tmp_path / "prompts").write_text("[1, 2, 3]\n\n[4]\n")
    more = (*LIVE, f"prompts={tmp_path / 'prompts'}", "system=bevy", "temperature=0.8", "top_k=5")
    assert main(quick(tiny, tmp_path, *more)) == 0
    rows = summary_of(tmp_path)["requests"]
    assert [row["prompt_tokens"] for row in rows] == [3, 1]
    (tmp_path / "prompts").write_text("words\n")
    assert main(quick(tiny, tmp_path / "b", *more)) == 2
    assert "no usable tokenizer" in capsys.readouterr().err


def test_a_real_model_needs_real_prompts(tmp_path, capsys):
    save_checkpoint(tmp_path / "checkpoint", "qwen3_moe")
    pack.run([f"checkpoint={tmp_path / 'checkpoint'}", f"out={tmp_path / 'pack'}", "dtype=bf16"])
    assert main(quick(tmp_path / "pack", tmp_path, *LIVE, "system=bevy")) == 2
    assert "routes noise otherwise than text" in capsys.readouterr().err


@pytest.mark.parametrize("system", ["llama_cpp", "llama_cpp_lfu", "static_2_2", "bevy", "bevy_fifo", "bevy_prefetch"])
def test_a_simulated_journal_gives_equal_decisions_here(system, tiny, tmp_path):
    from analysis.metrics import Metrics
    from conf import rundir
    from sim.run import simulate

    common = ("cache.fraction=0.7", "steps=6", "warmup=1")
    (settings,) = settings_of(quick(tiny, tmp_path, f"system={system}", "device=cpu_disk", *common))
    sim = tmp_path / "sim"
    sim.mkdir()
    rundir.write_records(sim, recorded(settings))
    simulate(recorded(settings), sim, False, measure=Metrics)
    # Its own settings are the journal's, whatever the command line says.
    assert main(quick(tiny, tmp_path, "system=llama_cpp", f"journal={sim / 'journal.jsonl.gz'}")) == 0
    found = compare_runs(sim, the_run(tmp_path))
    assert found.decisions_equal
    assert found.counts_equal
    assert found.machine.summary["system"] == system
    assert found.counts["demand_fetches"].sum() > 0


def test_a_journal_of_a_machine_is_replayed_and_another_configuration_is_noticed(tiny, tmp_path, capsys):
    (tmp_path / "prompts").write_text("[1, 2]\n[3]\n[5, 4]\n")
    live = (*LIVE, f"prompts={tmp_path / 'prompts'}", "system=bevy", "readers=3", "cache.fraction=0.7")
    assert main(quick(tiny, tmp_path / "live", *live)) == 0
    journal = the_run(tmp_path / "live") / "journal.jsonl.gz"
    assert main(quick(tiny, tmp_path / "again", "system=llama_cpp", f"journal={journal}")) == 0
    again = the_run(tmp_path / "again")
    records = [list(read_journal(path)[1]) for path in (journal, again / "journal.jsonl.gz")]
    assert [(r.events, r.commands) for r in records[0]] == [(r.events, r.commands) for r in records[1]]
    capsys.readouterr()
    other = tmp_path / "other.jsonl.gz"
    header, *lines = gzip.decompress(journal.read_bytes()).decode().splitlines()
    values = json.loads(header)
    values["config"]["readers"] = 1
    other.write_bytes(gzip.compress("\n".join([json.dumps(values), *lines]).encode() + b"\n"))
    assert main(quick(tiny, tmp_path / "third", f"journal={other}")) == 2
    assert "replay it with the configuration" in capsys.readouterr().err


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("argument", "part"),
    [
        ("link=fast", "raw or paced"),
        ("link=paced", "needs a rate above 0"),
        ("bytes_per_s=1e9", "is for link=paced"),
        ("readers=0", "at least 1"),
        ("mode=dream", "live or replay"),
        ("model=mixtral_8x7b", "leave model= out"),
        ("prompts=x", "is for mode=live"),
        ("pack=/nowhere", "is not an expert pack"),
        ("journal=/nowhere", "cannot be read"),
        ("system=nothing", "there is no such system"),
        ("--fast", "unknown option"),
    ],
)
def test_bad_input_is_one_line_and_nothing_is_left(argument, part, tiny, tmp_path, capsys):
    assert main(quick(tiny, tmp_path / "runs", argument)) == 2
    errors = capsys.readouterr().err
    assert errors.startswith("error: ")
    assert part in errors
    assert len(errors.splitlines()) == 1
    assert not list((tmp_path / "runs").rglob("*.json"))


def test_help_and_no_pack(capsys):
    assert main(["--help"]) == 0
    assert "python -m executor" in capsys.readouterr().out
    assert main(["system=bevy"]) == 2
    assert "pack has no value" in capsys.readouterr().err


def test_without_direct_reads_the_run_is_refused_or_marked_invalid(tiny, tmp_path, monkeypatch, capsys):
    def refuse():
        raise OSError(22, "Invalid argument")

    monkeypatch.setattr("executor.sources.IoOps", failing_reads(1, refuse))
    assert main(quick(tiny, tmp_path, "system=bevy", "allow_buffered=false")) == 2
    assert "not possible (read: Invalid argument)" in capsys.readouterr().err
    monkeypatch.setattr("executor.sources.IoOps", failing_reads(1, refuse))
    assert main(quick(tiny, tmp_path, "system=bevy")) == 1
    captured = capsys.readouterr()
    assert "invalid" in captured.err
    assert "tok/s" not in captured.out
    summary = summary_of(tmp_path)
    assert not summary["valid"]
    assert summary["read_mode"]["requested"] == "direct"
    assert summary["read_mode"]["effective"].startswith("buffered")


def test_a_run_whose_bytes_the_disk_did_not_give_is_invalid(tiny, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(host, "why_invalid", lambda *_: ["0.500 of the bytes"])
    assert main(quick(tiny, tmp_path, "system=bevy")) == 1
    assert "0.500 of the bytes" in capsys.readouterr().err


# ---------------------------------------------------------------- how a run breaks


def _eio():
    raise OSError(5, "Input/output error")


def _killed():
    raise SystemExit


@pytest.mark.parametrize(
    ("fail", "part"), [(_eio, "Input/output error"), (_killed, "SystemExit"), (lambda: 0, "short")]
)
def test_a_read_that_fails_ends_the_run_with_the_expert(fail, part, tiny, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("executor.sources.IoOps", failing_reads(12, fail))
    began = time.monotonic()
    assert main(quick(tiny, tmp_path, "system=bevy", "cache.fraction=0.5")) != 0
    assert time.monotonic() - began < 60  # a hang would be for ever
    captured = capsys.readouterr()
    assert "expert " in captured.err
    assert "offset" in captured.err
    assert part in captured.err
    assert "tok/s" not in captured.out
    assert not list(tmp_path.rglob("summary.json"))


def test_a_flipped_byte_is_found_by_its_checksum(tmp_path, capsys):
    folder = tiny_pack(tmp_path)
    with (folder / "experts.bin").open("r+b") as file:
        for expert in range(16):
            file.seek(expert * ExpertStore.open(folder).stride)
            first = file.read(1)
            file.seek(-1, 1)
            file.write(bytes([first[0] ^ 1]))
    assert main(quick(folder, tmp_path, "system=bevy", "verify_reads=true")) != 0
    assert "its checksum differs" in capsys.readouterr().err


def test_ctrl_c_in_mid_step_keeps_nothing_and_ends_the_threads(tiny, tmp_path, monkeypatch):
    import threading

    calls = [0]
    wait = OwnClock.wait

    def interrupted(self):
        calls[0] += 1
        if calls[0] == 9:
            raise KeyboardInterrupt
        return wait(self)

    monkeypatch.setattr(OwnClock, "wait", interrupted)
    assert main(quick(tiny, tmp_path, "system=bevy")) == 130
    assert not list(tmp_path.rglob("summary.json"))
    assert not [t.name for t in threading.enumerate() if t.name.startswith(("reader", "compute"))]


def test_a_steps_limit_is_a_turn(tiny, tmp_path):
    (settings,) = settings_of(quick(tiny, tmp_path, "system=bevy"))
    with OpenRun(recorded(settings), tmp_path / "journal") as run:
        assert run.steps == 2  # warmed in the core alone
        assert run.decode(4) == 4
        assert run.decode(4) == 2
        assert run.decode(4) == 0


# ---------------------------------------------------------------- the model of a pack


@pytest.mark.parametrize("name", ["qwen3_6_35b_a3b", "gemma4_26b_a4b", "qwen3_30b_a3b", "mixtral_8x7b", "olmoe_1b_7b"])
def test_sizes_of_a_packs_model_are_those_of_conf_model(name):
    from types import SimpleNamespace

    from omegaconf import OmegaConf

    from conf.compose import FOLDER
    from conf.models import ModelConfig
    from executor.pack import random_source

    source = random_source(name)
    moe = source.moe
    manifest = SimpleNamespace(
        name=f"{name}-random",
        random=True,
        dtype="q4_0",
        family=source.family.name,
        config=source.config,
        hidden_size=moe.hidden,
        intermediate_size=moe.intermediate,
        layers=moe.layers,
        n_experts=moe.n_experts,
        top_k=moe.top_k,
        source=source.origin,
    )
    ours = ModelConfig.from_config(model_node(SimpleNamespace(manifest=manifest)))
    theirs = ModelConfig.from_config(OmegaConf.to_container(OmegaConf.load(FOLDER / "model" / f"{name}.yaml")))
    assert ours.expert_bytes == theirs.expert_bytes
    assert ours.spec == theirs.spec
    # Small parameters (norms, router scales, biases) are left out of a pack's model.
    assert ours.body_bytes == pytest.approx(theirs.body_bytes, rel=0.07)
    assert ours.head_bytes == theirs.head_bytes
    assert ours.state_bytes(1000) == pytest.approx(theirs.state_bytes(1000))


def test_a_pack_of_another_shape_is_refused(tiny):
    from executor.run import check_model

    settings = {"model": {"name": "x", "n_layers": 3, "n_experts": 8, "top_k": 4}}
    with pytest.raises(UserError, match="leave model= out"):
        check_model(settings, ExpertStore.open(tiny))


def test_edit_json_is_used_for_damage(tiny, tmp_path, capsys):
    import shutil

    shutil.copytree(tiny, tmp_path / "copy")
    edit_json(tmp_path / "copy" / "manifest.json", lambda values: values.update(stride_bytes=1))
    assert main(quick(tmp_path / "copy", tmp_path, "system=bevy")) == 2
    assert "stride_bytes" in capsys.readouterr().err
