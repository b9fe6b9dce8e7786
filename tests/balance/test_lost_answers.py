"""The server did what it was asked, and the answer was lost: both sides agree again at once, not after a lease."""

from __future__ import annotations

import asyncio

import pytest

from conquiet.balance import StreamLease
from conquiet.errors import QueueError, StreamNotOwnedError
from conquiet.wire.scripts import Script
from tests.balance.crew import Crew, Handler
from tests.rigs.asking import round_trips
from tests.rigs.proxy import Proxy
from tests.rigs.waiting import LONG, eventually, turns

pytestmark = [pytest.mark.any_server, pytest.mark.guarantee]

TTL = 15.0
FAR = 600.0
"""Seconds of a lease that nobody waits for."""


def needle(what: str) -> bytes:
    return Script.named(f"balance_{what}").sha.encode()


async def warmed(crew: Crew) -> None:
    """The server knows the scripts, so that each is asked for once."""
    for what in ("take", "sweep", "claim", "finish", "release", "add", "regrant"):
        await crew.ask("SCRIPT", "LOAD", Script.named(f"balance_{what}").text)


# --- what was given -----------------------------------------------------------------------------------------------


async def test_a_stream_whose_taking_was_not_answered_is_owned_at_once(crew: Crew, proxy: Proxy) -> None:
    await warmed(crew)
    member = await crew.join("member", url=proxy.url, lease_ttl=FAR)
    cut = proxy.cut(needle("take"))
    await crew.add("s1", "s2")
    await asyncio.wait_for(cut.wait(), LONG)
    await member.owns("s1", "s2")
    await eventually(lambda: sorted(member.added) == ["s1", "s2"], "both to be told of, once")
    await member.balancer.done_stream("s1")
    await member.balancer.release_stream("s2")
    assert member.lost == []


async def test_a_stream_whose_takeover_was_not_answered_is_owned_at_once(crew: Crew, proxy: Proxy) -> None:
    await warmed(crew)
    first = await crew.join("first", lease_ttl=FAR)
    await first.balancer.add_stream("s", {"a": 1})
    await first.owns("s")
    heir = await crew.join("heir", url=proxy.url, lease_ttl=FAR, auto_claim=True, sweep_interval=FAR)
    await heir.has_looked()
    cut = proxy.cut(needle("sweep"))
    await first.balancer.release_stream("s")
    await asyncio.wait_for(cut.wait(), LONG)
    await heir.owns("s")
    assert heir.balancer.owned["s"].info == {"a": 1}


async def test_a_claim_that_was_not_answered_can_be_made_again(crew: Crew, proxy: Proxy) -> None:
    """The server has the caller for the owner already: that is no reason to refuse it."""
    await warmed(crew)
    member = await crew.join("member", url=proxy.url, lease_ttl=FAR, max_streams=1)
    await member.balancer.add_stream("full")
    await member.owns("full")
    await member.balancer.add_stream("s")
    proxy.cut(needle("claim"))
    with pytest.raises(QueueError):
        await member.balancer.claim("s")
    lease = await member.balancer.claim("s")
    assert lease.owned
    await lease.commit("1-1")
    await member.balancer.done_stream("s")


@pytest.mark.parametrize("way", ["cut", "cancelled"])
async def test_a_claim_that_failed_leaves_the_stream_to_others(crew: Crew, proxy: Proxy, way: str) -> None:
    await warmed(crew)
    member = await crew.join("member", url=proxy.url, lease_ttl=FAR, max_streams=1)
    await member.balancer.add_stream("full")
    await member.owns("full")
    await member.balancer.add_stream("s")
    if way == "cut":
        proxy.cut(needle("claim"))
        with pytest.raises(QueueError):
            await member.balancer.claim("s")
    else:
        hold = proxy.hold(needle("claim"))
        claiming = asyncio.ensure_future(member.balancer.claim("s"))
        await asyncio.wait_for(hold.caught.wait(), LONG)
        claiming.cancel()
        await asyncio.wait([claiming])
        hold.release()
    other = await crew.join("other", lease_ttl=FAR, auto_claim=True)
    await other.owns("s")
    assert member.owned == {"full"}
    assert member.added == ["full"], "a claim that failed is not told as a success"


