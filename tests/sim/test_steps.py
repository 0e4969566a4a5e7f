"""Whole steps through the real core, against step times worked out by hand."""

import random

import pytest
from sim_world import SHARE, A, B, C, K, device, play, tiny, union_s

from conf.sharing import DriverSharing, FairShare, GpuSharing, fixed_slots, one_at_a_time
from policies.core.messages import Fetch
from policies.core.types import Phase

FETCH = 3.0  # seconds: 3 MB at 1 MB/s
ENTRY, LAST = A * SHARE, A * (1 - SHARE)  # fixed parts


def warm(table, steps=2):
    """The same routing again: the second step finds every expert in a cache that holds all."""
    return table * steps


def spans(tape):
    """Length of every step."""
    return [b - a for a, b in zip([0.0, *tape.ends], tape.ends, strict=False)]


def test_one_request_without_misses():
    layers = 5
    model = tiny(layers, top_k=2)
    tape, _ = play(model, device(model), [[[[0, 1]] * layers]], 1, steps=2)
    assert spans(tape)[1] == pytest.approx(layers * (A + 2 * B + C) + K)


@pytest.mark.parametrize("kind", ["bevy", "batch"])
def test_one_request_with_misses(kind):
    """Nothing overlaps in a chain: each layer waits for its experts."""
    layers = 4
    model = tiny(layers, top_k=2)
    tape, backend = play(model, device(model), [[[[0, 1]] * layers]], 1, kind=kind)
    assert spans(tape) == pytest.approx([layers * (A + 2 * B + C) + K + layers * 2 * FETCH])
    assert backend.link.bytes_landed == layers * 2 * model.expert_bytes


@pytest.mark.parametrize(
    ("link", "pair_s"),
    [
        (FairShare(1e6, 8), 6.0),
        (FairShare(1e6, 8, per_reader_bytes_per_s=0.25e6), 12.0),
        (FairShare(1e6, 8, latency_s=0.5), 6.5),
        (one_at_a_time(1e6, latency_s=0.5), 7.0),
        (fixed_slots(1e6, 8), 24.0),
    ],
)
def test_the_sharing_model_shows_in_a_step(link, pair_s):
    layers = 3
    model = tiny(layers, top_k=2)
    tape, _ = play(model, device(model, link=link), [[[[0, 1]] * layers]], 1)
    assert spans(tape) == pytest.approx([layers * (A + 2 * B + C + pair_s) + K])


def test_two_requests_with_an_expert_each():
    """Two layers, requests 0 and 1, experts 0 and 1 of each layer missing; fair sharing.

    ENTRY for two ends at 2 + 1 = 3.  Both fetches run together and land at 9: one group of two.
    JOB 0 (a + 2 b + 2 c = 8) ends at 17.  Layer 1 likewise: fetched at 23; the last job (3 + 2) ends at 28; head 35.
    """
    model = tiny(2)
    tape, _ = play(model, device(model), [[[[0], [0]], [[1], [1]]]], 2)
    assert tape.ends == pytest.approx([35.0])
    assert [(c.layer, c.requests) for c, _, _ in tape.computes] == [(-1, (0, 1)), (0, (0, 1)), (1, (0, 1)), (2, (0, 1))]


def test_two_requests_run_ahead_on_a_serial_link():
    """The same, one read at a time: the groups split and the link works under the compute.

    ENTRY ends at 3; expert 0 lands at 6, expert 1 at 9.  JOB 0 of request 0 runs 6 to 12.5 (a + b + c = 6.5), that of
    request 1 12.5 to 19.  Request 0's next expert is read 12.5 to 15.5, request 1's 19 to 22.  At 19 request 0 is
    ready: its last job (3 + 1 = 4) runs to 23, that of request 1 to 27; head 34.
    """
    model = tiny(2)
    tape, _ = play(model, device(model, link=one_at_a_time(1e6)), [[[[0], [0]], [[1], [1]]]], 2)
    assert tape.ends == pytest.approx([34.0])
    assert [start for _, start, _ in tape.computes] == pytest.approx([0, 6, 12.5, 19, 23, 27])
    assert [end for _, _, end in tape.computes] == pytest.approx([3, 12.5, 19, 23, 27, 34])


def test_conventional_batching_waits_for_the_union():
    """Both experts at 9, one job of two a layer: the same as the lucky group above, on any link of that rate."""
    model = tiny(2)
    for link in (FairShare(1e6, 8), one_at_a_time(1e6)):
        tape, _ = play(model, device(model, link=link), [[[[0], [0]], [[1], [1]]]], 2, kind="batch")
        assert tape.ends == pytest.approx([35.0])


