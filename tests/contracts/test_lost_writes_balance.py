"""Whole streams on a server that lost its last writes: one owner each, the one that it records."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Final

import pytest

from conquiet.balance import StreamLease
from conquiet.balance.ledger import Given
from conquiet.errors import AlreadyClaimedError, ConfigError, StreamNotOwnedError
from conquiet.kit.clock import ManualClock
from tests.balance.crew import Crew, Handler, stuck
from tests.balance.test_fences import FAR, TTL, VERBS, Desk, finish
from tests.rigs.asking import ask
from tests.rigs.proxy import Proxy
from tests.rigs.rollback import Rollback
from tests.rigs.waiting import eventually

pytest_plugins = ("tests.contracts.rollback_fixtures",)
pytestmark = pytest.mark.guarantee

LEASE: Final = 15.0


@pytest.fixture
async def desk(rollback: Rollback, clock: ManualClock) -> AsyncIterator[Desk]:
    async with Desk(rollback.url, clock) as desk:
        yield desk


@pytest.fixture
async def crew(rollback: Rollback, clock: ManualClock) -> AsyncIterator[Crew]:
    crew = Crew(rollback.url, clock)
    yield crew
    await crew.aclose()


# --- the scripts ------------------------------------------------------------------------------------------------


async def is_refused_everything(desk: Desk, owner: str, given: Given) -> None:
    before = await desk.state()
    for verb in VERBS:
        with pytest.raises(StreamNotOwnedError):
            await verb(desk.of(owner), given)
        assert await desk.state() == before, verb.__name__


async def forgotten(desk: Desk, rollback: Rollback, owner: str) -> Given:
    """A stream that is this one's, as it was told; the server has the stream, and nobody for its owner."""
    ledger = desk.of(owner)
    await ledger.open()
    await ledger.renew([])
    await ledger.add("s", {"a": 1})
    await rollback.keep()
    [given] = (await ledger.take(1, 0, hungry=True)).given
    await ledger.move("s", given.epoch, "7-7")
    await rollback.lose()
    return given


@pytest.mark.parametrize("heir", ["bob#1", "ann#2", "ann#1"], ids=["another", "another life of it", "itself"])
async def test_of_two_claimants_only_the_recorded_one_is_accepted(desk: Desk, rollback: Rollback, heir: str) -> None:
    stale = await forgotten(desk, rollback, "ann#1")
    await is_refused_everything(desk, "ann#1", stale)
    [given] = (await desk.of(heir).take(1, 0, hungry=True)).given
    assert (given.stream, given.entry_id) == (stale.stream, stale.entry_id)
    assert given.epoch > stale.epoch
    await is_refused_everything(desk, "ann#1", stale)
    assert await desk.of(heir).position("s") == "0-0"
    await finish(desk.of(heir), given)


async def test_a_claim_that_was_forgotten_gives_way_to_the_next(desk: Desk, rollback: Rollback) -> None:
    first = await desk.given("ann#1")
    await desk.of("ann#1").release([("s", first.epoch)])
    await rollback.keep()
    stale = await desk.of("ann#1").claim("s")
    await rollback.lose()
    given = await desk.of("bob#1").claim("s")
    assert given.epoch > stale.epoch > first.epoch
    with pytest.raises(AlreadyClaimedError, match="bob#1"):
        await desk.of("ann#1").claim("s")
    await is_refused_everything(desk, "ann#1", stale)
    await finish(desk.of("bob#1"), given)


async def test_a_takeover_that_was_forgotten_leaves_the_owner_before_it(desk: Desk, rollback: Rollback) -> None:
    first = await desk.given("ann#1")
    await rollback.keep()
    desk.clock.advance(TTL + 20)
    [heirs] = (await desk.of("bob#1").sweep(1, 0, hungry=True)).given
    await rollback.lose()
    await is_refused_everything(desk, "bob#1", heirs)
    [third] = (await desk.of("cid#1").sweep(1, 0, hungry=True)).given
    assert third.epoch > heirs.epoch > first.epoch
    await is_refused_everything(desk, "ann#1", first)


async def test_where_an_epoch_comes_twice_the_incarnation_decides(desk: Desk, rollback: Rollback) -> None:
    """Writes lost and a clock that went back: the one case in which a number can be given a second time."""
    stale = await forgotten(desk, rollback, "ann#1")
    await ask(rollback.url, "SET", desk.keys.epochs, FAR)
    [given] = (await desk.of("ann#2").take(1, 0, hungry=True)).given
    assert given.epoch == FAR + 1
    await is_refused_everything(desk, "ann#1", Given("s", {}, given.epoch, stale.entry_id))
    await finish(desk.of("ann#2"), given)


