"""The synthetic router: well-formed traces, determinism, and statistics against closed forms and independent draws."""

from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest

from policies.core.types import ModelSpec, UserError
from traces import statistics
from traces.format import RequestTrace, Trace
from traces.generate import _on_grid, distinct_experts, generate
from traces.presets import GENERIC, WORKLOADS, Preset, preset_for

MODELS = (
    ModelSpec("qwen3_6_35b_a3b", 40, 256, 8),
    ModelSpec("gemma4_26b_a4b", 30, 128, 8),
    ModelSpec("mixtral_8x7b", 32, 8, 2),
    ModelSpec("qwen3_30b_a3b", 48, 128, 8),
    ModelSpec("olmoe_1b_7b", 16, 64, 8),
    ModelSpec("deepseek_v2_lite", 26, 64, 6),
    ModelSpec("gpt_oss_20b", 24, 32, 4),
    ModelSpec("gpt_oss_120b", 36, 128, 4),
    ModelSpec("glm_4_5_air", 45, 128, 8),
    ModelSpec("someone_elses", 3, 5, 5),
)
GEMMA4 = MODELS[1]
SMALL = ModelSpec("small", 6, 32, 4)
NO_HABIT = replace(
    GENERIC, affinity=0.0, slow=0.0, fast=0.0, popularity_by_depth=(1.0,), request_spread=0.0, step_spread=0.0
)


def independent(popularity: float) -> Preset:
    """Nothing but popularity and noise: what two tokens share is known from theory."""
    return replace(NO_HABIT, popularity=popularity, noise=0.98 - popularity, hidden=64)


def same(a: RequestTrace, b: RequestTrace) -> bool:
    return a.experts.tobytes() == b.experts.tobytes() and all(
        array.tobytes() == b.columns[name].tobytes() for name, array in a.columns.items()
    )


@pytest.mark.parametrize("workload", WORKLOADS)
@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_every_model_and_workload_gives_a_well_formed_trace(model: ModelSpec, workload: str) -> None:
    trace = generate(preset_for(model.name, workload), model, 2, 5, seed=3)
    for request in trace.requests:
        assert request.experts.shape == (5, model.n_layers, model.top_k)
        assert request.experts.dtype == np.uint16
        assert request.experts.max() < model.n_experts
        ordered = np.sort(request.experts, axis=-1)
        assert (ordered[..., 1:] != ordered[..., :-1]).all()
        weights = request.columns["weights"]
        assert weights.dtype == np.float16
        assert (np.diff(weights, axis=-1) <= 0).all()
        np.testing.assert_allclose(weights.astype(float).sum(-1), 1.0, atol=3e-3)


def test_the_shares_of_every_layer_are_shares() -> None:
    for model in MODELS:
        for workload in WORKLOADS:
            preset = preset_for(model.name, workload)
            assert preset.source
            popularity, habit, news = preset.shares(model.n_layers)
            habits = habit * (preset.affinity + preset.slow + preset.fast)
            np.testing.assert_allclose(popularity + habits + news + preset.noise, 1.0)
            assert min(popularity.min(), habit.min()) >= 0
            assert news.min() >= 0.02 - 1e-9


def test_the_chosen_are_the_highest_scores_in_descending_order() -> None:
    trace = generate(GENERIC, SMALL, 2, 20, seed=1, columns=("scores",))
    for request in trace.requests:
        scores = request.columns["scores"].astype(float)
        chosen = np.take_along_axis(scores, request.experts.astype(int), axis=-1)
        assert (np.diff(chosen, axis=-1) <= 0).all()
        rest = scores.copy()
        np.put_along_axis(rest, request.experts.astype(int), -np.inf, axis=-1)
        assert (chosen[..., -1] >= rest.max(-1)).all()
        softmax = np.exp(chosen) / np.exp(chosen).sum(-1, keepdims=True)
        np.testing.assert_allclose(request.columns["weights"], softmax, atol=5e-3)


def test_the_same_seed_gives_the_same_bytes_and_another_seed_others() -> None:
    first, again, other = (generate(GENERIC, SMALL, 3, 30, seed) for seed in (5, 5, 6))
    assert all(same(a, b) for a, b in zip(first.requests, again.requests, strict=True))
    assert not same(first.requests[0], other.requests[0])


