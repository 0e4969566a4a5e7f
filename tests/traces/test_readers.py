"""Each form of source file, written by hand here, and the real ones where they are beside the checkout."""

import io
import json

import numpy as np
import pytest

from traces.format import ABSENT, TraceError
from traces.readers import read, sniff
from traces.readers.common import Options

IDS = np.array([[[0, 3], [2, 1]], [[1, 0], [3, 2]], [[3, 1], [0, 2]]])  # [tokens 3, layers 2, k 2]

CSV = """# route_trace v1
# model=/data/toy-Q4.gguf arch=toy n_layer=3 n_expert=4 n_expert_used=2
# layer=0 expert_bytes=0 dense_bytes=7
# layer=1 expert_bytes=100 dense_bytes=8
# layer=2 expert_bytes=50 dense_bytes=9
turn,phase,step,layer,slot,expert,weight,residency,expert_bytes
0,0,0,1,0,3,0.75,0,100
0,0,0,1,1,1,0.25,0,100
0,0,1,1,0,3,0.5,0,0
0,0,1,1,1,2,0.5,0,100
0,0,1,2,0,0,0.9,0,50
0,0,1,2,1,1,0.1,0,50
0,1,2,1,0,1,0.8,1,0
0,1,2,1,1,0,0.2,0,100
0,1,2,2,0,1,0.6,1,0
0,1,2,2,1,3,0.4,0,50
"""


def convert(tmp_path, content, name="file", format=None, **options):
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return read(path, Options(**options), format)


def npz(**arrays):
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)
    return buffer.getvalue()


def rows(ids=IDS, layers=(1, 4), request="a", phases=None, weights=None):
    for token, layer_index in np.ndindex(ids.shape[:2]):
        row = {"request_id": request, "step_id": token, "layer_id": layers[layer_index]}
        row["phase"] = "decode" if phases is None else phases[token]
        row["expert_ids"] = ids[token, layer_index].tolist()
        if weights is not None:
            row["weights"] = weights[token, layer_index].tolist()
        yield row


def lines(*objects):
    return "\n".join(json.dumps(o) for o in objects)


# ---------------------------------------------------------------------------- BigMoeOnEdge


def test_bigmoe(tmp_path):
    trace, report = convert(tmp_path, CSV)
    assert report.format == "bigmoe"
    assert (trace.model.name, trace.model.n_layers, trace.model.n_experts, trace.model.top_k) == ("toy-Q4", 2, 4, 2)
    assert trace.layer_indices == (1, 2)  # layer 0 is dense
    assert trace.notes["expert_bytes"] == [100, 50]
    (request,) = trace.requests
    assert request.experts.tolist() == [
        [[3, 1], [ABSENT, ABSENT]],  # the last layer sees one prompt token only
        [[3, 2], [0, 1]],
        [[1, 0], [1, 3]],
    ]
    assert request.columns["phase"].tolist() == [0, 0, 1]
    assert (request.prompt_tokens, request.n_decode) == (2, 1)
    assert request.columns["weights"][2].tolist() == np.array([[0.8, 0.2], [0.6, 0.4]], np.float16).tolist()
    assert np.isnan(request.columns["weights"][0, 1]).all()
    assert report.changed == {"prefill tokens that lack some layers kept, with those gates marked absent": 1}
    assert not report.dropped


def test_bigmoe_reads_columns_by_name_and_knows_later_ones(tmp_path):
    head, _, body = CSV.partition("turn,")
    header, *body = ("turn," + body).splitlines()
    order = [8, 5, 4, 3, 2, 1, 0, 6]  # reversed, without residency
    lines = [[*(row.split(",")[i] for i in order), "0"] for row in body]
    lines[0][-1] = "1"
    named = [[*(header.split(",")[i] for i in order), "dropped"], *lines]
    text = head + "\n".join(",".join(row) for row in named)
    trace, report = convert(tmp_path, text)
    assert trace.digest == convert(tmp_path, CSV, "other")[0].digest
    assert report.changed["selections that the recording engine left out kept, as the router chose them"] == 1
    _, report = convert(tmp_path, text.replace("dropped", "surprise"))
    assert "column surprise ignored: unknown" in report.notes


