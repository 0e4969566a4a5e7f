"""Imperfect predictions of later gates: recall as a function of quality."""

import numpy as np
import pytest

from policies.core.types import ModelSpec, UserError
from traces.generate import generate
from traces.predictions import SharedErrors, next_gate_scores
from traces.presets import GENERIC

MODEL = ModelSpec("m", 10, 128, 8)


def recall(predicted: np.ndarray, experts: np.ndarray, distance: int) -> float:
    """Share of the experts chosen `distance` layers later that are among the k best predicted."""
    top = np.argsort(-predicted[:, :-distance].astype(float), axis=-1)[..., : experts.shape[-1]]
    return float((top[..., :, None] == experts[:, distance:, None, :]).any(-1).mean())


def shared(rng: np.random.Generator) -> SharedErrors:
    """All experts equally popular."""
    return SharedErrors.draw(np.zeros((10, 128), np.float32), rng)


@pytest.fixture(scope="module")
def routes() -> tuple[np.ndarray, np.ndarray]:
    scores = np.random.default_rng(0).standard_normal((60, 10, 128), dtype=np.float32) * 3 + 1
    return scores, np.argsort(-scores, axis=-1)[..., :8]


@pytest.mark.parametrize("distance", [1, 2, 3])
def test_quality_one_recalls_all_and_zero_by_chance(routes: tuple[np.ndarray, np.ndarray], distance: int) -> None:
    scores, experts = routes
    rng = np.random.default_rng(1)
    assert recall(next_gate_scores(scores, distance, 1.0, 8, rng, shared(rng)), experts, distance) == 1.0
    assert recall(next_gate_scores(scores, distance, 0.0, 8, rng, shared(rng)), experts, distance) == pytest.approx(
        8 / 128, abs=0.02
    )


def test_recall_grows_with_quality_as_that_of_correlated_normals(routes: tuple[np.ndarray, np.ndarray]) -> None:
    scores, experts = routes
    rng = np.random.default_rng(2)
    qualities = (0.2, 0.4, 0.6, 0.8, 0.9, 0.97)
    found = {q: recall(next_gate_scores(scores, 1, q, 8, rng, shared(rng)), experts, 1) for q in qualities}
    assert list(found.values()) == sorted(found.values())
    a, b = rng.standard_normal((2, 5000, 128))
    b = 0.8 * a + 0.6 * b
    top_a, top_b = (np.argsort(-x, axis=1)[:, :8] for x in (a, b))
    assert found[0.8] == pytest.approx((top_a[:, :, None] == top_b[:, None, :]).any(2).mean(), abs=0.03)


def test_errors_last_as_those_of_the_demo_model_s_gate() -> None:
    """What was measured there (chat; agentic), each within the two workloads' difference."""
    rng = np.random.default_rng(3)
    scores = rng.standard_normal((6, 300, 10, 128), dtype=np.float32)
    common = shared(rng)
    predicted = np.stack([next_gate_scores(s, 1, 0.9, 8, rng, common)[:, :-1].astype(np.float32) for s in scores])
    predicted -= predicted.mean(axis=-1, keepdims=True)
    truth = scores[:, :, 1:] - scores[:, :, 1:].mean(axis=-1, keepdims=True)
    truth /= truth.std(axis=-1, keepdims=True)
    errors = predicted - 0.9 * truth
    variance = errors.var()
    assert variance == pytest.approx(1 - 0.9**2, rel=0.02)
    assert (errors[:-1] * errors[1:]).mean() / variance == pytest.approx((0.061 + 0.052) / 2, abs=0.01)
    errors -= errors.mean(axis=(0, 1))
    for lag, measured in {1: (0.260, 0.286), 2: (0.139, 0.169), 4: (0.084, 0.114), 16: (0.051, 0.060)}.items():
        found = (errors[:, lag:] * errors[:, :-lag]).mean() / variance
        assert min(measured) - 0.025 < found < max(measured) + 0.025, f"lag {lag}: {found:.3f}"


def test_rare_experts_are_harder_to_foretell() -> None:
    """Errors beside scores of one size: 1.57 times as large for the rarer two fifths as for the more popular."""
    rng = np.random.default_rng(7)
    popularity = np.sort(rng.standard_normal((10, 128), dtype=np.float32) * 3 + 1)
    common = SharedErrors.draw(popularity, rng)
    scores = rng.standard_normal((200, 10, 128), dtype=np.float32)
    predicted = next_gate_scores(scores, 1, 0.0, 8, rng, common)[:, :-1].astype(np.float32)
    predicted -= predicted.mean(axis=-1, keepdims=True)
    size = predicted.std(axis=(0, 1))
    assert (size**2).mean() == pytest.approx(1, abs=0.03)
    ratio = np.sqrt((size[:51] ** 2).mean() / (size[-51:] ** 2).mean())
    assert ratio == pytest.approx(1.57, abs=0.1)


def test_the_first_tokens_errors_do_not_depend_on_how_many_there_are() -> None:
    scores = np.random.default_rng(4).standard_normal((30, 10, 128), dtype=np.float32)
    common = shared(np.random.default_rng(5))
    long, short = (next_gate_scores(s, 1, 0.5, 8, np.random.default_rng(6), common) for s in (scores, scores[:7]))
    assert np.array_equal(long[:7], short)


def test_columns_predict_the_trace_worse_with_distance() -> None:
    columns = ("next_scores_1", "next_scores_2", "next_scores_3")
    trace = generate(GENERIC, MODEL, 2, 40, seed=0, columns=columns)
    assert set(trace.columns) == {"weights", *columns}
    request = trace.requests[0]
    found = [recall(request.columns[name], request.experts, d) for d, name in enumerate(columns, 1)]
    assert found == sorted(found, reverse=True)
    assert found[0] > 0.6
    for distance, name in enumerate(columns, 1):
        assert request.columns[name].shape == (40, 10, 128)
        assert (request.columns[name][:, -distance:] == 0).all()


def test_a_model_with_fewer_layers_than_the_distance_has_no_predictions() -> None:
    scores = np.ones((4, 2, 8), np.float32)
    rng = np.random.default_rng(0)
    assert not next_gate_scores(scores, 3, 0.5, 2, rng, SharedErrors.draw(scores[0], rng)).any()


@pytest.mark.parametrize(("distance", "quality", "says"), [(4, 0.5, "distance is 4"), (1, 1.5, "quality is 1.5")])
def test_bad_values_are_named(distance: int, quality: float, says: str) -> None:
    rng, scores = np.random.default_rng(0), np.ones((1, 5, 8), np.float32)
    with pytest.raises(UserError, match=says):
        next_gate_scores(scores, distance, quality, 2, rng, SharedErrors.draw(scores[0], rng))
