"""Files of the checkout that options name are found from any folder; what the user gave comes first."""

import json
import os
import subprocess
import sys

from omegaconf import OmegaConf

from conf.paths import ROOT, located

BUNDLED = "traces/demo/chat.parquet"


def test_the_current_folder_comes_first_and_the_project_second(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert located(BUNDLED) == ROOT / BUNDLED
    assert located(ROOT / BUNDLED) == ROOT / BUNDLED
    assert str(located("nowhere/at/all")) == "nowhere/at/all"
    assert str(located("x" * 5000)) == "x" * 5000
    (tmp_path / "traces" / "demo").mkdir(parents=True)
    (tmp_path / BUNDLED).write_text("mine")
    assert located(BUNDLED).read_text() == "mine"


def test_the_options_name_files_that_are_there():
    for name in ("demo_chat", "demo_agentic"):
        path = OmegaConf.load(ROOT / "conf" / "workload" / f"{name}.yaml").path
        assert located(path).is_file()
        assert not path.startswith("/"), "recorded settings would differ from machine to machine"


def test_a_bundled_workload_runs_from_anywhere_as_the_same_cell(tmp_path):
    words = ["model=demo", "workload=demo_chat", "device=cpu_disk", "system=bevy_prefetch", "concurrency=2"]
    words += ["steps=3", "warmup=1", "study=s", "progress=false"]
    cells = []
    for folder in (ROOT, tmp_path):
        command = [sys.executable, "-m", "sim", *words, f"runs={tmp_path / folder.name}"]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        subprocess.run(command, cwd=folder, env=environment, check=True, capture_output=True)
        (cell,) = (tmp_path / folder.name / "s").glob("bevy*")
        cells.append(cell)
    assert cells[0].name == cells[1].name
    assert (cells[0] / "config.yaml").read_bytes() == (cells[1] / "config.yaml").read_bytes()
    steps = [json.loads((cell / "summary.json").read_text())["tokens_per_s"] for cell in cells]
    assert steps[0] == steps[1] > 0
