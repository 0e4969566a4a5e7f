"""Owns the synthetic router: a `Trace` with the statistics of a `Preset`.

Knows presets and the trace's value types.  Knows neither policies nor files.

A gate's scores are  m * (P + A (u + s)) + A (f + n) + e,  and the k highest are chosen:

- P: the fixed popularity of each expert of each layer, the same quantiles of a normal distribution in every layer;
- A h: a fixed random map of each layer applied to a hidden state h of few dimensions that all layers share: u constant
  for a request, s and f slow and fast AR(1) processes over its tokens, n new with each token.  As in a transformer's
  residual stream, one state speaks to all gates, so experts of one layer foretell the experts of the next, and a token
  that is unusual in one layer is so in all;
- e: noise of its own in each layer and expert;
- m: a lognormal factor of each (request, step), for all its layers: a token with a low m follows its popular and
  habitual experts less and misses more in all layers.

The overlap of two top-k sets depends only on the correlation of their scores, so each share of variance can be read
off a measured overlap (same request, other request, few or many steps apart).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import lru_cache
from math import comb
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from policies.core.types import ModelSpec, UserError
from traces.format import RequestTrace, Trace
from traces.predictions import COLUMNS as PREDICTIONS
from traces.predictions import SharedErrors, next_gate_scores
from traces.presets import Preset
from traces.processes import remember

Array = NDArray[np.float32]

CHUNK_SCORES = 1 << 19  # scores made at once: two MiB of float32, so that a chunk stays in the processor's cache
GRID = np.float32(1 / 256)  # hidden states and their maps are multiples of this: see `_on_grid`
OPENING_SHARE = 0.99  # share of variance that requests have in common in their opening
OPENING_FADE = 0.7  # what is left of it with each token after the opening
OPENING_TAIL = 12  # tokens until it is gone
GOLDEN = (5**0.5 - 1) / 2


@dataclass(frozen=True, slots=True)
class _Stream:
    """What one request adds, all its tokens at once (`tokens` x ...), without the noise of each expert."""

    factor: Array  # [tokens]: m
    habit: Array  # [tokens, hidden]: m (u + s) + f
    news: Array  # [tokens, hidden]: n


class _Router:
    """The parts that all requests share, and how they become scores."""

    def __init__(self, preset: Preset, model: ModelSpec, seed: int, columns: tuple[str, ...]) -> None:
        self.preset, self.model, self.seed, self.columns = preset, model, seed, columns
        self._made: dict[tuple[int, int], RequestTrace] = {}
        rng = self.rng(0)
        popularity, habit, news = preset.shares(model.n_layers)
        normal = NormalDist()
        quantiles = np.array([normal.inv_cdf((i + 0.5) / model.n_experts) for i in range(model.n_experts)])
        quantiles /= max(quantiles.std(), 1e-9)
        every_layer = np.broadcast_to(quantiles, (model.n_layers, model.n_experts))
        self.popularity = (rng.permuted(every_layer, axis=1) * popularity[:, None] ** 0.5).astype(np.float32)
        maps = rng.standard_normal((model.n_layers, preset.hidden, model.n_experts), dtype=np.float32)
        self.maps = _on_grid(maps / np.float32(preset.hidden**0.5))
        self.habit_scale = np.sqrt(habit).astype(np.float32)[:, None, None]  # [layers, 1, 1]
        self.news_scale = np.sqrt(news).astype(np.float32)[:, None, None]
        self.noise_scale = np.float32(preset.noise**0.5)
        self.start = float(rng.random())
        self.opening_share, self.opening_scores = self._opening()

    def rng(self, *key: int) -> np.random.Generator:
        """A generator of its own for each purpose, so that no draw depends on what else is generated."""
        return np.random.default_rng(np.random.SeedSequence(self.seed, spawn_key=key))

    def spread(self, number: int) -> float:
        """A value in (0, 1) for each request; those of any n in a row are evenly spread."""
        return min(max((self.start + number * GOLDEN) % 1.0, 1e-3), 1 - 1e-3)

    def affinity(self, number: int) -> Array:
        """The constant part u of a hidden state: orthogonal to the others of its block of `hidden` requests.

        Independent draws of so few dimensions would make some seeds' requests alike and others' not.
        """
        block, column = divmod(number, self.preset.hidden)
        square = self.rng(2, block).standard_normal((self.preset.hidden, self.preset.hidden))
        direction: Array = np.linalg.qr(square).Q[:, column].astype(np.float32)
        return direction * np.float32(self.preset.hidden**0.5)

    def stream(self, number: int, tokens: int) -> _Stream:
        """Hidden states: number 0 is the common opening, r + 1 is request r.  Any first tokens are the same."""
        p = self.preset
        hard = p.request_spread * NormalDist().inv_cdf(self.spread(number))
        factor = np.exp(-(hard + p.step_spread * self.rng(3, number).standard_normal(tokens))).astype(np.float32)
        draws = self.rng(4, number).standard_normal((tokens, 3, p.hidden), dtype=np.float32)
        constant = np.float32(p.affinity**0.5) * self.affinity(number)
        own = constant + np.float32(p.slow**0.5) * remember(draws[:, 0], p.slow_memory)
        fast = np.float32(p.fast**0.5) * remember(draws[:, 1], p.fast_memory)
        return _Stream(factor, factor[:, None] * own + fast, draws[:, 2])

    def scores(self, stream: _Stream, noise: Array, first: int) -> Array:
        """Scores [tokens, layers, experts] of the tokens from `first` on that `noise` covers; `noise` is used up."""
        part = slice(first, first + len(noise))
        hidden = self.habit_scale * stream.habit[part] + self.news_scale * stream.news[part]  # [layers, tokens, hidden]
        scores = noise
        scores *= self.noise_scale
        scores += np.matmul(_on_grid(hidden), self.maps).transpose(1, 0, 2)
        scores += stream.factor[part, None, None] * self.popularity
        return scores

    def request(self, request: int, tokens: int) -> RequestTrace:
        """All tokens of one request; made once, and read-only, because the cells of a sweep share it."""
        if (request, tokens) not in self._made:
            self._made[request, tokens] = self._make(request, tokens)
        return self._made[request, tokens]

    def _make(self, request: int, tokens: int) -> RequestTrace:
        model, keep_scores = self.model, bool(self.columns)
        stream, rng = self.stream(request + 1, tokens), self.rng(5, request)
        experts = np.empty((tokens, model.n_layers, model.top_k), np.uint16)
        weights = np.empty(experts.shape, np.float16)
        kept = np.empty((tokens, model.n_layers, model.n_experts) if keep_scores else 0, np.float32)
        chunk = max(1, CHUNK_SCORES // (model.n_layers * model.n_experts))
        for first in range(0, tokens, chunk):
            shape = (min(chunk, tokens - first), model.n_layers, model.n_experts)
            scores = self.scores(stream, rng.standard_normal(shape, dtype=np.float32), first)
            shared = self.opening_share[first : first + chunk, None, None][: shape[0]]
            opening = scores[: len(shared)]  # a view
            opening *= np.sqrt(1 - shared)
            opening += np.sqrt(shared) * self.opening_scores[first : first + len(shared)]
            part = slice(first, first + shape[0])
            experts[part], weights[part] = _choose(scores, model.top_k, self.preset.sharpness)
            if keep_scores:
                kept[part] = scores
        arrays = {"weights": weights, **self._columns(request, kept)}
        for made in (experts, *arrays.values()):
            made.setflags(write=False)
        return RequestTrace(request, experts, arrays)

    def _columns(self, request: int, scores: Array) -> dict[str, NDArray[np.float16]]:
        out = {}
        for column in self.columns:
            if column == "scores":
                out[column] = (scores * np.float32(self.preset.sharpness)).astype(np.float16)
            else:
                distance = PREDICTIONS[column]
                quality = self.preset.prediction_quality**distance
                rng, shared = self.rng(6, request, distance), SharedErrors.draw(self.popularity, self.rng(7, distance))
                out[column] = next_gate_scores(scores, distance, quality, self.model.top_k, rng, shared)
        return out

    def _opening(self) -> tuple[Array, Array]:
        """How much of the first tokens' scores all requests share [tokens], and those scores."""
        given = self.preset.opening_tokens
        tokens = given + OPENING_TAIL if given else 0
        stream = self.stream(0, tokens)
        noise = self.rng(1).standard_normal((tokens, self.model.n_layers, self.model.n_experts), dtype=np.float32)
        past = np.maximum(np.arange(tokens) - given + 1, 0)
        return (OPENING_SHARE * OPENING_FADE**past).astype(np.float32), self.scores(stream, noise, 0)


