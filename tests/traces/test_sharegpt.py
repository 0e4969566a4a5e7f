"""ShareGPT's format: one case for each irregularity, streaming, selection."""

import gzip
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from policies.core.types import UserError
from traces.format import TraceError
from traces.prompts import Conversation, Limits, Prompt, Tally, Tokenizer, draw, fit, select
from traces.records import read_records
from traces.sharegpt import conversation, read_sharegpt

ROOT = Path(__file__).resolve().parents[2]
BYTES = Tokenizer(lambda text: list(text.encode()), lambda messages: "\n\n".join(m["content"] for m in messages))


def entry(*turns: tuple[str, object], **more: object) -> dict[str, object]:
    return {"id": "a_0", "conversations": [{"from": role, "value": text} for role, text in turns], **more}


def read(record: object) -> tuple[object, Tally]:
    tally = Tally()
    found = conversation(record, 0, tally)
    return (found.messages if isinstance(found, Conversation) else found), tally


QA = (("user", "q"), ("assistant", "a"))


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        pytest.param(entry(("human", "q"), ("gpt", "a")), QA, id="plain"),
        *(pytest.param(entry(("user", "q"), (role, "a")), QA, id=role) for role in ("chatgpt", "bing", "bard")),
        pytest.param(entry(("human", "q"), ("function_call", "a")), QA, id="function call"),
        pytest.param(
            entry(("human", "q"), ("gpt", "a"), ("observation", "o"), ("assistant", "b")),
            (*QA, ("user", "o"), ("assistant", "b")),
            id="observation",
        ),
        pytest.param(entry(("gpt", "x"), ("human", "q"), ("gpt", "a")), QA, id="opens in mid-conversation"),
        pytest.param(
            entry(("system", "s"), ("gpt", "x"), ("human", "q"), ("gpt", "a")),
            (("system", "s"), *QA),
            id="system first",
        ),
        pytest.param(entry(("human", "q"), ("gpt", "a"), system="s"), (("system", "s"), *QA), id="system field"),
        pytest.param(entry(("human", "q"), ("gpt", "a"), ("human", "z")), QA, id="last question unanswered"),
        pytest.param(
            entry(("human", "q"), ("human", "r"), ("gpt", "a")), (("user", "q\n\nr"), QA[1]), id="not alternating"
        ),
        pytest.param(entry(("human", "q"), ("gpt", " \n"), ("gpt", "a")), QA, id="empty value"),
        pytest.param(entry(("human", "q\r\nr"), ("gpt", "a")), (("user", "q\nr"), QA[1]), id="line ends"),
        pytest.param(entry(("human", "q\ud83d"), ("gpt", "a")), (("user", "q�"), QA[1]), id="unpaired surrogate"),
        pytest.param(
            entry(("human", "q"), ("gpt", "<p>x &lt; y</p><p>z</p>")), (QA[0], ("assistant", "x < y\nz\n")), id="HTML"
        ),
        pytest.param(
            entry(("human", "q"), ("gpt", "```html\n<p>x</p>\n```")),
            (QA[0], ("assistant", "```html\n<p>x</p>\n```")),
            id="HTML that is code",
        ),
        pytest.param(
            entry(("human", "q"), ("gpt", "pythonCopy code\nx = 1")),
            (QA[0], ("assistant", "python\nx = 1")),
            id="button",
        ),
        pytest.param({"items": [{"from": "human", "text": "q"}, {"from": "gpt", "markdown": "a"}]}, QA, id="cousin"),
        pytest.param(
            {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}, QA, id="chat"
        ),
        pytest.param(entry(("human", "q"), ("gpt", "a"), tools="[]", model="m", plugins=[1]), QA, id="more fields"),
        pytest.param(entry(), "entries without messages", id="no turns"),
        pytest.param({"id": "x"}, "entries without messages", id="no list"),
        pytest.param({"conversations": None}, "entries without messages", id="null"),
        pytest.param(entry(("human", "q")), "conversations without a question and an answer", id="one turn"),
        pytest.param(entry(("gpt", "a")), "conversations without a question and an answer", id="answers only"),
        pytest.param(entry(("human", "q"), ("alien", "a")), "conversations with an unknown role", id="unknown role"),
        pytest.param(
            entry(("human", "q"), ("gpt", None)), "conversations with a message without text", id="null value"
        ),
        pytest.param(
            {"conversations": ["q", "a"]}, "conversations with a message that is no object", id="turns that are texts"
        ),
        pytest.param({"conversations": [{"value": "q"}]}, "conversations with an unknown role", id="no role"),
        *(pytest.param(bad, "entries that are no object", id=repr(bad)) for bad in (None, 3, "text", [1])),
    ],
)
def test_irregularities(record, expected):
    assert read(record)[0] == expected


