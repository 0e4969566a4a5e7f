"""One run on this machine: from resolved settings to the files of a run directory.

Owns the composition of pack, readers, decoder, core, workload and journal, how it is warmed, and the summary.
The metrics are computed by whoever is given as ``measure``: the analysis of a journal is not this world's business.
"""

from __future__ import annotations

import gc
import json
import math
import queue
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from conf import rundir
from executor import host
from executor.backend import TorchBackend
from executor.fast.backend import StreamBackend
from executor.fast.choice import check_choice, open_fast, why_declined
from executor.fast.decoder import FastDecoder
from executor.generate import Completion, Generation, resident_in
from executor.live_predictor import LivePredictor, live_predictor
from executor.machine import Link, MemoryPack, OwnClock, open_link, set_threads
from executor.model import Decoder
from executor.pace import SLACK_S, Instant, PacedLink
from executor.prefill import Prefill, scratch_slots
from executor.prompts import Prompts, load_prompts, stop_tokens
from executor.record import DEFAULT_COLUMNS, TraceRecorder
from executor.routing import JournalRouting, ReplayedJournal
from executor.sampling import Greedy, Sampler, Seeded
from executor.settings import MachineSettings
from executor.slots import SlotArena
from executor.stages import Stages
from executor.stand_in import batch_seconds, in_flight, link_of, stand_in
from executor.store import ExpertStore
from executor.summary import summarise
from executor.traced import TracedRequests
from executor.warm import InstantBackend
from executor.weights import SlotWeights, open_decoder
from policies.build import build_core, build_predictor, cache_slots
from policies.core.driver import drive
from policies.core.journal import Journal, Record, ReplayBackend, ReplayWorkload, read_journal, step_times
from policies.core.messages import StepBegin
from policies.core.protocols import Backend, Workload
from policies.core.types import ExpertId, ModelSpec, UserError
from policies.prefetch import NextGate
from traces.load import LoadedWorkload, load_workload

Measure = Callable[[Path, Mapping[str, Any]], dict[str, Any]]
"""``measure(folder, settings)`` writes ``steps.parquet`` and returns the metrics of the summary."""


def validate(settings: Mapping[str, Any]) -> None:
    """Build everything of a run that is built quickly.  Raises UserError where ``execute`` would."""
    machine = MachineSettings.from_settings(settings)
    store = ExpertStore.open(machine.pack)
    check_model(settings, store)
    build_core(settings, store.spec, in_flight(machine, stand_in(settings, machine)))
    if machine.torch_device == "cuda" and not torch.cuda.is_available():
        raise UserError("torch_device=cuda, but torch sees no GPU; set torch_device=cpu")
    check_choice(settings, machine, store)
    if machine.mode == "live":
        load_prompts(store, machine.prompts, settings["concurrency"], machine.prompt_tokens, settings["seed"])
        live_predictor(settings, store.spec)


def check_model(settings: Mapping[str, Any], store: ExpertStore) -> None:
    """Raise UserError if the settings describe another model than the pack's."""
    given = tuple(settings["model"].get(key) for key in ("n_layers", "n_experts", "top_k"))
    spec = store.spec
    if given != (spec.n_layers, spec.n_experts, spec.top_k):
        raise UserError(
            f"model={settings['model']['name']} has (layers, experts, top-k) {given}, the pack {store.path} "
            f"({spec.n_layers}, {spec.n_experts}, {spec.top_k}); leave model= out"
        )


