import hashlib
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from policies.core.types import ModelSpec
from traces import storage
from traces.format import RequestTrace, Trace, TraceError
from traces.storage import TraceWriter, write_trace
from traces.trace_file import TraceFile, read_trace

ROOT = Path(__file__).resolve().parents[2]


def same(a: Trace, b: Trace) -> bool:
    facts = ("model", "source", "seed", "layer_indices", "notes", "columns", "digest")
    if any(getattr(a, f) != getattr(b, f) for f in facts) or len(a.requests) != len(b.requests):
        return False
    for x, y in zip(a.requests, b.requests, strict=True):
        if (x.request, x.prompt_tokens, x.arrival_s, x.label) != (y.request, y.prompt_tokens, y.arrival_s, y.label):
            return False
        if not np.array_equal(x.experts, y.experts) or x.experts.dtype != y.experts.dtype:
            return False
        for name, values in x.columns.items():
            other = y.columns[name]
            if values.dtype != other.dtype or not np.array_equal(values, other, equal_nan=values.dtype.kind == "f"):
                return False
    return True


@pytest.fixture(params=[1, 500, 4 << 20])
def row_group_bytes(request, monkeypatch):
    """From one token a row group to one row group a file."""
    monkeypatch.setattr(storage, "ROW_GROUP_BYTES", request.param)


@pytest.mark.usefixtures("row_group_bytes")
def test_write_read_write_gives_the_same_bytes(tmp_path, rich_trace):
    write_trace(tmp_path / "a.parquet", rich_trace)
    read = read_trace(tmp_path / "a.parquet")
    assert same(read, rich_trace)
    write_trace(tmp_path / "b.parquet", read)
    assert (tmp_path / "a.parquet").read_bytes() == (tmp_path / "b.parquet").read_bytes()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.parquet", "b.parquet"]


@pytest.mark.usefixtures("row_group_bytes")
def test_columns_and_requests_on_demand(tmp_path, rich_trace):
    write_trace(tmp_path / "t.parquet", rich_trace)
    file = TraceFile(tmp_path / "t.parquet")
    assert [(r.request, r.tokens) for r in file.requests] == [(0, 7), (10, 2), (20, 9)]
    some = file.read(columns=["scores"], requests=[20, 0])
    assert some.columns == ("phase", "scores")  # phase always comes along: it says which tokens are decode steps
    assert [r.request for r in some.requests] == [0, 20]
    for got, want in zip(some.requests, (rich_trace.requests[0], rich_trace.requests[2]), strict=True):
        assert np.array_equal(got.experts, want.experts)
        assert np.array_equal(got.columns["scores"], want.columns["scores"])
    with pytest.raises(TraceError, match="no request 11; it has 3 requests"):
        file.read(requests=[11])


def test_a_request_in_parts_gives_the_same_bytes(tmp_path, rich_trace, monkeypatch):
    monkeypatch.setattr(storage, "ROW_GROUP_BYTES", 1000)
    write_trace(tmp_path / "whole.parquet", rich_trace)
    writer = TraceWriter(
        tmp_path / "parts.parquet",
        rich_trace.model,
        columns=rich_trace.columns,
        source=rich_trace.source,
        seed=rich_trace.seed,
        layer_indices=rich_trace.layer_indices,
        notes=rich_trace.notes,
        hidden_size=6,
    )
    with writer:
        for request in rich_trace.requests:
            for token in range(request.n_tokens):
                columns = {name: values[token : token + 1] for name, values in request.columns.items()}
                part = RequestTrace(
                    request.request,
                    request.experts[token : token + 1],
                    columns,
                    request.prompt_tokens,
                    request.arrival_s,
                    request.label,
                )
                writer.write(part)
        assert not (tmp_path / "parts.parquet").exists()
    assert (tmp_path / "parts.parquet").read_bytes() == (tmp_path / "whole.parquet").read_bytes()


def write_requests(path, model, requests, columns=()):
    with TraceWriter(path, model, columns=columns) as writer:
        for request in requests:
            writer.write(request)