def test_repairs_are_counted():
    _, tally = read(entry(("gpt", "x"), ("human", ""), ("human", "q"), ("gpt", "a"), ("gpt", "b"), ("human", "z")))
    assert tally.changed == {
        "answers before the first question left out": 1,
        "empty messages left out": 1,
        "neighbouring messages of one role joined": 1,
        "messages after the last answer left out": 1,
    }


def test_malformed_rows_and_doubles_are_skipped_with_a_count(tmp_path):
    good = entry(("human", "q"), ("gpt", "a"))
    rows = [None, 1, "x", [], {}, entry(), entry(("human", "q")), good, {**good, "id": "b_7"}, entry(("?", "q"))]
    path = tmp_path / "rows.json"
    path.write_text(json.dumps(rows))
    tally = Tally()
    assert [found.label for found in read_sharegpt(path, tally)] == ["a_0"]
    assert (tally.kept, sum(tally.dropped.values())) == (1, 9)
    assert tally.dropped["conversations that are there already"] == 1


ROWS = [entry(("human", f"question {i} é"), ("gpt", "answer " * (i + 1)), id=f"c_{i}") for i in range(40)]


def write(path: Path, kind: str) -> Path:
    lines = "\n".join(json.dumps(row) for row in ROWS)
    if kind == "lines":
        path.write_text(f"{lines}\n\nno json\n")
    elif kind == "pretty":
        path.write_text(json.dumps(ROWS, indent=2, ensure_ascii=False))
    elif kind == "gz":
        path.write_bytes(gzip.compress(json.dumps(ROWS).encode()))
    elif kind == "gz lines":
        path.write_bytes(gzip.compress(lines.encode()))
    elif kind == "parquet":
        pq.write_table(pa.Table.from_pylist(ROWS), path, row_group_size=7)
    elif kind == "bom":
        path.write_text(json.dumps(ROWS), encoding="utf-8-sig")
    return path


@pytest.mark.parametrize("kind", ["lines", "pretty", "gz", "gz lines", "parquet", "bom"])
def test_every_container_gives_the_same_conversations(tmp_path, kind):
    tally = Tally()
    found = list(read_sharegpt(write(tmp_path / "data", kind), tally))
    assert [c.label for c in found] == [row["id"] for row in ROWS]
    assert found[3].messages == (("user", "question 3 é"), ("assistant", "answer " * 4))
    assert tally.dropped == ({"lines that are no JSON": 1} if kind == "lines" else {})


def test_a_folder_is_read_in_the_order_of_names(tmp_path):
    (tmp_path / "b.json").write_text(json.dumps(ROWS[20:]))
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps(row) for row in ROWS[:20]))
    assert [c.label for c in read_sharegpt(tmp_path, Tally())] == [row["id"] for row in ROWS]


@pytest.mark.parametrize("chunk", [1, 2, 3, 7, 64])
def test_an_array_is_parsed_whatever_the_chunks(tmp_path, monkeypatch, chunk):
    values = [1, -25, 3.5e3, 'a"]\\,é😀', {"x": [1, {"y": "}"}]}, [], None, True, 12345]
    path = tmp_path / "a.json"
    path.write_text(json.dumps(values, ensure_ascii=False))
    monkeypatch.setattr("traces.records.CHUNK_BYTES", chunk)
    assert list(read_records(path, Tally())) == values


@pytest.mark.parametrize("text", ['[{"a": 1}, {"a": ', '[{"a": 1} {"a": 2', '[{"a": }, {}]', "[1, 2"])
def test_a_broken_array_is_one_clear_line(tmp_path, text):
    path = tmp_path / "broken.json"
    path.write_text(text)
    with pytest.raises(TraceError, match=r"broken\.json: record \d of the array is broken or cut off"):
        list(read_records(path, Tally()))


def test_a_missing_file_and_a_broken_gz(tmp_path):
    with pytest.raises(TraceError, match="cannot read"):
        list(read_records(tmp_path / "none.json", Tally()))
    (tmp_path / "cut.gz").write_bytes(gzip.compress(json.dumps(ROWS).encode())[:60])
    with pytest.raises(TraceError, match="cannot read"):
        list(read_records(tmp_path / "cut.gz", Tally()))


# ---------------------------------------------------------------------------- selection


