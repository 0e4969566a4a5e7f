"""ProMoE's networks: gradients by finite differences, training that finds what there is to find, the file."""

import numpy as np
import pytest
from prefetch_world import Request, choose, recall

from policies.core.types import ModelSpec, UserError
from policies.prefetch import ProMoE
from policies.prefetch.learning import windows
from policies.prefetch.mlp import Mlp, Trainer
from policies.prefetch.promoe import Networks, features
from traces import train_promoe
from traces.format import RequestTrace, Trace
from traces.storage import write_trace

LAYERS, EXPERTS, K, HIDDEN = 5, 12, 2, 6
SHAPE = (LAYERS, EXPERTS, K)


@pytest.mark.parametrize("loss", ["smooth_l1", "l1"])
def test_a_step_goes_down_the_slope_of_the_loss(loss):
    """Adam's first step is the sign of the gradient, which finite differences give."""
    rng = np.random.default_rng(0)
    rows, labels = rng.standard_normal((7, 4), dtype=np.float32), rng.standard_normal((7, 3), dtype=np.float32)
    network = Mlp.random([4, 5, 5, 3], rng)
    before = [p.copy() for p in (*network.weights, *network.biases)]
    trainer = Trainer(network, rng, dropout=0.0, rate=1e-3, loss=loss)
    slopes = []
    for parameter in (*network.weights, *network.biases):
        slope = np.zeros(parameter.shape)
        for index in np.ndindex(parameter.shape):
            kept = parameter[index]
            values = []
            for shift in (1e-2, -1e-2):
                parameter[index] = kept + np.float32(shift)
                values.append(trainer.loss(rows, labels))
            parameter[index] = kept
            slope[index] = values[0] - values[1]
        slopes.append(slope)
    trainer.epoch(rows, labels, batch=7)
    for parameter, old, slope in zip((*network.weights, *network.biases), before, slopes, strict=True):
        clear = np.abs(slope) > 2e-4
        assert clear.any()
        assert np.array_equal(np.sign(parameter - old)[clear], -np.sign(slope)[clear])


def test_standardised_inputs_can_be_folded_into_the_weights():
    rng = np.random.default_rng(2)
    network, rows = Mlp.random([4, 5, 3], rng), rng.standard_normal((7, 4), dtype=np.float32)
    network.biases[0][:] = 0.3
    mean, scale = rng.random((2, 4), dtype=np.float32) + np.float32(0.5)
    assert network.taking(mean, scale)(rows) == pytest.approx(network((rows - mean) / scale), abs=1e-5)


