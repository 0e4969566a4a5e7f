"""The scales of an experiment: the paper's sizes, or a minute that only shows that all of it works."""

from __future__ import annotations

from typing import Any

from omegaconf import DictConfig

SCALES = ("paper", "smoke")


def scaled(paper: Any, smoke: Any, *, _root_: DictConfig) -> Any:
    """The resolver ``${scaled:PAPER,SMOKE}`` of experiments: one of the two by the config's ``scale``.

    A third scale counts as the paper's here; the check of the settings refuses it.
    """
    return smoke if _root_.get("scale") == "smoke" else paper


def study_of(figure: str, scale: str) -> str:
    """The study that ``experiment=FIGURE`` writes at a scale."""
    return figure if scale == "paper" else f"{figure}_{scale}"
