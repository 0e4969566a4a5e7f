"""``python -m sim`` on a tiny model: the files of a run directory, the same bytes however it is run, bad input."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
from omegaconf import OmegaConf

from analysis.metrics import write_metrics
from conf import compose
from conf.models import ModelConfig
from policies.build import build_core
from policies.core.journal import read_journal, refeed
from policies.core.types import ModelSpec
from sim.__main__ import main

ROOT = Path(__file__).resolve().parents[2]
TINY = (
    "model=olmoe_1b_7b",
    "model.n_layers=4",
    "model.n_experts=16",
    "model.top_k=2",
    "model.attention=[{kind:full,layers:4,heads:16,kv_heads:16,head_dim:128}]",
    "concurrency=4",
    "steps=6",
    "warmup=2",
)
SUMMARY = {
    *("backend", "system", "model", "device", "workload", "concurrency", "cache_fraction", "cache_slots"),
    *("steps", "warmup", "seed", "tokens_per_s", "step_s_mean", "step_s_p50", "step_s_p95", "step_s_p99"),
    *("demand_fetches_per_step", "prefetches_needed_per_step", "prefetches_late_per_step"),
    *("prefetches_wasted_per_step", "bytes_per_step", "hit_rate", "busy_both", "link_only", "gpu_only", "neither"),
    *("gpu_busy_s_per_step", "link_busy_s_per_step", "group_size_share", "runahead", "bounds", "warnings"),
    *("requested", "effective", "host_wall_s", "host_modelled_per_wall", "host_peak_rss_bytes"),
}


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def run(*overrides: str) -> int:
    return main([*TINY, "workers=1", *overrides])


def folder(system: str) -> Path:
    (found,) = Path("runs/compare").glob(f"{system}-*")
    return found


def test_a_run_directory_has_everything(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("system=bevy", "check=true") == 0
    assert "Bevy" in capsys.readouterr().out
    run_dir = folder("bevy")
    assert sorted(os.listdir(run_dir)) == [
        "config.yaml",
        "environment.json",
        "journal.jsonl.gz",
        "steps.parquet",
        "summary.json",
    ]
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary.keys() >= SUMMARY
    assert list(summary) == sorted(summary)
    assert (summary["backend"], summary["system"], summary["model"]) == ("sim", "bevy", "olmoe_1b_7b")
    assert summary["cache_slots"] == 19  # 30% of 4 x 16, rounded down
    assert summary["requested"]["cache_fraction"] == 0.3
    assert summary["effective"]["cache_fraction"] == 19 / 64
    states = [summary[state] for state in ("busy_both", "link_only", "gpu_only", "neither")]
    assert sum(states) == pytest.approx(1)
    assert len(pd.read_parquet(run_dir / "steps.parquet")) == 6


@pytest.mark.parametrize("system", ["bevy", "specmd"])
def test_metrics_heard_while_running_are_those_of_the_journal(system: str) -> None:
    assert run(f"system={system}") == 0
    steps = folder(system) / "steps.parquet"
    heard = steps.read_bytes()
    read = write_metrics(folder(system), OmegaConf.to_container(OmegaConf.load(folder(system) / "config.yaml")))  # type: ignore[arg-type]
    assert steps.read_bytes() == heard
    summary = json.loads((folder(system) / "summary.json").read_text())
    assert read.keys() <= summary.keys()
    assert {**summary, **json.loads(json.dumps({k: v for k, v in read.items() if k != "warnings"}))} == summary


def test_the_journal_alone_gives_the_same_commands() -> None:
    assert run("system=bevy") == 0
    header, records = read_journal(folder("bevy") / "journal.jsonl.gz")
    config = OmegaConf.to_container(OmegaConf.load(folder("bevy") / "config.yaml"))
    assert header["config"] == config
    core = build_core(config, ModelSpec(**header["model"]), fetch_slots=8)  # type: ignore[arg-type]
    assert refeed(core, records) > 6


def test_bytes_are_fetches_times_the_size_of_an_expert() -> None:
    assert run("system=static_2_2") == 0
    summary = json.loads((folder("static_2_2") / "summary.json").read_text())
    model = ModelConfig.from_config(
        OmegaConf.to_container(OmegaConf.load(folder("static_2_2") / "config.yaml"))["model"]
    )
    assert summary["bytes_per_step"] == summary["demand_fetches_per_step"] * model.expert_bytes


def test_runahead_that_is_impossible_is_told_and_with_strict_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("system=bevy", "cache.slots=4") == 0
    summary = json.loads((folder("bevy") / "summary.json").read_text())
    assert summary["runahead"].startswith("off: ")
    assert summary["effective"]["runahead"] == summary["runahead"]
    assert any(line.startswith("runahead off: ") for line in summary["warnings"])
    assert run("system=bevy", "cache.slots=4", "strict=true") == 2
    assert "error: runahead is impossible" in capsys.readouterr().err


def files(root: Path) -> dict[str, bytes]:
    """Every file of every run; the host's timings and its state of the checkout left out."""
    found = {}
    for path in sorted(root.glob("runs/*/*/*")):
        content = path.read_bytes()
        if path.suffix == ".json":
            kept = {k: v for k, v in json.loads(content).items() if not k.startswith("host_") and k != "git"}
            content = json.dumps(kept).encode()
        found[str(path.relative_to(root))] = content
    return found


