"""How fast the simulator is: ratios measured in one process, cases interleaved, spread printed.

    python -m benchmarks.sim_speed [rounds=5] [steps=24] [memory=512]

core          microseconds of the core's own time an event (StepBegin, ComputeDone, FetchDone): a recorded order of
              events is fed to fresh cores with no backend; 40 layers x 256 experts, 8 requests, Bevy, 30% LFU cache
simulation    modelled seconds a second of CPU, Gemma4 on the M6, 8 requests, Bevy: driver, core, backend and routing
              from a ready trace; the journal's encoding and compression are shown apart
bare SimPy    the simulation's CPU time over that of a bare SimPy program with as many SimPy events as the simulation
              scheduled.  "callbacks": one environment, a chain of Timeouts, each with one callback that schedules the
              next - the kind of event that the simulation uses.  "processes": eight readers and one GPU, each a
              process that loops over `yield env.timeout(d)`.  "resources": as many commands as the simulation gave, in
              plain SimPy style: each a process that requests a Resource (eight readers, one GPU), waits a timeout and
              puts its completion into a Store, from which one driver process takes it and starts the next
memory        peak resident memory of a process that generates the routing of and simulates ``memory`` steps of
              Qwen3.6, 8 requests, with a journal; memory=0 leaves it out

CPU time of this process on one core (time.process_time), after gc.freeze().
"""

from __future__ import annotations

import gc
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import simpy
from simpy.events import Event as SimPyEvent
from simpy.events import Timeout

from conf.cells import resolved
from conf.compose import composing, expand
from conf.devices import DeviceConfig
from conf.models import ModelConfig
from policies.build import build_core
from policies.core.driver import drive
from policies.core.journal import Journal
from policies.core.messages import Command, ComputeDone, Event, FetchDone
from sim.backend import SimBackend
from traces.generate import generate
from traces.presets import preset_for
from traces.routing import TraceRouting
from traces.workload import TraceWorkload


class World:
    """One configuration, its trace generated once; ``run`` simulates it afresh."""

    def __init__(self, *overrides: str) -> None:
        with composing():
            (point,) = expand(["system=bevy", "concurrency=8", "warmup=0", *overrides])
        self.settings: dict[str, Any] = resolved(point.config)
        self.model = ModelConfig.from_config(self.settings["model"])
        self.device = DeviceConfig.from_config(self.settings["device"], self.model)
        preset = preset_for(self.model.name, "agentic")
        self.trace = generate(preset, self.model.spec, 8, self.settings["steps"], seed=0)

    def core(self) -> Any:
        return build_core(self.settings, self.model.spec, self.device.fetch_slots)

    def run(self, journal: Any = None) -> SimBackend:
        """Simulate all steps."""
        workload = TraceWorkload(self.trace, 8, self.settings["steps"], context_tokens=7000)
        backend = SimBackend(self.model, self.device, TraceRouting(self.trace, workload), workload.context_tokens)
        drive(self.core(), workload, backend, journal=journal)
        return backend


class Recorder:
    """Takes a journal's place and keeps the order of events."""

    def __init__(self) -> None:
        self.batches: list[tuple[Event, ...]] = []

    def record(self, now_s: float, events: list[Event], commands: list[Command]) -> None:
        self.batches.append(tuple(events))


def scheduled(backend: SimBackend) -> int:
    """SimPy events that a finished simulation has scheduled."""
    return int(next(backend._env._eid))


def bare_callbacks(count: int) -> None:
    env = simpy.Environment()
    left = count

    def fire(_: SimPyEvent | None) -> None:
        nonlocal left
        if left:
            left -= 1
            Timeout(env, 1.0).callbacks.append(fire)

    fire(None)
    env.run()