async def test_what_reached_the_server_late_is_found_a_heartbeat_later(crew: Crew, proxy: Proxy) -> None:
    """The connection broke while the question was on its way: the server came to it after the first look."""
    other = await crew.join("other", max_streams=1, lease_ttl=FAR)
    await other.balancer.add_stream("late")
    await other.owns("late")
    member = await crew.join("member", url=proxy.url)
    await member.has_looked()
    proxy.refuse(needle("take"), b"-ERR something odd\r\n")
    await crew.add("s")
    await member.owns("s")
    strays = member.balancer._consumer.strays
    await eventually(lambda: strays.looks == 1, "the first look")
    await other.balancer.release_stream("late")
    await eventually(lambda: member.expired == ["late"], "it to be free")
    behind = crew.make("behind", lease_ttl=FAR)
    behind._ledger.owner = member.balancer.consumer
    await behind._ledger.claim("late")
    await behind.aclose()
    assert member.owned == {"s"}
    crew.clock.advance(5)
    await member.owns("s", "late")
    assert strays.looks == 0


async def test_whoever_waits_for_a_look_takes_it_for_his_own(crew: Crew) -> None:
    """Were each to look, the second look would follow at once, and not find what reaches the server late."""
    member = await crew.join("member")
    await member.has_looked()
    strays = member.balancer._consumer.strays
    strays.doubt()
    await asyncio.gather(*(strays.settle() for _ in range(2)))
    assert strays.looks == 1


async def test_an_owner_and_a_server_that_lost_its_last_writes_agree_again(crew: Crew) -> None:
    """The server has the same owner in an epoch before: it is given the stream in a new one."""
    member = await crew.join("member", lease_ttl=FAR, sweep_interval=FAR)
    await member.balancer.add_stream("s", {"a": 1})
    await member.owns("s")
    lease = member.balancer.owned["s"]
    record = f"{lease.entry_id}|{lease.epoch - 1}|{member.balancer.consumer}"
    await crew.ask("HSET", crew.keys.owners, "s", record)
    crew.clock.advance(FAR / 3)
    await eventually(lambda: member.added == ["s", "s"], "it to be given anew")
    assert member.lost == ["s"]
    assert member.balancer.owned["s"].epoch > lease.epoch
    assert not lease.owned


async def test_who_leaves_gives_back_what_it_never_heard_of(crew: Crew, proxy: Proxy) -> None:
    await warmed(crew)
    member = await crew.join("member", url=proxy.url, lease_ttl=FAR)
    await member.balancer.add_stream("known")
    await member.owns("known")
    hold = proxy.hold(needle("take"))
    await crew.add("s1", "s2")
    await asyncio.wait_for(hold.caught.wait(), LONG)
    closing = asyncio.ensure_future(member.balancer.aclose())
    await asyncio.sleep(0)
    hold.release()
    await closing
    second = await crew.join("second", lease_ttl=FAR)
    await second.owns("known", "s1", "s2")


async def test_a_claim_that_is_answered_while_its_consumer_leaves_is_given_back(crew: Crew, proxy: Proxy) -> None:
    await warmed(crew)
    member = await crew.join("member", url=proxy.url, lease_ttl=FAR, max_streams=1)
    await member.balancer.add_stream("full")
    await member.owns("full")
    await member.balancer.add_stream("s")
    hold = proxy.hold(needle("claim"))
    claiming = asyncio.ensure_future(member.balancer.claim("s"))
    await asyncio.wait_for(hold.caught.wait(), LONG)
    closing = asyncio.ensure_future(member.balancer.aclose())
    await round_trips(crew.url)
    await turns()
    hold.release()
    await closing
    lease = await claiming
    assert not lease.owned
    second = await crew.join("second", lease_ttl=FAR)
    await second.owns("full", "s")


async def test_what_could_not_be_given_to_others_is_given_to_them_before_its_lease_ends(
    crew: Crew, proxy: Proxy
) -> None:
    first, second = Handler(), Handler()
    member = await crew.running("member", first, url=proxy.url)
    for name in ("s1", "s2"):
        await member.balancer.add_stream(name)
    await eventually(lambda: len(first.calls) == 2, "both to run")
    proxy.refuse(needle("release"), b"-ERR something odd\r\n")
    other = await crew.running("other", second)

    def refused() -> bool:
        return any(needle("release") in command for command in proxy.received)

    for _ in range(8):
        if not refused():
            await crew.lag_behind(4)
    assert refused()
    await eventually(lambda: len(second.calls) == 1, "the other to have its share", TTL / 2)
    assert len(other.owned) == 1
    assert len(first.calls) == 2, "what was given away was not begun anew"


async def test_what_is_being_given_to_others_is_not_taken_back_meanwhile(crew: Crew) -> None:
    """Its handler still ends: a second one beside it would be one too many."""
    cleaned = asyncio.Event()

    async def slow_to_end(stream: str, lease: StreamLease) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await cleaned.wait()

    first, second = Handler(slow_to_end), Handler()
    member = await crew.running("member", first)
    for name in ("s1", "s2"):
        await member.balancer.add_stream(name)
    await eventually(lambda: len(first.calls) == 2, "both to run")
    await crew.running("other", second)
    consumer = member.balancer._consumer
    for _ in range(8):
        if not consumer._leaving:
            await crew.lag_behind(4)
    assert len(consumer._leaving) == 1
    consumer.strays.doubt()
    await eventually(lambda: consumer.strays.looks == 1, "a look")
    assert len(first.calls) == 2
    cleaned.set()
    await eventually(lambda: len(second.calls) == 1, "the other to have it")
    assert len(first.calls) == 2


