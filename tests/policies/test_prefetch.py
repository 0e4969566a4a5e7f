"""The oracle predictor's errors, and what the prefetch policy asks for."""

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from policies.core.progress import Job, JobState
from policies.core.types import UserError
from policies.prefetch import OraclePredictor, Ranked

N_LAYERS, N_EXPERTS, TOP_K = 5, 32, 4


@dataclass
class Token:
    """One token as a predictor sees it."""

    request: int
    position: int
    layer: int
    experts: np.ndarray

    def column(self, name):
        raise AssertionError("the oracle reads no columns")


def tokens(n, layer=1):
    for i in range(n):
        rng = np.random.default_rng((9, i))
        experts = np.stack([rng.permutation(N_EXPERTS)[:TOP_K] for _ in range(N_LAYERS)])
        yield Token(i % 7, i, layer, experts)


def oracle(**options):
    return OraclePredictor(N_LAYERS, N_EXPERTS, TOP_K, **options)


def listed_and_right(predictor, token, distance):
    predicted = predictor.predict(token)
    truth = {int(e) for e in (token.layer + distance) * N_EXPERTS + token.experts[token.layer + distance]}
    return [expert in truth for expert, _ in predicted]


@pytest.mark.parametrize(("recall", "precision"), [(1.0, 1.0), (0.5, 1.0), (0.8, 0.4), (1.0, 0.25), (0.3, 0.6)])
@pytest.mark.parametrize("distance", [1, 3])
def test_recall_and_precision_are_as_asked(recall, precision, distance):
    predictor = oracle(distance=distance, recall=recall, precision=precision, seed=1)
    marks = [listed_and_right(predictor, token, distance) for token in tokens(1500)]
    right, listed = sum(map(sum, marks)), sum(map(len, marks))
    assert right / (1500 * TOP_K) == pytest.approx(recall, abs=0.01)
    assert right / listed == pytest.approx(precision, abs=0.01)


def test_wrong_ones_stand_at_every_rank():
    """With so many right as wrong ones, the first half of the list is no better than the second."""
    predictor = oracle(recall=1.0, precision=0.5)
    marks = np.array([listed_and_right(predictor, token, 1) for token in tokens(1500)])
    assert marks.shape[1] == 2 * TOP_K
    assert marks[:, :TOP_K].mean() == pytest.approx(0.5, abs=0.02)


def test_predictions_are_the_head_of_the_ranking():
    predictor = oracle(recall=0.75, precision=0.5, distance=2)
    for token in tokens(20):
        scores = predictor.scores(token, 3)
        predicted = predictor.predict(token)
        assert scores.shape == (N_EXPERTS,)
        assert scores.dtype == np.float32
        head = np.argsort(-scores, kind="stable")[: len(predicted)]
        assert [expert for expert, _ in predicted] == [3 * N_EXPERTS + int(e) for e in head]
        assert [score for _, score in predicted] == [float(scores[e]) for e in head]
        assert all(type(expert) is int and type(score) is float for expert, score in predicted)


def test_the_order_of_calls_does_not_matter():
    forth = [oracle(recall=0.5, precision=0.5).predict(token) for token in tokens(30)]
    predictor = oracle(recall=0.5, precision=0.5)
    back = [predictor.predict(token) for token in reversed(list(tokens(30)))]
    assert forth == back[::-1]
    assert forth != [oracle(recall=0.5, precision=0.5, seed=1).predict(token) for token in tokens(30)]


def test_nothing_is_predicted_beyond_the_last_layer():
    assert oracle(distance=2).predict(next(tokens(1, layer=3))) == ()
    assert len(oracle(distance=2).predict(next(tokens(1, layer=2)))) == TOP_K


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"distance": 0}, "distance"),
        ({"recall": 0.0}, "recall"),
        ({"recall": 1.1}, "recall"),
        ({"precision": float("nan")}, "precision"),
        ({"precision": 0.05}, "raise the precision"),
    ],
)
def test_impossible_oracles_are_refused(options, says):
    with pytest.raises(UserError, match=says):
        oracle(**options)


# ------------------------------------------------------------------ the policy


@dataclass
class View:
    jobs: list
    demand_in_flight: int = 0
    present: tuple = ()

    def absent(self, expert):
        return expert not in self.present


def job(id, *predicted, state=JobState.BLOCKED):
    return Job(id, unit=id, requests=tuple(range(len(predicted))), layer=0, needs=(), predicted=predicted, state=state)


def drain(policy, view):
    out = []
    while (expert := policy.next(view)) is not None:
        out.append(expert)
    return out


def test_best_first_and_equal_scores_by_id():
    view = View([job(1, ((8, 0.5), (9, 0.9), (7, 0.5)))])
    assert drain(Ranked(), view) == [9, 7, 8]


@pytest.mark.parametrize(("aggregate", "experts"), [("max", [8, 9, 7]), ("sum", [9, 8, 7])])
def test_scores_of_several_requests_are_joined(aggregate, experts):
    view = View([job(1, ((8, 0.75), (9, 0.5)), ((9, 0.5), (7, 0.25)))])
    assert drain(Ranked(aggregate=aggregate), view) == experts


def test_what_is_there_or_coming_is_skipped():
    policy = Ranked()
    view = View([job(1, ((8, 0.5), (9, 0.9), (7, 0.4)))], present=(9,))
    assert policy.next(view) == 8
    view.present = (7,)
    assert policy.next(view) is None


def test_the_best_of_all_jobs_goes_first_and_ties_to_the_older():
    view = View([job(1, ((8, 0.5),)), job(2, ((9, 0.9), (4, 0.5)))])
    assert drain(Ranked(), view) == [9, 8, 4]


def test_only_idle_and_while_running():
    waiting, running = job(1, ((8, 0.5),)), job(2, ((9, 0.4),), state=JobState.RUNNING)
    policy = Ranked(only_idle=True, while_running=True)
    assert policy.next(View([waiting, running], demand_in_flight=1)) is None
    assert drain(policy, View([waiting, running])) == [9]
    assert drain(Ranked(only_idle=True), View([waiting, running])) == [8, 9]


def test_rankings_of_finished_jobs_are_dropped():
    policy = Ranked()
    for id in range(1, 50):
        policy.next(View([job(id, ((8, 0.5),)), job(id + 1, ((9, 0.5),))]))
    assert len(policy._rankings) <= 2


def test_no_predictions_no_prefetch():
    assert Ranked().next(View([job(1, (), ())])) is None
    assert Ranked().next(View([])) is None


@pytest.mark.parametrize(
    ("options", "says"), [({"max_in_flight": 0}, "at least 1"), ({"aggregate": "mean"}, "max, sum")]
)
def test_wrong_options_are_refused(options, says):
    with pytest.raises(UserError, match=says):
        Ranked(**options)


SCRIPT = """
import sys
sys.path.insert(0, "tests/policies")
from test_prefetch import *
predictor = oracle(recall=0.8, precision=0.4, seed=3)
jobs = [job(i, predictor.predict(token), predictor.predict(token)) for i, token in enumerate(tokens(6))]
print(drain(Ranked(aggregate="sum"), View(jobs)))
"""


def test_choices_do_not_depend_on_the_hash_seed():
    root = Path(__file__).resolve().parents[2]
    printed = set()
    for seed in ("0", "random"):
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(root)}
        run = subprocess.run(
            [sys.executable, "-c", SCRIPT], cwd=root, env=environment, capture_output=True, text=True, check=True
        )
        printed.add(run.stdout)
    assert len(printed) == 1
    assert len(printed.pop()) > 20
