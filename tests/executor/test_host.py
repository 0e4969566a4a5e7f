"""Questions to the kernel: device bytes, page cache, clocks."""

import os

import pytest

pytest.importorskip("torch")

from executor import host
from executor.link_curve import check_rate, measure_point, pcie_bytes_per_s
from executor.machine import OwnClock, set_threads
from policies.core.types import UserError


def meter(asked, device):
    counts = iter([0, device])
    found = host.IoMeter(counter=lambda: next(counts))
    found.begin(100)
    found.end(100 + asked)
    return found


@pytest.mark.parametrize(
    ("asked", "device", "valid"),
    [
        (10**10, 10**10, True),
        (10**10, 985 * 10**7, True),
        (10**10, 1021 * 10**7, False),
        (1000, 900, False),
        (1000, 10**7, True),
    ],
)
def test_a_run_is_valid_if_the_device_gave_what_was_asked_for(asked, device, valid):
    reasons = host.why_invalid(meter(asked, device), direct=True)
    assert (not reasons) == valid
    if reasons:
        assert "1.021" in reasons[0] or "0.900" in reasons[0]


def test_page_cache_unknown_counters_and_no_reads():
    assert "page cache" in host.why_invalid(meter(1000, 1000), direct=False)[0]
    assert "does not tell" in host.why_invalid(meter(1000, None), direct=True)[0]
    assert host.why_invalid(meter(0, 5), direct=True) == []


def test_the_meter_adds_intervals_and_leaves_out_what_lies_between():
    counts = iter([10, 30, 100, 150])
    found = host.IoMeter(counter=lambda: next(counts))
    found.begin(0)
    found.end(20)
    found.begin(50)
    found.end(100)
    assert (found.asked_bytes, found.device_bytes, found.ratio) == (70, 70, 1.0)


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="needs a way to drop pages")
def test_a_file_just_read_is_in_the_page_cache(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"x" * (1 << 20))
    path.read_bytes()
    share = host.cached_share(path)
    if share is None:
        pytest.skip("this kernel does not tell")
    assert share == 1.0


def test_clocks_are_summed_up_and_a_moving_one_is_reported():
    clocks = host.Clocks("cpu", [1000.0, 1100.0])
    assert clocks.describe() == {"min_mhz": 1000.0, "mean_mhz": 1050.0, "max_mhz": 1100.0, "samples": 2}
    assert "1000 to 1100 MHz" in clocks.warnings()[0]
    assert host.Clocks("cpu").describe() is None
    assert host.Clocks("cpu", [1000.0, 1010.0]).warnings() == []


class FakeBackend:
    """Time as the test sets it."""

    def __init__(self):
        self.time = 5.0
        self.until = None

    def now(self):
        return self.time

    def idle(self, until_s):
        self.until = until_s


def test_a_clock_stands_while_others_have_their_turn():
    inner = FakeBackend()
    clock = OwnClock(inner)
    inner.time = 7.0
    clock.resume()
    assert clock.now() == 5.0
    inner.time = 8.0
    assert clock.now() == 6.0
    clock.pause()
    inner.time = 20.0
    clock.resume()
    assert clock.now() == 6.0
    clock.idle(7.0)
    assert inner.until == 21.0


def test_threads_are_chosen_or_as_asked():
    assert set_threads(1) == 1
    assert set_threads(None) >= 1
    set_threads(1)


def test_reads_are_timed_by_size_and_readers(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(os.urandom(1 << 18))
    point = measure_point(path, 4096, 2, 0.02, direct=False, seed=1)
    assert (point.size_bytes, point.readers) == (4096, 2)
    assert point.reads >= 2
    assert 0 < point.read_s_p50 <= point.read_s_p99
    assert point.bytes_per_s > 0
    path.unlink()
    pcie_bytes_per_s(path)


def test_a_rate_above_a_physical_limit_is_refused():
    check_rate("reading", 3e9, [("the link", 3.94e9), ("memory", None)])
    with pytest.raises(UserError, match=r"44\.70 GB/s, above the link of 3\.94 GB/s"):
        check_rate("reading", 44.7e9, [("memory", None), ("the link", 3.94e9)])