class OpenRun:
    """One system, ready to decode on this machine: own core, cache slots, readers, threads and journal.

    Several may be open at one time and take turns (``decode``): a clock stands while it is not its turn.
    ``shared``: another run's decoder whose weights this one uses too; ``memory``: with ``store=ram``, the pack that is
    in memory already.  Use it as a context manager.
    """

    def __init__(
        self,
        settings: Mapping[str, Any],
        journal: Path,
        shared: Decoder | None = None,
        memory: MemoryPack | None = None,
    ) -> None:
        """Raises UserError for settings that cannot run; opens files and starts threads in ``__enter__`` only."""
        self.settings, self.machine = settings, MachineSettings.from_settings(settings)
        self.store = ExpertStore.open(self.machine.pack)
        check_model(settings, self.store)
        self.device = stand_in(settings, self.machine)
        self._say = Stages(self.store.n_total * self.store.stride)
        self.steps = 0
        self.meter = host.IoMeter()
        self.clocks = host.Clocks(self.machine.torch_device)
        self.prompts: Prompts | None = None
        self.completions: list[Completion] = []
        self.recorder: TraceRecorder | None = None
        self._journal_path, self._shared, self._memory = journal, shared, memory
        self._records: list[Record] = []
        self._exit = ExitStack()
        self.routing: dict[str, Any] = {}
        self._digest, self.warnings = "", list[str]()
        self.faults: list[str] = []  # found by whoever lets it run: why its times are not to be believed

    # ------------------------------------------------------------------ life

    def __enter__(self) -> OpenRun:
        with ExitStack() as opening:
            self._open(opening)
            # What is there now stays: the collector need not look through it in the middle of a step.
            opening.callback(gc.unfreeze)
            gc.collect()
            gc.freeze()
            self._exit = opening.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        self._exit.__exit__(*error)

    def _open(self, stack: ExitStack) -> None:
        settings, machine, store = self.settings, self.machine, self.store
        spec, loaded, max_tokens = self._requests()
        live = machine.mode == "live"
        predict = _predicted(settings, spec) if live else 0
        if self._shared is None:
            set_threads(machine.threads)
            self._say("loading the shared weights, then checking the row rule at their shapes")
            self.decoder = open_decoder(store, settings["concurrency"], max_tokens, machine.torch_device, predict)
            self.decoder.check_rows()
        else:
            self.decoder = Decoder(self._shared.model, settings["concurrency"], max_tokens, predict=predict)
        if machine.record_trace is not None and self.prompts is not None:
            columns = machine.record_columns or DEFAULT_COLUMNS
            recorder = TraceRecorder(
                Path(machine.record_trace), self.decoder, store.manifest, self.prompts.tokens, columns
            )
            self.recorder = stack.enter_context(recorder)
            self.warnings.append(f"times include the recording of {machine.record_trace}")
        self.core = build_core(settings, spec, in_flight(machine, self.device))
        capacity = cache_slots(settings, spec)
        scratch = scratch_slots(capacity, machine.readers) if live else range(0)
        arena = SlotArena(store, capacity + len(scratch), self.decoder.device)
        done: Any = queue.SimpleQueue()
        sharing = link_of(machine, self.device)
        self.moment = Instant(0.0 if sharing is None else SLACK_S)
        paced = PacedLink(sharing, self.moment) if sharing is not None else None
        if machine.store == "ram" and self._memory is None:
            self._say(f"reading {store.n_total * store.stride / 1e9:.1f} GB of experts into host memory")
        predictor = live_predictor(settings, spec) if live else None
        self.fast = self._fast(arena, predictor)
        polls = self.fast is not None
        self.link: Link = open_link(store, arena, machine, done, paced=paced, pack=self._memory, polls=polls)
        stack.callback(self.link.close)
        routing = loaded.routing if loaded else JournalRouting(self._records) if self._records else None
        instant = self._instant(loaded)
        self.slots = SlotWeights(arena, self.decoder.dtype)
        given: dict[str, Any] = {"sampler": self._sampler(), "routing": routing, "first_step": instant}
        given |= {"paced_s": batch_seconds(self.device, self.decoder) if self.device else None, "instant": self.moment}
        self.backend = stack.enter_context(
            TorchBackend(self.decoder, self.slots, self.link.reader, done, **given, predictor=predictor)
            if self.fast is None
            else StreamBackend(self.fast, self.link.reader, done, **given, predictor=predictor, poll=self.link.poll)
        )
        self.clock = OwnClock(self.backend)
        header = {"config": dict(settings), "model": asdict(spec), "trace": self._digest}
        journal = ReplayedJournal(self._journal_path, header, self._records) if self._records else None
        self.journal = stack.enter_context(journal or Journal(self._journal_path, header))
        if instant and loaded is not None:
            self._warm(loaded, instant)
        self._say("ready")
        self._paced: Backend = ReplayBackend(self.clock, self._records) if self._records else self.clock
        self._work = self._workload(loaded, scratch)

    def _fast(self, arena: SlotArena, predictor: LivePredictor | None) -> FastDecoder | None:
        """The fast path; None if it was not asked for, or this system needs what it does not show."""
        if self.machine.kernels != "triton":
            return None
        declined = why_declined(self.machine, predictor)
        if declined is not None:
            self.warnings.append(f"runs with kernels=torch, not triton as was asked for: {declined}")
            return None
        return open_fast(self.settings, self.machine, self.decoder, arena, self.store)

    def _requests(self) -> tuple[ModelSpec, LoadedWorkload | None, int]:
        """The model as it is run, where routing comes from, and the most tokens that a request may have."""
        settings = self.settings
        # A random pack gets the routing of the model whose shapes it has, as in the simulator.
        spec = replace(self.store.spec, name=str(settings["model"]["name"]))
        steps = int(settings["steps"])
        if self.machine.mode == "live":
            count, seed = int(settings["concurrency"]), int(settings["seed"])
            self.prompts = load_prompts(self.store, self.machine.prompts, count, self.machine.prompt_tokens, seed)
            self.routing = {"kind": "live", "source": self.prompts.source, "requests": len(self.prompts.tokens)}
            return spec, None, max(map(len, self.prompts.tokens)) + steps + 1
        if self.machine.journal is not None:
            header, records = read_journal(Path(self.machine.journal))
            self._records, self._digest = list(records), str(header["trace"])
            self.routing = {"kind": "journal", "source": self.machine.journal}
            begins = sum(isinstance(event, StepBegin) for record in self._records for event in record.events)
            return spec, None, _longest_context(settings, None) + begins + 1
        loaded = load_workload(settings, spec, build_predictor(settings, spec))
        self.routing, self._digest, self.warnings = loaded.describe, loaded.digest, list(loaded.warnings)
        tokens = steps if not settings["workload"].get("start") else max(r.n_decode for r in loaded.trace.requests)
        return loaded.model, loaded, _longest_context(settings, loaded) + tokens + 1

    def _instant(self, loaded: LoadedWorkload | None) -> int:
        """Warm-up steps that run through the core alone."""
        return max(0, int(self.settings["warmup"]) - self.machine.settle) if loaded is not None else 0

    def _sampler(self) -> Sampler:
        if not self.machine.temperature:
            return Greedy()
        m = self.machine
        return Seeded(m.temperature, m.top_k, m.top_p, int(self.settings["seed"]))

    def _workload(self, loaded: LoadedWorkload | None, scratch: range) -> Workload:
        if self.prompts is not None:
            prefill = Prefill(self.backend, self.slots, scratch, resident_in(self.core), say=self._say)
            new, stop = int(self.settings["steps"]), stop_tokens(self.store)
            work = Generation(self.backend, prefill, self.prompts.tokens, max_new_tokens=new, stop=stop)
            self.completions = work.completions
            return work
        if loaded is not None:
            return TracedRequests(loaded.workload, self.backend, loaded.workload.context_tokens)
        context = _longest_context(self.settings, None)
        return TracedRequests(ReplayWorkload(self._records), self.backend, lambda _: context)

    def _warm(self, loaded: LoadedWorkload, steps: int) -> None:
        """Let the core see ``steps`` steps at time zero, then read what its cache holds by now."""
        world = InstantBackend(loaded.routing, loaded.model.n_layers)
        drive(self.core, Turn(loaded.workload, steps), world, journal=self.journal, check=self.settings["check"])
        self.steps += steps
        self._say(f"filling the cache: {len(self.core.cache.entries)} experts")
        residents: dict[ExpertId, int] = {expert: entry.slot for expert, entry in self.core.cache.entries.items()}
        self.backend.read(residents)
        for expert in residents:
            self.backend.landed(expert)

    # ------------------------------------------------------------------ decoding

    def decode(self, steps: int | None = None, on_step: Callable[[StepBegin, float], None] | None = None) -> int:
        """Take a turn of up to ``steps`` steps (None: all that are left); returns how many there were."""
        turn = Turn(self._work, steps)
        self.clocks.sample()
        self.meter.begin(self.link.counters.bytes_read)
        self.moment.saw(time.perf_counter())
        self.clock.resume()
        told = step_times(self._records).__getitem__ if self._records else None
        check = self.settings["check"]
        try:
            drive(self.core, turn, self._paced, journal=self.journal, check=check, on_step=on_step, told=told)
        finally:
            self.clock.pause()
        self.meter.end(self.link.counters.bytes_read)
        self.clocks.sample()
        self.steps += turn.count
        return turn.count


