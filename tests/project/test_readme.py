"""The README is true: its test command is what CI runs, and its example policy works."""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()


def block(language, first_line):
    (text,) = [b for b in re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL) if b.startswith(first_line)]
    return text


def test_ci_runs_the_readmes_test_command():
    command = "pip install -r requirements.txt && pytest"
    assert f"\n{command}\n" in README
    assert f"\n{command}\n" in (ROOT / ".ci" / "run").read_text()


def test_the_example_policy_runs(tmp_path):
    (tmp_path / "my_policies.py").write_text(block("python", "# my_policies.py"))
    (tmp_path / "my_conf" / "cache").mkdir(parents=True)
    (tmp_path / "my_conf" / "cache" / "highest.yaml").write_text(block("yaml", "# my_conf/cache/highest.yaml"))
    arguments = ["--config-dir", str(tmp_path / "my_conf"), "system=bevy", "cache=highest,lfu", f"runs={tmp_path}/runs"]
    run = subprocess.run(
        [sys.executable, "-m", "sim", *arguments, "steps=3", "warmup=1", "concurrency=2", "workers=1"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert "HighestId" in run.stdout
