"""Retention by expected use against its formula, written out once more with plain numbers and no memory of its own."""

from __future__ import annotations

import random

import pytest

from policies.core.messages import Gate
from policies.core.types import UserError
from policies.eviction import LFU, Belady, ExpectedUse
from policies.walk import walk

LAYERS, EXPERTS, K = 3, 6, 2
RECENT, HALF_LIFE, PRIOR = 0.3, 8.0, 4.0


def due(history, request_layers, step, expert):
    """Expected next use from all gates so far: (step, request, layer, experts) in order, steps from 1."""
    layer = expert // EXPERTS
    here = [gate for gate in history if gate[2] == layer]
    popularity = sum(expert in chosen for *_, chosen in here) / len(here)
    chances = {}
    for request in request_layers:
        mine = [expert in chosen for _, r, _, chosen in here if r == request]
        if not mine:
            continue
        age = range(len(mine) - 1, -1, -1)
        recent = sum(used * 0.5 ** (a + 1) for used, a in zip(mine, age, strict=True))
        weights = [0.5 ** (a / HALF_LIFE) for a in age]
        uses = sum(used * w for used, w in zip(mine, weights, strict=True))
        slow = (uses + PRIOR * popularity) / (sum(weights) + PRIOR)
        chances[request] = min(RECENT * recent + (1 - RECENT) * slow, 0.98)
    nobody = nobody_of_those_to_come = 1.0
    for request, chance in chances.items():
        nobody *= 1 - chance
        if request_layers[request] < layer:
            nobody_of_those_to_come *= 1 - chance
    return step + layer / LAYERS + nobody_of_those_to_come / max(1 - nobody, 1e-9)


@pytest.mark.parametrize("seed", range(5))
def test_the_victim_is_the_one_that_is_due_last(seed):
    """Requests at different layers.  A chance is that at the last gate of the layer, so all gates of a step count."""
    rng = random.Random(seed)
    policy = ExpectedUse(LAYERS, EXPERTS, RECENT, HALF_LIFE, PRIOR)
    for expert in range(LAYERS * EXPERTS):
        policy.touch(expert, 1)
        policy.release(expert)
    history = []
    for step in range(1, 7):
        policy.begin_step(step)
        at = dict.fromkeys(range(3), -1)
        while min(at.values()) < LAYERS - 1:
            request = rng.choice([r for r, layer in at.items() if layer < LAYERS - 1])
            at[request] += 1
            layer = at[request]
            chosen = tuple(rng.sample(range(layer * EXPERTS, (layer + 1) * EXPERTS), K))
            history.append((step, request, layer, chosen))
            policy.observe(request, Gate(chosen))
            here = range(layer * EXPERTS, (layer + 1) * EXPERTS)
            reckoned = {expert: due_at_observation(history, at, step, expert) for expert in here}
            last = max(reckoned.values())
            victim = policy.victim(set(here), 0)
            assert reckoned[victim] == pytest.approx(last, rel=1e-12)


def due_at_observation(history, at, step, expert):
    """A request's own chance counts its gates up to its own last one, popularity those up to then too."""
    layer = expert // EXPERTS
    nobody = nobody_of_those_to_come = 1.0
    for request in at:
        places = [i for i, (_, r, at_layer, _) in enumerate(history) if r == request and at_layer == layer]
        if not places:
            continue
        known = history[: places[-1] + 1]
        alone = due(known, {request: LAYERS}, 0, expert) - layer / LAYERS  # 1 / chance
        chance = 1 / alone
        nobody *= 1 - chance
        if at[request] < layer:
            nobody_of_those_to_come *= 1 - chance
    return step + layer / LAYERS + nobody_of_those_to_come / max(1 - nobody, 1e-9)


def test_an_expert_that_a_lagging_request_wants_stays():
    """Both requests have used expert 0 or 1 of layer 0 alone, so far; request 1 is still to come to the layer."""
    policy = ExpectedUse(1, 3)
    for step in range(1, 9):
        policy.begin_step(step)
        policy.observe(0, Gate((0,)))
        policy.observe(1, Gate((1,)))
    for expert in range(3):
        policy.touch(expert, 1)
        policy.release(expert)
    policy.begin_step(9)
    policy.observe(0, Gate((0,)))
    assert policy.victim({0, 1, 2}, 2) == 2
    assert policy.victim({0, 1}, 2) == 0  # request 0 wants it again in the next step, request 1 its own in this


def test_a_request_that_has_left_is_forgotten():
    policy = ExpectedUse(1, 3)
    for step in range(1, 5):
        policy.begin_step(step)
        policy.observe(0, Gate((0,)))
    for step in range(5, 8):
        policy.begin_step(step)
        policy.observe(1, Gate((1,)))
    for expert in (0, 1):
        policy.touch(expert, 1)
        policy.release(expert)
    assert policy.victim({0, 1}, 2) == 0


def test_pinned_and_forgotten_experts_are_no_victims():
    policy = ExpectedUse(1, 3)
    for expert in range(3):
        policy.touch(expert, 1)
        policy.release(expert)
    policy.touch(0, 1)
    policy.forget(1)
    assert policy.victim({2}, 0) == 2
    assert policy.victim(set(), 0) is None


def test_it_misses_less_than_lfu_where_requests_have_habits_that_change():
    """One request whose set of experts moves on every eight steps; the optimum bounds what can be had."""
    rng = random.Random(1)
    batches = []
    for step in range(120):
        for layer in range(4):
            habit = random.Random(f"{step // 8}/{layer}").sample(range(16), 4)
            batches.append([layer * 16 + e for e in (habit if rng.random() < 0.8 else rng.sample(range(16), 4))])
    policy = ExpectedUse(4, 16)
    misses = {"lfu": walk(batches, 24, LFU(), batches_per_step=4).misses}
    misses["optimum"] = walk(batches, 24, Belady(batches)).misses
    gates, touch, left = iter(batches), policy.touch, 0

    def touched(expert, uses):
        """The walk knows no requests: the first touch of a batch is when its gate has chosen."""
        nonlocal left
        if left == 0:
            batch = next(gates)
            policy.observe(0, Gate(tuple(batch)))
            left = len(batch)
        left -= 1
        touch(expert, uses)

    policy.touch = touched
    misses["ours"] = walk(batches, 24, policy, batches_per_step=4).misses
    assert misses["optimum"] <= misses["ours"] < 0.9 * misses["lfu"]


@pytest.mark.parametrize("wrong", [{"recent": 1.5}, {"half_life_steps": 0.0}, {"prior_steps": -1.0}])
def test_settings_that_cannot_be_are_refused(wrong):
    with pytest.raises(UserError, match="ExpectedUse"):
        ExpectedUse(2, 4, **wrong)
