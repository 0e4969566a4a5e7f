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
from analysis.metrics import Metrics
from conf import compose
from conf.cells import NOT_RESULTS
from conf.launch import launch, run_cell
from conf.scale import study_of
from policies.core.types import UserError
from sim import precision
from sim.run import simulate, validate

work = partial(simulate, measure=Metrics)


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
    code = launch(
        overrides, config_dir=flags.config_dir, work=work, validate=validate, report=report, only_failed=only_failed
    )
    if "experiment=all_figures" in overrides and code in (0, 1):
        code = max(code, figure_2(overrides, flags.config_dir))
    return code


def figure_2(overrides: Sequence[str], config_dir: Path | None) -> int:
    """The figure that no run of a system makes, unless it is there; returns the exit code."""
    given = dict(override.split("=", 1) for override in overrides if "=" in override)
    scale = given.get("scale", "paper")
    folder = Path(given.get("runs", "runs")) / study_of("precision", scale)
    if not (folder / "precision.csv").is_file() or given.get("force") == "true":
        elsewhere = ("experiment", *precision.NOT_HERE, *NOT_RESULTS)
        others = [f"{key}={value}" for key, value in given.items() if key not in elsewhere]
        seeds = given.get("seed", "0")
        small = [] if scale == "paper" else ["steps=24", "warmup=8", "sizes=0.2,0.4,0.6", "draws=2"]
        own = [f"out={folder}", f"seeds={seeds}", *([f"config_dir={config_dir}"] if config_dir else [])]
        try:
            precision.main([*own, "predictors=next_gate,finemoe", *small, *others])
        except UserError as error:
            print(f"error: Figure 2: {error}", file=sys.stderr)
            return 1
    print(draw_figure("fig2", [folder], folder))
    return 0


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