# --- what was changed ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("beats", [False, True], ids=["at once", "after a heartbeat"])
@pytest.mark.parametrize("what", ["finish", "release"])
async def test_an_end_that_was_not_answered_can_be_asked_for_again(
    crew: Crew, proxy: Proxy, what: str, beats: bool
) -> None:
    await warmed(crew)
    member = await crew.join("member", url=proxy.url, sweep_interval=FAR)
    await member.balancer.add_stream("s")
    await member.owns("s")
    end = member.balancer.done_stream if what == "finish" else member.balancer.release_stream
    proxy.cut(needle(what))
    with pytest.raises(QueueError):
        await end("s")
    if beats:
        await crew.lag_behind(4)
        await member.owns()
    await end("s")
    assert member.owned == set()
    with pytest.raises(StreamNotOwnedError):
        await end("s")
    how = {"finish": "finished", "release": "released"}[what]
    assert (member.lost, crew.counted("ended_total", consumer="member", how="lost")) == ([], 0)
    assert crew.counted("ended_total", consumer="member", how=how) == 1


async def test_an_end_that_did_not_arrive_is_asked_for_again_as_ever(crew: Crew, proxy: Proxy) -> None:
    member = await crew.join("member", url=proxy.url)
    await member.balancer.add_stream("s")
    await member.owns("s")
    proxy.refuse(needle("finish"), b"-ERR something odd\r\n")
    with pytest.raises(QueueError):
        await member.balancer.done_stream("s")
    await crew.lag_behind(4)
    assert member.balancer.owned["s"].owned
    await member.balancer.done_stream("s")
    assert await crew.size() == 0


async def test_an_end_that_another_prevented_is_no_success_the_second_time(crew: Crew, proxy: Proxy) -> None:
    """It did not arrive, and another took the stream over: whoever asks again is told so."""
    member = await crew.join("member", url=proxy.url, lease_ttl=FAR)
    await member.balancer.add_stream("s")
    await member.owns("s")
    proxy.refuse(needle("finish"), b"-ERR something odd\r\n")
    with pytest.raises(QueueError):
        await member.balancer.done_stream("s")
    await crew.ask("ZADD", crew.keys.leases, 1, "s")
    heir = await crew.join("heir", lease_ttl=FAR)
    await heir.owns("s")
    with pytest.raises(StreamNotOwnedError):
        await member.balancer.done_stream("s")
    assert heir.balancer.owned["s"].owned
    assert await crew.size() == 1


async def test_a_stream_that_was_finished_and_added_anew_is_not_finished_twice(crew: Crew, proxy: Proxy) -> None:
    member = await crew.join("member", url=proxy.url, lease_ttl=FAR, max_streams=1)
    await member.balancer.add_stream("s")
    await member.owns("s")
    await warmed(crew)
    proxy.cut(needle("finish"))
    with pytest.raises(QueueError):
        await member.balancer.done_stream("s")
    await crew.add("s")
    await member.balancer.done_stream("s")
    await eventually(lambda: member.added == ["s", "s"], "the new one")
    assert (await crew.size(), member.lost) == (1, [])


async def test_a_handler_that_returned_is_not_called_again_when_the_answer_to_its_end_was_lost(
    crew: Crew, proxy: Proxy
) -> None:
    await warmed(crew)

    async def returns(stream: str, lease: StreamLease) -> None:
        pass

    handler = Handler(returns)
    await crew.running("member", handler, url=proxy.url)
    cut = proxy.cut(needle("finish"))
    await crew.add("s")
    await asyncio.wait_for(cut.wait(), LONG)

    def ended() -> bool:
        crew.clock.advance(0.1)
        return crew.counted("ended_total", consumer="member") == 1

    await eventually(ended, "it to end")
    assert crew.counted("ended_total", consumer="member", how="finished") == 1
    assert handler.streams == ["s"]


async def test_a_stream_whose_adding_was_not_answered_is_there_once(crew: Crew, proxy: Proxy) -> None:
    await warmed(crew)
    producer = crew.make("producer", url=proxy.url)
    cut = proxy.cut(needle("add"))
    with pytest.raises(QueueError):
        await producer.add_stream("s")
    assert cut.is_set()
    id = await producer.add_stream("s")
    assert [found for found, _ in await crew.ask("XRANGE", crew.keys.input, "-", "+")] == [id]
    await producer.aclose()
