"""A prefetch moves bytes, never tokens: every prefetcher on a running model gives the plain model's logits."""

import functools
import math
import queue
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from memory_world import FixedSteps, MemoryReader, MemorySlots, Recorder  # noqa: E402
from tiny_models import make_decoder, prefill, prompts, random_model, tiny_config  # noqa: E402

from conf.cells import resolved  # noqa: E402
from conf.compose import composing, expand  # noqa: E402
from executor.backend import TorchBackend  # noqa: E402
from executor.live_predictor import LivePredictor, live_predictor  # noqa: E402
from policies.build import build_core, build_predictor  # noqa: E402
from policies.core.driver import drive  # noqa: E402
from policies.core.messages import ComputeDone, Fetch  # noqa: E402
from policies.core.types import FetchKind, UserError  # noqa: E402
from policies.prefetch.mlp import Mlp  # noqa: E402
from policies.prefetch.promoe import Networks  # noqa: E402
from traces.calibration import teach  # noqa: E402
from traces.format import RequestTrace, Trace  # noqa: E402
from traces.routing import TraceRouting  # noqa: E402
from traces.storage import write_trace  # noqa: E402

STEPS, HIDDEN = 5, 6
GIVEN = prompts([3, 7, 5])
OTHERS = prompts([4, 6], seed=2)
NEXT_GATE = ("mixtral_offloading", "mixtral_offloading_lfu", "specmd", "specmd_lfu", "bevy_prefetch")
LEARNT = ("finemoe", "finemoe_lfu", "finemoe_asis", "finemoe_asis_lfu", "moe_infinity", "moe_infinity_lfu")
PROMOE = ("promoe", "promoe_lfu")
HISTORY = ("previous_token", "popularity", "cooccurrence")  # options of prefetch=, here with Bevy's schedule


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


@functools.cache
def tiny():
    return random_model(tiny_config("qwen3_moe"))


@functools.cache
def spec():
    return make_decoder(tiny())[0].spec


def opened(given, **options):
    decoder, experts = make_decoder(tiny(), max_requests=len(given), **options)
    with torch.inference_mode():
        for request, prompt in given.items():
            prefill(decoder, experts, request, prompt)
    return decoder, experts


def plain(given):
    """One request after the other, all experts resident: logits, and experts and probabilities of every gate."""
    decoder, experts = opened(given)
    decoder.shows_scores = True
    logits, chosen, scores = {}, {}, {}
    with torch.inference_mode():
        for request in given:
            rows, ids, seen = [], [], []
            for _ in range(STEPS):
                gates = [decoder.entry([request])]
                gates += [decoder.job(layer, [request], table.__getitem__) for layer, table in enumerate(experts)][:-1]
                ids.append([gate.chosen[0] for gate in gates])
                seen.append([gate.scores[0] for gate in gates])
                rows.append(decoder.head([request])[0])
                decoder.feed(request, int(rows[-1].argmax()))
            logits[request], chosen[request] = torch.stack(rows), np.array(ids, np.uint16)
            scores[request] = np.log(np.array(seen))
    return logits, chosen, scores


@functools.cache
def expected():
    return plain(GIVEN)


@functools.cache
def recorded(others=False):
    """A trace of what the plain model does.  What its gates do not say is noise: any prediction must do."""
    _, chosen, scores = plain(OTHERS) if others else expected()
    rng, model = np.random.default_rng(others), spec()
    requests = []
    for request, experts in chosen.items():
        columns = {"scores": scores[request].astype(np.float16)}
        columns["next_scores_1"] = rng.normal(size=(STEPS, model.n_layers, model.n_experts)).astype(np.float16)
        columns["hidden"] = rng.normal(size=(STEPS, model.n_layers + 1, HIDDEN)).astype(np.float16)
        requests.append(RequestTrace(request, experts, columns))
    return Trace(model, tuple(requests), "the plain model")


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A trace of other requests to learn from, and ProMoE's networks as they are before any training."""
    folder, rng, model = tmp_path_factory.mktemp("files"), np.random.default_rng(0), spec()
    write_trace(folder / "others.parquet", recorded(others=True))
    networks = tuple(Mlp.random([HIDDEN, 8, 8, model.n_experts], rng) for _ in range(model.n_layers))
    Networks(networks, np.zeros(0, np.uint64)).save(folder / "networks.npz")
    return folder


def settings(*words):
    model = spec()
    shape = [f"model.{key}={getattr(model, key)}" for key in ("n_layers", "n_experts", "top_k")]
    fixed = ("model=qwen3_30b_a3b", *shape, "concurrency=3", "cache.slots=36", f"steps={STEPS}", "warmup=1")
    with composing() as first:
        (point,) = expand([*first, *fixed, *words])
    return resolved(point.config)


def files_of(name, files):
    if name in PROMOE:
        return [f"prefetch.predictor.path={files / 'networks.npz'}"]
    words = []
    if name in LEARNT or name in {"popularity", "cooccurrence", "learned_linear"}:
        words.append(f"prefetch.learn.path={files / 'others.parquet'}")
    if name.startswith("finemoe_asis"):
        words.append("prefetch.predictor.distance=1")  # the released 3 skips all that four layers have
    return words


