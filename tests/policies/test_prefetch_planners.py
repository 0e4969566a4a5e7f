"""Which expert the queues of ProMoE, FineMoE and MoE-Infinity offer next."""

from dataclasses import dataclass

import numpy as np
import pytest

from policies.core.messages import Gate
from policies.core.progress import Job
from policies.core.types import UserError
from policies.eviction.moe_infinity import MoEInfinityScore
from policies.eviction.predicted_lru import PredictedLRU
from policies.prefetch import ByLayer, Latest

EXPERTS = 10


@dataclass
class View:
    jobs: list
    present: tuple = ()
    demand_in_flight: int = 0

    def absent(self, expert):
        return expert not in self.present


def job(id, layer, *predicted):
    return Job(id, unit=0, requests=tuple(range(len(predicted))), layer=layer, needs=(), predicted=predicted)


def drain(policy, view):
    out = []
    while (expert := policy.next(view)) is not None:
        out.append(expert)
    return out


def test_by_layer_serves_the_lowest_layer_first():
    view = View([job(1, 0, ((31, 0.9), (12, 0.2), (11, 0.3)))])
    assert drain(ByLayer(EXPERTS), view) == [11, 12, 31]


def test_by_score_serves_the_best_first():
    view = View([job(1, 0, ((31, 0.9), (12, 0.2), (11, 0.3)))])
    assert drain(ByLayer(EXPERTS, priority="score"), view) == [31, 11, 12]


def test_scores_of_requests_add_up_and_the_batch_gets_so_many():
    predicted = ((11, 0.5), (12, 0.4)), ((13, 0.6), (12, 0.4)), ((21, 0.1),)
    assert drain(ByLayer(EXPERTS, most=2), View([job(1, 0, *predicted)])) == [12, 13, 21]


def test_predictions_outlive_their_job_until_their_layer_is_reached():
    policy = ByLayer(EXPERTS)
    assert policy.next(View([job(1, 0, ((11, 0.9), (31, 0.8), (32, 0.7)))])) == 11
    assert policy.next(View([job(2, 1, ((33, 0.75),))])) == 31
    assert drain(policy, View([job(3, 2)])) == [33, 32]
    assert drain(policy, View([job(4, 3)])) == []


def test_nothing_is_offered_twice_and_later_gates_add_to_what_is_left():
    policy = ByLayer(EXPERTS)
    assert policy.next(View([job(1, 0, ((31, 0.9), (32, 0.5), (33, 0.4)))])) == 31
    assert drain(policy, View([job(2, 1, ((31, 0.9), (33, 0.4)))])) == [33, 32]


def test_a_new_step_begins_with_empty_queues():
    policy = ByLayer(EXPERTS)
    assert policy.next(View([job(1, 2, ((31, 0.9), (32, 0.5)))])) == 31
    assert drain(policy, View([job(2, 0, ((31, 0.3),))])) == [31]


def test_residents_are_skipped():
    view = View([job(1, 0, ((11, 0.9), (12, 0.2)))], present=(11,))
    assert drain(ByLayer(EXPERTS), view) == [12]
    assert drain(Latest(), view) == [12]


def test_requests_at_different_layers_keep_the_queues_of_the_one_behind():
    policy = ByLayer(EXPERTS)
    behind, ahead = job(1, 0, ((11, 0.5),)), job(2, 3, ((41, 0.9),))
    assert drain(policy, View([behind, ahead])) == [11, 41]


def test_latest_forgets_what_was_said_before():
    policy = Latest()
    first = job(1, 0, ((11, 0.9), (12, 0.8)), ((21, 0.3), (22, 0.2)))
    assert policy.next(View([first])) == 21, "the last request overwrites the others"
    assert drain(policy, View([job(2, 1, ((31, 0.1),), ())])) == [31], "and a later gate what was not read"
    assert drain(policy, View([job(3, 2)])) == []


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: ByLayer(EXPERTS, max_in_flight=0), "at least 1 reader"),
        (lambda: ByLayer(EXPERTS, most=0), "most is 0"),
        (lambda: ByLayer(EXPERTS, priority="best"), "layer, score"),
        (lambda: Latest(max_in_flight=0), "at least 1 reader"),
    ],
)
def test_wrong_options_are_refused(make, says):
    with pytest.raises(UserError, match=says):
        make()


# ------------------------------------------------------------------ the evictions that go with them


def test_a_prediction_counts_as_a_use():
    policy = PredictedLRU()
    for expert in (1, 2, 3):
        policy.touch(expert, 1)
    policy.observe(0, Gate((5,), ((1, 0.9), (2, 0.5), (9, 0.4))))
    order = []
    evictable = {1, 2, 3}
    while (victim := policy.victim(evictable, 7)) is not None:
        order.append(victim)
        evictable.remove(victim)
        policy.forget(victim)
    assert order == [3, 2, 1]


def test_moe_infinity_keeps_early_layers():
    rng = np.random.default_rng(0)
    policy = MoEInfinityScore(n_layers=4, n_experts=EXPERTS)
    visits = {int(e): int(n) for e, n in zip(rng.permutation(40)[:12], rng.integers(1, 6, 12), strict=True)}
    for expert, uses in visits.items():
        policy.touch(expert, uses)
        policy.release(expert)
    order = []
    while (victim := policy.victim(visits.keys() - order, 0)) is not None:
        order.append(victim)
        policy.forget(victim)
    entered = list(visits)
    assert order == sorted(visits, key=lambda e: (visits[e] * (4 - e // EXPERTS), entered.index(e)))