def generate(  # noqa: PLR0917 - what a run says of its workload, in the order of its config
    preset: Preset,
    model: ModelSpec,
    requests: int,
    steps: int,
    seed: int,
    columns: tuple[str, ...] = (),
    length_spread: float = 0.0,
) -> Trace:
    """A trace of `requests` requests of `steps` decode tokens each, with routing weights.

    The same arguments give the same bytes.  A request's tokens depend on neither the number of requests nor the number
    of its tokens nor the columns.

    Args:
        preset: the statistics to imitate.
        model: layers, experts and top-k; the preset's depth profile is stretched to its layers.
        requests: number of requests, numbered from 0.
        steps: decode tokens of the longest request.
        seed: 0 or above; seeds give different experts their popularity.
        columns: besides ``weights``: ``scores`` (gate logits) and ``next_scores_1`` to ``_3`` (see `predictions`).
        length_spread: requests have between ``(1 - length_spread) * steps`` and ``steps`` tokens, evenly spread.

    Raises:
        UserError: a count, the seed, the spread or a column out of range.
    """
    for name, value, least in (("requests", requests, 1), ("steps", steps, 1), ("seed", seed, 0)):
        if value < least:
            raise UserError(f"{name} is {value}, expected at least {least}")
    if not 0.0 <= length_spread < 1.0:
        raise UserError(
            f"length_spread is {length_spread}, expected 0 to below 1 (share of steps that a request may lack)"
        )
    for column in columns:
        if column != "scores" and column not in PREDICTIONS:
            known = ", ".join(["scores", *PREDICTIONS])
            raise UserError(f"the synthetic router has no column {column}; it has {known}")
    router = _router(preset, model, seed, columns)
    return Trace(
        model=model,
        requests=tuple(
            router.request(r, max(1, round(steps * (1 - length_spread * router.spread(r))))) for r in range(requests)
        ),
        source=f"synthetic router, preset {preset.name}",
        seed=seed,
        notes={"preset": asdict(preset)},
    )


