"""Imperfect predictions of later gates: recall as a function of quality."""

import numpy as np
import pytest

from policies.core.types import ModelSpec, UserError
from traces.generate import generate
from traces.predictions import next_gate_scores
from traces.presets import GENERIC

MODEL = ModelSpec("m", 10, 128, 8)


def recall(predicted: np.ndarray, experts: np.ndarray, distance: int) -> float:
    """Share of the experts chosen `distance` layers later that are among the k best predicted."""
    top = np.argsort(-predicted[:, :-distance].astype(float), axis=-1)[..., : experts.shape[-1]]
    return float((top[..., :, None] == experts[:, distance:, None, :]).any(-1).mean())


@pytest.fixture(scope="module")
def routes() -> tuple[np.ndarray, np.ndarray]:
    scores = np.random.default_rng(0).standard_normal((60, 10, 128), dtype=np.float32) * 3 + 1
    return scores, np.argsort(-scores, axis=-1)[..., :8]


@pytest.mark.parametrize("distance", [1, 2, 3])
def test_quality_one_recalls_all_and_zero_by_chance(routes: tuple[np.ndarray, np.ndarray], distance: int) -> None:
    scores, experts = routes
    rng = np.random.default_rng(1)
    assert recall(next_gate_scores(scores, distance, 1.0, 8, rng), experts, distance) == 1.0
    assert recall(next_gate_scores(scores, distance, 0.0, 8, rng), experts, distance) == pytest.approx(
        8 / 128, abs=0.02
    )


def test_recall_grows_with_quality_as_that_of_correlated_normals(routes: tuple[np.ndarray, np.ndarray]) -> None:
    scores, experts = routes
    rng = np.random.default_rng(2)
    found = {q: recall(next_gate_scores(scores, 1, q, 8, rng), experts, 1) for q in (0.2, 0.4, 0.6, 0.8, 0.9, 0.97)}
    assert list(found.values()) == sorted(found.values())
    a, b = rng.standard_normal((2, 5000, 128))
    b = 0.8 * a + 0.6 * b
    top_a, top_b = (np.argsort(-x, axis=1)[:, :8] for x in (a, b))
    assert found[0.8] == pytest.approx((top_a[:, :, None] == top_b[:, None, :]).any(2).mean(), abs=0.03)


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
    assert not next_gate_scores(scores, 3, 0.5, 2, np.random.default_rng(0)).any()


@pytest.mark.parametrize(("distance", "quality", "says"), [(4, 0.5, "distance is 4"), (1, 1.5, "quality is 1.5")])
def test_bad_values_are_named(distance: int, quality: float, says: str) -> None:
    with pytest.raises(UserError, match=says):
        next_gate_scores(np.ones((1, 5, 8), np.float32), distance, quality, 2, np.random.default_rng(0))
