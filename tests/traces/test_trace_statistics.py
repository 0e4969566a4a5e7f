"""Statistics against brute force and closed forms."""

import itertools
import math

import numpy as np
import pytest

from policies.core.types import ModelSpec
from traces import statistics as st
from traces.format import RequestTrace, Trace


def sets(trace):
    """Experts as Python sets: [request][token][layer]."""
    return [[[set(gate) for gate in token] for token in r.decode.tolist()] for r in trace.requests]


def test_popularity_and_shares(make_trace):
    trace = make_trace((9, 4))
    counts = st.popularity(trace)
    for layer in range(3):
        for expert in range(8):
            assert counts[layer, expert] == sum(expert in token[layer] for r in sets(trace) for token in r)
    ordered = np.sort(counts, axis=1)[:, ::-1]
    assert st.hottest_share(counts, 0.3) == pytest.approx(ordered[:, :3].sum(1) / 26)  # ceil(2.4) experts
    for layer, row in enumerate(counts):
        p = [c / row.sum() for c in row if c]
        assert st.relative_entropy(counts)[layer] == pytest.approx(-sum(x * math.log(x) for x in p) / math.log(8))
        differences = sum(abs(int(a) - int(b)) for a in row for b in row)
        assert st.gini(counts)[layer] == pytest.approx(differences / (2 * 8 * row.sum()))
    assert st.relative_entropy(np.array([[5]])) == 1.0


def test_reuse(make_trace):
    trace = make_trace((9, 4))
    found = st.reuse(trace, (1, 3, 5, 20))
    assert list(found) == [1, 3, 5]
    for lag, by_layer in found.items():
        for layer in range(3):
            pairs = [len(r[t][layer] & r[t + lag][layer]) / 2 for r in sets(trace) for t in range(len(r) - lag)]
            assert by_layer[layer] == pytest.approx(sum(pairs) / len(pairs))


def test_overlap_and_union(make_trace):
    trace = make_trace((3, 2, 4, 1))
    frequency = st.inclusion(trace)
    for layer in range(3):
        means = [
            np.mean([len(a[layer] & b[layer]) / 2 for a in x for b in y])
            for x, y in itertools.combinations(sets(trace), 2)
        ]
        assert st.overlap(frequency, 2)[layer] == pytest.approx(np.mean(means))
    for together in (1, 2, 3, 4):
        means = []
        for group in itertools.combinations(sets(trace), together):
            sizes = [
                len(set().union(*(t[layer] for t in tokens)))
                for tokens in itertools.product(*group)
                for layer in range(3)
            ]
            means.append(np.mean(sizes) / 8)
        assert st.union_share(frequency, together) == pytest.approx(np.mean(means))


def test_prompt_tokens_do_not_count(rich_trace):
    assert st.popularity(rich_trace).sum() == 13 * 3 * 2
    assert st.inclusion(rich_trace).sum(-1) == pytest.approx(2.0)


def test_lockstep_and_batches(make_trace):
    trace = make_trace((5, 3, 4, 6))
    ids = st.lockstep(trace, 2, 100, seed=0)
    order = np.random.default_rng([0, 0]).permutation(4).tolist()
    left = {r: list(trace.requests[r].experts) for r in order}
    places = order[:2]
    waiting = order[2:]
    expected = []
    while True:
        for place, request in enumerate(places):
            if not left[request] and waiting:
                places[place] = waiting.pop(0)
        # a request that leaves makes room at the end of the order
        if any(not left[request] for request in places):
            break
        expected.append({request: left[request].pop(0) for request in places})
    assert len(ids) == len(expected)
    offsets = np.array([[0], [8], [16]])
    for step, tokens in zip(ids, expected, strict=True):
        assert sorted(step.tolist()) == sorted((t + offsets).tolist() for t in tokens.values())
    found = st.batches(ids)
    for index, batch in enumerate(found):
        step, layer = divmod(index, 3)
        assert batch == sorted(set(ids[step, :, layer].ravel().tolist()))
    assert len(st.lockstep(trace, 2, 3, seed=0)) == 3


def test_straggling_of_a_common_factor():
    rng = np.random.default_rng(0)
    factor = rng.integers(0, 5, (50, 4))
    misses = np.repeat(factor[..., None], 6, axis=-1)
    found = st.straggling([misses[:20], misses[20:]], early_layers=2)
    assert found["halves"] == pytest.approx(1.0)
    assert found["variation"] == pytest.approx(factor.std() / factor.mean())
    ranked = -np.sort(-(factor - factor.mean(1, keepdims=True)), axis=1)
    assert found["early"] == pytest.approx(2 * ranked.mean(0))
    assert found["all"] == pytest.approx(6 * ranked.mean(0))

    independent = st.straggling([rng.integers(0, 5, (5000, 4, 6))])
    assert abs(independent["halves"]) < 0.05
    assert math.isnan(st.straggling([np.zeros((3, 2, 4))])["halves"])


def test_the_largest_model_fits_in_uint16():
    """1,024 experts in 100 layers: packed ids exceed 16 bits."""
    model = ModelSpec("large", 100, 1024, 2)
    ids = np.broadcast_to(np.array([1022, 1023], np.uint16), (2, 100, 2)).copy()
    trace = Trace(model, (RequestTrace(0, ids),))
    assert st.popularity(trace)[:, 1022:].tolist() == [[2, 2]] * 100
    assert st.batches(st.lockstep(trace, 1, 2, seed=0))[-1] == [99 * 1024 + 1022, 99 * 1024 + 1023]
