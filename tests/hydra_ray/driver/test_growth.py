"""Each `scale` has its own time; what a failure or a standby lacks has none."""

from hydra_ray.driver.growth import Arrivals, Growth
from hydra_ray.driver.requests import Wishes


def fallback(growth, target, operation, num_members, now_s):
    wishes = Wishes(target_units=target, operation=operation)
    return growth.fallback(wishes, num_members=num_members, now_s=now_s, patience_s=120)


def test_a_newer_request_has_its_full_time_and_falls_back_to_what_was_met():
    growth = Growth(4, 0)
    assert fallback(growth, 5, 1, 4, 0) is None
    assert fallback(growth, 6, 2, 4, 100) is None
    assert fallback(growth, 6, 2, 4, 121) is None
    assert fallback(growth, 6, 2, 3, 221) == 4  # a member died meanwhile: still 4 are wanted
    assert fallback(growth, 4, 2, 3, 1000) is None


def test_a_request_once_met_is_never_withdrawn():
    growth = Growth(4, 0)
    assert fallback(growth, 6, 1, 4, 0) is None
    assert fallback(growth, 6, 1, 6, 60) is None
    assert fallback(growth, 6, 1, 3, 1000) is None  # a node was away for long
    assert fallback(growth, 8, 2, 5, 1001) is None
    assert fallback(growth, 8, 2, 5, 1122) == 6


def test_what_the_run_starts_with_is_never_withdrawn():
    growth = Growth(4, 0)
    assert fallback(growth, 4, 0, 0, 0) is None
    assert fallback(growth, 6, 1, 0, 10) is None
    assert fallback(growth, 6, 1, 3, 500) is None


def test_a_smaller_target_is_met_at_once():
    growth = Growth(4, 0)
    assert fallback(growth, 2, 1, 4, 0) is None
    assert fallback(growth, 5, 2, 2, 1) is None
    assert fallback(growth, 5, 2, 2, 122) == 2


def test_replacements_are_waited_for_as_long_as_they_come():
    arrivals = Arrivals()
    for now_s, ready in ((0, (0, 1)), (8, (0, 1, 4))):
        arrivals.see(ready, now_s=now_s)
        assert not arrivals.have_ended(now_s=now_s)
    arrivals.see((0, 1, 4), now_s=17)
    assert not arrivals.have_ended(now_s=17)
    assert arrivals.have_ended(now_s=18)


def test_no_request_is_open_once_it_is_met_and_until_the_next_one_is_seen():
    growth = Growth(4, 0)
    assert growth.is_settled(0)
    assert not growth.is_settled(1)  # asked for since the last look
    assert fallback(growth, 6, 1, 4, 0) is None
    assert not growth.is_settled(1)
    assert fallback(growth, 6, 1, 6, 60) is None
    assert growth.is_settled(1)