@lru_cache(maxsize=1)
def _router(preset: Preset, model: ModelSpec, seed: int, columns: tuple[str, ...]) -> _Router:
    """The last one is kept: neighbouring cells of a sweep differ in system, device or cache more often than in this."""
    return _Router(preset, model, seed, columns)


def distinct_experts(trace: Trace, n: int) -> float:
    """Expected number of distinct experts that `n` different requests choose at one layer in one step.

    Exact mean over layers, over the steps that all requests have and over all sets of `n` requests: an expert that `c`
    of `R` requests choose is missed by a set with probability ``C(R - c, n) / C(R, n)``.

    Raises:
        UserError: the trace has fewer than `n` requests.
    """
    total = len(trace.requests)
    if not 1 <= n <= total:
        raise UserError(f"distinct experts of {n} requests asked for, the trace has {total}")
    steps = min(request.n_decode for request in trace.requests)
    chosen = np.stack([request.decode[:steps] for request in trace.requests], axis=2)  # [steps, layers, requests, k]
    gates = np.arange(steps * trace.model.n_layers).reshape(steps, trace.model.n_layers, 1, 1)
    size = gates.size * trace.model.n_experts
    users = np.bincount((gates * trace.model.n_experts + chosen).ravel(), minlength=size)
    needed = np.array([1 - comb(total - c, n) / comb(total, n) for c in range(total + 1)])
    return float(needed[users].sum() / gates.size)


def _on_grid(values: Array) -> Array:
    """Round to multiples of `GRID`, so that float32 sums of their products are exact.

    A matrix product then has the same bits in whatever order the library adds, on any machine and number of threads.
    """
    steps: Array = np.rint(values / GRID)
    return steps * GRID


def _choose(scores: Array, top_k: int, sharpness: float) -> tuple[NDArray[np.uint16], NDArray[np.float16]]:
    """Experts [..., k] by descending score (ties: lower index) and softmax weights over them."""
    experts = scores.shape[-1]
    if top_k < experts:
        chosen = np.argpartition(scores, experts - top_k, axis=-1)[..., experts - top_k :]
        chosen.sort(axis=-1)
    else:
        chosen = np.broadcast_to(np.arange(experts), scores.shape)
    values = np.take_along_axis(scores, chosen, axis=-1)
    rank = np.argsort(-values, axis=-1, kind="stable")
    values = np.take_along_axis(values, rank, axis=-1)
    weights = np.exp(np.float32(sharpness) * (values - values[..., :1]))
    weights /= weights.sum(axis=-1, keepdims=True)
    return np.take_along_axis(chosen, rank, axis=-1).astype(np.uint16), weights.astype(np.float16)
