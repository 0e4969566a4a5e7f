"""Auto: which way a step runs, from made-up durations whose best way is known."""

from __future__ import annotations

import pytest

from conf.compose import composing, expand
from policies.build import build_core
from policies.core.core import DecisionCore
from policies.core.messages import StepBegin, StepTook
from policies.core.progress import Job
from policies.core.types import ModelSpec, ProtocolError, UserError
from policies.eviction import LFU
from policies.schedule import Alone, Auto, LowestLayerFirst, LowestLayerThenSrtf, PerRequest

EIGHT = tuple(range(8))
WAYS = {(8,): "batch", (4, 4): "halves", (2, 2, 2, 2): "pairs", (1,) * 8: "bevy"}


def way(auto, requests=EIGHT):
    return WAYS[tuple(len(unit) for unit in auto.units(requests))]


def run(auto, seconds, steps):
    """Step times by way and number of fetches; the ways that were taken."""
    taken = []
    for step in range(steps):
        fetches = 100 + 7 * (step % 5)
        taken.append(way(auto))
        auto.learn(seconds(taken[-1], fetches), fetches)
    return taken


def test_every_way_is_tried_in_turns_first():
    assert run(Auto(trials=3), lambda *_: 1.0, 12) == ["batch", "halves", "pairs", "bevy"] * 3


@pytest.mark.parametrize("best", WAYS.values())
def test_the_shortest_way_wins_whatever_its_steps_happened_to_fetch(best):
    """Seconds are 0.05 a fetch plus a constant that is 4% less for the best: fetches differ by up to 28%."""
    taken = run(Auto(), lambda w, fetches: 0.05 * fetches + (5.5 if w == best else 6.0), 48)
    assert set(taken[40:]) == {best}


def test_of_equals_the_fewest_groups_win():
    taken = run(Auto(tie=0.01), lambda w, fetches: fetches * (1.5 if w == "batch" else 1.0), 40)
    assert set(taken[30:]) == {"halves"}


def test_ways_far_behind_are_not_tried_again():
    seconds = {"batch": 2.0, "halves": 1.2, "pairs": 1.05, "bevy": 1.0}
    taken = run(Auto(trials=3, pause=12), lambda w, _: seconds[w], 48)
    assert taken[12:18] == ["pairs", "bevy"] * 3
    assert set(taken[18:]) == {"bevy"}


def test_what_is_best_may_change():
    auto = Auto(trials=3, pause=12)
    run(auto, lambda w, _: 1.0 if w == "bevy" else 1.05, 24)
    assert set(run(auto, lambda w, _: 1.1 if w == "bevy" else 0.9, 60)[-10:]) <= {"batch", "halves", "pairs"}


def test_steps_without_a_duration_teach_nothing():
    auto = Auto(trials=2)
    assert run(auto, lambda *_: 0.0, 30) == ["batch"] * 30
    assert run(auto, lambda *_: 1.0, 4) == ["batch", "halves", "pairs", "bevy"]


def test_another_number_of_requests_is_learnt_anew():
    auto = Auto(trials=2)
    run(auto, lambda w, _: 1.0 if w == "bevy" else 2.0, 20)
    assert [len(auto.units((1, 2))) for _ in range(2)] == [1, 1]
    auto.learn(1.0, 5)
    assert auto.units((1, 2)) == [(1,), (2,)]
    assert auto.units((3,)) == [(3,)]


def test_bevy_merges_and_static_groups_do_not():
    auto = Auto(trials=2)
    jobs = [Job(number, number, (number,), 0, (number,)) for number in range(2)]
    merged = {}
    for _ in range(4):
        name = way(auto)
        merged[name] = len(auto.group(jobs[0], jobs))
        auto.learn(1.0, 1)
    assert merged == {"batch": 1, "halves": 1, "pairs": 1, "bevy": 2}


@pytest.mark.parametrize("wrong", [{"trials": 1}, {"pause": 0}, {"tie": -0.1}, {"worse": 1.0}])
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
        learning.handle(StepTook(0, 1.0))
    other = core(PerRequest(), Alone())
    assert not other.wants_step_times
    with pytest.raises(ProtocolError, match="nobody wants it"):
        other.handle(StepTook(0, 1.0))


def test_without_a_batching_the_partition_must_batch():
    with composing():
        (auto,) = expand(["system=auto"])
        (bevy,) = expand(["system=bevy", "schedule.batching=null"])
    model = ModelSpec("m", 30, 128, 8)
    assert build_core(auto.config, model, fetch_slots=8).wants_step_times
    with pytest.raises(UserError, match=r"schedule\.batching is None"):
        build_core(bevy.config, model, fetch_slots=8)
