"""Runs with a CPU that computes experts: invariants, journals, the choice."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from worlds import AnyOrder, Routes, Steps

from policies.core.core import DecisionCore
from policies.core.driver import drive
from policies.core.journal import Journal, ReplayBackend, ReplayWorkload, read_journal, refeed
from policies.core.messages import Compute, HostCompute, HostDone, StepBegin
from policies.core.types import ModelSpec, Phase, ProtocolError, UserError
from policies.eviction import LFU
from policies.prefetch import Ranked
from policies.schedule import (
    Alone,
    EarlierEnd,
    LowestLayerFirst,
    LowestLayerThenSrtf,
    OneUnit,
    PerRequest,
    SameLayer,
)

MODEL = ModelSpec("tiny", n_layers=3, n_experts=6, top_k=2)
TIMES = {"fetch_s": 2.0, "expert_s": 1.5, "move_s": 1.0}


def core(capacity, cpu=True, together=False, **options):
    return DecisionCore(
        MODEL,
        capacity,
        LFU(),
        partition=OneUnit() if together else PerRequest(),
        batching=Alone() if together else SameLayer(),
        compute_order=LowestLayerFirst(),
        fetch_order=LowestLayerThenSrtf(),
        host=EarlierEnd(**TIMES) if cpu else None,
        **{"fetch_slots": 2, **options},
    )


class Memory:
    def __init__(self):
        self.rows = []

    def record(self, t_s, events, commands):
        self.rows.append((tuple(events), tuple(commands)))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    capacity=st.integers(4, MODEL.n_total),
    together=st.booleans(),
    prefetch=st.booleans(),
    seed=st.integers(0, 2**20),
)
def test_the_cpu_computes_what_the_gpu_does_not(capacity, together, prefetch, seed):
    """Each request's experts of a layer: those of its batch and those of the CPU, each once."""
    routes = Routes(MODEL, seed, predict=prefetch)
    options = {"prefetch": Ranked(max_in_flight=2)} if prefetch else {}
    run = core(capacity, together=together, **options)
    memory, world = Memory(), AnyOrder(routes, seed)
    drive(run, Steps(3, range(3)), world, journal=memory, check=True)
    hosted, running, step = {}, {}, -1
    for events, commands in memory.rows:
        for event in events:
            if isinstance(event, StepBegin):
                step = event.step
            if isinstance(event, HostDone):
                assert event.task in running  # before its job
                del running[event.task]
        for command in commands:
            if isinstance(command, HostCompute):
                running[command.task] = command
                for request in command.requests:
                    hosted.setdefault((step, request, command.expert // 6), set()).add(command.expert)
            elif isinstance(command, Compute) and command.phase is Phase.JOB:
                for request in command.requests:
                    (gate,) = routes.gates(step, (request,), command.layer)
                    on_cpu = hosted.pop((step, request, command.layer), set())
                    assert {*gate.experts} - on_cpu <= {*command.experts}
                    assert on_cpu <= {*gate.experts}
                    assert not any(request in task.requests for task in running.values())
    assert not hosted
    assert not running


def test_a_journal_is_read_back_refed_and_replayed(tmp_path):
    with Journal(tmp_path / "j", {}) as journal:
        drive(core(11), Steps(4, range(4)), AnyOrder(Routes(MODEL, 4), 1), journal=journal)
    records = list(read_journal(tmp_path / "j")[1])
    assert any(isinstance(command, HostCompute) for record in records for command in record.commands)
    assert refeed(core(11), records) == len(records)
    other = ReplayBackend(AnyOrder(Routes(MODEL, 4), seed=9), records)
    with Journal(tmp_path / "k", {}) as journal:
        drive(core(11), ReplayWorkload(records), other, journal=journal)
    again = list(read_journal(tmp_path / "k")[1])
    assert [(r.events, r.commands) for r in again] == [(r.events, r.commands) for r in records]


def test_who_computes():
    choice = EarlierEnd(fetch_s=2.0, expert_s=2.0, move_s=1.0, token_share=0.5)
    assert choice.choose({7: 1, 8: 1, 9: 1}, 0, []) == [8]  # 7: 2 < 3; 8: 3 < 4; 9: 4 < 5
    assert choice.choose({7: 1}, 1, []) == [7]  # 3 < 4
    assert choice.choose({7: 3}, 1, []) == []  # three tokens take 4
    assert choice.choose({7: 1}, 2, [1, 3]) == []  # the CPU is busy for 2 + 4


def test_wrong_settings_and_answers():
    with pytest.raises(UserError, match="EarlierEnd"):
        EarlierEnd(0.0, 1.0, 1.0)
    for cpu in (False, True):
        with pytest.raises(ProtocolError, match="no such task"):
            core(18, cpu=cpu).handle(HostDone(3))