def test_bigmoe_cut_off_in_a_row_or_a_token(tmp_path):
    cut = CSV[: CSV.rindex("1,3,0.4")] + "1,"
    trace, report = convert(tmp_path, cut)
    assert trace.requests[0].n_tokens == 2  # the decode token is incomplete
    assert report.dropped == {"rows cut off at the end": 1, "decode tokens that lack a layer": 1}


def test_bigmoe_turns_are_requests(tmp_path):
    second = [row.replace("0,", "1,", 1) for row in CSV.splitlines()[-4:]]
    trace, _ = convert(tmp_path, CSV + "\n".join(second))
    assert [(r.label, r.n_tokens, r.prompt_tokens) for r in trace.requests] == [("turn 0", 3, 2), ("turn 1", 1, None)]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("route_trace v1", "route_trace v2", "only version 1 is known"),
        ("n_expert=4", "experts=4", "preamble lacks the line"),
        ("turn,phase,step,layer", "turn,phase,step,level", "lacks the column layer"),
        ("0,0,1,1,0,3,0.5", "0,0,1,1,0,x,0.5", "row 2: .* must be whole numbers from 0"),
        ("0,0,1,1,0,3,0.5", "0,0,1,1,0,-3,0.5", "row 2: .* must be whole numbers from 0"),
        ("0,0,1,1,0,3,0.5", "0,0,1,1,0,4,0.5", "token 1, layer 0: expert id 4 is out of range"),
        ("0,0,1,1,0,3,0.5", "0,0,1,1,0,2,0.5", "chose an expert twice"),
        ("0,1,2,1,1,0", "0,1,2,1,0,0", r"turn 0: a \(step, layer, slot\) is there twice"),
    ],
)
def test_bad_bigmoe(tmp_path, old, new, message):
    assert old in CSV
    with pytest.raises(TraceError, match=message):
        convert(tmp_path, CSV.replace(old, new))


def test_bigmoe_without_rows(tmp_path):
    with pytest.raises(TraceError, match="holds no requests"):
        convert(tmp_path, "\n".join(CSV.splitlines()[:6]))


@pytest.mark.parametrize(
    ("name", "shape", "decode", "prompt"),
    [("gemma", (30, 128, 6), 128, 29), ("qwen", (48, 128, 6), 128, 28), ("gptoss", (36, 128, 2), 64, 85)],
)
def test_real_csv_and_npz_are_one_trace(shared_data, name, shape, decode, prompt):
    csv, _ = read(shared_data / "bigmoe_routes" / f"{name}.route.csv", Options())
    npz, report = read(shared_data / "bigmoe_routes" / "routes.npz", Options(key=f"{name}_decode_ids", n_experts=128))
    assert report.format == "arrays"
    assert (csv.model.n_layers, csv.model.n_experts, csv.model.top_k) == shape
    assert csv.digest == npz.digest
    (request,) = csv.requests
    assert (request.n_decode, request.prompt_tokens) == (decode, prompt)
    assert np.allclose(
        request.columns["weights"].astype(float),
        npz.requests[0].columns["weights"].astype(float),
        atol=1e-3,
        equal_nan=True,
    )


# ---------------------------------------------------------------------------- arrays


def test_npz_of_one_request_and_of_many(tmp_path):
    one, report = convert(tmp_path, npz(ids=IDS.astype(np.int16), n_expert=4))
    assert one.requests[0].experts.tolist() == IDS.tolist()
    assert one.model.n_experts == 4
    assert "weights to tell" in report.notes[0]

    many, _ = convert(tmp_path, npz(ids=np.stack([IDS, IDS[::-1]]), category=np.array(["x", "y"])), n_experts=9)
    assert [r.label for r in many.requests] == ["x", "y"]
    assert many.requests[1].experts.tolist() == IDS[::-1].tolist()
    assert many.model.n_experts == 9

    lens, _ = convert(tmp_path, npz(ids=np.concatenate([IDS, IDS]), lens=[2, 0, 4]))
    assert [r.n_tokens for r in lens.requests] == [2, 4]
    assert lens.requests[1].experts.tolist() == [*IDS[2:].tolist(), *IDS.tolist()]


