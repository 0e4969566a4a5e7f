"""The study of prefetch precision: closed forms, brute force, and the command."""

import csv
import random
from functools import partial

import numpy as np
import pytest

from policies.core.types import CapacityError, ModelSpec, UserError
from policies.eviction import LFU, LRU, FineMoEScore, LeastStale, PerLayer, Random
from policies.eviction.moe_infinity import MoEInfinityScore
from policies.prefetch import OraclePredictor
from policies.walk import lockstep_batches, walk
from sim import coverage, precision
from sim.precision_table import COLUMNS
from traces.format import RequestTrace, Trace
from traces.storage import write_trace

STEPS, REQUESTS, LAYERS, EXPERTS, K = 30, 3, 4, 24, 4


def routes(seed=0, steps=STEPS):
    rng = np.random.default_rng(seed)
    return rng.random((steps, REQUESTS, LAYERS, EXPERTS)).argsort(axis=-1)[..., :K]


def flags(rng, share, rows=200):
    return rng.random((rows, 1, EXPERTS)) < share


def brute_force(order, needed, resident, share):
    selected = covered = demanded = 0
    for ranking, want, have in zip(order[:, 0], needed[:, 0], resident[:, 0], strict=True):
        missing = [e for e in ranking if want[e] and not have[e]]
        goal = -(-len(missing) * round(share * 100) // 100)
        met = 0
        for expert in ranking:
            if met == goal:
                break
            if not have[expert]:
                selected += 1
                met += bool(want[expert])
        covered, demanded = covered + goal, demanded + len(missing)
    return coverage.Counts(selected, covered, demanded)


@pytest.mark.parametrize("share", [0.8, 0.5, 1.0])
def test_counts_are_those_of_a_walk_down_the_ranking(share):
    rng = np.random.default_rng(1)
    order = coverage.ranking(rng.random((200, 1, EXPERTS), dtype=np.float32))
    needed, resident = flags(rng, 0.3), flags(rng, 0.4)
    assert coverage.count(order, needed, resident, share) == brute_force(order, needed, resident, share)


@pytest.mark.parametrize("cached", [0.0, 0.3, 0.6])
def test_a_perfect_predictor_has_precision_one(cached):
    rng = np.random.default_rng(2)
    needed, resident = flags(rng, 0.3), flags(rng, cached)
    counts = coverage.count(coverage.ranking(needed.astype(np.float32)), needed, resident, 0.8)
    assert counts.precision == 1.0
    assert counts.coverage >= 0.8


@pytest.mark.parametrize("cached", [0.0, 0.5])
def test_a_random_predictor_has_chance_precision(cached):
    """The r-th of m needed among n candidates in random order stands at place r (n + 1)/(m + 1) on average."""
    rng = np.random.default_rng(3)
    needed, resident = flags(rng, 0.3, 6000), flags(rng, cached, 6000)
    candidates = (~resident).sum(-1)
    demanded = (needed & ~resident).sum(-1)
    goal = np.ceil(0.8 * demanded)
    expected = goal.sum() / (goal * (candidates + 1) / (demanded + 1)).sum()
    order = coverage.ranking(rng.random(needed.shape, dtype=np.float32))
    assert coverage.count(order, needed, resident, 0.8).precision == pytest.approx(expected, rel=0.01)


def test_the_randomised_cache_keeps_both_numbers_and_nothing_else():
    rng = np.random.default_rng(4)
    needed, resident = flags(rng, 0.3, 20_000), flags(rng, 0.4, 20_000)
    other = coverage.randomised(coverage.lots(needed, rng), needed, resident)
    assert np.array_equal((other & needed).sum(-1), (resident & needed).sum(-1))
    assert np.array_equal((other & ~needed).sum(-1), (resident & ~needed).sum(-1))
    alike = needed[0, 0] = np.arange(EXPERTS) < 9
    resident[0, 0] = np.arange(EXPERTS) % 3 == 0
    counts = np.zeros(EXPERTS)
    for _ in range(4000):
        counts += coverage.randomised(coverage.lots(needed[:1], rng), needed[:1], resident[:1])[0, 0]
    assert counts[alike] / 4000 == pytest.approx(np.full(9, 3 / 9), abs=0.03), "every needed expert alike"
    assert counts[~alike] / 4000 == pytest.approx(np.full(15, 5 / 15), abs=0.03)


@pytest.mark.parametrize("policy", [LRU, LFU])
def test_the_cache_is_that_of_the_untimed_walk(policy):
    ids = routes()
    capacity = 40
    shown = coverage.residents(policy(), capacity, coverage.uses_of(ids, EXPERTS), [1])[1]
    held = np.concatenate([np.zeros((STEPS, 1, EXPERTS), bool), shown], axis=1)  # of layer l before layer l - 1
    assert held.sum(axis=(1, 2)).max() <= capacity
    if policy is LRU:  # the walk counts a use by several requests once, which LFU would notice
        batches = [sorted(batch) for batch in lockstep_batches(ids, EXPERTS)]
        expected = walk(batches, capacity, LRU(), batches_per_step=LAYERS)
        now = coverage.residents(LRU(), capacity, coverage.uses_of(ids, EXPERTS), [0])[0]
        assert int((now & (coverage.uses_of(ids, EXPERTS) > 0)).sum()) == expected.hits


def test_residents_are_those_of_prediction_time():
    """One step, two layers, a cache for one layer: what layer 1 held is gone once layer 0 was served."""
    uses = np.zeros((2, 2, 4), np.uint16)
    uses[:, :, :2] = 1
    shown = coverage.residents(LRU(), 2, uses, [0, 1])
    assert not shown[0].any()
    assert shown[1][1, 0].tolist() == [True, True, False, False]


def test_a_cache_below_one_layer_is_refused():
    with pytest.raises(CapacityError, match="use larger sizes"):
        coverage.residents(LRU(), 3, coverage.uses_of(routes(), EXPERTS), [1])


ONLINE = {
    "lru": LRU,
    "lfu": LFU,
    "lfu in cache": partial(LFU, count="in_cache"),
    "lfu decay": partial(LFU, count="decay", half_life_steps=32),
    "least-stale": partial(LeastStale, 256, "spatial", "just_passed"),
    "finemoe": FineMoEScore,
    "moe-infinity": partial(MoEInfinityScore, 4, 256),
    "per layer": partial(PerLayer, LRU, 4, 256, 307),
    "random": partial(Random, 0),
}


@pytest.mark.parametrize("policy", ONLINE.values(), ids=ONLINE)
def test_uniform_routing_leaves_every_online_cache_at_its_size(policy):
    """Hit rate c/N: a policy that beats it sees the future.  A step uses little of the cache, or LRU floods it."""
    ids = np.random.default_rng(5).integers(256, size=(6_000, 1, 4, 1))
    uses = coverage.uses_of(ids, 256)
    needed = uses > 0
    shown = coverage.residents(policy(), 307, uses, [0])[0]
    assert (shown & needed)[500:].sum() / needed[500:].sum() == pytest.approx(307 / 1024, abs=0.01)


def test_uniform_routing_leaves_a_blind_predictor_at_chance():
    """k of E for each request, whatever the cache holds: both regions are empty."""
    ids = routes(seed=6, steps=600)
    uses = coverage.uses_of(ids, EXPERTS)
    needed = uses[:, 1:] > 0
    shown = coverage.residents(LFU(), 48, uses, [1])[1]
    previous = np.concatenate([np.zeros((1, LAYERS - 1, EXPERTS)), uses[:-1, 1:]]).astype(np.float32)
    rng = np.random.default_rng(0)
    order = coverage.ranking(previous + rng.random(previous.shape, dtype=np.float32) / 2)
    counts = coverage.count(order, needed, shown, 0.8)
    candidates, demanded = (~shown).sum(-1), (needed & ~shown).sum(-1)
    goal = np.ceil(0.8 * demanded)
    expected = goal.sum() / (goal * (candidates + 1) / (demanded + 1)).sum()
    assert counts.precision == pytest.approx(expected, abs=0.01)


# ------------------------------------------------------------------ scores


class Blind:
    """Scores by place alone; keeps what it was asked."""

    distance = 2
    columns = ()

    def __init__(self):
        self.asked = []

    def scores(self, observation, target_layer):
        self.asked.append((observation.request, observation.position, observation.layer, target_layer))
        return np.full(EXPERTS, observation.position + 10 * target_layer, np.float32)


@pytest.mark.parametrize(("aggregate", "expected"), [("sum", 10 * 2 * 2 + 0 + 4), ("max", 24)])
def test_every_token_is_asked_once_in_its_order_and_requests_are_joined(aggregate, expected):
    ids = routes(steps=5).astype(np.uint16)
    requests = {r: RequestTrace(r, ids[:, r]) for r in range(2)}
    places = [[(0, 0), (1, 4)]]
    predictor = Blind()
    scores = precision.batch_scores(
        predictor,
        2,
        ModelSpec("toy", LAYERS, EXPERTS, K),
        requests=requests,
        places=places,
        aggregate=aggregate,
    )
    assert scores[0, 2].tolist() == [expected] * EXPERTS
    asked = [(0, 0, layer, layer + 2) for layer in range(2)]
    asked += [(1, token, layer, layer + 2) for token in range(5) for layer in range(2)]
    assert predictor.asked == asked


# ------------------------------------------------------------------ the command

SMALL = (
    "model=olmoe_1b_7b",
    "model.n_layers=4",
    "model.n_experts=16",
    "model.top_k=2",
    "model.attention=[{kind:full,layers:4,heads:16,kv_heads:16,head_dim:128}]",
    "concurrency=3",
    "steps=40",
    "warmup=10",
    "learn_requests=3",
    "learn_steps=20",
)


def test_the_command_writes_the_table_and_the_picture(tmp_path, capsys):
    names = "oracle,next_gate,previous_token,popularity,cooccurrence,moe_infinity,finemoe,learned_linear"
    assert (
        precision.main(
            [*SMALL, f"predictors={names}", "sizes=0.3,0.6", "draws=2", "aggregate=max", f"out={tmp_path / 'a'}"]
        )
        == 0
    )
    with (tmp_path / "a" / "precision.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert tuple(rows[0]) == COLUMNS
    assert len(rows) == 8 * (1 + 2 * 2)
    for row in rows:
        assert 0 <= float(row["precision"]) <= 1
        assert float(row["coverage"]) >= 0.8
        if row["predictor"] == "oracle":
            assert float(row["precision"]) == 1.0
        if row["cache_kind"] == "none":
            assert float(row["held_share"]) == 0
    assert (tmp_path / "a" / "precision.png").read_bytes()[:4] == b"\x89PNG"
    shown = capsys.readouterr().out
    assert "holds" in shown
    assert "finemoe" in shown
    assert (
        precision.main(
            [*SMALL, f"predictors={names}", "sizes=0.3,0.6", "draws=2", "aggregate=max", f"out={tmp_path / 'b'}"]
        )
        == 0
    )
    assert (tmp_path / "a" / "precision.csv").read_bytes() == (tmp_path / "b" / "precision.csv").read_bytes()


def test_several_seeds_give_a_spread(tmp_path):
    arguments = [*SMALL, "predictors=next_gate", "sizes=0.5", "draws=2", f"out={tmp_path}"]
    assert precision.main([*arguments, "seeds=0,1,2"]) == 0
    with (tmp_path / "precision.csv").open() as file:
        rows = {row["cache_kind"]: row for row in csv.DictReader(file)}
    assert all(float(row["precision_sd"]) > 0 for row in rows.values())


def test_oracle_with_errors_is_worse_than_perfect_and_better_than_chance(tmp_path):
    model = ModelSpec("toy", LAYERS, EXPERTS, K)
    ids = routes(steps=100).astype(np.uint16)
    requests = {r: RequestTrace(r, ids[:, r]) for r in range(REQUESTS)}
    places = [[(r, step) for r in range(REQUESTS)] for step in range(100)]
    uses = coverage.uses_of(ids.astype(np.int64), EXPERTS)
    needed = uses[:, 1:] > 0
    found = []
    for recall in (1.0, 0.7, 0.4):
        oracle = OraclePredictor(LAYERS, EXPERTS, K, recall=recall, precision=0.9)
        scores = precision.batch_scores(oracle, 1, model, requests=requests, places=places, aggregate="max")
        order = coverage.ranking(scores[:, 1:])
        found.append(coverage.count(order, needed, np.zeros_like(needed), 0.8).precision)
    assert found == sorted(found, reverse=True)
    assert found[-1] > needed.mean()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["predictors=none"], "prefetch=none predicts nothing"),
        (["predictors=nobody"], "there is no such prefetch"),
        (["predictors=promoe"], "train_promoe"),
        (["sizes=2"], "sizes must lie between 0 and 1"),
        (["sizes=many"], "sizes and coverage are numbers"),
        (["coverage=0"], "coverage above 0"),
        (["aggregate=mean"], "expected sum or max"),
        (["draws=0"], "draws is 0"),
        (["concurrency=2,3"], "one value for each setting"),
        (["warmup=40"], "leaves nothing"),
        (["seed=1"], "seed= has no effect in this study; give seeds=LIST"),
        (["system=bevy"], "predictors are asked without one"),
    ],
)
def test_bad_input_is_one_line_and_writes_nothing(arguments, says, tmp_path):
    with pytest.raises(UserError, match=says) as error:
        precision.main([*SMALL, *arguments, f"out={tmp_path / 'x'}"])
    assert "\n" not in str(error.value)
    assert not (tmp_path / "x").exists()


