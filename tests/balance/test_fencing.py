"""An owner that cannot renew stops before another can begin, and one that works on is kept."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from conquiet import EmbeddedRedis
from conquiet.balance import StreamAdded, StreamDisowned, StreamLease
from conquiet.errors import StreamNotOwnedError
from conquiet.kit.clock import SYSTEM_CLOCK, ManualClock
from conquiet.wire.scripts import Script
from tests.balance.crew import Crew, Handler, Member, stuck
from tests.conftest import Rung
from tests.rigs.clocks import WatchedClock
from tests.rigs.proxy import Proxy
from tests.rigs.servers import on_a_port
from tests.rigs.waiting import LONG, eventually

pytestmark = [pytest.mark.guarantee, pytest.mark.slow]

RENEW = Script.named("balance_renew").sha.encode()
TTL = 15.0
FAR = 6000.0
"""Seconds of a lease beside which the time that a test takes is nothing."""


async def owner_of(crew: Crew, consumer: str = "owner", **options: Any) -> Member:
    member = await crew.join(consumer, **options)
    await member.balancer.add_stream("s", {"a": 1})
    await member.owns("s")
    return member


async def test_who_cannot_renew_gives_up_before_the_servers_time_is_up(crew: Crew, proxy: Proxy) -> None:
    """Its own clock says when, and the server still refuses everybody else at that moment."""
    mine = WatchedClock()
    owner = await owner_of(crew, url=proxy.url, clock=mine)
    lease = owner.balancer.owned["s"]
    hold = proxy.hold(RENEW)
    before = mine.waits
    mine.advance(TTL * 0.85)
    await mine.waited_again(before + 2)  # those who look whether its time is up have looked
    assert (lease.owned, owner.lost) == (True, [])
    mine.advance(TTL * 0.06)
    await eventually(lambda: owner.lost == ["s"], "the owner to give up")
    assert not lease.owned
    assert owner.owned == set()
    [event] = owner.told(StreamDisowned)
    assert (event.info, event.epoch) == ({"a": 1}, lease.epoch)
    assert "in time" in event.reason
    hold.release()


async def test_nobody_else_can_own_it_as_long_as_its_owner_believes_to(crew: Crew, proxy: Proxy) -> None:
    owner = await owner_of(crew, url=proxy.url)
    lease = owner.balancer.owned["s"]
    proxy.hold(RENEW)
    heir = await crew.join("heir", auto_claim=True)
    overlaps = 0
    for _ in range(20):
        await crew.tick(1)
        overlaps += bool(lease.owned and heir.owned)
    await heir.owns("s")
    assert overlaps == 0
    assert not lease.owned
    assert owner.lost == ["s"]
    assert heir.balancer.owned["s"].epoch > lease.epoch


@pytest.mark.any_server
@pytest.mark.guarantee
async def test_a_renewal_counts_from_when_it_was_asked_for(crew: Crew, proxy: Proxy) -> None:
    """However late its answer is: the server's lease began before the answer."""
    mine = ManualClock()
    owner = await owner_of(crew, url=proxy.url, clock=mine, lease_ttl=FAR)
    lease = owner.balancer.owned["s"]
    slow = proxy.hold(RENEW)
    mine.advance(FAR / 3)
    await asyncio.wait_for(slow.caught.wait(), LONG)
    mine.advance(FAR / 2)
    renewals = owner.balancer._consumer.streams.renewals
    proxy.refuse(RENEW, b"-LOADING Redis is loading the dataset in memory\r\n", times=1000)
    slow.release()
    await eventually(lambda: owner.balancer._consumer.streams.renewals > renewals, "the late answer")
    owned = [lease.owned]
    for share in (0.3, 0.15):
        mine.advance(FAR * share)
        owned.append(lease.owned)
    assert owned == [True, True, False]


