"""From where on claims look: from the beginning, unless that has become dear."""

from __future__ import annotations

import pytest

from conquiet.jobs.stores.postgres.looking import Looks, Place

pytestmark = pytest.mark.slow

LAST = Place(-5, 1_000, 7)


@pytest.fixture(autouse=True)
def looks_cost_little() -> None:
    """Here they cost what the test says."""


def known(took_ms: float, jobs: int = 0, times: int = 2) -> Looks:
    """After so many looks from the beginning, the last of them at second 100."""
    looks = Looks()
    looks.found(LAST, False, 0)
    for _ in range(times):
        looks.looked(100.0, took_ms, jobs)
    return looks


def test_what_costs_little_is_done_from_the_beginning_each_time() -> None:
    assert known(20.0).begin(100.0) is None
    assert known(200.0, jobs=1000).begin(100.0) is None, "for so many that is not much"


def test_one_dear_look_may_be_an_accident() -> None:
    assert known(34.0, times=1).begin(100.0) is None
    looks = known(34.0, times=1)
    looks.looked(100.0, 3.0, 0)
    looks.looked(100.0, 34.0, 0)
    assert looks.begin(100.0) is None


def test_after_two_dear_looks_the_next_come_ten_times_as_late() -> None:
    looks = known(40.0)
    assert looks.begin(100.0) == LAST
    assert looks.begin(100.39) == LAST
    assert looks.begin(100.41) is None
    assert 0.39 < looks.left(100.0) < 0.41
    assert looks.left(200.0) == 0.0
    looks.looked(100.41, 40.0, 0)
    assert looks.begin(100.8) == LAST, "it is still dear"
    looks.looked(101.0, 4.0, 0)
    assert looks.begin(101.0) is None, "not any more"


def test_who_has_claimed_nothing_yet_looks_from_the_beginning() -> None:
    looks = Looks()
    looks.looked(0.0, 500.0, 0)
    looks.looked(0.0, 500.0, 0)
    assert looks.begin(0.0) is None


def test_a_look_goes_on_where_the_last_one_stopped() -> None:
    looks = known(40.0)
    looks.found(Place(-5, 1_100, 9), False, 50_000)
    assert looks.begin(100.0) == Place(-5, 1_100, 9)
    looks.found(None, False, 50_000)
    assert looks.begin(100.0) == Place(-5, 1_100, 9)


def test_where_nothing_was_left_it_goes_on_with_what_is_new() -> None:
    """With a second for those who were on their way."""
    looks = known(40.0)
    looks.found(None, True, 50_000)
    assert looks.begin(100.0) == Place(-5, 49_000, 0)
    looks.found(Place(-5, 49_500, 3), True, 50_000)
    assert looks.begin(100.0) == Place(-5, 49_500, 3), "and never back"
