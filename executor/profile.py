"""A device profile from measurements: the YAML that ``python -m sim --config-dir DIR device=NAME`` reads.

Owns which measured figure becomes which constant.  Measures nothing.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from conf.sharing import DriverSharing
from executor import host
from executor.driver_fit import driver_level, driver_run, from_step, scaled
from executor.job_fit import JobFit, JobSample, job_samples, level, table
from executor.link_curve import LinkPoint
from executor.pack_model import model_node
from executor.store import ExpertStore
from policies.core.journal import read_journal


@dataclass(frozen=True, slots=True)
class Calibration:
    """What was measured.  ``samples``: of runs with all experts at hand; ``spread`` of the fit is in ``fit``.

    ``driver``: its constants where it launches batches itself; then ``fit`` is the GPU's time alone, and if it copies
    itself, ``copy_bytes_per_s`` the link's.
    """

    curve: tuple[LinkPoint, ...]
    fit: JobFit
    samples: tuple[JobSample, ...]
    memory_bytes_per_s: float
    pcie_bytes_per_s: float | None
    clocks: Mapping[str, Any] | None
    context_tokens: int | None
    driver: DriverSharing | None = None
    copy_bytes_per_s: float | None = None


@dataclass(frozen=True, slots=True)
class LinkRun:
    """What runs over the link showed: the rate while it was busy, and how much reading slows computing.

    ``in_order``: one transfer moves at a time.
    """

    bytes_per_s: float
    contention: float
    in_order: bool


def as_seen(
    name: str,
    store: ExpertStore,
    found: Calibration,
    link: LinkRun,
    *,
    run: Path,
    bytes_per_s: float,
    readers: int,
    warmup: int = 0,
    waited_us: float | None = None,
) -> dict[str, Any]:
    """The device YAML of a machine as ``run`` (conventional batching) met it: its speed moves within minutes.

    What a job's time is made of is the calibration's; how fast machine and link were in that minute, the run's.
    Where the driver has constants of its own it is they that move, the GPU's clock does not: in the steps from
    ``warmup`` on.  ``waited_us``: for how long a batch it had nothing to do; None: they stay as calibrated.
    """
    records = [record for record in read_journal(run / "journal.jsonl.gz")[1] if record.t_s > 0]
    then = found
    if found.driver is None:
        then = replace(found, fit=found.fit.scaled(level(job_samples(records), found.fit, store.spec.n_layers)))
    elif waited_us is not None:
        measured = from_step(records, warmup)
        samples = job_samples(measured)
        busy = driver_run(measured, samples, 1e-6 * waited_us * len(samples), units=1)
        then = replace(found, driver=scaled(found.driver, driver_level(busy, found.driver)))
    return profile(name, store, then, replace(link, bytes_per_s=bytes_per_s), readers=readers)


def fewest_readers(found: Calibration, stride: int) -> int:
    """The smallest number of readers that reaches 95% of the best rate with reads of one expert."""
    whole = {point.readers: point.bytes_per_s for point in found.curve if point.size_bytes == stride}
    return min(count for count, rate in whole.items() if rate >= 0.95 * max(whole.values()))


def profile(name: str, store: ExpertStore, found: Calibration, link: LinkRun, *, readers: int) -> dict[str, Any]:
    """The device YAML: the constants that the simulator reads, and under ``measured`` all that was seen."""
    fit = found.fit
    whole = [point for point in found.curve if point.size_bytes == store.stride]
    one = next((point for point in whole if point.readers == 1), None)
    quantisation = model_node(store)["quantisation"]
    how = "copies alone" if found.copy_bytes_per_s is not None else "seen by a run over the link while it was busy"
    sharing = {
        "sharing": "one_at_a_time" if link.in_order else "fair",
        "bytes_per_s": _marked(link.bytes_per_s, how),
        "readers": _marked(readers, "reader threads of the run"),
        "latency_s": _marked(0.0, "contained in the rates"),
        "read_splits": _marked(1, "one read an expert"),
    }
    if one is not None and not link.in_order:
        cap = min(one.bytes_per_s, link.bytes_per_s)
        sharing["per_reader_bytes_per_s"] = _marked(cap, "one reader, an expert a read")
    note = f"least squares over {fit.samples} jobs, spread {fit.spread:.0%}"
    affine = {
        "model": str(model_node(store)["name"]),
        "quantisation": quantisation,
        "kind": "affine",
        "a_s": _marked(fit.layer_s, note),
        "b_s": _marked(fit.expert_s, note),
        "c_s": _marked(fit.request_s, f"{note}; at the contexts of the runs, {found.context_tokens or 'which differ'}"),
        "c_per_token_s": {"value": 0.0, "source": "assumed", "note": "one context length was measured"},
        "head_s": _marked(fit.head_s, "mean of the heads"),
    }
    roofline = {
        "memory_bytes_per_s": _marked(found.memory_bytes_per_s, "sum of 256 MB of floats"),
        "dense_efficiency": _marked(
            max(1e-3, store.expert_bytes / max(fit.expert_s, 1e-9) / found.memory_bytes_per_s), "an expert's products"
        ),
        "expert_efficiency": {"value": 1.0, "source": "assumed", "note": "the same products"},
        "launch_s": _marked(fit.layer_s, "a of the fit, attention included"),
        "request_launch_s": _marked(fit.request_s, "c of the fit"),
    }
    return {
        "name": name,
        "label": f"{name}, calibrated",
        "link": sharing,
        "gpu": {
            "contention": _marked(link.contention, "jobs beside reads over jobs without, Bevy"),
            "host_s": _marked(0.0, f"contained in {'the driver' if found.driver else 'a of the fit'}"),
            "streams": _marked(1, "one compute thread"),
            "overlap_speedup": {"value": 1.0, "source": "assumed", "note": "one compute thread"},
            "roofline": roofline,
            "fits": {"pack": affine},
        },
        **_driver(found),
        "measured": {
            "machine": host.versions(),
            "clocks": dict(found.clocks) if found.clocks else None,
            "load_average": host.load_average(),
            "pcie_bytes_per_s": found.pcie_bytes_per_s,
            "link_by_size_and_readers": [point.describe() for point in found.curve],
            "jobs_by_requests_and_experts": table(found.samples, store.spec.n_layers),
            "fit_spread": fit.spread,
        },
    }


def _driver(found: Calibration) -> dict[str, Any]:
    if found.driver is None:
        return {}
    note = "least squares over runs with and without reads"
    return {"driver": {key: _marked(value, note) for key, value in asdict(found.driver).items()}}


def _marked(value: float, note: str) -> dict[str, Any]:
    return {"value": value, "source": "measured", "note": note}


def write_profile(out: Path, store: ExpertStore, device: Mapping[str, Any]) -> tuple[Path, Path]:
    """Write ``device`` and the pack's model below ``out``, each whole or not at all."""
    model = model_node(store)
    written = []
    # Another name than that of conf/model, whose file would be found first.
    for group, name, node in (("device", device["name"], device), ("model", f"{model['name']}_pack", model)):
        path = out / group / f"{name}.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_name(f".{path.name}.{os.getpid()}")
        unfinished.write_text(OmegaConf.to_yaml(OmegaConf.create(dict(node))))
        os.replace(unfinished, path)
        written.append(path)
    return written[0], written[1]
