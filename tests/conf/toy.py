"""A command with the sweep of ``python -m sim`` and toy cells: ``python -m tests.conf.toy key=value ...``.

TOY_SLEEP_S: how long a cell takes.  TOY_BROKEN, TOY_DIES: a system whose cells fail, or end their process.
TOY_REFUSES: every cell refuses its input.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from conf import rundir
from conf.launch import launch
from policies.core.types import UserError


def work(settings: Mapping[str, Any], folder: Path, progress: bool) -> None:
    system = settings["system"]["name"]
    with (folder.parent / "calls").open("a") as calls:
        calls.write(system + "\n")
    (folder / "part").write_text("half")
    time.sleep(float(os.environ.get("TOY_SLEEP_S", "0")))
    if system == os.environ.get("TOY_BROKEN"):
        raise ZeroDivisionError("a policy divided by zero\nand has more to say")
    if system == os.environ.get("TOY_DIES"):
        os._exit(9)
    if os.environ.get("TOY_REFUSES"):
        raise UserError("the trace has no requests; give another one")
    (folder / "part").write_text("whole")
    rundir.write_json(folder / "summary.json", {"tokens_per_s": 1.0, "seed": settings["seed"]})


def validate(settings: Mapping[str, Any]) -> None:
    if settings["concurrency"] > 100:
        raise UserError("concurrency is above 100; lower it")


def report(run_dirs: Sequence[Path], study: Path) -> None:
    print("\n".join(sorted(run.name for run in run_dirs)))


def main(overrides: Sequence[str], config_dir: Path | None = None, only_failed: bool = False) -> int:
    return launch(
        overrides, work=work, validate=validate, report=report, config_dir=config_dir, only_failed=only_failed
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