class Turn:
    """At most ``steps`` steps of a workload that goes on afterwards."""

    def __init__(self, inner: Workload, steps: int | None) -> None:
        self._inner, self._steps = inner, math.inf if steps is None else steps
        self.count = 0

    def begin(self, now_s: float) -> StepBegin | float | None:
        """The inner workload's next step, or None when the turn is over."""
        if self.count >= self._steps:
            return None
        begin = self._inner.begin(now_s)
        self.count += isinstance(begin, StepBegin)
        return begin


def _predicted(settings: Mapping[str, Any], spec: ModelSpec) -> int:
    """How many experts the model's own gates predict for the next layer, in live mode; 0 for other predictors."""
    predictor = build_predictor(settings, spec)
    if not isinstance(predictor, NextGate) or predictor.distance != 1:
        return 0
    overfetch = float(settings["prefetch"]["predictor"]["overfetch"])
    return min(spec.n_experts, math.ceil(overfetch * spec.top_k))


def _longest_context(settings: Mapping[str, Any], loaded: LoadedWorkload | None) -> int:
    context = settings["workload"].get("context_tokens")
    if isinstance(context, int):
        return context
    if context is not None:
        return max(int(bound) for bound in context)
    return max((r.prompt_tokens or r.first_decode for r in loaded.trace.requests), default=0) if loaded else 0


