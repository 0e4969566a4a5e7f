"""``python -m executor`` without arguments: does runahead pay on this machine?

Makes a random model once, measures the machine, and runs conventional batching, static grouping and Bevy in turns
with real direct reads, first as fast as the disk gives, then with a link held to a rate at which fetching takes
1.2 times as long as computing; then the simulator predicts the same cells from what was measured.

A machine's speed moves within minutes.  So the paced rate follows from how long batching computed in its latest turns;
and the prediction takes from the calibration what a job's time is made of, and from batching's own turns how fast
machine and disk were in that minute: it is one for the other systems.

Owns the sequence and its time budget.  The simulator is given as ``predict``, because neither world knows the other.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from conf.cells import cell_name
from executor.calibrate import Setting, calibrate, describe, link_run
from executor.compose import settings_of
from executor.interleave import interleave, until
from executor.machine import set_threads
from executor.pack import random_source
from executor.pack_writer import write_pack
from executor.profile import LinkRun, as_seen, fewest_readers, write_profile
from executor.run import Measure
from executor.short_run import ShortRun, short_runs
from executor.store import ExpertStore
from policies.core.types import ModelSpec
from traces import command
from traces.generate import generate
from traces.presets import preset_for
from traces.storage import write_trace

SYSTEMS = ("llama_cpp_lfu", "static_4_4", "bevy")
FRACTIONS = (0.3, 0.5, 0.7)
LINKS = ("raw", "paced")
REQUESTS = 8
CONTEXT_TOKENS = 256
WARMUP = 50  # 48 in the core alone, 2 that settle
TRACE_STEPS = 256
RHO = 1.2
"""Fetch over compute of batching with the smallest cache, on the paced link."""

MAX_STEPS = 60
"""Measured steps of a system and cell: how many there are depends on the time that is left."""
AFTERWARDS_S = 40.0
"""Kept for the sentinel, the predictions and the table."""


Predict = Callable[[Sequence[str], Path], Sequence[Path]]
"""``predict(overrides, config_dir)``: simulate these cells; their run directories in order."""


@dataclass(frozen=True, slots=True)
class Group:
    """Systems that took turns: ``steps`` of each, warm-up included.

    Of batching: ``bytes_per_s`` is the rate that it saw, ``fetched_bytes`` and ``compute_s`` are of one step.
    """

    title: str
    link: str
    fraction: float
    steps: int
    bytes_per_s: float
    fetched_bytes: float
    compute_s: float
    runs: tuple[Path, ...]


@dataclass(frozen=True, slots=True)
class Demo:
    """What the demo leaves: groups of runs, and for each run the simulator's run of its cell."""

    groups: tuple[Group, ...]
    predicted: Mapping[Path, Path]


@dataclass(frozen=True, slots=True)
class Options:
    """``seconds``: for everything but making the pack; ``steps``: None to let the budget decide."""

    pack: Path
    runs: Path
    seconds: int
    steps: int | None
    allow_buffered: bool

    @classmethod
    def parse(cls, arguments: Sequence[str]) -> Options:
        """From ``key=value``.  Raises UserError."""
        given = command.parse(arguments, ("pack", "runs", "seconds", "steps", "allow_buffered"))
        runs = Path(given.get("runs", "runs"))
        return cls(
            pack=Path(given.get("pack", runs / "packs" / "demo")),
            runs=runs,
            seconds=command.whole_number(given, "seconds") or 300,
            steps=command.whole_number(given, "steps", least=2),
            allow_buffered=command.flag(given, "allow_buffered"),
        )


def make_pack(path: Path) -> ExpertStore:
    """The random model, made the first time: 24 layers x 32 experts of 1.5 MB, attention in real proportions."""
    if not path.exists():
        write_pack(random_source("demo"), path, "bf16")
    return ExpertStore.open(path)