class Watch:
    """A journal that keeps the kinds of all fetches and the gates in the order of their completion."""

    def __init__(self):
        self.kinds, self.gates = [], []

    def record(self, t_s, events, commands):
        self.kinds += [command.kind for command in commands if isinstance(command, Fetch)]
        self.gates += [gate for event in events if isinstance(event, ComputeDone) for gate in event.gates]


class Steps(FixedSteps):
    """Knows which row of the trace each request's token is."""

    @property
    def positions(self):
        return dict.fromkeys(self._requests, self._step)


def decoded(config, *, live=None, predict=0, replayed=None):
    """Logits, what was fetched and said, and how many experts were imposed that the model would not have chosen."""
    decoder, experts = opened(GIVEN, predict=predict)
    core = build_core(config, spec(), 4)
    done, sampler, watch = queue.SimpleQueue(), Recorder(), Watch()
    slots = MemorySlots(experts[0][0], core.cache.capacity)
    reader = MemoryReader(experts, slots, done, delay_s=3e-4, seed=3)
    workload = Steps(None, list(GIVEN), STEPS)
    routing = TraceRouting(recorded(), workload, replayed) if replayed else None
    parts = {"sampler": sampler, "routing": routing, "predictor": live}
    try:
        with TorchBackend(decoder, slots, reader, done, **parts) as backend:
            workload._backend = backend
            drive(core, workload, backend, journal=watch, check=True)
    finally:
        reader.close()
    return {request: torch.stack(rows) for request, rows in sampler.logits.items()}, watch, backend.times.foreign


def assert_unchanged(found, watch):
    assert any(gate.predicted for gate in watch.gates)
    assert FetchKind.PREFETCH in watch.kinds
    right = expected()[0]
    assert found.keys() == right.keys()
    for request, rows in right.items():
        assert torch.equal(found[request], rows), f"request {request}"


@pytest.mark.parametrize("system", NEXT_GATE)
def test_the_next_gate_of_the_running_model(system):
    config = settings(f"system={system}")
    overfetch = config["prefetch"]["predictor"]["overfetch"]
    found, watch, _ = decoded(config, predict=math.ceil(overfetch * spec().top_k))
    assert live_predictor(config, spec()) is None  # the decoder's own
    assert_unchanged(found, watch)


@pytest.mark.parametrize("name", [*LEARNT, *HISTORY])
def test_predictors_on_the_gates_of_the_running_model(name, files):
    choice = ("system=bevy", f"prefetch={name}") if name in HISTORY else (f"system={name}",)
    config = settings(*choice, *files_of(name, files))
    found, watch, _ = decoded(config, live=live_predictor(config, spec()))
    assert_unchanged(found, watch)


@pytest.mark.parametrize("name", [*PROMOE, "learned_linear", "oracle", "next_gate"])
def test_predictors_on_recorded_gates(name, files):
    choice = (f"system={name}",) if name in PROMOE else ("system=bevy", f"prefetch={name}")
    config = settings(*choice, *files_of(name, files))
    predictor = build_predictor(config, spec())
    teach(predictor, config, spec(), recorded(), list(GIVEN))
    found, watch, foreign = decoded(config, replayed=predictor)
    assert foreign == 0
    assert_unchanged(found, watch)


@pytest.mark.parametrize("name", [*HISTORY, "moe_infinity", "finemoe"])
def test_live_predictions_are_those_from_a_trace_of_the_same_gates(name, files):
    config = settings("system=bevy", f"prefetch={name}", *files_of(name, files))
    live, other = live_predictor(config, spec()), build_predictor(config, spec())
    teach(other, config, spec(), recorded(), list(GIVEN))
    trace = recorded()
    workload = Steps(None, list(GIVEN), STEPS)
    routing = TraceRouting(trace, workload, other)
    requests = {request.request: request for request in trace.requests}
    for step in range(STEPS):
        workload._step = step
        for layer in range(spec().n_layers):
            scores = [np.exp(np.float32(requests[r].columns["scores"][step, layer])) for r in GIVEN]
            chosen = [requests[r].experts[step, layer].tolist() for r in GIVEN]
            found = live.predict(layer, list(GIVEN), chosen, scores)
            for mine, gate in zip(found, routing.gates(step, tuple(GIVEN), layer), strict=True):
                assert [e for e, _ in mine] == [e for e, _ in gate.predicted]
                assert [s for _, s in mine] == pytest.approx([s for _, s in gate.predicted], abs=1e-5)


def test_what_a_running_model_cannot_show_is_refused(files):
    for name, message in (("oracle", "the future"), ("learned_linear", "scores"), ("promoe", "hidden")):
        with pytest.raises(UserError, match=f"{message}.*mode=replay"):
            live_predictor(settings("system=bevy", f"prefetch={name}", *files_of(name, files)), spec())
    with pytest.raises(UserError, match=r"prefetch\.learn\.path=FILE"):
        live_predictor(settings("system=bevy", "prefetch=popularity"), spec())
    assert live_predictor(settings("system=bevy"), spec()) is None
    previous = live_predictor(settings("system=bevy", "prefetch=previous_token"), spec())
    assert isinstance(previous, LivePredictor)
    assert not previous.reads_scores


def test_every_system_that_prefetches_is_among_these():
    folder = Path(__file__).resolve().parents[2] / "conf" / "system"
    prefetching = [path.stem for path in folder.glob("*.yaml") if "/prefetch: none" not in path.read_text()]
    assert sorted(prefetching) == sorted((*NEXT_GATE, *LEARNT, *PROMOE))
