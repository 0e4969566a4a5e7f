"""``python -m benchmarks.kill_sweep [kills=20] [seed=0]``: a sweep that is killed again and again loses nothing.

Runs a small Figure 13 without interruption, then the same in another folder with ``kill -9`` of the whole process
group at random moments, and compares every file of every run but the host's own timings.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from policies.core.types import UserError
from traces import command

COMMAND = (sys.executable, "-m", "sim", "experiment=fig13", "scale=smoke", "steps=8", "warmup=4")
ROOT = Path(__file__).resolve().parents[1]


def main(arguments: list[str]) -> int:
    settings = command.parse(arguments, ("kills", "seed"))
    kills = command.whole_number(settings, "kills") or 20
    moments = random.Random(command.whole_number(settings, "seed", least=0) or 0)
    with tempfile.TemporaryDirectory() as name:
        whole, killed = Path(name) / "whole", Path(name) / "killed"
        took_s, table = sweep(whole)
        for kill in range(1, kills + 1):
            process = start(killed)
            with suppress(subprocess.TimeoutExpired):
                process.communicate(timeout=moments.uniform(0.2, 1.0) * took_s)
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            finished = len(list(killed.rglob("[a-z]*/summary.json")))
            print(f"kill {kill}: {finished} cells finished", flush=True)
            if finished == len(list(whole.rglob("[a-z]*/summary.json"))):
                shutil.rmtree(killed)  # all there: the next kills need something to interrupt
        _, again = sweep(killed)
        if again != table or contents(killed) != contents(whole):
            raise UserError(f"after {kills} kills the results differ from those of the uninterrupted sweep")
    print(f"{kills} kills: table, figure values and every run equal the uninterrupted sweep's, byte for byte")
    return 0


def start(runs: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*COMMAND, f"runs={runs}"], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        start_new_session=True,
    )  # fmt: skip


def sweep(runs: Path) -> tuple[float, str]:
    """Run to the end; seconds, and what it prints without the names of folders."""
    began_s = time.perf_counter()
    process = start(runs)
    out = process.communicate()[0]
    if process.returncode:
        raise UserError(f"the sweep ended with {process.returncode}")
    return time.perf_counter() - began_s, out.replace(str(runs), "RUNS")


def contents(runs: Path) -> dict[str, bytes]:
    """Files of finished runs and the figure's values, without host timings and the record of the machine."""
    found = {}
    for path in sorted(runs.rglob("*")):
        if path.is_dir() or path.name == "environment.json" or path.relative_to(runs).parts[1].startswith("."):
            continue
        data = path.read_bytes()
        if path.name == "summary.json":
            data = json.dumps({k: v for k, v in json.loads(data).items() if not k.startswith("host_")}).encode()
        found[str(path.relative_to(runs))] = data
    return found


if __name__ == "__main__":
    sys.exit(command.run(main, f"usage: {__doc__}"))
