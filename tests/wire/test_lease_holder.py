"""What the holder of a lease may believe by its own clock."""

from __future__ import annotations

import pytest

from conquiet.errors import QueueError
from conquiet.wire.lease import Lease, renewal_timeout
from conquiet.wire.scripts import run
from tests.wire.desk import TTL, A, Desk, desk, lease

__all__ = ["desk"]

pytestmark = pytest.mark.guarantee


def test_the_holder_stops_before_the_lease_can_have_run_out() -> None:
    held = lease(asked=100.0)
    assert held.is_safe(108.9)
    assert not held.is_safe(109.1)


def test_a_renewal_counts_from_when_it_was_asked() -> None:
    held = lease(asked=100.0)
    held.renewed(1, asked=105.0)
    assert held.is_safe(113.9)
    assert not held.is_safe(114.1)


def test_an_older_answer_does_not_shorten_it() -> None:
    held = lease(asked=100.0)
    held.renewed(1, asked=90.0)
    assert held.is_safe(108.9)


@pytest.mark.parametrize("reply", [0, -1])
def test_a_refused_renewal_is_final(reply: int) -> None:
    held = lease()
    held.renewed(reply, asked=101.0)
    assert held.lost
    held.renewed(1, asked=102.0)
    assert not held.is_safe(102.0)


def test_an_error_tells_nothing_of_the_lease() -> None:
    held = lease(asked=100.0)
    held.renewed(QueueError("away"), asked=105.0)
    assert held.is_safe(108.9)
    assert not held.is_safe(109.1)


async def test_its_renewal_is_the_script(desk: Desk) -> None:
    _, epoch, *_ = await desk.acquire(A)
    held = Lease.acquired(desk.key, A, int(epoch), TTL / 1000, asked=0.0)
    before = await desk.now()
    assert await run(desk.link, desk.stream, held.renewal(60_000)) == 1
    assert int((await desk.fields())["until_ms"]) >= before + TTL + 60_000


@pytest.mark.parametrize("ttl", [0.6, 1.0, 2.0, 15.0, 60.0])
def test_two_renewals_can_fail_before_the_lease_is_given_up(ttl: float) -> None:
    beat, pause = ttl / 3, ttl / 12
    assert Lease.acquired("key", A, 1, ttl, 0.0).is_safe(beat + renewal_timeout(ttl) + pause + renewal_timeout(ttl))
