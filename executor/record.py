"""The routing of a live run as a trace, in the form that ``traces.capture`` writes.

Owns the rows between a gate and the trace's file.  Hears the gates of prompts and of decode tokens on the compute
thread; knows neither the schedule nor where experts lie.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType

import numpy as np
from torch import Tensor

from executor.model import Decoder, GateRows
from executor.store import Manifest
from policies.core.types import RequestId, UserError
from traces.format import COLUMN_DTYPES, DECODE, NEXT_SCORES, PREFILL, Array
from traces.spool import Spool
from traces.storage import VERSION

DEFAULT_COLUMNS = ("token_id", "weights", "next_scores_1")
FLUSH_TOKENS = 16
"""Tokens of a request that wait in memory before they go to its files together."""
SMALLEST = 1e-30  # a probability that was rounded to zero still has a logarithm

Rows = Mapping[str, Array]


class TraceRecorder:
    """Listens to a decoder while its context is open; ``write`` makes the trace of what was heard.

    ``prompts``: token ids of every request that the run decodes.  A request's rows are its prompt and the tokens that
    it was fed afterwards; the last token that it answered with is fed to nobody and has no row.  ``columns``: of
    ``settings.RECORDABLE``; ``phase`` is always there.  Scores are log-probabilities: logits less a constant of the
    token and layer.
    """

    def __init__(
        self, out: Path, decoder: Decoder, pack: Manifest, prompts: Sequence[Sequence[int]], columns: Sequence[str]
    ) -> None:
        """Raises UserError if ``out`` is there already or cannot be written."""
        if out.exists():
            raise UserError(f"record_trace={out} is there already; remove it or give another file")
        self._out, self._decoder, self._pack = out, decoder, pack
        self._prompts, self._columns = prompts, columns
        self._layers: dict[RequestId, list[Rows]] = {}
        self._waiting: dict[RequestId, list[Rows]] = {}
        self._heard = [0] * len(prompts)
        self._shapes: dict[str, list[int]] = {}
        plan = {"version": VERSION, "model": pack.name, "columns": list(columns), "prompts": [list(p) for p in prompts]}
        self._spool = Spool(out.with_name(f"{out.name}.parts"), plan)

    def __enter__(self) -> TraceRecorder:
        for request in range(len(self._prompts)):
            self._spool.begin(request)
        self._decoder.listener = self.hear
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        """A run that broke leaves nothing."""
        self._decoder.listener = None
        if kind is not None:
            self._spool.remove()

    def hear(self, layer: int, slots: Sequence[int], rows: GateRows) -> None:
        """What the gate of ``layer`` said: of the tokens of one prompt, or of one token of each of several requests."""
        found = {name: _numpy(values[: len(slots)], name) for name, values in self._values(layer, rows).items()}
        request_of = {state.slot: request for request, state in self._decoder.requests.items()}
        places: dict[RequestId, list[int]] = {}
        for at, slot in enumerate(slots):
            places.setdefault(request_of[slot], []).append(at)
        for request, mine in places.items():
            layers = self._layers.setdefault(request, [])
            layers.append({name: values[mine] for name, values in found.items()})
            if len(layers) == len(self._decoder.layers):
                self._add(request, self._layers.pop(request))

    def write(self) -> int:
        """Make the trace of all requests; returns its number of tokens."""
        for request, prompt in enumerate(self._prompts):
            self._flush(request)
            facts = {"tokens": self._heard[request], "prompt_tokens": len(prompt), "shapes": self._shapes}
            self._spool.finish(request, {**facts, "arrival_s": None, "label": f"#{request}"})
        try:
            return self._spool.write(
                self._out,
                replace(self._decoder.spec, name=self._pack.name),
                len(self._prompts),
                source=f"{self._pack.name}, decoded live",
                layer_indices=self._pack.layers,
                notes={"dtype": self._pack.dtype, "scores": "log-probabilities"},
            )
        finally:
            self._spool.remove()

    def _values(self, layer: int, rows: GateRows) -> dict[str, Tensor]:
        """The columns of one call, on the device and with its padding."""
        values = {"experts": rows.chosen, "weights": rows.weights, "scores": rows.scores.clamp(min=SMALLEST).log()}
        later = self._decoder.layers[layer + 1 :]
        for at, name in enumerate(NEXT_SCORES):
            if name not in self._columns:
                continue
            if at < len(later):
                values[name] = later[at].scores(rows.residual, rows.expert_input).clamp(min=SMALLEST).log()
            else:
                values[name] = rows.scores.new_zeros(rows.scores.shape)  # there is no such layer
        return {name: values[name] for name in ("experts", *self._columns) if name in values}

    def _add(self, request: RequestId, layers: Sequence[Rows]) -> None:
        """Tokens that have passed every gate."""
        rows = {name: np.stack([layer[name] for layer in layers], axis=1) for name in layers[0]}
        first, count = self._heard[request], len(rows["experts"])
        prompt = self._prompts[request][first : first + count]
        rows["phase"] = np.full(count, PREFILL if prompt else DECODE, COLUMN_DTYPES["phase"])
        if "token_id" in self._columns:
            fed = prompt or [self._decoder.requests[request].token]
            rows["token_id"] = np.array(fed, COLUMN_DTYPES["token_id"])
        self._shapes = self._shapes or {name: list(values.shape[1:]) for name, values in rows.items()}
        self._heard[request] += count
        waiting = self._waiting.setdefault(request, [])
        waiting.append(rows)
        if sum(len(part["experts"]) for part in waiting) >= FLUSH_TOKENS:
            self._flush(request)

    def _flush(self, request: RequestId) -> None:
        if waiting := self._waiting.pop(request, None):
            self._spool.append(request, {name: np.concatenate([part[name] for part in waiting]) for name in waiting[0]})


def _numpy(values: Tensor, name: str) -> Array:
    whole: Array = values.cpu().numpy().astype(np.uint16 if name == "experts" else COLUMN_DTYPES[name])
    return whole