def test_a_request_depends_on_neither_the_number_of_requests_nor_of_steps_nor_the_columns() -> None:
    preset = replace(GENERIC, opening_tokens=2)
    model = ModelSpec("wide", 40, 256, 8)  # several chunks
    whole = generate(preset, model, 3, 90, seed=2)
    fewer = generate(preset, model, 2, 90, seed=2, columns=("next_scores_2",))
    shorter = generate(preset, model, 3, 25, seed=2)
    assert same(whole.requests[1], fewer.requests[1])
    assert whole.requests[2].experts[:25].tobytes() == shorter.requests[2].experts.tobytes()


def test_products_of_numbers_on_the_grid_are_exact() -> None:
    """So the order in which a matrix library adds cannot change a bit."""
    rng = np.random.default_rng(0)
    left = _on_grid(2 * rng.standard_normal((200, 36), dtype=np.float32))
    right = _on_grid(rng.standard_normal((36, 300), dtype=np.float32) / 6)
    assert ((left @ right) == (left.astype(np.float64) @ right.astype(np.float64))).all()


def test_uniform_routing_has_the_distinct_experts_of_independent_choice() -> None:
    trace = generate(independent(0.0), SMALL, 8, 200, seed=0)
    for n in (1, 2, 5, 8):
        assert distinct_experts(trace, n) == pytest.approx(32 * (1 - (1 - 4 / 32) ** n), rel=0.01)


@pytest.mark.parametrize("popularity", [0.2, 0.5, 0.8])
def test_popularity_is_the_correlation_of_two_requests_scores(popularity: float) -> None:
    model = ModelSpec("m", 12, 64, 8)
    often = statistics.inclusion(generate(independent(popularity), model, 6, 100, seed=1))
    rng = np.random.default_rng(9)
    common, a, b = rng.standard_normal((3, 20_000, 64))
    a, b = (popularity**0.5 * common + (1 - popularity) ** 0.5 * x for x in (a, b))
    top_a, top_b = (np.argsort(-x, axis=1)[:, :8] for x in (a, b))
    expected = (top_a[:, :, None] == top_b[:, None, :]).sum((1, 2)).mean() / 8
    assert statistics.overlap(often, 8).mean() == pytest.approx(expected, abs=0.02)


def test_memory_sets_how_reuse_falls_with_the_distance() -> None:
    preset = replace(NO_HABIT, popularity=0.0, fast=0.9, fast_memory=0.6, noise=0.05, hidden=64)
    reuse = {lag: v.mean() for lag, v in statistics.reuse(generate(preset, SMALL, 4, 300, 0), (1, 3, 12)).items()}
    assert reuse[1] > reuse[3] + 0.1
    assert reuse[3] > reuse[12] + 0.03
    assert reuse[12] == pytest.approx(4 / 32, abs=0.02)


def test_distinct_experts_equals_all_sets_counted() -> None:
    trace = generate(GENERIC, SMALL, 5, 4, seed=7)
    for n in (1, 2, 3, 5):
        counts = [
            len({int(e) for r in group for e in r.experts[step, layer]})
            for group in combinations(trace.requests, n)
            for step in range(4)
            for layer in range(6)
        ]
        assert distinct_experts(trace, n) == pytest.approx(np.mean(counts))
    with pytest.raises(UserError, match="has 5"):
        distinct_experts(trace, 6)


def test_requests_share_their_opening() -> None:
    preset = preset_for("gpt_oss_20b", "chat")
    trace = generate(preset, MODELS[6], 8, 60, seed=0)
    together = np.stack([r.experts for r in trace.requests], axis=2).reshape(60, 24, 32)
    union = np.array([[len(set(gate)) for gate in step] for step in together.tolist()]).mean(1)
    assert union[: preset.opening_tokens].max() < 6.2  # recorded: 4.5 to 6.2 of at least 4
    assert union[30:].mean() > 14  # recorded: 13 to 20


def test_lengths_differ_by_the_spread() -> None:
    trace = generate(GENERIC, SMALL, 10, 100, seed=0, length_spread=0.5)
    lengths = sorted(r.n_tokens for r in trace.requests)
    assert 50 <= lengths[0] < 60
    assert 90 < lengths[-1] <= 100


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"requests": 0}, "requests is 0"),
        ({"steps": 0}, "steps is 0"),
        ({"seed": -1}, "seed is -1"),
        ({"length_spread": 1.0}, "length_spread is 1.0"),
        ({"columns": ("hidden",)}, "no column hidden; it has scores, next_scores_1"),
    ],
)
def test_bad_arguments_are_named(arguments: dict[str, object], says: str) -> None:
    with pytest.raises(UserError, match=says):
        generate(**{"preset": GENERIC, "model": SMALL, "requests": 2, "steps": 2, "seed": 0, **arguments})  # type: ignore[arg-type]