def test_a_shared_expert_is_read_once():
    model = tiny(2)
    tape, backend = play(model, device(model), [[[[0], [0]], [[0], [0]]]], 2)
    assert backend.link.bytes_landed == 2 * model.expert_bytes
    assert tape.ends == pytest.approx([ENTRY + 2 * C + FETCH + A + B + 2 * C + FETCH + LAST + B + K])


def test_a_link_bound_step_lasts_as_long_as_its_reads():
    """Reads of 300 s against jobs of seconds: the step is its reads, and compute at both ends."""
    layers, n = 6, 4
    model = tiny(layers, n_experts=8)
    dev = device(model, link=FairShare(1e4, 8))
    tape, backend = play(model, dev, [[[[r]] * layers for r in range(n)]], n)
    reads = layers * n * 300.0
    assert backend.link.bytes_landed == layers * n * model.expert_bytes
    assert reads <= tape.ends[0] <= reads + layers * (A + n * (B + C)) + K


def test_a_compute_bound_step_lasts_as_long_as_its_jobs():
    """Reads of 3 ms: requests stay together, and each layer waits for its four reads."""
    layers, n = 6, 4
    model = tiny(layers, n_experts=8)
    tape, _ = play(model, device(model, link=FairShare(1e9, 8)), [[[[r]] * layers for r in range(n)]], n)
    assert tape.ends == pytest.approx([layers * (A + n * (B + C)) + K + layers * n * 0.003])


def test_two_in_flight_hide_the_host():
    """Two singles of three layers, all resident, launch 1 s.

    One in flight pays 1 s a batch: ENTRY, 6 jobs, HEAD.  With two in flight the launch of one runs under the work of
    the other; only ENTRY, the first job and HEAD have nobody to hide behind.
    """
    layers = 3
    model = tiny(layers)
    table = warm([[[[0]] * layers, [[1]] * layers]])
    work = ENTRY + 2 * C + 2 * (2 * (A + B + C) + LAST + B) + K
    for slots, exposed in ((1, 8), (2, 3)):
        dev = device(model, gpu=GpuSharing(host_s=1.0))
        tape, _ = play(model, dev, table, 2, kind=[1, 1], steps=2, compute_slots=slots)
        assert spans(tape)[1] == pytest.approx(work + exposed * 1.0)


def test_a_chain_pays_its_driver_for_every_completion():
    layers, n = 4, 3
    model = tiny(layers, top_k=2)
    dev = device(model, driver=DriverSharing(batch_s=10.0, request_s=1.0, fetch_s=0.25))
    tape, _ = play(model, dev, [[[[0, 1]] * layers] * n], n, kind="batch")
    compute = layers * (A + 2 * B + n * C) + K
    driver = (layers + 2) * (10.0 + n * 1.0) + layers * 2 * 0.25
    assert spans(tape) == pytest.approx([compute + layers * 2 * FETCH + driver])


def test_jobs_that_run_together_cost_the_driver_more_than_one_job_of_as_many_requests():
    """All resident in the second step: ENTRY makes the jobs, each layer's batch ends as many, HEAD none."""
    layers, n = 3, 4
    model = tiny(layers, top_k=2)
    dev = device(model, driver=DriverSharing(batch_s=10.0, job_s=2.0, request_s=1.0))
    compute = layers * (A + 2 * B + n * C) + K
    for kind, jobs in (("batch", 1), ("bevy", n)):
        tape, _ = play(model, dev, warm([[[[0, 1]] * layers] * n]), n, kind=kind, steps=2)
        driver = (layers + 2) * (10.0 + n * 1.0) + (layers + 1) * jobs * 2.0
        assert spans(tape)[1] == pytest.approx(compute + driver)


