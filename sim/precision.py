"""``python -m sim.precision``: prefetch precision under caching (paper §2.4, Figure 2).

Owns the command: which predictors, sizes and seeds.  ``sim.coverage`` has the arithmetic, ``sim.precision_table`` the
table.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tqdm import tqdm

from conf.cells import check, resolved
from conf.compose import composing, expand
from conf.models import ModelConfig
from policies.build import build_core, build_predictor
from policies.core.messages import Prediction
from policies.core.types import ModelSpec, RequestId, UserError
from policies.prefetch import Predictor
from sim import coverage
from sim.precision_table import Row, draw, show, summarise, write
from traces import command
from traces.calibration import Lesson, require_columns, teach
from traces.format import RequestTrace
from traces.load import load_workload
from traces.routing import TokenObservation

USAGE = """
Usage: python -m sim.precision [predictors=LIST] [sizes=LIST] [seeds=LIST] [draws=5] [coverage=0.8] [aggregate=sum]
                               [out=runs/precision] [config_dir=DIR] [settings of python -m sim ...]

For each cache size and predictor: rank the experts of the target layer that are not in the cache, take the shortest
prefix that covers 80% of those needed; precision is the needed share of the prefix.  Three caches: the actual one, one
that holds as many needed and unneeded experts but others at random, and none.

  predictors=LIST  options of prefetch= (default: next_gate,finemoe,learned_linear); promoe needs promoe=FILE
  sizes=LIST       cache as shares of all experts (default: 0.1,0.2,0.3,0.4,0.5,0.6)
  seeds=LIST       of the workload (default: 0); with several, precision_sd is the spread over seeds and draws
  draws=5          of the randomised cache
  aggregate=sum    of the scores of a step's requests; or max
  learn_path=FILE learn_requests=32 learn_steps=128    what predictors learn from: see conf/prefetch
  promoe=FILE      the networks that python -m traces.train_promoe wrote
  out=DIR          gets precision.csv and precision.png

