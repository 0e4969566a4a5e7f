"""``python -m traces.train_promoe``: train ProMoE's networks on a trace with hidden states.

Owns the command: which requests are held out, when training stops, what is printed.  The network and its gradients are
``policies.prefetch.mlp``, what predicts what is ``policies.prefetch.promoe``.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from tqdm import tqdm

from policies.core.types import UserError
from policies.prefetch.learning import windows
from policies.prefetch.mlp import Mlp, Trainer
from policies.prefetch.popularity import frequency
from policies.prefetch.predictor import FloatArray
from policies.prefetch.promoe import Networks, features
from traces import command
from traces.calibration import RECORD, Lesson
from traces.trace_file import TraceFile

USAGE = """
Usage: python -m traces.train_promoe trace=FILE out=FILE [requests=N] [width=256] [epochs=500] [batch=128]
                                    [dropout=0.1] [seed=0]

Trains ProMoE's networks on the decode tokens of a trace with the column hidden, one network for each MoE layer, and
prints their recall on held-out requests beside that of the previous token and of static popularity.

  trace=FILE      a trace with hidden states
  out=FILE        where the networks go; then: python -m sim system=promoe prefetch.predictor.path=FILE
  requests=N      the last N requests of the trace only, so that the first are left to test on (default: all)
  width=256       of the two hidden layers
  epochs=500      at most; training stops when the held-out loss of 20 epochs is within 1% of the 20 before
  batch=128       tokens
  dropout=0.1     share of the hidden units that a step leaves out
  seed=0          of weights, order and dropout

ProMoE's own training has width=1024 epochs=2000 batch=8192 dropout=0.5, on far more tokens; on a few thousand that
stops at the popularity of each expert.

The products are small: numpy is several times faster with OPENBLAS_NUM_THREADS=1, all the more on a busy machine.
"""
HELD_OUT = 0.1  # of the requests, at least one
PATIENCE, WITHIN = 20, 0.01


def main(argv: Sequence[str]) -> int:
    """Run the command; returns the exit code."""
    arguments = command.parse(argv, ["trace", "out", "requests", "width", "epochs", "batch", "dropout", "seed"])
    if missing := [key for key in ("trace", "out") if key not in arguments]:
        raise UserError(f"{missing[0]}= is missing; see python -m traces.train_promoe --help")
    file = TraceFile(arguments["trace"])
    if "hidden" not in file.columns:
        raise UserError(
            f"{file.path} has no column hidden (it has {', '.join(file.columns) or 'expert ids only'}); record it with "
            f"{RECORD.format(column='hidden')}"
        )
    most = command.whole_number(arguments, "requests") or len(file.requests)
    ids = [stored.request for stored in file.requests][-most:]
    lessons = [Lesson(r) for r in file.read(columns=("hidden",), requests=ids).requests if r.n_decode > 1]
    held = max(1, round(HELD_OUT * len(lessons)))
    if len(lessons) <= held:
        raise UserError(
            f"{file.path} has {len(lessons)} requests of two decode tokens or more; training needs at least 2"
        )
    train, test = lessons[:-held], lessons[-held:]
    networks = _train(
        train,
        test,
        file.model.n_experts,
        width=command.whole_number(arguments, "width") or 256,
        epochs=command.whole_number(arguments, "epochs") or 500,
        batch=command.whole_number(arguments, "batch") or 128,
        dropout=_dropout(arguments.get("dropout", "0.1")),
        seed=command.whole_number(arguments, "seed", least=0) or 0,
    )
    learnt = np.concatenate([windows(lesson.experts) for lesson in lessons])
    Networks(tuple(networks), learnt).save(Path(arguments["out"]))
    recalls = held_out_recall(networks, train, test, file.model.n_experts, file.model.top_k)
    tokens = sum(len(lesson.experts) for lesson in test)
    print(f"recall at k on {tokens} tokens of {len(test)} held-out requests: ", end="")
    print(", ".join(f"{name} {value:.3f}" for name, value in recalls.items()))
    print(f"networks: {arguments['out']}")
    return 0


def _train(
    train: Sequence[Lesson],
    test: Sequence[Lesson],
    n_experts: int,
    *,
    width: int,
    epochs: int,
    batch: int,
    dropout: float,
    seed: int,
) -> list[Mlp]:
    """One network for each layer, each until its held-out loss stands still.

    Inputs are standardised for the training, since a few dimensions of a hidden state can be far larger than the rest;
    the network that comes out takes them as they are.
    """
    rows, unseen = [list(map(features, lessons)) for lessons in (train, test)]
    networks = []
    for layer in tqdm(range(len(rows[0])), unit="layer", disable=None):
        rng = np.random.default_rng([seed, layer])
        inputs, labels = _joined(rows, train, layer, n_experts)
        held_inputs, held_labels = _joined(unseen, test, layer, n_experts)
        mean, scale = inputs.mean(axis=0), inputs.std(axis=0) + np.float32(1e-6)
        inputs, held_inputs = (inputs - mean) / scale, (held_inputs - mean) / scale
        network = Mlp.random([inputs.shape[1], width, width, n_experts], rng)
        trainer = Trainer(network, rng, dropout=dropout)
        losses: list[float] = []
        for _ in range(epochs):
            trainer.epoch(inputs, labels, batch)
            losses.append(trainer.loss(held_inputs, held_labels))
            if len(losses) >= 2 * PATIENCE:
                recent, before = np.mean(losses[-PATIENCE:]), np.mean(losses[-2 * PATIENCE : -PATIENCE])
                if abs(recent - before) <= WITHIN * before:
                    break
        networks.append(network.taking(mean, scale))
    return networks


def _dropout(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1:
        raise UserError(f"dropout is {text}, expected a share from 0 to below 1")
    return value


def _joined(
    rows: Sequence[Sequence[FloatArray]], lessons: Sequence[Lesson], layer: int, n_experts: int
) -> tuple[FloatArray, FloatArray]:
    """Inputs and multi-hot labels of one target layer, over all requests."""
    inputs = np.concatenate([request[layer] for request in rows])
    experts = np.concatenate(
        [
            lesson.experts[len(lesson.experts) - len(request[layer]) :, layer]
            for lesson, request in zip(lessons, rows, strict=True)
        ]
    )
    labels = np.zeros((len(inputs), n_experts), np.float32)
    np.put_along_axis(labels, experts.astype(np.int64), 1, axis=1)
    return inputs, labels


def held_out_recall(
    networks: Sequence[Mlp], train: Sequence[Lesson], test: Sequence[Lesson], n_experts: int, top_k: int
) -> dict[str, float]:
    """Share of the chosen experts among the best k of each predictor, over all layers and all tokens but the first."""
    popular = np.argsort(-frequency(train, len(networks), n_experts), axis=-1, kind="stable")[:, :top_k]
    found = {"networks": 0, "previous token": 0, "popularity": 0}
    total = 0
    for lesson in test:
        for layer, rows in enumerate(features(lesson)):
            chosen = lesson.experts[1:, layer, :, None]
            scores = networks[layer](rows[len(rows) - len(chosen) :])
            top = np.argsort(-scores, axis=-1, kind="stable")[:, None, :top_k]
            total += chosen.size
            found["networks"] += int((chosen == top).sum())
            found["previous token"] += int((chosen == lesson.experts[:-1, layer, None, :]).sum())
            found["popularity"] += int((chosen == popular[layer]).sum())
    return {name: count / total for name, count in found.items()}


if __name__ == "__main__":
    sys.exit(command.run(main, USAGE))