@pytest.mark.any_server
@pytest.mark.guarantee
@pytest.mark.parametrize("what", ["take", "sweep", "claim", "regrant"])
async def test_a_lease_counts_from_when_it_was_asked_for(crew: Crew, proxy: Proxy, what: str) -> None:
    mine = ManualClock()
    if what == "sweep":
        await crew.die(await owner_of(crew))
    else:
        await crew.add("full" if what == "claim" else "s")
    for name in ("take", "sweep", "claim", "regrant"):
        await crew.ask("SCRIPT", "LOAD", Script.named(f"balance_{name}").text)
    if what == "regrant":
        proxy.cut(Script.named("balance_take").sha.encode())
    slow = proxy.hold(Script.named(f"balance_{what}").sha.encode())
    member = await crew.join("member", url=proxy.url, clock=mine, max_streams=1, lease_ttl=FAR)
    proxy.refuse(RENEW, b"-LOADING Redis is loading the dataset in memory\r\n", times=1000)
    claiming: list[asyncio.Future[StreamLease]] = []
    if what == "claim":
        await member.owns("full")
        await crew.add("s")
        claiming.append(asyncio.ensure_future(member.balancer.claim("s")))
    await asyncio.wait_for(slow.caught.wait(), LONG)
    mine.advance(FAR * 0.8)
    slow.release()
    await eventually(lambda: "s" in member.owned, "the late answer")
    lease = member.balancer.owned["s"]
    owned = [lease.owned]
    mine.advance(FAR * 0.1 + 1)
    owned.append(lease.owned)
    assert owned == [True, False]
    await asyncio.gather(*claiming)


@pytest.mark.guarantee
async def test_one_renewal_that_fails_is_no_loss(crew: Crew, proxy: Proxy) -> None:
    owner = await owner_of(crew, url=proxy.url)
    done = proxy.cut(RENEW)
    crew.clock.advance(5)
    await asyncio.wait_for(done.wait(), LONG)
    proxy.refuse(RENEW, b"-LOADING Redis is loading the dataset in memory\r\n", times=2)
    for _ in range(20):
        await crew.tick(1.3)
    assert proxy.count(RENEW) > 3
    assert (owner.lost, owner.owned) == ([], {"s"})


async def test_it_is_told_at_the_next_renewal_that_another_has_it(crew: Crew) -> None:
    owner = await owner_of(crew)
    lease = owner.balancer.owned["s"]
    await crew.ask("ZADD", crew.keys.leases, 1, "s")
    heir = await crew.join("heir")
    await heir.owns("s")
    crew.clock.advance(5)
    await eventually(lambda: owner.lost == ["s"], "the owner to be told")
    assert not lease.owned
    with pytest.raises(StreamNotOwnedError):
        await lease.read()


async def test_a_lone_consumer_gets_its_streams_back_after_a_silence(crew: Crew, proxy: Proxy) -> None:
    owner = await owner_of(crew, url=proxy.url, auto_claim=True)
    proxy.shut()
    crew.clock.advance(TTL + 1)
    await eventually(lambda: owner.lost == ["s"], "the owner to give up")
    proxy.reopen()
    await owner.owns("s")
    first, second = [event.epoch for event in owner.told(StreamAdded)]
    assert second > first


async def test_a_lone_consumer_without_auto_claim_is_told_that_its_stream_is_free(crew: Crew, proxy: Proxy) -> None:
    owner = await owner_of(crew, url=proxy.url)
    epoch = owner.balancer.owned["s"].epoch
    proxy.shut()
    crew.clock.advance(TTL + 1)
    await eventually(lambda: owner.lost == ["s"], "the owner to give up")
    proxy.reopen()
    await eventually(lambda: owner.expired == ["s"], "it to be told")
    assert (await owner.balancer.claim("s")).epoch > epoch


async def test_what_was_given_but_whose_answer_was_lost_is_found_again(crew: Crew, proxy: Proxy) -> None:
    """The server believes that it has the stream, and it knows nothing of it."""
    member = await crew.join("member", url=proxy.url, auto_claim=True)
    cut = proxy.cut(Script.named("balance_take").sha.encode())
    await crew.add("s")
    await asyncio.wait_for(cut.wait(), LONG)
    for _ in range(5):
        await crew.tick(4)
    await member.owns("s")


# --- work that blocks or is stuck ---------------------------------------------------------------------------------


async def test_renewals_go_on_while_the_event_loop_is_blocked(crew: Crew) -> None:
    owner = await owner_of(crew, clock=SYSTEM_CLOCK, lease_ttl=1.5)
    heir = crew.make("heir", clock=SYSTEM_CLOCK, lease_ttl=1.5, auto_claim=True)
    time.sleep(4)  # noqa: ASYNC251 - that is the point
    late = Member(heir)
    await heir.open()
    crew.members.append(late)
    await late.looks_again()
    assert (owner.owned, owner.lost, heir.owned) == ({"s"}, [], {})


