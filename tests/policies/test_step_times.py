"""StepTimes: estimates from made-up steps whose times are known."""

from __future__ import annotations

import pytest

from policies.schedule.step_times import StepTimes


def times(planes, steps, exact, busy=0.5):
    """Each way in turns at the given (fetches, experts)."""
    found = StepTimes(exact, [not one for one in exact])
    for fetches, experts in steps:
        for way, plane in enumerate(planes):
            seconds = plane(fetches, experts)
            found.add(way, seconds, busy * seconds, fetches, experts)
    return found.estimates()


def test_a_plane_is_found_where_the_late_steps_are():
    """Late steps are far from most: 3 of each of two ways, at 10 fetches and 400 experts."""
    steps = [(200, 300), (90, 500), (150, 350), (60, 450), (10, 400), (10, 400), (10, 400)]
    planes = [lambda f, e: 1 + 0.02 * f + 0.003 * e, lambda f, e: 2 + 0.01 * f + 0.002 * e]
    found = times(planes, steps, [True, True])
    assert [way.seconds for way in found] == pytest.approx([2.4, 2.9], rel=0.01)


def test_a_way_not_seen_of_late_looks_better_than_it_is_if_its_seconds_are_convex():
    """Seconds are the longer of computing and fetching; steps at 300 to 400 fetches, then the other way at 10."""
    found = StepTimes([True, False], [False, True])
    for step in range(8):
        fetches = 300 + 100 * (step // 2 % 2)
        found.add(step % 2, max(2.0, 0.01 * fetches), 1.0, fetches, 300)
    for _ in range(6):
        found.add(0, 2.5, 1.0, 10, 300)
    assert 0 < found.estimates()[1].seconds < 2.0


def test_a_way_not_seen_of_late_is_less_certain():
    found = StepTimes([False, False], [False, False])
    for step in range(30):
        for way in (0, 1) if step < 4 else (0,):
            found.add(way, 1.0 + 0.01 * (step % 3), 0.5, 100 + step % 5, 300)
    often, seldom = found.estimates()
    assert 0 < often.deviation < seldom.deviation < 0.1


def test_computing_alone_bounds_a_way_unless_its_batches_merge():
    """Half of each step is computing; with fewer experts it takes in proportion less; a bound by one step fades."""
    found = times([lambda f, e: 2.0, lambda f, e: 2.0], [(10, 400), (11, 400), (12, 400)], [True, False])
    assert found[0].floor_s == pytest.approx(1.0)
    assert found[1].floor_s == 0.0
    fewer = times([lambda f, e: 2.0] * 2, [(10, 400)] * 2 + [(10, 200)] * 3, [True, False])
    assert fewer[0].floor_s == pytest.approx(0.5)
    old = StepTimes([False, False], [False, True])
    for way in (0, *[1] * 200):
        old.add(way, 2.0, 1.0, 10, 400)
    assert old.estimates()[0].floor_s == 1.0
    assert old.estimates()[0].sure == pytest.approx(0.998**201)
    batching = StepTimes([True], [False])
    batching.add(0, 2.0, 1.0, 10, 400)
    assert batching.estimates()[0].floor_s == 0.0


def test_a_plane_drawn_far_ends_at_what_computing_takes():
    """Groups that computed for 4 s in their one step, at 200 fetches; others fall from 4 s to 1.5 s at 10."""
    found = StepTimes([False, False], [True, False])
    found.add(1, 4.0, 4.0, 200, 300)
    for fetches in (210, 150, 90, 50, 20, *[10] * 6):
        found.add(0, 1.4 + 0.0125 * fetches, 1.0, fetches, 300)
    few, groups = found.estimates()
    assert few.seconds == pytest.approx(1.525, rel=0.02)
    assert groups.sure * groups.floor_s <= groups.seconds <= 4.0
    assert groups.seconds > 3.9


def test_steps_that_something_held_up_do_not_count():
    """Ten steps of a second and five of three seconds, whatever their fetches."""
    found = StepTimes([False], [True])
    for step in range(15):
        found.add(0, 3.0 if step % 3 == 1 else 1.0 + 0.001 * step, 0.5, 100 + 5 * (step % 4), 300)
    assert found.estimates()[0].seconds == pytest.approx(1.0, rel=0.05)


def test_a_way_that_was_never_tried_has_no_estimate():
    found = StepTimes([True, False], [False, True])
    assert found.estimates() == [None, None]
    found.add(1, 2.0, 1.0, 10, 300)
    batching, bevy = found.estimates()
    assert batching is None
    assert bevy.seconds == pytest.approx(2.0)


def test_only_late_steps_are_kept():
    found = StepTimes([True], [False])
    for _ in range(500):
        found.add(0, 1.0, 0.5, 10, 300)
    assert found.counts == [40]
    assert found.estimates()[0].seconds == pytest.approx(1.0)


def test_a_way_whose_steps_all_had_other_numbers_of_fetches_is_not_near():
    found = StepTimes([True, False], [False, True])
    for way in (0, 1, *[0] * 6):
        found.add(way, 1.0, 0.5, 400 if way else 20, 300)
    assert [way.near for way in found.estimates()] == [True, False]
    found.add(1, 1.0, 0.5, 20, 300)
    assert found.estimates()[1].near
