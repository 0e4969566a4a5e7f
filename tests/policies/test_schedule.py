"""Partitions, batchings and orders: tables of what goes in and what comes out."""

import pytest

from policies.core.progress import Job
from policies.core.types import UserError
from policies.schedule import (
    Alone,
    Fifo,
    GlobalSrtf,
    LowestLayerFirst,
    LowestLayerThenSrtf,
    OneUnit,
    PerRequest,
    SameLayer,
    Sizes,
)


@pytest.mark.parametrize(
    ("partition", "requests", "units"),
    [
        (PerRequest(), (7, 3, 5), [(7,), (3,), (5,)]),
        (PerRequest(), (), []),
        (OneUnit(), (7, 3, 5), [(7, 3, 5)]),
        (OneUnit(), (), []),
        (Sizes([2, 1]), (7, 3, 5), [(7, 3), (5,)]),
        (Sizes([1, 2]), (7, 3, 5), [(7,), (3, 5)]),
        (Sizes([2, 2, 2]), (7, 3, 5), [(7, 3), (5,)]),  # the last requests have left
        (Sizes([4, 4]), (), []),
    ],
)
def test_units(partition, requests, units):
    assert list(partition.units(requests)) == units


def test_more_requests_than_the_sizes_hold_are_refused():
    with pytest.raises(UserError, match=r"\[3, 3\] hold 6 requests but a step has 7"):
        Sizes([3, 3]).units(tuple(range(7)))


@pytest.mark.parametrize("sizes", [[], [3, 0], [-1], [2.5], [True], ["3"]])
def test_sizes_are_whole_numbers(sizes):
    with pytest.raises(UserError, match="at least 1"):
        Sizes(sizes)


def job(id, layer, missing=0, ready_seq=-1):
    return Job(id, unit=id, requests=(id,), layer=layer, needs=(), missing=missing, ready_seq=ready_seq)


def test_groups():
    ready = [job(1, layer=4), job(2, layer=3), job(5, layer=4), job(6, layer=4)]
    assert [j.id for j in SameLayer().group(ready[2], ready)] == [1, 5, 6]
    assert [j.id for j in SameLayer().group(ready[1], ready)] == [2]
    assert [j.id for j in Alone().group(ready[2], ready)] == [5]


@pytest.mark.parametrize(
    ("order", "ids"),
    [
        (LowestLayerFirst(), [3, 4, 1, 2]),
        (Fifo(), [2, 4, 1, 3]),
        (Fifo(by="issue"), [1, 2, 3, 4]),
        (LowestLayerThenSrtf(), [4, 3, 1, 2]),
        (GlobalSrtf(), [1, 2, 4, 3]),
    ],
)
def test_orders(order, ids):
    """Ties go to the older job, which is the core's rule."""
    jobs = [
        job(1, layer=5, missing=1, ready_seq=30),
        job(2, layer=9, missing=1, ready_seq=10),
        job(3, layer=2, missing=4, ready_seq=40),
        job(4, layer=2, missing=3, ready_seq=20),
    ]
    assert [j.id for j in sorted(jobs, key=lambda j: (order.key(j), j.id))] == ids


def test_fifo_knows_two_ages():
    with pytest.raises(UserError, match="ready, issue"):
        Fifo(by="layer")