def bare_processes(count: int) -> None:
    env = simpy.Environment()
    workers = 9

    def work(delay_s: float) -> Any:
        for _ in range(count // workers):
            yield env.timeout(delay_s)

    for worker in range(workers):
        env.process(work(1.0 + 0.1 * worker))
    env.run()


def bare_resources(fetches: int, batches: int) -> None:
    env = simpy.Environment()
    readers, gpu, done = simpy.Resource(env, 8), simpy.Resource(env, 1), simpy.Store(env)
    delays = [(readers, 1.0)] * fetches + [(gpu, 1.5)] * batches
    delays = delays[::2] + delays[1::2]  # both kinds in flight all the time

    def command(server: simpy.Resource, delay_s: float) -> Any:
        with server.request() as turn:
            yield turn
            yield env.timeout(delay_s)
        yield done.put(None)

    def driver() -> Any:
        for at, (server, delay_s) in enumerate(delays):
            env.process(command(server, delay_s))
            if at >= 8:
                yield done.get()

    env.process(driver())
    env.run()


def cpu_s(work: Callable[[], object]) -> float:
    began = time.process_time()
    work()
    return time.process_time() - began


def show(name: str, values: list[float], unit: str, target: str) -> None:
    middle, spread = statistics.median(values), f"({min(values):.2f} to {max(values):.2f})"
    print(f"{name:46s} {middle:8.2f} {unit:14s} {spread:18s} target {target}")


def measure(rounds: int, steps: int) -> None:
    wide = World("model=qwen3_6_35b_a3b", f"steps={steps}")
    gemma = World("model=gemma4_26b_a4b", f"steps={steps}")
    recorder = Recorder()
    wide.run(recorder)
    events = sum(map(len, recorder.batches))
    commands = Recorder()
    backend = gemma.run(commands)
    modelled_s, timers = backend.now(), scheduled(backend)
    fetches = sum(isinstance(event, FetchDone) for batch in commands.batches for event in batch)
    batches = sum(isinstance(event, ComputeDone) for batch in commands.batches for event in batch)
    print(
        f"{events} core events at 40 x 256 x 8; Gemma4: {modelled_s:.2f} modelled seconds, {fetches} fetches, "
        f"{batches} batches, {timers} SimPy events"
    )

    def core_only() -> None:
        handle = wide.core().handle
        for batch in recorder.batches:
            handle(*batch)

    def with_journal() -> None:
        with tempfile.TemporaryDirectory() as folder, Journal(Path(folder) / "journal", {}) as journal:
            gemma.run(journal)

    cases: Mapping[str, Callable[[], object]] = {
        "core": core_only,
        "simulation": gemma.run,
        "journal": with_journal,
        "callbacks": lambda: bare_callbacks(timers),
        "processes": lambda: bare_processes(timers),
        "resources": lambda: bare_resources(fetches, batches),
    }
    taken: dict[str, list[float]] = {name: [] for name in cases}
    gc.collect()
    gc.freeze()
    for _ in range(rounds):
        for name, work in cases.items():
            taken[name].append(cpu_s(work))

    def ratios(base: str) -> list[float]:
        return [whole / bare for whole, bare in zip(taken["simulation"], taken[base], strict=True)]

    show("core", [t / events * 1e6 for t in taken["core"]], "us an event", "<= 15")
    show("simulation, Gemma4, 8 requests", [modelled_s / t for t in taken["simulation"]], "modelled s / s", ">= 15")
    show("  the same with its journal written", [modelled_s / t for t in taken["journal"]], "modelled s / s", "-")
    show(
        "  a command of it, everything included",
        [t / (fetches + batches) * 1e6 for t in taken["simulation"]],
        "us",
        "-",
    )
    show("simulation / bare SimPy, callbacks", ratios("callbacks"), "x", "<= 8")
    show("simulation / bare SimPy, processes", ratios("processes"), "x", "<= 8")
    show("simulation / bare SimPy, resources", ratios("resources"), "x", "<= 8")


def peak_memory(steps: int) -> None:
    """Simulate in this process and print its peak."""
    world = World("model=qwen3_6_35b_a3b", f"steps={steps}")
    with tempfile.TemporaryDirectory() as folder, Journal(Path(folder) / "journal", {}) as journal:
        world.run(journal)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    print(f"{f'memory, Qwen3.6, {steps} steps':46s} {peak / 2**20:8.0f} {'MiB':33s} target <= 1024")


def main() -> None:
    if sys.argv[1:2] == ["--peak"]:
        peak_memory(int(sys.argv[2]))
        return
    options = dict(argument.split("=", 1) for argument in sys.argv[1:])
    measure(int(options.get("rounds", 5)), int(options.get("steps", 24)))
    sys.stdout.flush()
    if steps := int(options.get("memory", 512)):
        subprocess.run([sys.executable, "-m", "benchmarks.sim_speed", "--peak", str(steps)], check=True)


if __name__ == "__main__":
    main()