def execute(settings: Mapping[str, Any], folder: Path, progress: bool, *, measure: Measure) -> None:
    """Run one cell; writes ``journal.jsonl.gz``, ``steps.parquet`` and ``summary.json`` into ``folder``.

    In live mode also ``completions.jsonl``.  Nothing is written but the journal if the run breaks: no token of a broken
    run is reported.  Raises UserError for bad settings, and whatever broke.
    """
    began_s = time.perf_counter()
    with OpenRun(settings, folder / "journal.jsonl.gz") as run:
        total = None if run.prompts is not None else settings["steps"] - run.steps
        with tqdm(total=total, unit="step", disable=None if progress else True) as bar:

            def advance(_begin: StepBegin, _ended_s: float) -> None:
                bar.update()

            run.decode(on_step=advance)
    finish(run, folder, measure, host_wall_s=time.perf_counter() - began_s)


def finish(run: OpenRun, folder: Path, measure: Measure, **more: Any) -> dict[str, Any]:
    """Write what a closed run leaves beside its journal; returns the summary."""
    if run.recorder is not None:
        run.recorder.write()
    summary = {**summarise(run, measure(folder, run.settings)), **more}
    if run.prompts is not None:
        lines = [
            {"request": c.request, "ended": c.ended, "tokens": c.tokens, "text": run.prompts.text(c.tokens)}
            for c in run.completions
        ]
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (folder / "completions.jsonl").write_text(text, encoding="utf-8")
    rundir.write_json(folder / "summary.json", summary)
    return summary