def test_what_completes_while_the_driver_is_busy_waits_for_its_turn():
    """Two requests, a read at a time, a completed batch costs 1 s and a read 2 s.

    ENTRY ends at 3 and is taken up by 4; the reads land at 7 and 10.  The first is taken up by 9, and request 0 runs
    9 to 15.5; the second by 12.  Request 1 runs 16.5 to 23 beside the read of 16.5 to 19.5, taken up by 21.5.  Request
    0's last job runs 24 to 28, but from 27 to 29 the driver is busy with request 1's last read: its end is taken up by
    30, request 1 runs 30 to 34 and the head 35 to 42.
    """
    model = tiny(2)
    dev = device(model, link=one_at_a_time(1e6), driver=DriverSharing(batch_s=1.0, fetch_s=2.0))
    tape, _ = play(model, dev, [[[[0], [0]], [[1], [1]]]], 2)
    assert [start for _, start, _ in tape.computes] == pytest.approx([0, 9, 16.5, 24, 30, 35])
    assert [end for _, _, end in tape.computes] == pytest.approx([4, 16.5, 24, 30, 35, 43])
    assert [end for _, _, end in tape.fetches] == pytest.approx([9, 12, 21.5, 29])
    assert tape.ends == pytest.approx([43.0])


def test_two_streams_shorten_the_work():
    layers = 3
    model = tiny(layers)
    table = warm([[[[0]] * layers, [[1]] * layers]])
    dev = device(model, gpu=GpuSharing(streams=2, overlap_speedup=1.25))
    tape, _ = play(model, dev, table, 2, kind=[1, 1], steps=2, compute_slots=2)
    # Both requests run side by side through equal jobs: the jobs' work at 1.25 a second, ENTRY and HEAD alone.
    jobs = 2 * (2 * (A + B + C) + LAST + B)
    assert spans(tape)[1] == pytest.approx(ENTRY + 2 * C + jobs / 1.25 + K)


def test_contention_stretches_compute_by_the_time_of_overlap():
    """GPU time x (1 - 1/f) lost while both are busy: work = alone + overlapped / f."""
    rng = random.Random(3)
    layers, n, factor = 8, 4, 1.5
    model = tiny(layers, n_experts=16, top_k=2)
    table = [[[rng.sample(range(16), 2) for _ in range(layers)] for _ in range(n)] for _ in range(4)]
    dev = device(model, gpu=GpuSharing(contention=factor))
    tape, _ = play(model, dev, table, n, capacity=40, steps=4)
    compute = [(start, end) for _, start, end in tape.computes]
    reads = [(start, end) for _, start, end in tape.fetches]
    busy, linked = union_s(compute), union_s(reads)
    both = busy + linked - union_s(compute + reads)
    work = sum(
        dev.times.seconds(c.phase, c.layer, len(c.requests), len(c.experts), len(c.requests) * C)
        for c, _, _ in tape.computes
    )
    assert both > 0
    assert busy - both + both / factor == pytest.approx(work)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("kind", ["bevy", "batch", [2, 2]])
def test_conservation(seed, kind):
    """Bytes = reads x size; the link never beats its rate; compute is the sum of its jobs, one after the other."""
    rng = random.Random(seed)
    layers, n = 6, 4
    model = tiny(layers, n_experts=16, top_k=2)
    table = [[[rng.sample(range(16), 2) for _ in range(layers)] for _ in range(n)] for _ in range(5)]
    link = rng.choice([FairShare(1e6, 8), FairShare(2e6, 4, 1e6, 0.1), one_at_a_time(3e6, 0.2), fixed_slots(4e6, 8)])
    dev = device(model, link=link)
    tape, backend = play(model, dev, table, n, capacity=24 + seed, kind=kind, steps=5)

    assert backend.link.bytes_landed == len(tape.fetches) * model.expert_bytes
    assert all(isinstance(command, Fetch) for command, _, _ in tape.fetches)
    linked = union_s([(start, end) for _, start, end in tape.fetches])
    assert linked * link.bytes_per_s >= backend.link.bytes_landed * (1 - 1e-9)

    work = sum(
        dev.times.seconds(c.phase, c.layer, len(c.requests), len(c.experts), len(c.requests) * C)
        for c, _, _ in tape.computes
    )
    assert union_s([(start, end) for _, start, end in tape.computes]) == pytest.approx(work)
    assert sum(end - start for _, start, end in tape.computes) == pytest.approx(work)
    assert sum(c.phase is Phase.HEAD for c, _, _ in tape.computes) == 5


def test_equal_runs_give_equal_times():
    rng = random.Random(1)
    model = tiny(6, n_experts=16, top_k=2)
    table = [[[rng.sample(range(16), 2) for _ in range(6)] for _ in range(4)] for _ in range(3)]
    tapes = [play(model, device(model), table, 4, capacity=30, steps=3)[0] for _ in range(2)]
    assert tapes[0].computes == tapes[1].computes
    assert tapes[0].fetches == tapes[1].fetches