def test_an_unknown_workload_is_named() -> None:
    with pytest.raises(UserError, match="no synthetic workload poetry; expected agentic or chat"):
        preset_for("gemma4_26b_a4b", "poetry")


# ---------------------------------------------------------------------------- like the paper and like recorded routes


def fetches(trace: Trace, slots: int) -> np.ndarray:
    """Demand fetches of each step: LFU over one cache, counts in token uses and kept, ties to the older last use."""
    model = trace.model
    resident, rank = (
        np.zeros(model.n_total, bool),
        np.zeros(model.n_total),
    )  # rank: uses, then the last use as a fraction
    together = np.stack([r.experts for r in trace.requests], axis=2).reshape(-1, model.n_layers, 8 * model.top_k)
    out = np.zeros(len(together))
    for now, gates in enumerate(together.reshape(-1, 8 * model.top_k)):
        step, layer = divmod(now, model.n_layers)
        needed, uses = np.unique(layer * model.n_experts + gates, return_counts=True)
        rank[needed] = np.floor(rank[needed]) + uses + now / (len(together) * model.n_layers)
        out[step] += np.count_nonzero(~resident[needed])
        resident[needed] = False  # pinned
        others = np.flatnonzero(resident)
        surplus = len(others) + len(needed) - slots
        if surplus > 0:
            resident[others[np.argsort(rank[others])[:surplus]]] = False
        resident[needed] = True
    return out


def test_gemma4_agentic_meets_the_papers_fetches_and_shared_experts() -> None:
    preset = preset_for("gemma4_26b_a4b", "agentic")
    traces = [generate(preset, GEMMA4, 8, 96, seed) for seed in range(3)]
    means = [fetches(trace, 1152)[48:].mean() for trace in traces]
    assert np.mean(means) == pytest.approx(235, rel=0.03)  # Fig. 10b
    assert np.std(means) < 0.05 * 235
    for n, expected in ((1, 8), (2, 14), (3, 19), (6, 29), (8, 34)):  # with these the M6's job times fit Fig. 4a
        assert np.mean([distinct_experts(trace, n) for trace in traces]) == pytest.approx(expected, abs=0.6)


def test_misses_of_a_token_hang_together_across_layers() -> None:
    """Fig. 5: who misses more in the first layers misses more in all."""

    def halves(preset: Preset) -> float:
        trace = generate(preset, GEMMA4, 4, 120, seed=1)
        rank = np.argsort(np.argsort(-statistics.popularity(trace), axis=1), axis=1)
        cold = np.stack(
            [(np.take_along_axis(rank[None], r.experts.astype(int), 2) >= 38).sum(2) for r in trace.requests]
        )
        return float(np.corrcoef(cold[:, :, :15].sum(2).ravel(), cold[:, :, 15:].sum(2).ravel())[0, 1])

    assert halves(preset_for("gemma4_26b_a4b", "agentic")) > 0.5
    assert abs(halves(independent(0.4))) < 0.15


def test_gpt_oss_matches_recorded_routes(shared_data) -> None:  # type: ignore[no-untyped-def]
    ids = np.load(shared_data / "gptoss20b_routes" / "routes_512.npz")["ids"][:16, 6:262].astype(np.uint16)
    model = MODELS[6]
    real = Trace(model, tuple(RequestTrace(n, r) for n, r in enumerate(ids)))
    made = generate(preset_for(model.name, "chat"), model, 16, 262, seed=0)
    made = replace(made, requests=tuple(RequestTrace(r.request, r.experts[6:]) for r in made.requests))
    for lag in (1, 4, 64):
        want, got = (statistics.reuse(t, (lag,))[lag] for t in (real, made))
        assert got.mean() == pytest.approx(want.mean(), abs=0.04)
        assert np.corrcoef(got, want)[0, 1] > 0.85  # layer by layer
    want, got = (statistics.union_share(statistics.inclusion(t), 8) for t in (real, made))
    assert got == pytest.approx(want, abs=0.03)