def test_a_column_that_the_trace_lacks_is_asked_for_by_its_predictor(tmp_path):
    model = ModelSpec("toy", LAYERS, EXPERTS, K)
    ids = routes(steps=50).astype(np.uint16)
    trace = Trace(model, tuple(RequestTrace(r, ids[:, r]) for r in range(REQUESTS)), "made by a test")
    write_trace(tmp_path / "toy.parquet", trace)
    shape = (f"model.n_layers={LAYERS}", f"model.n_experts={EXPERTS}", f"model.top_k={K}")
    attention = f"model.attention=[{{kind:full,layers:{LAYERS},heads:16,kv_heads:16,head_dim:128}}]"
    stored = ("workload=trace", f"workload.path={tmp_path / 'toy.parquet'}", "predictors=previous_token,finemoe")
    with pytest.raises(UserError, match=r"no column scores, which FineMoE needs.*traces\.capture"):
        precision.main([*SMALL, *shape, attention, *stored, f"out={tmp_path / 'x'}"])


def test_nothing_depends_on_global_randomness():
    random.seed(1)
    needed = routes()[:, :1, :, :1] > 0
    assert np.array_equal(
        coverage.lots(needed, np.random.default_rng(1)), coverage.lots(needed, np.random.default_rng(1))
    )