def make_routing(path: Path, spec: ModelSpec) -> Path:
    """Generated routing of the gpt-oss-20b preset (24 layers x 32 experts, top-4), stretched to the pack's layers."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_trace(path, generate(preset_for("gpt_oss_20b", "chat"), spec, REQUESTS, TRACE_STEPS, 0))
    return path


def demo(options: Options, *, measure: Measure, predict: Predict) -> Demo:
    """Run it.  Raises UserError for what cannot be measured here."""
    store = make_pack(options.pack)
    began_s = time.perf_counter()
    spec = store.spec
    threads = set_threads(None)
    routing = make_routing(options.pack.with_name(f"{options.pack.name}_routing.parquet"), spec)
    buffered = f"allow_buffered={str(options.allow_buffered).lower()}"
    base = [f"pack={options.pack}", f"concurrency={REQUESTS}", f"threads={threads}", buffered]
    workload = ["workload=trace", f"workload.path={routing}", f"workload.context_tokens={CONTEXT_TOKENS}"]
    base += workload

    _say(f"calibrating with {threads} thread(s) ...")
    quick = [word for word in base if not word.startswith("concurrency=")]
    found = calibrate(Setting(tuple(quick), REQUESTS, 2), context_tokens=CONTEXT_TOKENS)
    readers = fewest_readers(found, store.stride)
    base.append(f"readers={readers}")
    smallest = f"cache.fraction={FRACTIONS[0]}"
    (first,) = short_runs([[*base, "link=raw", "system=llama_cpp_lfu", smallest]], 4)
    setting = Setting((*quick, f"readers={readers}"), REQUESTS, 4)
    steps = options.steps or MAX_STEPS
    _say(f"up to {steps} steps a system and cell, in turns of two")
    groups: list[Group] = []
    reading: dict[str, LinkRun] = {}
    deadline_s = began_s + options.seconds - AFTERWARDS_S
    left = len(LINKS) * len(FRACTIONS)
    for name in LINKS:
        link = [f"link={name}"]
        if name == "paced":
            link.append(f"bytes_per_s={_round(groups[0].fetched_bytes / (RHO * groups[-1].compute_s))}")
        reading[name] = link_run(setting, found, spec.n_layers, *link, smallest)
        _say(f"{', '.join(link)}:\n{describe(found, reading[name])}")
        for fraction in FRACTIONS:
            shared_s = max(0.0, deadline_s - time.perf_counter()) / left
            sweep = [*base, *link, f"cache.fraction={fraction}", f"warmup={WARMUP}", f"steps={WARMUP + steps}"]
            sweep += [f"system={','.join(SYSTEMS)}", "study=demo", f"runs={options.runs}"]
            turns = [(settings, _folder(settings)) for settings in settings_of(sweep)]
            stop, on_round = until(time.perf_counter() + shared_s, steps)
            done = interleave(turns, measure=measure, stop=stop, on_round=on_round)
            groups.append(_group(name, fraction, done, [folder for _, folder in turns]))
            left -= 1
            _say(f"{groups[-1].title}: done")
    (last,) = short_runs([[*base, "link=raw", "system=llama_cpp_lfu", smallest]], 4)
    drift = (last.step_s / last.steps) / (first.step_s / first.steps)
    _say(f"sentinel (llama.cpp + LFU, 30%, raw), last over first: {drift:.2f}; the link {_rates(first, last)}")
    predicted: dict[Path, Path] = {}
    for group in groups:
        conf = options.runs / "demo" / "conf"
        name, seen = (
            f"demo_{group.link}_{100 * group.fraction:.0f}",
            {"bytes_per_s": group.bytes_per_s, "readers": readers},
        )
        node = as_seen(name, store, found, reading[group.link], run=group.runs[0], **seen)
        device, model = write_profile(conf, store, node)
        cells = [f"device={device.stem}", f"model={model.stem}", f"system={','.join(SYSTEMS)}", *workload]
        cells += [f"cache.fraction={group.fraction}", f"concurrency={REQUESTS}", f"steps={group.steps}"]
        cells += [f"warmup={WARMUP}", "study=demo_predicted", f"runs={options.runs}"]
        predicted |= zip(group.runs, predict(cells, conf), strict=True)
    return Demo(tuple(groups), predicted)


def _group(link: str, fraction: float, done: Sequence[dict[str, Any]], runs: Sequence[Path]) -> Group:
    """``done``: the summaries, batching's first."""
    steps, rate = int(done[0]["steps"]), float(done[0]["link_bytes_per_s"] or 0.0)
    measured = f"{REQUESTS} requests, {steps - WARMUP} steps each"
    title = f"{fraction:.0%} cache, {done[0]['link']} link, {measured}"
    fetched_bytes, compute_s = float(done[0]["bytes_per_step"]), float(done[0]["gpu_busy_s_per_step"])
    return Group(title, link, fraction, steps, rate, fetched_bytes, compute_s, tuple(runs))


def _folder(settings: Mapping[str, Any]) -> Path:
    return Path(str(settings["runs"])) / str(settings["study"]) / cell_name(settings)


def _round(rate: float) -> float:
    return float(f"{rate:.3g}")


def _rates(first: ShortRun, last: ShortRun) -> str:
    return f"{first.bytes_per_s / 1e9:.2f} GB/s, then {last.bytes_per_s / 1e9:.2f}"


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