def conversations(count: int):
    return lambda tally: iter(
        [Conversation(f"{i}", (("user", f"question {i}"), ("assistant", f"answer {i}"))) for i in range(count)]
    )


def labels(count: int, requests: int, seed: int) -> list[str]:
    return [p.label for p in select(conversations(count), requests, seed, BYTES, limits=Limits())[0]]


def test_selection_depends_on_seed_and_number_only():
    assert labels(500, 20, 1) == labels(500, 20, 1) != labels(500, 20, 2)
    assert labels(500, 20, 1)[:5] == labels(500, 5, 1)
    assert len({*labels(500, 20, 1)}) == 20


def test_draw_is_the_sort_by_each_conversations_number():
    rng = np.random.default_rng(3)
    numbers = [rng.random() for _ in range(50)]
    found = draw(conversations(50)(Tally()), 8, 3)
    assert [int(c.label) for c in found] == np.argsort(numbers)[:8].tolist()


def test_too_few_prompts_are_an_error_unless_repeated():
    with pytest.raises(UserError, match=r"3 fitting prompts, not 7.*repeat=true"):
        labels(3, 7, 0)
    prompts, *_ = select(conversations(3), 7, 0, BYTES, limits=Limits(), repeat=True)
    assert [p.label for p in prompts] == labels(3, 3, 0) * 2 + labels(3, 1, 0)


def test_a_data_set_of_mostly_unfit_conversations_is_read_until_enough_fit():
    def reader(tally):
        for i in range(2000):
            yield Conversation(f"{i}", (("user", "question"), ("assistant", "long enough" if i % 100 == 0 else "no")))

    prompts, _, fitted = select(reader, 15, 0, BYTES, limits=Limits())
    assert len(prompts) == 15
    assert all(int(p.label) % 100 == 0 for p in prompts)
    assert fitted.dropped["answers too short"] > 100


def test_the_longest_history_that_fits_is_the_prompt():
    talk = Conversation("t", (("user", "q" * 10), ("assistant", "a" * 6), ("user", "r" * 50), ("assistant", "b" * 9)))
    whole = b"\n\n".join([b"q" * 10, b"a" * 6, b"r" * 50])
    assert fit(talk, BYTES, Limits(most_prompt=100)) == Prompt("t", tuple(whole), 9)
    assert fit(talk, BYTES, Limits(most_prompt=20)) == Prompt("t", tuple(b"q" * 10), 6)
    assert fit(talk, BYTES, Limits(most_prompt=5)) == "prompts too long"
    assert fit(talk, BYTES, Limits(most_prompt=5, cut=True)) == Prompt("t", tuple(b"r" * 5), 9)
    assert fit(Conversation("t", (("user", "q"), ("assistant", "answer"))), BYTES, Limits()) == "prompts too short"


# ---------------------------------------------------------------------------- real input


def test_the_fastchat_sample(shared_data):
    tally = Tally()
    found = list(read_sharegpt(shared_data / "sharegpt_samples" / "dummy_conversation.json", tally))
    assert (len(found), tally.dropped, tally.changed) == (500, {}, {})
    assert found[0].label == "identity_0"


@pytest.mark.slow
def test_three_hundred_megabytes_are_read_under_600_mib(tmp_path):
    path = tmp_path / "big.json"
    with path.open("w") as file:
        file.write("[")
        for i in range(30_000):
            text = f"{i} " + "lorem ipsum " * 410
            file.write(("," if i else "") + json.dumps(entry(("human", text), ("gpt", text), id=f"c_{i}"), indent=1))
        file.write("]")
    assert path.stat().st_size > 290e6
    code = (
        "import re, sys\nfrom traces.prompts import *\nfrom traces.sharegpt import read_sharegpt\n"
        "tok = Tokenizer(lambda t: list(t.encode()), lambda m: m[0]['content'])\n"
        "read = lambda tally: read_sharegpt(sys.argv[1], tally)\n"
        "prompts, tally, _ = select(read, 32, 0, tok, limits=Limits(most_prompt=9000))\n"
        # Not ru_maxrss: that of a child begins with what its parent used.
        "print(len(prompts), tally.kept, re.search(r'VmHWM:\\s*(\\d+) kB', open('/proc/self/status').read())[1])"
    )
    run = subprocess.run([sys.executable, "-c", code, path], cwd=ROOT, capture_output=True, text=True, check=True)
    prompts, kept, kib = map(int, run.stdout.split())
    assert (prompts, kept) == (32, 30_000)
    assert kib < 600 * 1024, f"{kib / 1024:.0f} MiB"
