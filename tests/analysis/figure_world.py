"""Summaries as finished runs of the simulator leave them, with numbers chosen by hand; no simulation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

CONF = Path(__file__).resolve().parents[2] / "conf"


def node(group: str, name: str) -> Any:
    return OmegaConf.to_container(OmegaConf.load(CONF / group / f"{name}.yaml"))


class Runs:
    """``add`` writes a finished run, ``fail`` a failed one, into the folder of a study."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def add(
        self,
        system: str,
        tokens_per_s: float,
        *,
        cache: float = 0.3,
        seed: int = 0,
        predictor: Any = None,
        **values: Any,
    ) -> Path:
        config = self._config(system, cache, seed, values)
        step_s = values.get("concurrency", 8) / tokens_per_s
        summary = {
            "backend": "sim",
            **{group: config[group]["name"] for group in ("system", "model", "device", "workload")},
            **{key: config[key] for key in ("concurrency", "steps", "warmup", "seed")},
            "cache_fraction": cache,
            "cache_slots": round(cache * 3840),
            "tokens_per_s": tokens_per_s,
            "step_s_mean": step_s,
            "demand_fetches_per_step": 200.0,
            "prefetches_needed_per_step": 0.0,
            "prefetches_wasted_per_step": 0.0,
            "busy_both": 0.5,
            "link_only": 0.3,
            "gpu_only": 0.2,
            "neither": 0.0,
            "gpu_busy_s_per_step": 0.7 * step_s,
            "link_busy_s_per_step": 0.8 * step_s,
            "hit_rate": 0.6,
            "group_size_share": {"1": 0.5, "2": 0.3, "5": 0.2},
            "runahead": "on",
            "bounds": {},
            "warnings": [],
            "predictor": predictor,
            **{key: value for key, value in values.items() if key not in config},
        }
        folder = self.folder / self._name(config)
        folder.mkdir()
        OmegaConf.save(OmegaConf.create(config), folder / "config.yaml")
        (folder / "summary.json").write_text(json.dumps(summary))
        return folder

    def fail(self, system: str, reason: str, *, cache: float = 0.3, seed: int = 0, **values: Any) -> None:
        config = self._config(system, cache, seed, values)
        name = self._name(config)
        failure = {"cell": name, "kind": "RuntimeError", "reason": reason, "settings": config, "traceback": []}
        (self.folder / f"{name}.failed.json").write_text(json.dumps(failure))

    def _name(self, config: Any) -> str:
        parts = [config[group]["name"] for group in ("system", "model", "device", "workload")]
        return "-".join([*parts, f"c{config['concurrency']}", str(config["cache"]["fraction"]), f"s{config['seed']}"])

    @staticmethod
    def _config(system: str, cache: float, seed: int, values: dict[str, Any]) -> Any:
        file = CONF / "system" / f"{system}.yaml"
        label = OmegaConf.load(file).system.label if file.exists() else system
        return {
            "system": {"name": system, "label": label},
            "model": node("model", values.get("model", "gemma4_26b_a4b")),
            "device": node("device", values.get("device", "m6")),
            "workload": node("workload", values.get("workload", "agentic")),
            "cache": {"fraction": cache, "slots": None},
            "prefetch": {"policy": None, "predictor": None},
            "concurrency": values.get("concurrency", 8),
            "steps": 512,
            "warmup": 256,
            "seed": seed,
            "study": "made",
        }
