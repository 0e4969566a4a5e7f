"""The journal: same bytes, read back as written, re-fed and replayed to the same commands, broken files refused."""

import gzip

import pytest
from worlds import AnyOrder, Routes, Steps, make_core

from policies.core.core import DecisionCore
from policies.core.driver import drive
from policies.core.journal import Journal, ReplayBackend, ReplayWorkload, read_journal, refeed, step_times, story
from policies.core.messages import Compute, ComputeDone, Gate, StepBegin, StepEnd
from policies.core.types import ModelSpec, Phase, ProtocolError, UserError
from policies.eviction import LFU
from policies.prefetch import Ranked
from policies.schedule import Auto, LowestLayerFirst, LowestLayerThenSrtf

MODEL = ModelSpec("m", n_layers=4, n_experts=8, top_k=2)
NAMES = ["llama_cpp", "static_2_1", "bevy", "bevy_both"]


def core_for(name, prefetch):
    # llama_cpp gets a cache below the union of three requests, so that some layers pass in waves.
    capacity = 6 if name == "llama_cpp" else 12
    return make_core(name, MODEL, capacity, fetch_slots=3, prefetch=Ranked(max_in_flight=2) if prefetch else None)


def record(path, name="bevy", prefetch=False, seed=1, steps=3):
    with Journal(path, {"config": {"seed": seed}}) as journal:
        world = AnyOrder(Routes(MODEL, 4, predict=prefetch), seed)
        drive(core_for(name, prefetch), Steps(steps, range(3)), world, journal=journal)
    return path


@pytest.mark.parametrize("prefetch", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_a_fresh_core_gives_the_same_commands(tmp_path, name, prefetch):
    header, records = read_journal(record(tmp_path / "j", name, prefetch))
    assert header == {"schema": 2, "config": {"seed": 1}}
    records = list(records)
    assert refeed(core_for(name, prefetch), records) == len(records)
    assert sum(isinstance(c, StepEnd) for r in records for c in r.commands) == 3


@pytest.mark.parametrize("prefetch", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_another_world_made_to_follow_gives_the_same_commands(tmp_path, name, prefetch):
    _, records = read_journal(record(tmp_path / "j", name, prefetch, seed=1))
    records = list(records)
    other = ReplayBackend(AnyOrder(Routes(MODEL, 4, predict=prefetch), seed=99), records)
    with Journal(tmp_path / "k", {}) as journal:
        drive(core_for(name, prefetch), ReplayWorkload(records), other, journal=journal)
    _, again = read_journal(tmp_path / "k")
    assert [(r.events, r.commands) for r in again] == [(r.events, r.commands) for r in records]


def learning_core():
    auto = Auto()
    orders = {"compute_order": LowestLayerFirst(), "fetch_order": LowestLayerThenSrtf()}
    return DecisionCore(MODEL, 12, LFU(), partition=auto, batching=auto, fetch_slots=3, **orders)


def test_a_core_that_learns_from_durations_is_told_the_journal_s(tmp_path):
    """The other world takes another time for everything; the decisions are those of the first."""
    with Journal(tmp_path / "j", {}) as journal:
        drive(learning_core(), Steps(24, range(3)), AnyOrder(Routes(MODEL, 4), 1), journal=journal)
    records = list(read_journal(tmp_path / "j")[1])
    assert refeed(learning_core(), records) == len(records)
    told = step_times(records)
    assert len(told) == 24
    assert len({took.seconds for took in told.values()}) > 1
    assert all(0 < took.busy_s <= took.seconds for took in told.values())
    slower = AnyOrder(Routes(MODEL, 4), seed=99, most=1)
    world = ReplayBackend(slower, records)
    with Journal(tmp_path / "k", {}) as journal:
        drive(learning_core(), ReplayWorkload(records), world, journal=journal, told=told.__getitem__)
    again = list(read_journal(tmp_path / "k")[1])
    assert [(r.events, r.commands) for r in again] == [(r.events, r.commands) for r in records]
    assert slower.now() > records[-1].t_s


def test_predictions_come_back_exactly(tmp_path):
    """Any score that a predictor may give, beside gates without predictions."""
    scores = (1 / 3, -0.0, 5e-324, 1.7976931348623157e308, float("inf"), 0.1 + 0.2, 7.0)
    gates = (Gate((0, 1), tuple(enumerate(scores, start=2**31 - 8))), Gate((2, 3)), Gate((4, 5), ((9, 0.25),)))
    begin = StepBegin(0, (0, 1, 2))
    with Journal(tmp_path / "j", {}) as journal:
        journal.record(0.0, [begin], [Compute(1, Phase.ENTRY, -1, (0, 1, 2))])
        journal.record(1.0, [ComputeDone(1, gates)], [])
    _, done = read_journal(tmp_path / "j")[1]
    assert done.events == (ComputeDone(1, gates),)
    assert str(done.events[0].gates[0].predicted[1]) == str((2**31 - 7, -0.0))


def test_the_same_run_gives_the_same_bytes(tmp_path):
    first, second = record(tmp_path / "a"), record(tmp_path / "b")
    assert first.read_bytes() == second.read_bytes()


def test_another_core_is_found_out(tmp_path):
    _, records = read_journal(record(tmp_path / "j", "bevy"))
    with pytest.raises(ProtocolError, match="record"):
        refeed(core_for("llama_cpp", False), records)


def test_a_journal_that_ends_too_early_stops_the_replay(tmp_path):
    _, records = read_journal(record(tmp_path / "j"))
    records = list(records)
    with pytest.raises(ProtocolError, match="the journal has ended"):
        drive(
            core_for("bevy", False), ReplayWorkload(records), ReplayBackend(AnyOrder(Routes(MODEL, 4), 1), records[:9])
        )


def test_broken_files_are_refused_in_one_line(tmp_path):
    whole = record(tmp_path / "j").read_bytes()
    text = gzip.decompress(whole)
    broken = {
        "empty": b"",
        "text": b"hello\n",
        "cut": whole[: len(whole) // 2],
        "schema": gzip.compress(b'{"schema": 99}\n'),
        "list": gzip.compress(b"[1]\n"),
        "record": gzip.compress(text + b'[1.0, [["C"]], []]\n'),
        "line": gzip.compress(text + b"[1.0, \n"),
    }
    for name, data in broken.items():
        path = tmp_path / name
        path.write_bytes(data)
        with pytest.raises(UserError) as error:
            list(read_journal(path)[1])
        assert str(path) in str(error.value)
        assert "\n" not in str(error.value)
    with pytest.raises(UserError):
        read_journal(tmp_path / "absent")


def test_the_story_of_an_expert(tmp_path):
    _, records = read_journal(record(tmp_path / "j"))
    records = list(records)
    fetched = records[1].commands[0].expert
    lines = list(story(MODEL, records, fetched))
    layer, index = MODEL.split(fetched)
    assert "chosen by" in lines[0]
    assert f"of {layer}:{index} into slot" in lines[1]
    assert any("landed" in line for line in lines)
    assert any("computed in batch" in line for line in lines)
