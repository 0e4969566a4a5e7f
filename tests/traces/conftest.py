"""Small random traces."""

from collections.abc import Callable

import numpy as np
import pytest

from policies.core.types import ModelSpec
from traces.format import NEXT_NORM_SCORES, NEXT_SCORES, RequestTrace, Trace

MODEL = ModelSpec("toy", n_layers=3, n_experts=8, top_k=2)


def random_experts(rng: np.random.Generator, tokens: int, model: ModelSpec = MODEL) -> np.ndarray:
    """Distinct experts [tokens, layers, k] in random order."""
    order = rng.random((tokens, model.n_layers, model.n_experts)).argsort(axis=-1)
    return order[..., : model.top_k].astype(np.uint16)


@pytest.fixture
def make_trace() -> Callable[..., Trace]:
    def make(lengths: tuple[int, ...] = (5, 3, 4), model: ModelSpec = MODEL, seed: int = 0, **kwargs: object) -> Trace:
        rng = np.random.default_rng(seed)
        requests = tuple(RequestTrace(r, random_experts(rng, n, model)) for r, n in enumerate(lengths))
        return Trace(model, requests, source="made by a test", **kwargs)

    return make


@pytest.fixture
def rich_trace() -> Trace:
    """All columns, a prompt whose tokens lack a layer, descriptive fields, layers 1, 2 and 5 of the original model."""
    rng = np.random.default_rng(1)
    layers, experts, hidden = MODEL.n_layers, MODEL.n_experts, 6
    requests = []
    for number, (prompt, tokens) in enumerate(((3, 7), (0, 2), (2, 9))):
        ids = random_experts(rng, tokens)
        weights = rng.random(ids.shape).astype(np.float16)
        unseen = max(0, prompt - 1)
        ids[:unseen, -1] = 65535
        weights[:unseen, -1] = np.nan
        columns = {
            "phase": (np.arange(tokens) >= prompt).astype(np.uint8),
            "token_id": rng.integers(0, 50_000, tokens).astype(np.int32),
            "weights": weights,
            "hidden": rng.random((tokens, layers + 1, hidden)).astype(np.float16),
        }
        for name in ("scores", *NEXT_SCORES, *NEXT_NORM_SCORES):
            columns[name] = rng.random((tokens, layers, experts)).astype(np.float16)
        requests.append(RequestTrace(number * 10, ids, columns, prompt or None, number * 0.5, f"r{number}"))
    return Trace(MODEL, tuple(requests), "by hand", 7, (1, 2, 5), {"expert_bytes": [10, 20, 30]})
