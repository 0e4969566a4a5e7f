"""Predictors against closed forms, brute force, chance, and the recalls of real routes."""

from itertools import pairwise

import numpy as np
import pytest
from prefetch_world import Request, choose, random_request, recall

from policies.core.types import UserError
from policies.prefetch import (
    Cooccurrence,
    FineMoE,
    LearnedLinear,
    MoEInfinity,
    NextGate,
    Popularity,
    PreviousToken,
)
from policies.prefetch.cost import FREE, cost_of
from policies.prefetch.learning import refuse_overlap, windows
from policies.prefetch.listing import leading
from policies.prefetch.predictor import ManyAtOnce

LAYERS, EXPERTS, K = 6, 16, 3
SHAPE = (LAYERS, EXPERTS, K)


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def correlated(rng, tokens, number=0):
    """A request whose gates all read one hidden state, with the columns of a capture."""
    maps = np.random.default_rng(5).standard_normal((LAYERS, 8, EXPERTS))
    hidden = rng.standard_normal((tokens, 8))
    scores = np.einsum("th,lhe->tle", hidden, maps).astype(np.float32)
    following = np.zeros_like(scores)
    following[:, :-1] = scores[:, 1:]
    return Request(choose(scores, K), {"scores": scores, "next_scores_1": following}, number)


def uniform(rng, tokens, number=0):
    return random_request(
        rng,
        tokens,
        *SHAPE,
        number,
        scores=rng.standard_normal((tokens, LAYERS, EXPERTS), dtype=np.float32),
        next_scores_1=rng.standard_normal((tokens, LAYERS, EXPERTS), dtype=np.float32),
    )


MAKE = {
    "next gate": lambda: NextGate(*SHAPE, hidden=8),
    "previous token": lambda: PreviousToken(*SHAPE),
    "popularity": lambda: Popularity(*SHAPE),
    "co-occurrence": lambda: Cooccurrence(*SHAPE),
    "MoE-Infinity": lambda: MoEInfinity(*SHAPE),
    "FineMoE": lambda: FineMoE(*SHAPE),
    "FineMoE as released": lambda: FineMoE(*SHAPE, rule="released"),
    "learned linear": lambda: LearnedLinear(*SHAPE),
}


def taught(name, make_request, seed=0, requests=6):
    predictor = MAKE[name]()
    if hasattr(predictor, "learn"):
        rng = np.random.default_rng([seed, 1])
        predictor.learn([make_request(rng, 60, 100 + r) for r in range(requests)])
    return predictor


@pytest.mark.parametrize("name", MAKE)
def test_uniform_routing_leaves_every_predictor_at_chance(name):
    """A predictor above chance here sees the future."""
    rng = np.random.default_rng(2)
    predictor = taught(name, uniform)
    tested = [uniform(rng, 150, r) for r in range(4)]
    assert recall(predictor, tested, K) == pytest.approx(K / EXPERTS, abs=0.015)


@pytest.mark.parametrize("name", MAKE)
def test_no_score_depends_on_what_is_not_known_yet(name):
    """Two requests that differ only beyond the observed layer get the same scores and predictions."""
    rng = np.random.default_rng(3)
    one, two = taught(name, correlated), taught(name, correlated)
    seen, other = correlated(rng, 5), correlated(rng, 5)
    layer, position = 2, 3
    changed = Request(seen.experts.copy(), {key: column.copy() for key, column in seen.columns.items()})
    for later in (np.s_[position, layer + 1 :], np.s_[position + 1 :]):
        changed.experts[later] = other.experts[later]
        for key in changed.columns:
            changed.columns[key][later] = other.columns[key][later]
    for token, twin in zip(seen.tokens(), changed.tokens(), strict=True):
        known = (token.position, token.layer) <= (position, layer)
        if known:
            assert one.predict(token) == two.predict(twin)
            target = min(token.layer + one.distance, LAYERS - 1)
            if target >= one.distance and token.layer + one.distance == target:
                assert np.array_equal(one.scores(token, target), two.scores(twin, target))


