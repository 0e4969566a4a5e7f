from dataclasses import replace

import numpy as np
import pytest

from policies.core.types import ModelSpec, UserError
from traces.format import ABSENT, Digest, RequestTrace, Trace, TraceError

MODEL = ModelSpec("toy", 2, 4, 2)
GOOD = np.array([[[0, 1], [2, 3]], [[3, 2], [1, 0]]], np.uint16)


def with_value(token, layer, slot, value):
    ids = GOOD.copy()
    ids[token, layer, slot] = value
    return ids


def phase(*values):
    return {"phase": np.array(values, np.uint8)}


@pytest.mark.parametrize(
    ("experts", "columns", "message"),
    [
        (with_value(1, 0, 1, 4), {}, r"token 1, layer 0: expert id 4 is out of range, toy has 4 experts .*\(0 to 3\)"),
        (with_value(0, 1, 0, 3), {}, r"token 0, layer 1: one gate chose an expert twice \(\[3, 3\]\)"),
        (with_value(1, 1, slice(None), ABSENT), {}, "token 1, layer 1: a decode token lacks experts"),
        (with_value(0, 1, 0, ABSENT), phase(0, 1), "token 0, layer 1: some of the 2 experts are absent"),
        (GOOD, phase(1, 0), "a prefill token follows a decode token"),
        (GOOD, phase(0, 2), "phase 2 is neither"),
        (GOOD.astype(np.int64), {}, "experts are int64, expected uint16"),
        (GOOD[:, :1], {}, r"shape \[2, 1, 2\], expected \[tokens, 2, 2\]"),
        (GOOD[:0], {}, "has no tokens"),
        (GOOD, {"colour": GOOD}, "unknown column colour"),
        (GOOD, {"scores": np.zeros((2, 2, 3), np.float16)}, r"scores is float16 \[2, 2, 3\], expected .* \[2, 2, 4\]"),
        (GOOD, {"weights": np.zeros((2, 2, 2))}, "weights is float64"),
        (GOOD, {"hidden": np.zeros((2, 2, 5), np.float16)}, r"expected float16 \[2, 3, 5\]"),
        (GOOD, {"hidden": np.zeros((2, 3), np.float16)}, "column hidden"),
    ],
)
def test_a_bad_request_is_one_clear_line(experts, columns, message):
    with pytest.raises(TraceError, match=message) as error:
        Trace(MODEL, (RequestTrace(5, experts, columns),))
    assert "\n" not in str(error.value)
    assert "request 5" in str(error.value)


def test_bad_traces():
    good = RequestTrace(0, GOOD)
    with pytest.raises(TraceError, match="holds no requests"):
        Trace(MODEL, ())
    with pytest.raises(TraceError, match="must ascend"):
        Trace(MODEL, (good, good))
    with pytest.raises(TraceError, match="same columns"):
        Trace(MODEL, (good, RequestTrace(1, GOOD, phase(1, 1))))
    with pytest.raises(TraceError, match="layer_indices must be 2 ascending"):
        Trace(MODEL, (good,), layer_indices=(1, 1))
    with pytest.raises(TraceError, match="fewer than 65535"):
        Trace(ModelSpec("huge", 2, 70_000, 2), (good,))
    with pytest.raises(UserError, match="top_k 5 is above its 4 experts"):
        ModelSpec("toy", 2, 4, 5)


def test_prefill_may_lack_a_layer():
    ids = with_value(0, 1, slice(None), ABSENT)
    request = RequestTrace(0, ids, phase(0, 1))
    Trace(MODEL, (request,))
    assert (request.n_tokens, request.first_decode, request.n_decode) == (2, 1, 1)
    assert request.decode.tolist() == [[[3, 2], [1, 0]]]


def test_digest_depends_on_ids_lengths_and_shape_only():
    def digest(model=MODEL, cut=((0, 2),), **kwargs):
        return Trace(model, tuple(RequestTrace(i, GOOD[a:b]) for i, (a, b) in enumerate(cut)), **kwargs).digest

    assert digest() == digest(source="elsewhere", seed=3, notes={"a": 1})
    assert len({digest(), digest(cut=((0, 1), (1, 2))), digest(replace(MODEL, n_experts=5))}) == 3

    parts = Digest(MODEL)
    parts.add(RequestTrace(0, GOOD[:1]))
    parts.add(RequestTrace(0, GOOD[1:]))
    assert parts.hexdigest() == digest()