def captured(rng, tokens, number=0):
    """Hidden states that drift from token to token and from layer to layer, and the gates that read them."""
    maps = np.random.default_rng(5).standard_normal((LAYERS, HIDDEN, EXPERTS))
    state = np.cumsum(rng.standard_normal((tokens, LAYERS + 1, HIDDEN)) * 0.1, axis=1)
    state[0] += rng.standard_normal(HIDDEN)
    for token in range(1, tokens):
        state[token] += 0.3 * state[token - 1, -1] + rng.standard_normal(HIDDEN)
    scores = np.einsum("tlh,lhe->tle", state[:, :-1], maps)
    return Request(choose(scores, K), {"hidden": state.astype(np.float16)}, number)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A trace on disk and the networks that the command makes of it."""
    folder = tmp_path_factory.mktemp("promoe")
    rng = np.random.default_rng(1)
    requests = [captured(rng, 120, number) for number in range(10)]
    stored = [RequestTrace(r.request, r.experts, r.columns) for r in requests]
    write_trace(folder / "trace", Trace(ModelSpec("toy", *SHAPE), tuple(stored), source="toy"))
    arguments = [f"trace={folder / 'trace'}", f"out={folder / 'networks'}", "width=32", "batch=32", "epochs=60"]
    assert train_promoe.main(arguments) == 0
    return folder, requests


def test_training_beats_previous_token_and_popularity(trained):
    folder, requests = trained
    predictor = ProMoE(*SHAPE, path=str(folder / "networks"))
    tested = [captured(np.random.default_rng(9), 120)]
    own = recall(predictor, tested, K)
    chosen = np.concatenate([r.experts for r in requests])
    popular = [np.bincount(chosen[:, layer].ravel(), minlength=EXPERTS).argsort()[-K:] for layer in range(LAYERS)]
    truth = tested[0].experts
    by_popularity = np.mean([np.isin(truth[:, layer], popular[layer]).mean() for layer in range(2, LAYERS)])
    repeated = np.mean([np.isin(b, a).mean() for t in range(119) for a, b in zip(truth[t], truth[t + 1], strict=True)])
    assert own > max(by_popularity, repeated) + 0.1


def test_what_predicts_what(trained):
    folder, _ = trained
    predictor = ProMoE(*SHAPE, path=str(folder / "networks"))
    request = captured(np.random.default_rng(9), 6)
    hidden, networks = request.columns["hidden"].astype(np.float32), Networks.load(folder / "networks").networks
    whole = predictor.all_scores(request)
    for token in request.tokens():
        predicted = predictor.predict(token)
        layers = sorted({expert // EXPERTS for expert, _ in predicted})
        expected = [1, 2] if token.layer == 0 else [token.layer + 2]
        assert layers == [layer for layer in expected if layer < LAYERS]
        for layer in layers:
            if layer < 3:
                before = hidden[token.position - 1, LAYERS] if token.position else None
                scores = np.zeros(EXPERTS) if before is None else networks[layer](before)
            else:
                scores = networks[layer](hidden[token.position, layer - 2])
            assert predictor.scores(token, layer) == pytest.approx(scores, rel=1e-4, abs=1e-5)
            assert whole[token.position, layer] == pytest.approx(scores, rel=1e-4, abs=1e-5)
    assert [len(rows) for rows in features(request)] == [5, 5, 5, 6, 6]


def test_the_file_remembers_the_requests(trained):
    folder, requests = trained
    predictor = ProMoE(*SHAPE, path=str(folder / "networks"))
    assert all(np.isin(windows(r.experts), predictor.learnt).all() for r in requests)


def test_the_same_command_gives_the_same_bytes(trained):
    folder, _ = trained
    arguments = [f"trace={folder / 'trace'}", "width=4", "epochs=2"]
    for name in ("a", "b"):
        assert train_promoe.main([*arguments, f"out={folder / name}"]) == 0
    one, two = (Networks.load(folder / name) for name in ("a", "b"))
    for a, b in zip(one.networks, two.networks, strict=True):
        assert all(np.array_equal(x, y) for x, y in zip(a.weights, b.weights, strict=True))


@pytest.mark.parametrize(
    ("path", "shape", "says"),
    [
        (None, SHAPE, "python -m traces.train_promoe"),
        ("absent", SHAPE, "no such file"),
        ("trace", SHAPE, "holds no networks"),
        ("networks", (LAYERS, EXPERTS + 1, K), "trained for 5 layers x 12 experts, the model has 5 x 13"),
    ],
)
def test_wrong_files_are_refused(trained, path, shape, says):
    with pytest.raises(UserError, match=says):
        ProMoE(*shape, path=None if path is None else str(trained[0] / path))


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["out=x"], "trace= is missing"),
        (["trace={trace}"], "out= is missing"),
        (["trace={trace}", "out=x", "requests=1"], "training needs at least 2"),
        (["trace={trace}", "out=x", "epochs=0"], "epochs is 0"),
        (["trace={trace}", "out=x", "dropout=1"], "dropout is 1"),
        (["trace={plain}", "out=x"], "no column hidden .*python -m traces.capture .*columns=hidden"),
    ],
)
def test_wrong_arguments_are_refused(trained, arguments, says, tmp_path):
    plain = RequestTrace(0, trained[1][0].experts)
    write_trace(tmp_path / "plain", Trace(ModelSpec("toy", *SHAPE), (plain,)))
    filled = [a.format(trace=trained[0] / "trace", plain=tmp_path / "plain") for a in arguments]
    with pytest.raises(UserError, match=says):
        train_promoe.main(filled)
