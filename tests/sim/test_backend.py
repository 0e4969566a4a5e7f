"""The backend: completions of one instant, routing of the next layer, waiting for nothing, idling."""

import pytest
from sim_world import SHARE, A, B, C, Table, device, tiny

from conf.sharing import FairShare, GpuSharing
from policies.core.messages import Compute, ComputeDone, Fetch, FetchDone, StepEnd
from policies.core.types import DeadlockError, FetchKind, Phase, ProtocolError
from sim.backend import SimBackend

D = FetchKind.DEMAND
ENTRY_S = A * SHARE + C


def backend(model=None, **options):
    model = model or tiny()
    table = [[[[0], [1]], [[2], [3]]], [[[4], [5]], [[6], [7]]]]  # step, request, layer
    routing = Table(model, table)
    return SimBackend(model, device(model, **options), routing, lambda _: 0), routing


def test_completions_of_one_instant_come_together():
    b, _ = backend()
    for fetch in range(3):
        b.submit(Fetch(fetch, fetch, fetch, D))
    assert b.wait() == [FetchDone(0), FetchDone(1), FetchDone(2)]
    assert b.now() == pytest.approx(9.0)


def test_a_batch_and_a_fetch_of_one_instant_come_together():
    b, _ = backend(link=FairShare(3e6 / ENTRY_S, 8))
    b.submit(Fetch(1, 0, 0, D))
    b.submit(Compute(2, Phase.ENTRY, -1, (0,)))
    assert {type(event) for event in b.wait()} == {FetchDone, ComputeDone}


def test_gates_are_the_next_layers_in_the_order_of_the_batch():
    b, routing = backend()
    b.submit(Compute(1, Phase.ENTRY, -1, (1, 0)))
    (done,) = b.wait()
    assert [gate.experts for gate in done.gates] == [(2,), (0,)]
    b.submit(Compute(2, Phase.JOB, 0, (0,), (0,), (0,)))
    (done,) = b.wait()
    assert [gate.experts for gate in done.gates] == [(8 + 1,)]
    b.submit(Compute(3, Phase.JOB, 1, (0,), (9,), (1,)))
    assert b.wait() == [ComputeDone(3)]
    b.submit(Compute(4, Phase.HEAD, 2, (1, 0)))
    assert b.wait() == [ComputeDone(4)]
    assert routing.asked == [(0, (1, 0), 0), (0, (0,), 1)]


def test_each_entry_begins_a_step():
    model = tiny()
    routing = Table(model, [[[[0], [1]]]])
    b = SimBackend(model, device(model), routing, lambda _: 0, first_step=5)
    for batch in (1, 2):
        b.submit(Compute(batch, Phase.ENTRY, -1, (0,)))
        b.wait()
    assert routing.asked == [(5, (0,), 0), (6, (0,), 0)]


def test_contexts_are_asked_at_each_step():
    model = tiny()
    tokens = {0: 1000}
    b = SimBackend(model, device(model, token_s=1e-3), Table(model, [[[[0], [1]]]]), tokens.__getitem__)
    b.submit(Compute(1, Phase.ENTRY, -1, (0,)))
    b.wait()
    assert b.now() == pytest.approx(ENTRY_S + 1)
    tokens[0] = 3000  # a context grows between steps, not within one
    b.submit(Compute(2, Phase.JOB, 0, (0,), (0,), (0,)))
    b.wait()
    assert b.now() == pytest.approx(ENTRY_S + 1 + A + B + C + 1)
    b.submit(Compute(3, Phase.ENTRY, -1, (0,)))
    b.wait()
    assert b.now() == pytest.approx(2 * ENTRY_S + 1 + A + B + C + 1 + 3)


def test_waiting_for_nothing_is_a_deadlock():
    b, _ = backend()
    with pytest.raises(DeadlockError, match="nothing is in flight"):
        b.wait()
    b.submit(Fetch(1, 0, 0, D))
    b.wait()
    with pytest.raises(DeadlockError, match=r"at 3\.0"):
        b.wait()


def test_a_step_end_is_no_work():
    b, _ = backend()
    with pytest.raises(ProtocolError, match="StepEnd"):
        b.submit(StepEnd(0))


def test_idling_passes_time_and_reads_go_on():
    b, _ = backend()
    b.submit(Fetch(1, 0, 0, D))
    b.submit(Fetch(2, 1, 1, D))
    b.idle(4.0)
    assert b.now() == 4.0
    b.idle(3.0)
    assert b.now() == 4.0
    b.idle(20.0)
    assert b.now() == 20.0
    assert b.wait() == [FetchDone(1), FetchDone(2)]
    assert b.now() == 20.0


def test_the_gpu_slows_while_the_link_is_busy():
    b, _ = backend(gpu=GpuSharing(contention=2.0))
    b.submit(Fetch(1, 0, 0, D))  # 3 s
    b.submit(Compute(2, Phase.ENTRY, -1, (0,)))
    b.submit(Compute(3, Phase.JOB, 0, (0,), (0,), (0,)))
    # ENTRY is 2.5 s: 1.5 s of it are done in 3 s, then 1 s more; JOB starts at 4 s and runs alone.
    assert b.wait() == [FetchDone(1)]
    b.wait()
    assert b.now() == pytest.approx(3 + (ENTRY_S - 1.5))
    b.wait()
    assert b.now() == pytest.approx(3 + (ENTRY_S - 1.5) + A + B + C)