def test_npz_padding_and_holes(tmp_path):
    padded = np.full((2, 5, 2, 2), -1)
    padded[0, :3] = IDS
    padded[1] = np.concatenate([IDS, IDS[:2]])
    padded[1, 2, 1] = -1  # a hole: what comes after did not follow what comes before
    trace, report = convert(tmp_path, npz(ids=padded))
    assert [r.n_tokens for r in trace.requests] == [3, 2]
    assert report.dropped == {"decode tokens that lack a layer": 1, "tokens after a token that lacks a layer": 2}

    trace, report = convert(tmp_path, npz(ids=padded[:, :, :, ::-1], lens=[0, 2]))
    assert [r.n_tokens for r in trace.requests] == [2]
    assert report.dropped == {"requests without a complete token": 1}


def test_npz_weights_decide_the_rank_order(tmp_path):
    weights = np.where(np.arange(3)[:, None, None] == 1, [0.25, 0.75], [0.5, 0.5])
    weights = np.broadcast_to(weights, IDS.shape)
    trace, report = convert(tmp_path, npz(ids=IDS, weights=weights))
    assert trace.requests[0].experts.tolist() == [IDS[0].tolist(), IDS[1, :, ::-1].tolist(), IDS[2].tolist()]
    assert trace.requests[0].columns["weights"][1].tolist() == [[0.75, 0.25]] * 2
    assert report.changed == {"gates put into router rank order by their weights": 2}
    top_one, _ = convert(tmp_path, npz(ids=IDS, weights=weights), top_k=1)
    assert top_one.requests[0].experts[..., 0].tolist() == [[0, 2], [0, 2], [3, 0]]


def test_npy_and_routed_experts_with_a_prompt(tmp_path):
    buffer = io.BytesIO()
    np.save(buffer, IDS)
    assert convert(tmp_path, buffer.getvalue())[0].requests[0].experts.tolist() == IDS.tolist()

    trace, report = convert(tmp_path, npz(routed_experts=IDS[1:], prompt_routed_experts=IDS[:1]), "toy.npz")
    assert trace.requests[0].experts.tolist() == IDS.tolist()
    assert trace.requests[0].columns["phase"].tolist() == [0, 1, 1]
    assert trace.requests[0].prompt_tokens == 1
    assert trace.model.name == "toy"
    (note,) = report.notes
    assert note.startswith("n_experts is INFERRED: 4, from the largest id 3; toy.npz does not say it.")


@pytest.mark.parametrize(
    ("arrays", "options", "message"),
    [
        ({"ids": IDS}, {"n_experts": 3}, "token 0, layer 0: expert id 3 is out of range, the model has 3"),
        ({"ids": IDS, "n_expert": 4}, {"n_experts": 5}, "n_experts=5 contradicts .* says 4"),
        ({"ids": IDS}, {"top_k": 3}, "top_k=3 does not fit"),
        ({"ids": IDS}, {"key": "nothing"}, "no array nothing; it has ids"),
        ({"a": IDS, "b": IDS}, {}, "several arrays of ids; choose one with key= a, b"),
        ({"a": IDS[0]}, {}, r"no integer array .* it has a \[2, 2\]"),
        ({"ids": IDS[0]}, {}, r"ids is int64 \[2, 2\], expected"),
        ({"ids": IDS.astype(float)}, {}, "ids is float64"),
        ({"ids": IDS, "lens": [1, 1]}, {}, "lens sums to 2, the ids have 3"),
        ({"ids": IDS[None], "lens": [4]}, {}, "lens must hold 1 lengths from 0 to 3"),
        ({"ids": IDS, "weights": np.zeros((3, 2, 1))}, {}, "they must agree|weights has shape"),
        ({"ids": IDS * 0}, {}, "chose an expert twice"),
        ({"ids": IDS * 0 - 1}, {}, "no requests with a complete token"),
        ({"ids": IDS[:0]}, {}, "no requests"),
        ({"ids": np.array([{}], dtype=object)}, {}, "Python objects"),
        ({"routed_experts": IDS, "prompt_routed_experts": IDS[:, :1]}, {}, "does not fit the decode ids"),
        ({"ids": IDS + 70_000}, {"n_experts": 80_000}, "fewer than 65535"),
    ],
)
def test_bad_npz(tmp_path, arrays, options, message):
    with pytest.raises(TraceError, match=message) as error:
        convert(tmp_path, npz(**arrays), **options)
    assert "\n" not in str(error.value)


