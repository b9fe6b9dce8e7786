"""The group that comes with a lease: made, found lost, deleted and made anew."""

from __future__ import annotations

import pytest

from conquiet.errors import QueueError
from tests.wire.desk import A, B, Desk, desk

__all__ = ["desk"]

pytestmark = pytest.mark.guarantee


async def test_the_group_is_made_where_there_is_none(desk: Desk) -> None:
    await desk.call("XADD", desk.stream, "7-1", "payload", "1")
    assert (await desk.acquire(A))[-1] == b"0-0"
    [group] = await desk.call("XINFO", "GROUPS", desk.stream)
    assert group[1] == b"billing"


async def test_a_group_that_was_there_and_is_gone_is_not_made_anew(desk: Desk) -> None:
    await desk.call("XADD", desk.stream, "7-1", "payload", "1")
    await desk.call("HSET", desk.key, "epoch", 1)
    assert await desk.acquire(A, known="1") == [b"NOGROUP"]
    assert await desk.fields() == {"epoch": "1"}


@pytest.mark.parametrize(("lost", "start"), [("0-0", b"0-0"), ("$", b"7-1"), ("resume", b"6-3")])
async def test_unless_the_caller_says_where_it_goes_on(desk: Desk, lost: str, start: bytes) -> None:
    await desk.call("XADD", desk.stream, "7-1", "payload", "1")
    await desk.call("HSET", desk.key, "resume", "6-3", "epoch", 1)
    assert (await desk.acquire(A, known="1", lost=lost))[-1] == start


async def test_after_a_flush_a_known_group_begins_at_the_beginning(desk: Desk) -> None:
    assert (await desk.acquire(A, known="1"))[-1] == b"0-0"


async def test_who_joined_before_a_group_was_deleted_is_refused(desk: Desk) -> None:
    await desk.acquire(A)
    joined = await desk.now()
    await desk.delete_group()
    assert await desk.acquire(A, since=joined) == [b"DELETED"]
    assert await desk.acquire(B, since=joined) == [b"DELETED"]
    assert (await desk.fields()).keys() == {"epoch", "deleted_ms"}


async def test_who_joined_after_it_was_deleted_makes_it_anew(desk: Desk) -> None:
    await desk.acquire(A)
    await desk.delete_group()
    desk.later += 1
    assert (await desk.acquire(B, since=await desk.now() + 1))[0] == b"OK"
    assert "deleted_ms" not in await desk.fields()


async def test_deleting_a_group_fences_its_owner_off(desk: Desk) -> None:
    epoch = await desk.hold(A)
    await desk.delete_group()
    assert await desk.renew(A, epoch) == 0
    assert await desk.release(A, epoch) == 0
    assert await desk.suspect(A, epoch, "5-1") == 0


async def test_something_else_under_the_partitions_key_leaves_no_lease_behind(desk: Desk) -> None:
    await desk.call("SET", desk.stream, "hello")
    with pytest.raises(QueueError, match="WRONGTYPE"):
        await desk.acquire(A)
    assert await desk.fields() == {}