@pytest.mark.parametrize("name", MAKE)
def test_what_is_listed_is_well_formed(name):
    predictor = taught(name, correlated)
    lists = [(token, predictor.predict(token)) for token in correlated(np.random.default_rng(4), 4).tokens()]
    assert any(predicted for _, predicted in lists)
    for token, predicted in lists:
        experts, scores = [e for e, _ in predicted], [s for _, s in predicted]
        assert all(type(e) is int and type(s) is float for e, s in predicted)
        assert len({*experts}) == len(experts)
        assert scores == sorted(scores, reverse=True)
        assert min(scores, default=1) > 0, "scores of several requests are added up"
        assert all(token.layer < e // EXPERTS < LAYERS for e in experts)


@pytest.mark.parametrize("name", [name for name, make in MAKE.items() if isinstance(make(), ManyAtOnce)])
def test_many_tokens_at_once_are_predicted_as_one_by_one(name):
    """The same experts; scores differ by the order in which a matrix product adds."""
    predictor, other = taught(name, correlated), taught(name, correlated)
    request = correlated(np.random.default_rng(5), 9)
    lists = list(predictor.predict_all(request))
    assert [len(token) for token in lists] == [LAYERS] * 9
    for token in request.tokens():
        found, expected = lists[token.position][token.layer], other.predict(token)
        assert [expert for expert, _ in found] == [expert for expert, _ in expected]
        assert [score for _, score in found] == pytest.approx([score for _, score in expected], rel=1e-4)
        assert all(type(expert) is int and type(score) is float for expert, score in found)


@pytest.mark.parametrize("count", [1, 5, 40])
@pytest.mark.parametrize("width", [40, 600])
def test_the_leading_scores_are_those_of_a_stable_sort(width, count):
    rng = np.random.default_rng(6)
    scores = np.round(rng.standard_normal((50, width)), 1).astype(np.float32)  # many ties, and zeros of both signs
    assert np.array_equal(leading(scores, count), np.argsort(-scores, axis=-1, kind="stable")[:, :count])


def test_next_gate_lists_the_best_of_its_column():
    request = correlated(np.random.default_rng(6), 3)
    for overfetch, listed in ((1.0, 3), (1.5, 5), (0.3, 1)):
        predictor = NextGate(*SHAPE, hidden=8, overfetch=overfetch)
        for token in request.tokens():
            expected = choose(request.columns["next_scores_1"][token.position, token.layer], listed)
            first = (token.layer + 1) * EXPERTS
            expected = [] if token.layer == LAYERS - 1 else [first + int(e) for e in expected]
            assert [e for e, _ in predictor.predict(token)] == expected
    assert NextGate(*SHAPE, hidden=8, distance=3).columns == ("next_scores_3",)
    assert cost_of(predictor).bytes_per_batch == 8 * EXPERTS * 4


def test_previous_token_repeats_it_in_rank_order():
    request = random_request(np.random.default_rng(7), 4, *SHAPE)
    predictor = PreviousToken(*SHAPE)
    for token in request.tokens():
        target = token.layer + 1
        if token.position == 0 or target == LAYERS:
            assert predictor.predict(token) == ()
        else:
            expected = [target * EXPERTS + int(e) for e in request.experts[token.position - 1, target]]
            assert [e for e, _ in predictor.predict(token)] == expected
    assert cost_of(predictor) == FREE


def test_a_gap_in_the_tokens_is_no_previous_token():
    request = random_request(np.random.default_rng(7), 5, *SHAPE)
    predictor = PreviousToken(*SHAPE)
    assert predictor.predict(request.at(0, 0)) == ()
    assert predictor.predict(request.at(2, 0)) == ()
    assert len(predictor.predict(request.at(3, 0))) == K


def test_popularity_counts():
    requests = [random_request(np.random.default_rng(r), 20, *SHAPE) for r in range(3)]
    predictor = Popularity(*SHAPE)
    predictor.learn(requests)
    for layer in range(LAYERS - 1):
        chosen = np.concatenate([r.experts[:, layer + 1].ravel() for r in requests])
        expected = [(chosen == e).sum() / 60 for e in range(EXPERTS)]
        assert predictor.scores(requests[0].at(0, layer), layer + 1) == pytest.approx(expected, rel=1e-6)


def test_cooccurrence_is_the_geometric_mean_of_conditional_shares():
    requests = [correlated(np.random.default_rng(r), 40) for r in range(3)]
    predictor = Cooccurrence(*SHAPE)
    predictor.learn(requests)
    token = correlated(np.random.default_rng(9), 1).at(0, 2)
    tokens = np.concatenate([r.experts for r in requests])
    share = [(tokens[:, 3] == e).any(-1).mean() + 1e-6 for e in range(EXPERTS)]
    for e, score in enumerate(predictor.scores(token, 3)):
        chances = []
        for chosen in token.experts[2]:
            having = tokens[(tokens[:, 2] == chosen).any(-1), 3]
            chances.append(((having == e).any(-1).sum() + 0.5 * share[e]) / (len(having) + 0.5))
        assert score == pytest.approx(np.prod(chances) ** (1 / K), rel=1e-4)


def test_moe_infinity_takes_the_matrix_most_alike_in_later_layers():
    learnt = [random_request(np.random.default_rng(r), 12, *SHAPE) for r in range(5)]
    predictor = MoEInfinity(*SHAPE)
    predictor.learn(learnt)
    request = random_request(np.random.default_rng(3), 12, *SHAPE)  # the same tokens as the fourth learnt one

    def counts(experts):
        out = np.zeros((LAYERS, EXPERTS))
        for token in experts:
            np.add.at(out, (np.arange(LAYERS)[:, None], token), 1)
        return out

    stored = [counts(r.experts) for r in learnt]
    for token in request.tokens():
        if token.layer == LAYERS - 1:
            continue
        mine = counts(request.experts[: token.position])
        alike = []
        for matrix in stored:
            rows = [
                m @ s / (np.linalg.norm(m) * np.linalg.norm(s)) if m.any() else 0
                for m, s in zip(mine[token.layer + 1 :], matrix[token.layer + 1 :], strict=True)
            ]
            alike.append(np.mean(rows))
        matched = stored[int(np.argmax(np.round(alike, 6)))]
        expected = matched[token.layer + 1] / matched[token.layer + 1].sum()
        assert predictor.scores(token, token.layer + 1) == pytest.approx(expected, rel=1e-5)
    assert (alike[3]) == max(alike)


@pytest.mark.parametrize("rule", ["paper", "released"])
def test_finemoe_follows_the_most_similar_trajectory(rule):
    learnt = [correlated(np.random.default_rng(r), 20) for r in range(3)]
    predictor = FineMoE(*SHAPE, rule=rule, distance=2, listed=LAYERS * EXPERTS)
    predictor.learn(learnt)
    maps = softmax(np.concatenate([r.columns["scores"] for r in learnt]).astype(np.float64))
    request = correlated(np.random.default_rng(8), 6)
    for token in request.tokens():
        mine = softmax(request.columns["scores"][token.position].astype(np.float64))[: token.layer + 1].ravel()
        theirs = maps[:, : token.layer + 1].reshape(len(maps), -1)
        alike = theirs @ mine / np.linalg.norm(theirs, axis=1) / np.linalg.norm(mine)
        matched, delta = maps[alike.argmax()], 1 - alike.max()
        if rule == "released":
            expected = {}
            for distance, target in enumerate(range(token.layer + 3, LAYERS)):
                row, kept = matched[target], []
                for e in np.argsort(-row):
                    if len(kept) < K or row[[*kept, e]].sum() <= delta:
                        kept.append(e)
                    else:
                        break
                for e in range(EXPERTS):
                    score = (row[e] if e in kept else 0) + 1e-6
                    expected[target * EXPERTS + e] = score * (1 - distance / (LAYERS + 1))
        else:
            expected = {}
            targets = [1, 2] if token.layer == 0 else [token.layer + 2]
            for target in [t for t in targets if t < LAYERS]:
                row, kept = matched[target], []
                for e in np.argsort(-row):
                    if len(kept) >= K and row[kept].sum() >= delta:
                        break
                    kept.append(e)
                expected |= {target * EXPERTS + int(e): row[e] / (target - token.layer) for e in kept}
        predicted = dict(predictor.predict(token))
        assert predicted.keys() == expected.keys()
        for expert, score in expected.items():
            assert predicted[expert] == pytest.approx(score, rel=1e-3, abs=1e-9)


def test_finemoe_lists_equal_scores_by_id_and_no_impossible_expert():
    def coarse(number):
        scores = np.round(correlated(np.random.default_rng(number), 20).columns["scores"])  # many ties
        scores[:, 1::2, ::2] = -200  # probability 0 in every other layer
        return Request(choose(scores, K), {"scores": scores}, number)

    predictor = FineMoE(*SHAPE)
    predictor.learn([coarse(number) for number in range(3)])
    lists = [found for token in predictor.predict_all(coarse(8)) for found in token if found]
    assert all(found == tuple(sorted(found, key=lambda pair: (-pair[1], pair[0]))) for found in lists)
    assert all(score > 0 for found in lists for _, score in found)
    assert any(one[1] == other[1] for found in lists for one, other in pairwise(found))


def test_finemoe_scores_a_request_as_it_scores_its_tokens():
    predictor = taught("FineMoE", correlated)
    request = correlated(np.random.default_rng(8), 10)
    whole = predictor.all_scores(request)
    for token in request.tokens():
        target = token.layer + predictor.distance
        if target < LAYERS:
            assert np.array_equal(whole[token.position, target], predictor.scores(token, target))
    assert not whole[:, : predictor.distance].any()


def test_the_store_holds_as_many_maps_as_it_may():
    predictor = FineMoE(*SHAPE, capacity=50)
    predictor.learn([correlated(np.random.default_rng(r), 40) for r in range(3)])
    assert cost_of(predictor).memory_bytes == 50 * LAYERS * EXPERTS * 4
    assert cost_of(predictor).bytes_per_batch == 50 * EXPERTS * 4


def test_learned_linear_recovers_linear_gates():
    """Gates that are linear in one hidden state can be foretold from each other but for the cut at k."""
    predictor = taught("learned linear", correlated, requests=20)
    tested = [correlated(np.random.default_rng(20 + r), 50, r) for r in range(3)]
    assert recall(predictor, tested, K) > 0.8
    assert recall(taught("popularity", correlated, requests=20), tested, K) < 0.4


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: NextGate(*SHAPE, hidden=8, distance=4), "distance is 4"),
        (lambda: NextGate(*SHAPE, hidden=8, overfetch=0), "overfetch is 0"),
        (lambda: FineMoE(*SHAPE, rule="both"), "paper, released"),
        (lambda: FineMoE(*SHAPE, capacity=0), "capacity is 0"),
        (lambda: LearnedLinear(*SHAPE, features="weights"), "scores, hidden"),
        (lambda: LearnedLinear(*SHAPE, ridge=0), "ridge is 0"),
        (lambda: PreviousToken(*SHAPE, distance=0), "distance is 0"),
    ],
)
def test_impossible_options_are_refused(make, says):
    with pytest.raises(UserError, match=says):
        make()