def test_truncated_npz(tmp_path):
    whole = npz(ids=np.tile(IDS, (50, 1, 1)))
    for size in range(4, len(whole), 301):
        with pytest.raises(TraceError):
            convert(tmp_path, whole[:size])


def test_real_npz(shared_data):
    oss, _ = read(shared_data / "gptoss20b_routes" / "routes_512.npz", Options())
    raw = np.load(shared_data / "gptoss20b_routes" / "routes_512.npz")["ids"]
    assert (oss.model.n_layers, oss.model.n_experts, oss.model.top_k) == (24, 32, 4)
    assert np.array_equal(np.stack([r.experts for r in oss.requests]), raw)

    small, report = read(shared_data / "gptoss20b_routes" / "routes_small.npz", Options())
    assert small.columns == ("weights",)
    assert not report.changed  # its weights confirm the rank order
    deepseek, report = read(shared_data / "deepseekv2lite_routes" / "routes_small.npz", Options())
    assert [r.n_tokens for r in deepseek.requests] == [128] * 16
    weights = deepseek.requests[0].columns["weights"]
    assert (weights[..., 1:] <= weights[..., :-1]).all()
    assert report.changed["gates put into router rank order by their weights"] > 0
    with pytest.raises(TraceError, match="no integer array"):
        read(shared_data / "gemma4_heat" / "heat.npz", Options())


# ---------------------------------------------------------------------------- routed_experts in JSON


@pytest.mark.parametrize(
    "content",
    [
        json.dumps(IDS.tolist()),
        json.dumps({"routed_experts": IDS.tolist()}, indent=1),
        json.dumps([{"routed_experts": IDS.tolist()}]),
        lines({"routed_experts": IDS.tolist()}, {"text": "no routes"}),
        json.dumps({"id": "r", "choices": [{"index": 0, "routed_experts": IDS.tolist()}]}),
    ],
)
def test_routed_json(tmp_path, content):
    trace, report = convert(tmp_path, content)
    assert report.format == "routed_json"
    assert [r.experts.tolist() for r in trace.requests] == [IDS.tolist()]


def test_routed_json_with_prompts_and_rubbish(tmp_path):
    first = {"request_id": "a", "routed_experts": IDS[1:].tolist(), "prompt_routed_experts": IDS[:1].tolist()}
    second = {"request_id": "b", "routed_experts": IDS.tolist(), "n_experts": 16}
    trace, report = convert(tmp_path, lines(first, [1], {}, second) + "\n{broken", "toy.jsonl")
    assert [(r.label, r.prompt_tokens) for r in trace.requests] == [("a", 1), ("b", None)]
    assert trace.requests[1].columns["phase"].tolist() == [1, 1, 1]
    assert trace.model.n_experts == 16
    assert report.dropped == {
        "entries that are no object": 1,
        "entries without routed_experts": 1,
        "lines that are no JSON": 1,
    }


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{broken", "is no JSON"),
        ("{}", "no requests"),
        (json.dumps({"routed_experts": [[[0, 1], [2]]]}), "even nested lists"),
        (json.dumps({"routed_experts": [[0, 1]]}), "even nested lists"),
        (json.dumps({"routed_experts": [[[0.5, 1.0]]]}), "must be integers"),
        (lines({"routed_experts": IDS.tolist()}, {"routed_experts": IDS[:, :1].tolist()}), r"entry 1: \[layers, k\]"),
        (
            json.dumps({"routed_experts": IDS.tolist(), "prompt_routed_experts": IDS[:, :1].tolist()}),
            "differ in layers",
        ),
        ("[" * 100_000, "is no JSON"),
    ],
)
def test_bad_routed_json(tmp_path, content, message):
    with pytest.raises(TraceError, match=message):
        convert(tmp_path, content)


