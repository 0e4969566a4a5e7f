"""The trace in memory: which experts each token of each request chose at each MoE layer.

Owns the value types, the checks that every trace must pass and the digest that names a trace.
Does not know files (``traces.storage``) or how a trace is used (``traces.workload``, ``traces.routing``).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from policies.core.types import ModelSpec, RequestId, UserError

Array = NDArray[Any]

ABSENT = 65535
"""Expert id in every place of a (token, layer) that the recorder did not see.  Prefill tokens only: engines skip
the last layer for prompt tokens whose output nobody needs.  A decode token is complete or it is not in a trace."""

PREFILL, DECODE = 0, 1

NEXT_SCORES = ("next_scores_1", "next_scores_2", "next_scores_3")
NEXT_NORM_SCORES = ("next_norm_scores_1", "next_norm_scores_2", "next_norm_scores_3")

COLUMN_DTYPES: dict[str, str] = {
    "phase": "uint8",  # [tokens] PREFILL or DECODE; a trace without it holds decode tokens only
    "token_id": "int32",  # [tokens]
    "weights": "float16",  # [tokens, layers, k] mixing weights of the chosen experts
    "scores": "float16",  # [tokens, layers, E] all scores of the layer's gate
    "next_scores_1": "float16",  # [tokens, layers, E] gate l + 1 applied to the gate input of layer l
    "next_scores_2": "float16",
    "next_scores_3": "float16",
    "next_norm_scores_1": "float16",  # [tokens, layers, E] gate l + 1 applied to the residual behind that input, in
    "next_norm_scores_2": "float16",  # the norm of layer l + 1; left out where routers have a norm of their own, since
    "next_norm_scores_3": "float16",  # those read the residual itself and the two are one
    "hidden": "float16",  # [tokens, layers + 1, H] hidden states at the layer boundaries
}
"""Optional columns, in the order in which a file stores them."""


class TraceError(UserError):
    """A trace, or a file that should hold one, is not what it must be."""


@dataclass(frozen=True, slots=True, eq=False)
class RequestTrace:
    """One request's tokens in order, prompt tokens first.

    ``experts``: uint16 [tokens, layers, k], expert indices of each layer in router rank order (``ABSENT``: not seen).
    ``columns``: optional arrays by the names of ``COLUMN_DTYPES``, first axis tokens.
    ``prompt_tokens``: length of the prompt, recorded or not; ``arrival_s``: when the request came.
    ``label``: what the source called it.
    """

    request: RequestId
    experts: Array
    columns: Mapping[str, Array] = field(default_factory=dict)
    prompt_tokens: int | None = None
    arrival_s: float | None = None
    label: str = ""

    @property
    def n_tokens(self) -> int:
        """Rows of the trace, recorded prompt tokens included."""
        return len(self.experts)

    @property
    def first_decode(self) -> int:
        """Row of the first decode token: the number of recorded prompt tokens."""
        phase = self.columns.get("phase")
        return 0 if phase is None else int(np.count_nonzero(phase == PREFILL))

    @property
    def n_decode(self) -> int:
        """Decode tokens: the steps that this request can run."""
        return self.n_tokens - self.first_decode

    @property
    def decode(self) -> Array:
        """Experts of the decode tokens, uint16 [decode tokens, layers, k]."""
        return self.experts[self.first_decode :]


@dataclass(frozen=True, slots=True, eq=False)
class Trace:
    """Requests of one model, ragged by request, with ascending request ids.

    ``layer_indices``: layer of the original model behind each MoE layer (they differ where a model has dense layers).
    ``source``: where the routes come from; ``seed``: of the generator; ``notes``: further facts, JSON values only.
    """

    model: ModelSpec
    requests: tuple[RequestTrace, ...]
    source: str = ""
    seed: int | None = None
    layer_indices: tuple[int, ...] = ()
    notes: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_model(self.model)
        if not self.layer_indices:
            object.__setattr__(self, "layer_indices", tuple(range(self.model.n_layers)))
        check_layer_indices(self.model, self.layer_indices)
        if not self.requests:
            raise TraceError(f"trace of {self.model.name} holds no requests; give at least one request with tokens")
        ids = [request.request for request in self.requests]
        if any(b <= a for a, b in pairwise(ids)):
            raise TraceError(
                f"request ids of a trace must ascend without repeats, got {_short(ids)}; sort the requests"
            )
        for request in self.requests:
            check_request(self.model, request)
            if set(request.columns) != set(self.requests[0].columns):
                raise TraceError(
                    f"request {request.request} has columns {sorted(request.columns)} but request {ids[0]} has "
                    f"{sorted(self.requests[0].columns)}; all requests of a trace need the same columns"
                )

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the optional columns, in file order."""
        return tuple(name for name in COLUMN_DTYPES if name in self.requests[0].columns)

    @property
    def n_tokens(self) -> int:
        """Tokens of all requests."""
        return sum(request.n_tokens for request in self.requests)

    @property
    def digest(self) -> str:
        """Content digest: see ``Digest``."""
        digest = Digest(self.model)
        for request in self.requests:
            digest.add(request)
        return digest.hexdigest()


