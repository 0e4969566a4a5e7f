"""Reader of BigMoeOnEdge's ``route_trace v1`` CSV, and of the cache residency that it records.

The preamble (``#`` lines) names the model and, for each layer, the bytes of an expert; below it is one row a chosen
expert: ``turn, phase, step, layer, slot, expert, weight, residency``, read by name.  The column ``expert_bytes`` is
what was *read* for this row (0 on a hit), not a size: sizes are in the preamble.  Each turn becomes a request.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from traces.format import Array, Trace, TraceError
from traces.readers.common import Options, RawRequest, Report, build

if TYPE_CHECKING:
    import pandas as pd

VERSION_LINE = "# route_trace v1"
NEEDED = ("phase", "step", "layer", "slot", "expert")
KNOWN = (*NEEDED, "turn", "weight", "residency", "expert_bytes", "dropped")


@dataclass(frozen=True, slots=True)
class Preamble:
    """What the ``#`` lines say."""

    model: str
    n_experts: int
    top_k: int
    expert_bytes: dict[int, int]
    dense_bytes: dict[int, int]


@dataclass(frozen=True, slots=True, eq=False)
class Residency:
    """The lookups of the recorded run's expert cache, in its order.

    A batch is what the engine looks up at once: the distinct experts of all prompt tokens at one layer, then of one
    decode token at one layer.  ``keys``: int64 [lookups], ``layer * n_experts + expert``; ``batch``: int64 [lookups];
    ``hit`` and ``decode``: bool [lookups]; ``sizes_bytes``: int64 [n_layers * n_experts].
    """

    keys: Array
    batch: Array
    hit: Array
    decode: Array
    sizes_bytes: Array


def read(path: Path, options: Options, report: Report) -> Trace:
    """Read one file."""
    preamble = read_preamble(path)
    frame = _frame(path, report)
    layers = np.unique(frame["layer"].to_numpy())
    k = max(preamble.top_k, int(frame["slot"].max()) + 1)
    raw = [_request(path, turn, rows, layers, k) for turn, rows in frame.groupby("turn", sort=True)]
    return build(
        raw,
        options,
        report,
        source=path.name,
        model=preamble.model,
        n_experts=preamble.n_experts,
        layer_indices=tuple(int(layer) for layer in layers),
        notes={
            "expert_bytes": [preamble.expert_bytes.get(int(layer)) for layer in layers],
            "dense_bytes": [preamble.dense_bytes.get(int(layer)) for layer in layers],
        },
    )


def read_preamble(path: Path) -> Preamble:
    """The ``#`` lines at the top of a file."""
    lines = []
    with path.open(encoding="utf-8-sig") as file:
        for line in file:
            if not line.startswith("#"):
                break
            lines.append(line.strip())
    if not lines or lines[0] != VERSION_LINE:
        found = lines[0] if lines else "no preamble"
        raise TraceError(
            f"{path}: expected the first line {VERSION_LINE!r}, got {found[:60]!r}; only version 1 is known"
        )
    model = re.search(r"# model=(\S+).*?\bn_expert=(\d+) n_expert_used=(\d+)", "\n".join(lines))
    if model is None:
        raise TraceError(f"{path}: the preamble lacks the line '# model=... n_expert=... n_expert_used=...'")
    sizes = re.findall(r"# layer=(\d+) expert_bytes=(\d+)(?: dense_bytes=(\d+))?", "\n".join(lines))
    return Preamble(
        model=Path(model[1]).stem,
        n_experts=int(model[2]),
        top_k=int(model[3]),
        expert_bytes={int(layer): int(size) for layer, size, _ in sizes},
        dense_bytes={int(layer): int(size or 0) for layer, _, size in sizes},
    )