# --- consumers --------------------------------------------------------------------------------------------------


async def test_an_owner_that_was_forgotten_gives_its_stream_up(
    crew: Crew, rollback: Rollback, clock: ManualClock
) -> None:
    """It is cut off while the server comes back and gives its stream to another; then it goes on, as it thinks."""
    await crew.add("s")
    await rollback.keep()
    zombies, heirs = Handler(), Handler()
    async with Proxy(rollback.url) as proxy:
        zombie = await crew.running("zombie", zombies, url=proxy.url)
        await zombie.owns("s")
        stale = zombie.balancer.owned["s"]
        proxy.shut()
        await rollback.lose()
        heir = await crew.running("heir", heirs)
        await heir.owns("s")
        assert heir.balancer.owned["s"].epoch > stale.epoch
        proxy.lead_to(rollback.url)
        proxy.reopen()
        with pytest.raises(StreamNotOwnedError):
            await zombie.balancer.done_stream("s")
        await zombie.owns()
        await eventually(lambda: zombies.ended == ["s"], "its handler is cancelled")
        await heir.owns("s")
        await heir.balancer.done_stream("s")
        assert await crew.size() == 0
        await crew.aclose()
    assert len(heirs.calls) == 1


async def test_an_owner_that_was_forgotten_takes_its_stream_anew_and_never_works_on_it_twice_at_once(
    crew: Crew, rollback: Rollback
) -> None:
    """The handler that is cancelled has ended before the next one begins."""
    running: list[int] = []
    most = 0

    async def work(stream: str, lease: StreamLease) -> None:
        nonlocal most
        running.append(lease.epoch)
        most = max(most, len(running))
        try:
            await stuck(stream, lease)
        finally:
            await asyncio.sleep(0.1)  # it takes its time
            running.remove(lease.epoch)

    await crew.add("s")
    await rollback.keep()
    handler = Handler(work)
    member = await crew.running("a", handler)
    await member.owns("s")
    await rollback.lose()
    await eventually(lambda: len(handler.calls) == 2, "it is given the stream anew")
    assert handler.calls[1][1] > handler.calls[0][1]
    await member.owns("s")
    assert most == 1


async def test_a_stream_that_was_done_comes_back(crew: Crew, rollback: Rollback) -> None:
    """It is whoever's it was then: that one is given it anew, or another when the lease ends."""
    await crew.add("s")
    member = await crew.join("a", auto_claim=True)
    await member.owns("s")
    await rollback.keep()
    await member.balancer.done_stream("s")
    await rollback.lose()
    assert await crew.size() == 1
    await crew.lag_behind(2 * LEASE)
    await eventually(lambda: len(member.added) > 1 and member.owned == {"s"}, "it is there again")
    await member.balancer.done_stream("s")
    assert await crew.size() == 0


async def test_a_release_that_was_forgotten_lasts_for_a_lease_at_most(crew: Crew, rollback: Rollback) -> None:
    """Until then nobody has it; then one has: who gave it back, if it has noticed, or another."""
    await crew.add("s")
    member = await crew.join("a")
    await member.owns("s")
    await rollback.keep()
    await member.balancer.release_stream("s")
    await rollback.lose()
    heir = await crew.join("b", auto_claim=True)
    await crew.lag_behind(2 * LEASE)
    await eventually(lambda: len(member.balancer.owned) + len(heir.balancer.owned) == 1, "somebody owns it")
    owner = member if member.owned else heir
    await owner.balancer.done_stream("s")


async def test_a_stream_that_was_handed_in_and_forgotten_can_be_handed_in_again(
    crew: Crew, rollback: Rollback, clock: ManualClock
) -> None:
    """Nobody can claim what the server does not know, and whoever had it gives it up."""
    member = await crew.join("a")
    await rollback.keep()
    await crew.add("s")
    await member.owns("s")
    await rollback.lose()
    with pytest.raises(ConfigError, match="no unfinished stream 's'"):
        await member.balancer.claim("s")
    clock.advance(LEASE / 3)
    await eventually(lambda: member.lost == ["s"], "it is told")
    await crew.add("s")
    await member.owns("s")


async def test_a_service_that_was_forgotten_begins_anew(crew: Crew, rollback: Rollback, clock: ManualClock) -> None:
    """Its group too: consumers that are there make it again."""
    await rollback.keep()
    member = await crew.join("a")
    await crew.add("s")
    await member.owns("s")
    await rollback.lose()
    clock.advance(LEASE / 3)
    await eventually(lambda: member.lost == ["s"], "it is told")
    await crew.add("t")
    await member.owns("t")