class Digest:
    """SHA-256 over shape, request ids, lengths and expert ids, fed request by request or in parts of a request.

    Columns and descriptive fields do not enter: two traces with one digest lead to the same decisions of any
    policy that asks for no column.
    """

    def __init__(self, model: ModelSpec) -> None:
        self._hash = hashlib.sha256(json.dumps([model.n_layers, model.n_experts, model.top_k]).encode())
        self._lengths: list[list[int]] = []

    def add(self, part: RequestTrace) -> None:
        """Take in the next tokens, of a new request or of the last one."""
        if not self._lengths or self._lengths[-1][0] != part.request:
            self._lengths.append([part.request, 0])
        self._lengths[-1][1] += part.n_tokens
        self._hash.update(np.ascontiguousarray(part.experts, "<u2").tobytes())

    def hexdigest(self) -> str:
        """The digest of all that was added."""
        whole = self._hash.copy()
        whole.update(json.dumps(self._lengths).encode())
        return whole.hexdigest()


# ---------------------------------------------------------------------------- checks


def check_model(model: ModelSpec) -> None:
    """Raise TraceError if a trace cannot hold this model."""
    if model.n_experts >= ABSENT:
        raise TraceError(f"{model.name} has {model.n_experts} experts a layer; a trace holds fewer than {ABSENT}")


def check_layer_indices(model: ModelSpec, indices: tuple[int, ...]) -> None:
    """Raise TraceError unless there is one original layer for each MoE layer, ascending."""
    if len(indices) != model.n_layers or any(b <= a for a, b in pairwise(indices)):
        raise TraceError(
            f"layer_indices must be {model.n_layers} ascending layer numbers of {model.name}, got {_short(indices)}"
        )


def check_request(model: ModelSpec, request: RequestTrace) -> None:
    """Raise TraceError at the first thing that is wrong with one request (or a part of one)."""
    _check_shapes(model, request)
    _check_phase(request)
    _check_experts(model, request)


def _check_shapes(model: ModelSpec, request: RequestTrace) -> None:
    name, experts = f"request {request.request}", request.experts
    if not 0 <= request.request < 1 << 31:
        raise TraceError(f"{name}: a request id must be from 0 to 2147483647; number the requests from 0")
    if experts.dtype != np.uint16:
        raise TraceError(f"{name}: experts are {experts.dtype}, expected uint16; convert them")
    if experts.ndim != 3 or experts.shape[1:] != (model.n_layers, model.top_k):
        raise TraceError(
            f"{name}: experts have shape {list(experts.shape)}, expected [tokens, {model.n_layers}, {model.top_k}] "
            f"for {model.name}"
        )
    if not len(experts):
        raise TraceError(f"{name} has no tokens; leave it out")
    for column, array in request.columns.items():
        if column not in COLUMN_DTYPES:
            raise TraceError(f"{name}: unknown column {column}; a trace may have {', '.join(COLUMN_DTYPES)}")
        tail: tuple[int, ...] = array.shape[1:]
        expected = {
            "phase": (),
            "token_id": (),
            "weights": (model.n_layers, model.top_k),
            "hidden": (model.n_layers + 1, tail[-1] if len(tail) == 2 else 0),
        }.get(column, (model.n_layers, model.n_experts))
        if array.dtype != COLUMN_DTYPES[column] or len(array) != len(experts) or tail != expected:
            raise TraceError(
                f"{name}: column {column} is {array.dtype} {list(array.shape)}, expected {COLUMN_DTYPES[column]} "
                f"{[len(experts), *expected]}"
            )


def _check_phase(request: RequestTrace) -> None:
    phase = request.columns.get("phase")
    if phase is None:
        return
    if phase.max() > DECODE:
        raise TraceError(f"request {request.request}: phase {phase.max()} is neither 0 (prefill) nor 1 (decode)")
    if (phase[1:] < phase[:-1]).any():
        raise TraceError(f"request {request.request}: a prefill token follows a decode token; put prompt tokens first")


def _check_experts(model: ModelSpec, request: RequestTrace) -> None:
    experts = request.experts
    absent = experts == ABSENT
    if bad := first_true((experts >= model.n_experts) & ~absent):
        raise TraceError(
            f"request {request.request}, token {bad[0]}, layer {bad[1]}: expert id {experts[bad]} is out of range, "
            f"{model.name} has {model.n_experts} experts a layer (0 to {model.n_experts - 1})"
        )
    missing = absent.any(-1)
    decode = missing[request.first_decode :]
    if hole := first_true(decode):
        raise TraceError(
            f"request {request.request}, token {hole[0] + request.first_decode}, layer {hole[1]}: a decode token lacks "
            f"experts; only prefill tokens may be incomplete"
        )
    if half := first_true(missing & ~absent.all(-1)):
        raise TraceError(
            f"request {request.request}, token {half[0]}, layer {half[1]}: some of the {model.top_k} experts are "
            f"absent; a gate is recorded whole or not at all"
        )
    ordered = np.sort(experts, axis=-1)
    if twice := first_true(((ordered[..., 1:] == ordered[..., :-1]) & ~missing[..., None]).any(-1)):
        raise TraceError(
            f"request {request.request}, token {twice[0]}, layer {twice[1]}: one gate chose an expert twice "
            f"({experts[twice].tolist()}); the {model.top_k} experts of a gate must differ"
        )


def first_true(mask: Array) -> tuple[int, ...] | None:
    """Index of the first true element in C order, or None."""
    if not mask.any():
        return None
    return tuple(int(i) for i in np.unravel_index(int(mask.argmax()), mask.shape))


def _short(values: object) -> str:
    text = str(list(values))  # type: ignore[call-overload]
    return text if len(text) <= 60 else f"{text[:57]}..."