# ------------------------------------------------------------------ nobody learns from what is tested


def test_windows_know_a_request_again():
    rng = np.random.default_rng(0)
    request, other = (random_request(rng, 30, 2, 4, 1).experts for _ in range(2))
    keys = windows(request)
    assert len(keys) == 23
    assert np.array_equal(windows(request[5:20]), keys[5:13])
    assert not np.isin(windows(other), keys).any()
    assert len(windows(request[:7])) == 0


def test_a_tested_request_is_recognised_and_a_shared_opening_is_not():
    rng = np.random.default_rng(1)
    learnt, other = (random_request(rng, 40, *SHAPE).experts for _ in range(2))
    opening = np.concatenate([learnt[:12], other])
    refuse_overlap("FineMoE", windows(learnt), [(1, other), (2, opening)], "advice")
    with pytest.raises(UserError, match="FineMoE has learnt from request 3, which is tested here; advice"):
        refuse_overlap("FineMoE", windows(learnt), [(1, other), (3, learnt[10:25])], "advice")
    with pytest.raises(UserError, match="request 4, which is tested"):
        refuse_overlap("FineMoE", windows(learnt), [(4, np.concatenate([learnt, other, other]))], "advice")


# ------------------------------------------------------------------ real routes


@pytest.mark.parametrize(
    ("make", "expected"),
    [(PreviousToken, 0.453), (Cooccurrence, 0.593), (Popularity, 0.273)],
)
def test_recalls_on_gpt_oss_20b(shared_data, make, expected):
    """Counts learnt on other requests, recall at 4 of layer l + 1; values of an independent evaluation."""
    ids = np.load(shared_data / "gptoss20b_routes" / "routes_512.npz")["ids"]
    predictor = make(24, 32, 4)
    if hasattr(predictor, "learn"):
        predictor.learn([Request(request) for number, request in enumerate(ids) if number % 4])
    tested = [Request(request[:100].astype(np.int64), request=number) for number, request in enumerate(ids[::4])]
    assert recall(predictor, tested, 4) == pytest.approx(expected, abs=0.03)
