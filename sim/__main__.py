"""``python -m sim``: simulate one system or a sweep of them.

Wires the parts together: the sweep (``conf.launch``), one cell (``sim.run``), and the analysis of finished runs.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import hydra
from omegaconf import DictConfig

from analysis.compare import plot, print_table
from analysis.figures import draw_figure, figure_of
from analysis.metrics import write_metrics
from conf import compose
from conf.launch import launch, run_cell
from sim.run import simulate, validate

work = partial(simulate, measure=write_metrics)


@hydra.main(version_base=compose.VERSION_BASE, config_path=str(compose.FOLDER), config_name="config")
def by_hydra(config: DictConfig) -> None:
    """What Hydra's own flags act on (``--help``, ``--cfg``, ``--info``)."""
    run_cell(work, os.getpid(), config)


def main(arguments: Sequence[str]) -> int:
    """Run the command line; returns the exit code."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--multirun", "-m", action="store_true")  # a habit of Hydra's users: here it is always on
    parser.add_argument("--config-dir", "-cd", type=Path)
    parser.add_argument("--cells", default="all")
    flags, overrides = parser.parse_known_args(arguments)
    if any(override.startswith("-") for override in overrides):
        compose.register_sources()
        by_hydra()
        return 0
    if flags.cells not in ("all", "failed"):
        print(f"error: --cells {flags.cells}: expected all or failed", file=sys.stderr)
        return 2
    only_failed = flags.cells == "failed"
    return launch(
        overrides, config_dir=flags.config_dir, work=work, validate=validate, report=report, only_failed=only_failed
    )


def report(run_dirs: Sequence[Path], study: Path) -> None:
    """Draw the paper's figure of a study that is for one; else print the table of finished runs and draw them."""
    if (name := figure_of(study)) is not None:
        print(draw_figure(name, run_dirs, study))
        return
    print(print_table(run_dirs))
    if len(run_dirs) > 1:
        figure = study / "compare.png"
        plot(run_dirs, figure)
        print(f"figure: {figure}")
    print(f"runs:   {study}/")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