async def test_a_stream_without_progress_goes_to_another(crew: Crew) -> None:
    owner = await owner_of(crew, progress_timeout=30.0)
    lease = owner.balancer.owned["s"]
    for _ in range(15):
        await crew.tick(4)
        lease.progress()
    assert owner.owned == {"s"}
    heir = await crew.join("heir", auto_claim=True)
    for _ in range(15):
        await crew.tick(4)
    await heir.owns("s")
    assert owner.lost == ["s"]


async def test_a_stuck_handler_is_cancelled_and_its_stream_handled_anew(crew: Crew) -> None:
    handler = Handler(stuck)
    member = await crew.running("m", handler, progress_timeout=30.0)
    await member.balancer.add_stream("s")
    await eventually(lambda: handler.streams == ["s"], "the handler to be called")
    for _ in range(15):
        await crew.tick(4)
    await eventually(lambda: handler.ended == ["s"], "the stuck one to be cancelled")
    await eventually(lambda: handler.streams == ["s", "s"], "the handler to be called anew")


@pytest.mark.parametrize("how", ["messages", "read"])
async def test_to_wait_for_an_idle_stream_is_no_lack_of_progress(crew: Crew, how: str) -> None:
    member = await crew.join(clock=SYSTEM_CLOCK, lease_ttl=0.9, progress_timeout=0.6)
    await member.balancer.add_stream("s")
    await member.owns("s")

    async def read(lease: StreamLease) -> None:
        if how == "read":
            await lease.read(block_ms=60_000)
        async for _ in lease.messages():
            pass

    reading = asyncio.ensure_future(read(member.balancer.owned["s"]))
    await asyncio.sleep(3.5)  # the time in which nothing happens: longer than without progress, and than its lease
    reading.cancel()
    await asyncio.wait([reading])
    assert member.lost == []


# --- the server is gone -------------------------------------------------------------------------------------------


@pytest.fixture
async def mortal(rung: Rung) -> EmbeddedRedis:
    if not rung.binary:
        pytest.skip("needs a server's binary")
    return on_a_port(rung.binary)


async def test_closing_is_bounded_when_the_server_is_silent(mortal: EmbeddedRedis, clock: ManualClock) -> None:
    async with mortal, Proxy(mortal.url) as proxy:
        crew = Crew(proxy.url, clock)
        await owner_of(crew)
        hold = proxy.hold(b"")
        async with asyncio.timeout(LONG):
            await crew.aclose()
        hold.release()


async def test_closing_when_the_server_is_gone_ends_quietly(mortal: EmbeddedRedis, clock: ManualClock) -> None:
    async with mortal:
        crew = Crew(mortal.url, clock)
        member = await owner_of(crew)
    async with asyncio.timeout(LONG):
        await crew.aclose()
    assert member.events[-1].stream == ""


@pytest.mark.parametrize("script", ["balance_take", "balance_sweep"])
async def test_the_loops_outlive_cut_and_refused_answers(crew: Crew, proxy: Proxy, script: str) -> None:
    member = await crew.join("member", url=proxy.url, auto_claim=True)
    needle = Script.named(script).sha.encode()
    proxy.refuse(needle, b"-ERR something odd\r\n", times=3)
    proxy.refuse(needle, b"-OOM command not allowed when used memory > 'maxmemory'.\r\n", times=2)
    cut = proxy.cut(needle)
    other = await crew.join("other")
    await other.balancer.add_stream("mine")
    await eventually(lambda: bool(other.owned or member.owned), "an owner")
    await crew.die(other)
    await proxy.disconnect()
    await asyncio.wait_for(cut.wait(), LONG)
    await crew.add("new")
    for _ in range(6):
        await crew.tick(4)
    await eventually(lambda: {"mine", "new"} <= member.owned, f"both, not {member.owned}")


async def test_a_server_that_refuses_everything_for_a_while(crew: Crew, proxy: Proxy) -> None:
    member = await owner_of(crew, url=proxy.url)
    proxy.shut()
    await crew.add("new")
    for _ in range(3):
        await crew.tick(1)
    proxy.reopen()
    await member.owns("s", "new")
    assert member.lost == []
