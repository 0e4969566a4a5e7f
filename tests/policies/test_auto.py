"""Auto: which way a step runs, from made-up durations whose best way is known."""

from __future__ import annotations

import pytest

from conf.compose import composing, expand
from policies.build import build_core
from policies.core.core import DecisionCore
from policies.core.driver import drive
from policies.core.messages import ComputeDone, Fetch, FetchDone, Gate, StepBegin, StepEnd, StepTook
from policies.core.progress import Job
from policies.core.types import ModelSpec, Phase, ProtocolError, UserError
from policies.eviction import LFU
from policies.schedule import Alone, Auto, LowestLayerFirst, LowestLayerThenSrtf, PerRequest, SameLayer

EIGHT = tuple(range(8))
WAYS = {(8,): "batch", (4, 4): "halves", (2, 2, 2, 2): "pairs", (1,) * 8: "bevy"}


def way(auto, requests=EIGHT):
    return WAYS[tuple(len(unit) for unit in auto.units(requests))]


def run(auto, seconds, steps, level=100, busy=0.0):
    """Step times by way, number of fetches and of experts; the ways that were taken."""
    taken = []
    for step in range(steps):
        fetches, experts = level + 7 * (step % 5), 300 + 11 * (step % 7)
        taken.append(way(auto))
        took = seconds(taken[-1], fetches, experts)
        auto.learn(took, busy * took, fetches, experts)
    return taken


def test_every_way_is_tried_in_turns_first():
    assert run(Auto(trials=3), lambda *_: 1.0, 12) == ["batch", "bevy", "halves", "pairs"] * 3


@pytest.mark.parametrize("best", WAYS.values())
def test_the_shortest_way_wins_whatever_its_steps_happened_to_need(best):
    """A constant that is 4% less for the best; what fetches and experts take differs by up to 28%."""
    taken = run(Auto(), lambda w, f, e: 0.05 * f + 0.01 * e + (5.5 if w == best else 6.0), 60)
    assert taken[20:].count(best) >= 38


def test_a_way_that_computes_for_longer_than_the_best_takes_is_not_tried_again():
    """All cost the same while much is missing; then each needs its computing alone, and no trial tells it."""
    computes = {"batch": 1.0, "halves": 2.0, "pairs": 4.0, "bevy": 1.1}
    auto = Auto(trials=2)
    for fetches in [400] * 8 + [2] * 40:
        name = way(auto)
        auto.learn(max(computes[name], 0.02 * fetches), computes[name], fetches, 300)
    late = [way(auto)]
    for _ in range(20):
        auto.learn(computes[late[-1]], computes[late[-1]], 2, 300)
        late.append(way(auto))
    assert {*late} <= {"batch", "bevy"}
    assert late.count("batch") > 15


def test_pairs_are_not_even_tried_where_halves_compute_for_too_long():
    """Batching waits for a tenth of its step; halves compute for longer than it takes, and pairs share even less."""
    auto, taken = Auto(), []
    for _ in range(25):
        taken.append(way(auto))
        seconds = {"batch": 1.0, "halves": 1.2, "bevy": 1.1}[taken[-1]]
        auto.learn(seconds, 0.9 if taken[-1] == "batch" else seconds, 5, 300)
    assert taken[:4] == ["batch", "bevy", "halves", "batch"]
    assert taken.count("halves") == 1


def test_what_is_best_may_change():
    auto = Auto()
    run(auto, lambda w, *_: 1.0 if w == "bevy" else 1.05, 24)
    late = run(auto, lambda w, *_: 1.1 if w == "bevy" else 0.9, 60)[-20:]
    assert {*late} <= {"batch", "halves", "pairs"}


def test_late_outliers_do_not_cast_a_way_out():
    """One step in ten takes three times as long, whatever runs."""
    auto, taken = Auto(), []
    for step in range(200):
        taken.append(way(auto))
        seconds = (1.0 if taken[-1] == "bevy" else 1.15) * (3 if step % 10 == 9 else 1)
        auto.learn(seconds, seconds, 100, 300)
    assert taken[100:].count("bevy") >= 80


def test_steps_without_a_duration_teach_nothing():
    auto = Auto()
    assert run(auto, lambda *_: 0.0, 30) == ["batch"] * 30
    assert run(auto, lambda *_: 1.0, 4) == ["batch", "bevy", "halves", "pairs"]


def test_each_number_of_requests_is_learnt_for_itself_and_kept():
    auto = Auto()
    run(auto, lambda w, *_: 1.0 if w == "bevy" else 2.0, 20)
    assert auto.units((1, 2)) == [(1, 2)]
    auto.learn(1.0, 1.0, 5, 300)
    assert auto.units((1, 2)) == [(1,), (2,)]
    assert auto.units((3,)) == [(3,)]
    assert way(auto) == "bevy"