def test_a_failed_write_leaves_nothing(tmp_path, make_trace):
    trace = make_trace((2, 2))
    first, second = trace.requests
    path = tmp_path / "t.parquet"
    with pytest.raises(TraceError, match="write requests in order"):
        write_requests(path, trace.model, [second, first])
    with pytest.raises(TraceError, match="no requests"):
        write_requests(path, trace.model, [])
    with pytest.raises(TraceError, match="opened for"):
        write_requests(path, trace.model, [first], ["scores"])
    with pytest.raises(TraceError, match="unknown column colour"):
        TraceWriter(path, trace.model, columns=["colour"])
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(TraceError, match="cannot write"):
        TraceWriter(tmp_path / "nowhere" / "t.parquet", trace.model)


def test_prefill_after_decode_across_parts(tmp_path, make_trace):
    trace = make_trace((2,))
    ids = trace.requests[0].experts
    parts = [RequestTrace(0, ids[i : i + 1], {"phase": np.array([1 - i], np.uint8)}) for i in (0, 1)]
    with pytest.raises(TraceError, match="prefill token follows"):
        write_requests(tmp_path / "t", trace.model, parts, ["phase"])


def test_pandas_reads_it_as_it_is(tmp_path, rich_trace):
    write_trace(tmp_path / "t.parquet", rich_trace)
    frame = pd.read_parquet(tmp_path / "t.parquet")
    assert len(frame) == 18 * 3
    assert frame[["request", "token", "layer"]].apply(tuple, axis=1).is_monotonic_increasing
    row = frame[(frame.request == 20) & (frame.token == 4) & (frame.layer == 1)].iloc[0]
    assert row.experts.tolist() == rich_trace.requests[2].experts[4, 1].tolist()
    assert row.scores.tolist() == rich_trace.requests[2].columns["scores"][4, 1].tolist()
    encodings = {
        encoding
        for column in range(pq.ParquetFile(tmp_path / "t.parquet").metadata.num_columns)
        for encoding in pq.ParquetFile(tmp_path / "t.parquet").metadata.row_group(0).column(column).encodings
    }
    assert "BYTE_STREAM_SPLIT" not in encodings  # duckdb refuses it for half floats


def test_bytes_depend_on_no_hash_seed_and_no_clock(tmp_path):
    program = (
        "import numpy as np, sys; from policies.core.types import ModelSpec; from traces.format import *;"
        "from traces.storage import write_trace; m = ModelSpec('m', 2, 4, 2);"
        "ids = np.array([[[0, 1], [2, 3]]], np.uint16); c = {n: np.zeros((1, 2, 4), np.float16) for n in "
        "set(NEXT_SCORES)}; write_trace(sys.argv[1], Trace(m, (RequestTrace(0, ids, c),), notes={'b': 1, 'a': 2}))"
    )
    digests = set()
    for seed in ("0", "1"):
        path = tmp_path / seed
        subprocess.run(
            [sys.executable, "-c", program, path], cwd=ROOT, env={"PYTHONHASHSEED": seed, "PATH": ""}, check=True
        )
        digests.add(hashlib.sha256(path.read_bytes()).hexdigest())
    assert len(digests) == 1


# ---------------------------------------------------------------------------- damaged files


@pytest.fixture
def stored(tmp_path, rich_trace):
    path = tmp_path / "t.parquet"
    write_trace(path, rich_trace)
    return path


def rewrite(path: Path, table=None, change=lambda header: header) -> None:
    """Store a trace file again with another table or header, as some other program might."""
    file = pq.ParquetFile(path)
    header = json.loads(file.metadata.metadata[b"trace"])
    table = file.read() if table is None else table
    change(header)
    with pq.ParquetWriter(path, table.schema.remove_metadata()) as writer:
        writer.write_table(table)
        writer.add_key_value_metadata({"trace": json.dumps(header)})


def test_truncated_at_any_byte(tmp_path, make_trace):
    write_trace(tmp_path / "t.parquet", make_trace((4, 3)))
    whole = (tmp_path / "t.parquet").read_bytes()
    cut = tmp_path / "cut.parquet"
    for size in [*range(0, len(whole), 37), len(whole) - 1]:
        cut.write_bytes(whole[:size])
        with pytest.raises(TraceError) as error:
            read_trace(cut)
        assert "\n" not in str(error.value)