def recorded_residency(path: str | Path) -> Residency:
    """The recorded run's cache lookups and which of them hit."""
    path = Path(path)
    preamble = read_preamble(path)
    frame = _frame(path, Report())
    if "residency" not in frame:
        raise TraceError(f"{path} has no column residency; this recording does not say what was cached")
    layers = np.unique(frame["layer"].to_numpy())
    if unsized := sorted(set(layers.tolist()) - set(preamble.expert_bytes)):
        raise TraceError(f"{path}: the preamble gives no expert_bytes for layer {unsized[0]}")
    layer = np.searchsorted(layers, frame["layer"].to_numpy())
    keys = layer * preamble.n_experts + frame["expert"].to_numpy()
    # All prompt tokens pass a layer together; a decode token alone.
    step = np.where(frame["phase"] == 0, -1, frame["step"])
    where = np.stack([frame["turn"].to_numpy(), step, layer])
    batch = np.concatenate([[0], np.cumsum((where[:, 1:] != where[:, :-1]).any(axis=0))])
    # Each expert once a batch, in the order of last use; whether it was there, its first row of the batch tells.
    unique = batch * (len(layers) * preamble.n_experts) + keys
    _, first, inverse = np.unique(unique, return_index=True, return_inverse=True)
    last = np.zeros(len(first), np.int64)
    np.maximum.at(last, inverse, np.arange(len(unique)))
    first = first[np.argsort(last)]
    sizes = [preamble.expert_bytes[index] for index in layers.tolist()]
    return Residency(
        keys=keys[first],
        batch=batch[first],
        hit=frame["residency"].to_numpy()[first] == 1,
        decode=frame["phase"].to_numpy()[first] == 1,
        sizes_bytes=np.repeat(np.array(sizes, np.int64), preamble.n_experts),
    )


def _frame(path: Path, report: Report) -> pd.DataFrame:
    import pandas as pd  # noqa: PLC0415

    try:
        frame = pd.read_csv(path, comment="#")
    except (ValueError, pd.errors.ParserError) as error:
        raise TraceError(f"{path} is no readable CSV: {' '.join(str(error).split())[:120]}") from None
    if missing := [name for name in NEEDED if name not in frame]:
        raise TraceError(f"{path} lacks the column {missing[0]}; it has {', '.join(map(str, frame.columns))}")
    for name in frame.columns:
        if name not in KNOWN:
            report.note(f"column {name} ignored: unknown")
    if "turn" not in frame:
        frame = frame.assign(turn=0)
    whole = frame[[*NEEDED, "turn"]].apply(pd.to_numeric, errors="coerce").to_numpy(np.float64)
    wrong = ~((whole >= 0) & (whole % 1 == 0)).all(axis=1)
    if len(frame) and wrong[-1]:  # the recorder was stopped while it wrote
        report.drop("rows cut off at the end", 1)
        frame, wrong = frame.iloc[:-1], wrong[:-1]
    if wrong.any():
        raise TraceError(
            f"{path}, row {int(wrong.argmax())}: {', '.join((*NEEDED, 'turn'))} must be whole numbers from 0"
        )
    if not len(frame):
        raise TraceError(f"{path} holds no requests: it has no rows")
    frame = frame.astype(dict.fromkeys((*NEEDED, "turn"), "int64"))
    if "dropped" in frame:
        lost = int((frame["dropped"] == 1).sum())
        report.change("selections that the recording engine left out kept, as the router chose them", lost)
    return frame


def _request(path: Path, turn: object, rows: pd.DataFrame, layers: Array, k: int) -> RawRequest:
    token, steps = rows["step"].to_numpy(), np.unique(rows["step"].to_numpy())
    at = (
        np.searchsorted(steps, token),
        np.searchsorted(layers, rows["layer"].to_numpy()),
        rows["slot"].to_numpy(),
    )
    ids = np.full((len(steps), len(layers), k), -1, np.int64)
    flat = np.ravel_multi_index(at, ids.shape)
    if len(np.unique(flat)) != len(flat):
        raise TraceError(f"{path}, turn {turn}: a (step, layer, slot) is there twice")
    ids[at] = rows["expert"].to_numpy()
    weights = None
    if "weight" in rows:
        weights = np.full(ids.shape, np.nan)
        weights[at] = rows["weight"].to_numpy()
    phase = np.zeros(len(steps), np.uint8)
    phase[at[0]] = rows["phase"].to_numpy()
    return RawRequest(ids, phase, weights, label=f"turn {turn}")