def test_same_bytes_under_any_hash_seed_and_number_of_workers(tmp_path: Path) -> None:
    processes = []
    starts = (("0", 1, "bevy,llama_cpp"), ("1", 2, "bevy,llama_cpp"), ("random", 1, "bevy"))
    for number, (seed, workers, systems) in enumerate(starts):
        (tmp_path / str(number)).mkdir()
        command = [sys.executable, "-m", "sim", *TINY, f"system={systems}", f"workers={workers}"]
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)}
        processes.append(
            subprocess.Popen(command, cwd=tmp_path / str(number), env=environment, stdout=subprocess.PIPE, text=True)
        )
    tables = [process.communicate(timeout=100)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0]
    assert tables[0] == tables[1]
    assert "figure: runs/compare/compare.png" in tables[0]
    serial, parallel, alone = (files(tmp_path / str(number)) for number in range(3))
    assert len(serial) == 2 * 5
    assert serial == parallel
    assert alone == {name: content for name, content in serial.items() if "/bevy-" in name}


def test_nothing_of_the_machine_is_in_the_files(tmp_path: Path) -> None:
    assert run("system=bevy", f"runs={tmp_path}/my runs") == 0
    for path in (tmp_path / "my runs").glob("compare/*/*"):
        content = path.read_bytes()
        text = gzip.decompress(content) if path.suffix == ".gz" else content
        assert str(tmp_path).encode() not in text


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (("cache=nope",), "cache=nope: there is no such cache"),
        (("model.top_k=17",), "top_k 17 is above its 16 experts"),
        (("cache.slots=1",), "needs its top-2"),
        (("device.link.bytes_per_s.value=-1",), "bytes_per_s"),
        (("device.gpu.host_s.value=nan",), "host_s"),
        (("system=static_3_3",), "make the sizes add up to the concurrency"),
        (("workload=trace", "workload.path=absent.parquet"), "workload.path=absent.parquet cannot be read"),
        (("workload=trace",), "workload.path is not set"),
        (("schedule.partition._target_=policies.schedule.Nope",), "cannot make a policies.schedule.Nope"),
    ],
)
def test_bad_input(overrides: tuple[str, ...], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    more = () if overrides[0].startswith("system") else ("system=bevy",)
    assert run(*more, *overrides) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert says in error
    assert not list(Path().glob("runs/*/*"))


def test_bad_input_that_shows_in_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("system=bevy", "workload.context_tokens=x") == 2
    assert "\nerror: workload.context_tokens is x" in capsys.readouterr().err
    assert not list(Path().glob("runs/*/*"))


def test_a_broken_policy_is_isolated(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def broken(self: object, job: object) -> tuple[int, ...]:
        raise RuntimeError("no order today")

    monkeypatch.setattr("policies.schedule.Fifo.key", broken)
    assert run("system=bevy_fifo,bevy") == 1
    errors = capsys.readouterr().err
    assert "bevy_fifo-" in errors
    assert ": RuntimeError: no order today\n" in errors
    (summary,) = Path("runs").glob("*/*/summary.json")
    assert summary.parent.name.startswith("bevy-")


def test_help_names_every_option(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["sim", "--help"])
    with pytest.raises(SystemExit) as caught:
        main(["--help"])
    assert not caught.value.code
    text = capsys.readouterr().out
    for path in compose.FOLDER.glob("[a-z]*/*.yaml"):
        assert path.stem in text
    assert "static_<sizes>" in text


def test_cells_is_all_or_failed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--cells", "some") == 2
    assert capsys.readouterr().err == "error: --cells some: expected all or failed\n"