def test_bevy_merges_and_static_groups_do_not():
    auto = Auto(trials=2)
    jobs = [Job(number, number, (number,), 0, (number,)) for number in range(2)]
    merged = {}
    for _ in range(4):
        name = way(auto)
        merged[name] = len(auto.group(jobs[0], jobs))
        auto.learn(1.0, 0.5, 1, 1)
    assert merged == {"batch": 1, "halves": 1, "pairs": 1, "bevy": 2}


@pytest.mark.parametrize("wrong", [{"trials": 0}, {"boldness": -0.1}])
def test_settings_that_cannot_be_are_refused(wrong):
    with pytest.raises(UserError, match="Auto"):
        Auto(**wrong)


def core(partition, batching):
    orders = {"compute_order": LowestLayerFirst(), "fetch_order": LowestLayerThenSrtf()}
    return DecisionCore(ModelSpec("m", 2, 4, 2), 8, LFU(), partition=partition, batching=batching, **orders)


def test_only_a_core_that_learns_takes_durations_and_only_between_steps():
    auto = Auto()
    learning = core(auto, auto)
    assert learning.wants_step_times
    learning.handle(StepBegin(0, (0, 1)))
    with pytest.raises(ProtocolError, match="unfinished"):
        learning.handle(StepTook(0, 1.0, 1.0))
    other = core(PerRequest(), Alone())
    assert not other.wants_step_times
    with pytest.raises(ProtocolError, match="nobody wants it"):
        other.handle(StepTook(0, 1.0, 1.0))


class Learner(PerRequest):
    """Keeps what it is told."""

    def learn(self, *what):
        self.what = what


def test_what_a_step_took_and_what_it_was():
    """Two requests, two layers of four experts, top-2: the numbers of fetches and of distinct experts by hand."""
    learner = Learner()
    made = core(learner, SameLayer())
    chosen = iter([[(0, 1), (1, 2)], [(4, 5), (4, 5)]])  # of layer 0, of layer 1
    events = [StepBegin(0, (7, 8))]
    gates = {}
    while True:
        commands = made.handle(*events)
        if any(isinstance(command, StepEnd) for command in commands):
            break
        events = []
        for command in commands:
            if isinstance(command, Fetch):
                events.append(FetchDone(command.fetch))
            elif command.phase is not Phase.HEAD and command.layer < 1:
                if command.layer + 1 not in gates:
                    gates[command.layer + 1] = dict(zip((7, 8), next(chosen), strict=True))
                picked = [gates[command.layer + 1][request] for request in command.requests]
                events.append(ComputeDone(command.batch, tuple(map(Gate, picked))))
            else:
                events.append(ComputeDone(command.batch))
    made.handle(StepTook(0, 3.0, 2.0))
    assert learner.what == (3.0, 2.0, 5, 5)


class Clock:
    """A backend whose every batch takes one second and every fetch two, one thing at a time, in order."""

    def __init__(self, routes):
        self.routes, self.t_s, self.todo = routes, 0.0, []

    def now(self):
        return self.t_s

    def submit(self, command):
        self.todo.append(command)

    def wait(self):
        command = self.todo.pop(0)
        self.t_s += 2.0 if isinstance(command, Fetch) else 1.0
        if isinstance(command, Fetch):
            return [FetchDone(command.fetch)]
        gates = command.phase is not Phase.HEAD and command.layer < 1
        return [ComputeDone(command.batch, (Gate(self.routes[command.layer + 1]),) if gates else ())]


def test_the_driver_tells_the_seconds_in_which_a_batch_ran():
    """One request: four batches of 1 s; two fetches of 2 s before each of two jobs, when none runs."""
    learner = Learner()
    steps = iter([StepBegin(0, (7,)), None])
    workload = type("Once", (), {"begin": lambda self, now_s: next(steps)})()
    drive(core(learner, SameLayer()), workload, Clock({0: (0, 1), 1: (4, 5)}))
    assert learner.what == (12.0, 4.0, 4, 4)


def test_without_a_batching_the_partition_must_batch():
    with composing():
        (auto,) = expand(["system=auto"])
        (bevy,) = expand(["system=bevy", "schedule.batching=null"])
    model = ModelSpec("m", 30, 128, 8)
    assert build_core(auto.config, model, fetch_slots=8).wants_step_times
    with pytest.raises(UserError, match=r"schedule\.batching is None"):
        build_core(bevy.config, model, fetch_slots=8)