# ---------------------------------------------------------------------------- one object a (token, layer)


def test_layer_rows(tmp_path):
    shuffled = np.random.default_rng(0).permutation(list(rows()) + list(rows(IDS[::-1], request=7)))
    trace, report = convert(tmp_path, lines(*shuffled))
    assert report.format == "layer_rows"
    assert trace.layer_indices == (1, 4)
    found = {r.label: r.experts.tolist() for r in trace.requests}
    assert found == {"a": IDS.tolist(), "7": IDS[::-1].tolist()}


def test_layer_rows_with_prefill_and_weights(tmp_path):
    weights = np.broadcast_to([0.75, 0.25], IDS.shape)
    decode = list(rows(IDS[1:], weights=weights))
    prompt = [
        {"request_id": "a", "phase": "prefill", "step_id": 0, "layer_id": layer, "expert_ids": ids, "weights": weights}
        for layer, ids, weights in ((1, [[0, 1], [2, 3]], [[1, 0]] * 2), (4, [[1, 2], [3, 0]], [[1, 0]] * 2))
    ]
    trace, _ = convert(tmp_path, lines(*decode, *prompt))
    (request,) = trace.requests
    assert request.experts[:2].tolist() == [[[0, 1], [1, 2]], [[2, 3], [3, 0]]]
    assert request.experts[2:].tolist() == IDS[1:].tolist()
    assert request.columns["phase"].tolist() == [0, 0, 1, 1]
    assert request.columns["weights"][2:].tolist() == weights[1:].tolist()


def test_layer_rows_that_are_broken(tmp_path):
    good = list(rows())
    content = lines(*good[:-1]) + '\n{"request_id": "a"}\n[1]\n{"request_id": "a", "step_id": 2, "lay'
    trace, report = convert(tmp_path, content)
    assert trace.requests[0].experts.tolist() == IDS[:2].tolist()
    assert report.dropped == {
        "lines without request_id, step_id, layer_id, a known phase or expert_ids": 1,
        "lines that are no JSON object": 2,
        "decode tokens that lack a layer": 1,
    }


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (lines(*rows(), *rows()), "line 7: request a, step 0, layer 1 is there twice"),
        (lines(*rows(), *rows(IDS[..., :1], request="b")), "gates have 1 to 2 experts"),
        (lines({"expert_ids": [1]}), "no line with request_id"),
        (lines(*rows(phases=["thinking"] * 3)), "no line with request_id"),
    ],
)
def test_bad_layer_rows(tmp_path, content, message):
    with pytest.raises(TraceError, match=message):
        convert(tmp_path, content)


# ---------------------------------------------------------------------------- telling forms apart


def test_sniffing_and_overriding(tmp_path):
    path = tmp_path / "f"
    for content, form in [
        (CSV, "bigmoe"),
        (CSV.partition("turn,")[1] + CSV.partition("turn,")[2], "bigmoe"),
        (lines(*rows()), "layer_rows"),
        (lines({"routed_experts": []}), "routed_json"),
    ]:
        path.write_text(content)
        assert sniff(path) == form
    path.write_text("what is this")
    with pytest.raises(TraceError, match="cannot tell its form"):
        sniff(path)
    with pytest.raises(TraceError, match="unknown format csv; expected one of bigmoe"):
        read(path, Options(), "csv")
    with pytest.raises(TraceError, match="no such file"):
        read(tmp_path / "none", Options())
    path.write_bytes(b"PAR1")
    with pytest.raises(TraceError, match="if it is a trace, use it as it is"):
        sniff(path)
    for form in ("bigmoe", "arrays", "routed_json", "layer_rows"):
        path.write_bytes(b"\xff\xfe\x00\x80 rubbish \x00")
        with pytest.raises(TraceError):
            read(path, Options(), form)
        path.write_bytes(b"")
        with pytest.raises(TraceError):
            read(path, Options(), form)
