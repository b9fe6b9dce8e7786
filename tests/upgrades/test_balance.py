"""Balanced streams of an earlier version: each goes to one owner, from where the last one was."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from redis.asyncio import Redis

from conquiet import AlreadyClaimedError, StreamBalancer
from tests.balance.crew import Member
from tests.rigs.waiting import eventually
from tests.upgrades.conftest import Home
from tests.upgrades.scenes.balance import KEYS, OWNED, SERVICE

pytestmark = pytest.mark.any_server

FREE = {"session:lost", "session:released", "session:new", "session:foreign"}
Joined = Callable[..., Awaitable[Member]]


@pytest.fixture
def room() -> str:
    return "balance"


@pytest.fixture
async def join(home: Home) -> AsyncIterator[Joined]:
    members: list[Member] = []

    async def joined(consumer: str = "pod-9", **options: Any) -> Member:
        given = {"service": SERVICE, "handle_signals": False, "sweep_interval": 0.2, "clock": home.clock}
        member = Member(StreamBalancer(home.url, consumer=consumer, **{**given, **options}))
        members.append(member)
        await member.balancer.open()
        member.listen()
        return member

    yield joined
    for member in members:
        await member.balancer.aclose()
        await member.ended()


async def test_what_nobody_owns_is_taken_at_once(home: Home, join: Joined) -> None:
    """And what an owner of that version may still be at work on is not."""
    home.clock.advance(16.0)  # consumers that are gone do not count any more
    member = await join(auto_claim=True)
    await member.owns(*FREE)
    with pytest.raises(AlreadyClaimedError, match="pod-1"):
        await member.balancer.claim("session:owned")


async def test_all_is_read_on_from_where_the_last_owner_was(home: Home, join: Joined) -> None:
    home.clock.advance(OWNED + 1)
    member = await join(auto_claim=True)
    await member.owns(*FREE, "session:owned")
    owned, epochs = member.balancer.owned, home.facts["epochs"]
    assert all(lease.epoch > max(epochs.values()) for lease in owned.values())
    assert owned["session:owned"].info == {"tenant": "a", "name": "session:owned"}
    assert owned["session:new"].info == {"tenant": "b"}
    assert owned["session:foreign"].info == {"n": 1}
    for name, ids in home.facts["ids"].items():
        lease = owned[name]
        assert [message.id for message in await lease.read()] == ids[2:]
        await lease.commit(ids[-1])
        await member.balancer.done_stream(name)
    assert member.owned == {"session:new", "session:foreign"}


async def test_what_was_finished_can_be_added_anew_and_what_was_not_cannot(home: Home, join: Joined) -> None:
    home.clock.advance(16.0)
    member = await join()
    await member.owns(*FREE)
    assert await member.balancer.add_stream("session:owned") == home.facts["entries"]["session:owned"]
    await member.balancer.add_stream("session:finished", {"again": True})
    await member.owns(*FREE, "session:finished")
    lease = member.balancer.owned["session:finished"]
    assert lease.info == {"again": True}
    assert lease.epoch > home.facts["epochs"]["session:finished"]


async def test_what_was_set_aside_is_still_there(home: Home, join: Joined) -> None:
    home.clock.advance(16.0)
    member = await join()
    await member.owns(*FREE)
    async with Redis.from_url(home.url) as client:
        rows: Any = await client.xrange(KEYS.bad)
    [(_, fields)] = rows
    assert b"no json" in fields[b"entry"]
    assert fields[b"reason"]


async def test_two_share_what_is_there(home: Home, join: Joined) -> None:
    home.clock.advance(OWNED + 1)
    one, other = await join("pod-8", max_streams=3), await join("pod-9", max_streams=3)
    everything = {*FREE, "session:owned"}
    await eventually(lambda: one.owned | other.owned == everything, "all to be owned")
    assert not one.owned & other.owned
