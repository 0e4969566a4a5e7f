"""SWE-agent trajectories, OpenHands, texts and lengths: one case for each irregularity."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from traces.lengths import read_lengths
from traces.prompts import Conversation, Tally
from traces.swe_agent import read_swe_agent, trajectory
from traces.text import read_text

SYSTEM = {"role": "system", "text": None, "system_prompt": "rules", "cutoff_date": "01.01.2023", "mask": False}
TALK = (("system", "rules"), ("user", "task"), ("assistant", "ls"))


def item(role: str, text: str | None) -> dict[str, object]:
    return {"role": role, "text": text, "system_prompt": None, "cutoff_date": None, "mask": role == "ai"}


def messages(record: object) -> object:
    found = trajectory(record, 0, Tally())
    return found.messages if isinstance(found, Conversation) else found


CALL = {"id": "1", "type": "function", "function": {"name": "bash", "arguments": '{"command": "ls"}'}}


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        pytest.param({"trajectory": [SYSTEM, item("user", "task"), item("ai", "ls")]}, TALK, id="public rows"),
        pytest.param(
            {"trajectory": [SYSTEM, item("user", "task"), item("ai", "ls"), item("user", "seen")]},
            TALK,
            id="ends on user",
        ),
        pytest.param(
            {"trajectory": [item("user", "task"), item("ai", None), item("ai", "ls")]}, TALK[1:], id="null text"
        ),
        pytest.param(
            {
                "history": [
                    {"role": "system", "content": "rules", "agent": "main", "message_type": "system_prompt"},
                    {"role": "user", "content": [{"type": "text", "text": "task"}]},
                    {"role": "assistant", "content": "ls"},
                ],
                "trajectory": [{"action": "x", "observation": "y", "response": "z"}],
            },
            TALK,
            id="history with parts",
        ),
        pytest.param(
            {
                "environment": "repo",
                "trajectory": [
                    {"action": "ls", "observation": "a.py", "response": "", "thought": "look", "state": "{}"},
                    {"action": "x", "observation": "", "response": "submit", "thought": ""},
                ],
            },
            (("user", "repo"), ("assistant", "look\nls"), ("user", "a.py"), ("assistant", "submit")),
            id="steps only",
        ),
        pytest.param(
            {
                "trajectory": [
                    {"role": "system", "content": "rules"},
                    {"role": "user", "content": "task"},
                    {"role": "assistant", "content": None, "tool_calls": [CALL]},
                    {"role": "tool", "content": "a.py", "name": "bash", "tool_call_id": "1"},
                    {"role": "assistant", "content": "done", "tool_calls": None},
                ]
            },
            (*TALK[:2], ("assistant", 'bash {"command": "ls"}'), ("user", "a.py"), ("assistant", "done")),
            id="OpenHands",
        ),
        pytest.param({"trajectory": None}, "rows without a trajectory", id="null"),
        pytest.param({"trajectory": []}, "rows without a trajectory", id="empty"),
        pytest.param({"trajectory": [SYSTEM]}, "trajectories without a task and an answer", id="no answer"),
        pytest.param({"trajectory": [None]}, "trajectories with an item that is no object", id="null item"),
        pytest.param({"trajectory": [item("critic", "x")]}, "trajectories with an unknown role", id="unknown role"),
        pytest.param([], "rows that are no object", id="no object"),
    ],
)
def test_irregularities(record, expected):
    assert messages(record) == expected


def test_the_row_number_tells_tries_of_one_issue_apart(tmp_path):
    row = {
        "instance_id": "repo-1",
        "model_name": "m",
        "target": True,
        "trajectory": [SYSTEM, item("user", "task"), item("ai", "ls")],
        "exit_status": "submitted",
        "generated_patch": "p" * 1000,
        "eval_logs": "l" * 1000,
    }
    pq.write_table(pa.Table.from_pylist([row] * 5), tmp_path / "t.parquet", row_group_size=2)
    found = list(read_swe_agent(tmp_path / "t.parquet", Tally()))
    assert [c.label for c in found] == [f"{i}:repo-1" for i in range(5)]
    assert {c.messages for c in found} == {TALK}


def test_a_traj_file_is_one_object_over_many_lines(tmp_path):
    path = tmp_path / "a.traj"
    path.write_text(
        json.dumps({"history": [{"role": "user", "content": "t"}, {"role": "assistant", "content": "a"}]}, indent=2)
    )
    assert [c.messages for c in read_swe_agent(tmp_path, Tally())] == [(("user", "t"), ("assistant", "a"))]


@pytest.mark.parametrize("name", ["train-00000-of-00001.parquet", "sample_raw.json"])
def test_the_five_public_rows(shared_data, name):
    tally = Tally()
    found = list(read_swe_agent(shared_data / "nebius_swe_agent_sample" / name, tally))
    assert (len(found), tally.dropped, tally.changed) == (5, {}, {})
    assert [len(c.messages) for c in found] == [13, 29, 11, 17, 33]
    assert [len(c.messages[0][1]) for c in found] == [4873] * 5


def test_the_traj_samples(shared_data):
    found = list(read_swe_agent(shared_data / "swe_agent_traj", Tally()))
    assert [len(c.messages) for c in found] == [29, 23, 11, 11]


def test_texts(tmp_path):
    (tmp_path / "a.txt").write_text("first")
    (tmp_path / "b.txt").write_text(" \n")
    (tmp_path / "c.bin").write_bytes(b"\0\1")
    tally = Tally()
    assert [c.messages for c in read_text(tmp_path, tally)] == [(("user", "first"),)]
    assert tally.dropped == {"empty texts": 1, "files that are no text": 1}
    lines = tmp_path / "l.jsonl"
    lines.write_text('{"text": "x"}\n{"prompt": "y"}\n{"other": 1}\n7\n')
    assert [c.messages[0][1] for c in read_text(lines, tally)] == ["x", "y"]
    book = tmp_path / "book.txt"
    book.write_text("\n\n".join(["word " * 150] * 5))
    assert [len(c.messages[0][1]) > 1000 for c in read_text(book, Tally())] == [True, True, False]


def test_lengths_flat_and_in_sessions(tmp_path):
    rows = [
        {"input_toks": 10, "output_toks": 5, "arrival_time_ns": 2_000_000_000},
        {"input_toks": 0, "output_toks": 5},
        {"input_toks": "many"},
        {
            "session_id": "s",
            "arrival_time_ns": 3_000_000_000,
            "sub_requests": [
                {"input_toks": 7, "output_toks": 1, "tool_duration_ns": 500_000_000},
                {"input_toks": 9, "output_toks": 2},
            ],
        },
    ]
    path = tmp_path / "l.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    tally = Tally()
    found = [(x.label, x.prompt_tokens, x.answer_tokens, x.arrival_s) for x in read_lengths(path, tally)]
    assert found == [("0", 10, 5, 2.0), ("s.0", 7, 1, 3.0), ("s.1", 9, 2, 3.5)]
    assert tally.dropped == {"requests without lengths": 2}


def test_the_public_lengths(shared_data):
    tally = Tally()
    found = list(read_lengths(shared_data / "llmservingsim_workloads" / "workload_me2_01_mixed.jsonl", tally))
    assert (len(found), tally.dropped) == (608, {})