Settings and their defaults here: model=qwen3_6_35b_a3b workload=chat concurrency=8 steps=512 warmup=256 cache=lfu
"""
OWN = (
    *("predictors", "sizes", "seeds", "draws", "coverage", "aggregate", "out", "config_dir"),
    *("promoe", "learn_path", "learn_requests", "learn_steps"),
)
NOT_HERE = {
    "seed": "give seeds=LIST",
    "system": "predictors are asked without one",
    "prefetch": "give predictors=LIST",
    "study": "results go to out=DIR",
    "runs": "results go to out=DIR",
    "force": "results in out=DIR are replaced",
}
DEFAULTS = ("model=qwen3_6_35b_a3b", "workload=chat", "concurrency=8", "steps=512", "warmup=256")


Scores = npt.NDArray[np.float32]
Settings = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Study:
    """What is asked for, apart from predictors and settings."""

    sizes: tuple[float, ...] = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6)
    draws: int = 5
    coverage: float = 0.8
    aggregate: str = "sum"


class _Recorder:
    """Stands where a predictor would, so that the trace is loaded with all columns that any predictor needs."""

    def __init__(self, predictors: Sequence[Predictor]) -> None:
        self.columns = tuple(dict.fromkeys(column for predictor in predictors for column in predictor.columns))

    def predict(self, _: TokenObservation) -> tuple[Prediction, ...]:
        """Nothing."""
        return ()


def measure(settings: Mapping[str, Settings], study: Study) -> Iterator[Row]:
    """All values of one seed.

    ``settings``: resolved settings of a run by the predictor's name; they differ in ``prefetch`` only.
    """
    first = next(iter(settings.values()))
    spec = ModelConfig.from_config(first["model"]).spec
    predictors: dict[str, Predictor] = {}
    for name, own in settings.items():
        predictor = build_predictor(own, spec)
        if predictor is None:
            raise UserError(f"prefetch={name} predicts nothing; leave it out of predictors=")
        require_columns(own, predictor)
        predictors[name] = predictor
    loaded = load_workload(first, spec, _Recorder(list(predictors.values())))
    spec, trace, steps, warmup = loaded.model, loaded.trace, int(first["steps"]), int(first["warmup"])
    places = _places(loaded.workload, min(steps, loaded.workload.full_steps))
    by_id = {request.request: request for request in trace.requests}
    experts = np.array([[by_id[request].experts[row] for request, row in step] for step in places])
    uses = coverage.uses_of(experts.astype(np.int64), spec.n_experts)
    needed = uses[warmup:] > 0
    distances = {name: int(getattr(predictor, "distance", 1)) for name, predictor in predictors.items()}

    orders: dict[str, coverage.Order] = {}
    for name, predictor in tqdm(predictors.items(), desc="scores", disable=None):
        teach(predictor, settings[name], spec, trace, loaded.workload.requests)
        scores = batch_scores(
            predictor, distances[name], spec, requests=by_id, places=places[warmup:], aggregate=study.aggregate
        )
        orders[name] = coverage.ranking(scores[:, distances[name] :])
        nothing = np.zeros_like(needed[:, distances[name] :])
        counts = coverage.count(orders[name], needed[:, distances[name] :], nothing, study.coverage)
        yield Row(name, 0.0, "none", counts.precision, counts.coverage, 0.0)

    rng = np.random.default_rng([int(first["seed"]), 3])
    draws = [coverage.lots(needed, rng) for _ in range(study.draws)]
    for fraction in tqdm(study.sizes, desc="sizes", disable=None):
        cache = {**first["cache"], "fraction": fraction, "slots": None}
        core = build_core({**first, "cache": cache, "prefetch": {"policy": None}}, spec, fetch_slots=8)
        policy, capacity = core.cache.eviction, core.cache.capacity
        shown = coverage.residents(policy, capacity, uses, sorted({*distances.values()}))
        for name, order in orders.items():
            wanted, resident = needed[:, distances[name] :], shown[distances[name]][warmup:]
            held = float((wanted & resident).sum() / wanted.sum())
            counts = coverage.count(order, wanted, resident, study.coverage)
            yield Row(name, fraction, "actual", counts.precision, counts.coverage, held)
            for lots in draws:
                other = coverage.randomised(lots[:, distances[name] :], wanted, resident)
                counts = coverage.count(order, wanted, other, study.coverage)
                yield Row(name, fraction, "randomized", counts.precision, counts.coverage, held)


def batch_scores(
    predictor: Predictor,
    distance: int,
    spec: ModelSpec,
    *,
    requests: Mapping[RequestId, RequestTrace],
    places: Sequence[Sequence[tuple[RequestId, int]]],
    aggregate: str,
) -> Scores:
    """The predictor's scores for each target layer, joined over the requests of a step [steps, layers, experts].

    A predictor may score a whole request by ``all_scores(request)``; any other is asked token by token and layer by
    layer, each request from its first decode token on.
    """
    joined = np.zeros((len(places), spec.n_layers, spec.n_experts), np.float32)
    steps_of: dict[RequestId, list[tuple[int, int]]] = {}  # (step, decode token)
    for step, active in enumerate(places):
        for request, row in active:
            steps_of.setdefault(request, []).append((step, row - requests[request].first_decode))
    if aggregate == "max":
        joined.fill(-np.inf)
    for request, pairs in steps_of.items():
        steps, tokens = np.array(pairs).T
        scores = _request_scores(predictor, distance, spec, requests[request], int(tokens[-1]) + 1)[tokens]
        joined[steps] = np.maximum(joined[steps], scores) if aggregate == "max" else joined[steps] + scores
    return joined


def _request_scores(predictor: Predictor, distance: int, spec: ModelSpec, request: RequestTrace, tokens: int) -> Scores:
    whole: Callable[[Lesson], Scores] | None = getattr(predictor, "all_scores", None)
    if whole is not None:
        return whole(Lesson(request, tokens))
    out = np.zeros((tokens, spec.n_layers, spec.n_experts), np.float32)
    for token in range(tokens):
        row = request.first_decode + token
        for layer in range(spec.n_layers - distance):
            observation = TokenObservation(request.request, row, layer, request.experts[row], request)
            out[token, layer + distance] = predictor.scores(observation, layer + distance)
    return out


def _places(workload: Any, steps: int) -> list[list[tuple[RequestId, int]]]:
    """Which row of which request each place holds at each step; only steps with all places filled."""
    places: list[list[tuple[RequestId, int]]] = []
    while len(places) < steps and workload.begin(0.0) is not None:
        places.append(list(workload.positions.items()))
    return places


# ---------------------------------------------------------------------------- the command


def main(argv: Sequence[str]) -> int:
    """Run the command; returns the exit code."""
    own, given = command.split(argv, OWN)
    for key in [word.partition("=")[0] for word in given]:
        if key in NOT_HERE:
            raise UserError(f"{key}= has no effect in this study; {NOT_HERE[key]}")
    overrides = [*DEFAULTS, *given]
    study = _study(own)
    names = own.get("predictors", "next_gate,finemoe,learned_linear").split(",")
    seeds = [command.whole_number({"seeds": seed}, "seeds", least=0) for seed in own.get("seeds", "0").split(",")]
    out = Path(own.get("out", "runs/precision"))
    rows: list[Row] = []
    with composing(Path(own["config_dir"]) if "config_dir" in own else None) as more:
        for seed in seeds:
            settings = {name: _settings([*more, *overrides, f"seed={seed}"], name, own) for name in names}
            rows += measure(settings, study)
    table = summarise(rows)
    out.mkdir(parents=True, exist_ok=True)
    _replace(out / "precision.csv", lambda path: write(table, path))
    _replace(out / "precision.png", lambda path: draw(table, path))
    show(table, study.coverage)
    print(f"table:  {out / 'precision.csv'}\nfigure: {out / 'precision.png'}")
    return 0


def _study(own: Mapping[str, str]) -> Study:
    default = Study()
    try:
        sizes = tuple(float(size) for size in own["sizes"].split(",")) if "sizes" in own else default.sizes
        share = float(own.get("coverage", default.coverage))
    except ValueError:
        raise UserError("sizes and coverage are numbers, as in sizes=0.1,0.3,0.6 coverage=0.8") from None
    if not all(0 < size < 1 for size in sizes) or not 0 < share <= 1:
        raise UserError("sizes must lie between 0 and 1, coverage above 0 and up to 1")
    aggregate = own.get("aggregate", default.aggregate)
    if aggregate not in ("sum", "max"):
        raise UserError(f"aggregate is {aggregate}, expected sum or max")
    return Study(sizes, command.whole_number(own, "draws") or default.draws, share, aggregate)


def _settings(overrides: Sequence[str], predictor: str, own: Mapping[str, str]) -> Settings:
    """The settings of a run with this predictor."""
    more = [f"prefetch={predictor}"]
    if predictor == "promoe" and "promoe" in own:
        more.append(f"prefetch.predictor.path={own['promoe']}")
    points = list(expand([*overrides, "system=llama_cpp_lfu", *more]))
    if len(points) != 1:
        raise UserError("this study takes one value for each setting; give lists as predictors=, sizes= and seeds=")
    settings = resolved(points[0].config)
    check(settings)
    learn = settings["prefetch"].get("learn")
    if learn is not None:
        learn["path"] = own.get("learn_path", learn["path"])
        for key in ("requests", "steps"):
            learn[key] = command.whole_number(own, f"learn_{key}") or learn[key]
    return settings


def _replace(path: Path, write: Callable[[Path], None]) -> None:
    partial = path.with_name(f".{os.getpid()}.{path.name}")
    try:
        write(partial)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


if __name__ == "__main__":
    sys.exit(command.run(main, USAGE))