def test_changed_bytes_never_go_unnoticed(tmp_path, make_trace):
    """Every flipped byte is refused or was none of the trace's content."""
    trace = make_trace((4, 3))
    write_trace(tmp_path / "t.parquet", trace)
    whole = (tmp_path / "t.parquet").read_bytes()
    footer = len(whole) - 8 - int.from_bytes(whole[-8:-4], "little")
    rng = np.random.default_rng(0)
    bad = tmp_path / "bad.parquet"
    for at in rng.choice(footer, 60, replace=False):
        flipped = bytearray(whole)
        flipped[at] ^= 1 << int(rng.integers(8))
        bad.write_bytes(flipped)
        try:
            read = read_trace(bad)
        except TraceError:
            continue
        assert read.digest == trace.digest


def test_no_trace_at_all(tmp_path):
    with pytest.raises(TraceError, match="no such file"):
        read_trace(tmp_path / "none.parquet")
    (tmp_path / "text").write_text("hello")
    with pytest.raises(TraceError, match="no readable trace"):
        read_trace(tmp_path / "text")
    with pytest.raises(TraceError, match="no readable trace"):
        read_trace(tmp_path)
    pq.write_table(pa.table({"a": [1]}), tmp_path / "other.parquet")
    with pytest.raises(TraceError, match="is a Parquet file but no trace"):
        read_trace(tmp_path / "other.parquet")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda h: h.update(version=2), "trace version 2, this program reads 1"),
        (lambda h: h.update(digest="0" * 64), "digest of the expert ids is .*, the header says 000000000000"),
        (lambda h: h["requests"].clear(), "holds no requests"),
        (lambda h: h["requests"].pop(), "54 rows, its header promises 27"),
        (lambda h: h["model"].update(n_experts=5), "column scores has type|out of range"),
        (lambda h: h["model"].update(top_k=9), "top_k 9 is above its 8 experts"),
        (lambda h: h["model"].update(n_layers=4), "rows, its header promises"),
        (lambda h: h["model"].pop("top_k"), "no readable trace"),
        (lambda h: h.pop("columns"), "no readable trace"),
        (lambda h: h.update(requests=3), "no readable trace"),
        (lambda h: h.update(layer_indices=[3, 2, 1]), "layer_indices"),
    ],
)
def test_bad_headers(stored, change, message):
    rewrite(stored, change=change)
    with pytest.raises(TraceError, match=message) as error:
        read_trace(stored)
    assert "\n" not in str(error.value)
    assert str(stored) in str(error.value)


def test_missing_and_mistyped_columns(stored):
    table = pq.read_table(stored)
    rewrite(stored, table.drop_columns(["experts"]))
    with pytest.raises(TraceError, match="lacks the column experts"):
        read_trace(stored)
    rewrite(stored, table.set_column(0, "request", table["request"].cast("int64")))
    with pytest.raises(TraceError, match="column request has type int64, expected int32"):
        read_trace(stored)


def test_a_column_that_nobody_recorded(tmp_path, make_trace):
    write_trace(tmp_path / "t.parquet", make_trace())
    with pytest.raises(TraceError, match=r"has no column scores \(it has expert ids only\)"):
        read_trace(tmp_path / "t.parquet", columns=["scores"])


def test_out_of_range_id_in_a_file(stored):
    rewrite(stored, change=lambda h: (h["model"].update(n_experts=8), h.update(columns=[])))
    table = pq.read_table(stored)
    ids = table["experts"].combine_chunks().flatten().to_numpy().copy()
    ids[-1] = 8
    bad = pa.FixedSizeListArray.from_arrays(pa.array(ids), 2)
    rewrite(stored, table.set_column(3, "experts", bad), lambda h: h.update(columns=["phase"]))
    with pytest.raises(TraceError, match="request 20, token 8, layer 2: expert id 8 is out of range"):
        read_trace(stored)


def test_one_expert_and_top_one(tmp_path):
    trace = Trace(ModelSpec("dense", 1, 1, 1), (RequestTrace(0, np.zeros((3, 1, 1), np.uint16)),))
    write_trace(tmp_path / "t.parquet", trace)
    assert same(read_trace(tmp_path / "t.parquet"), trace)
