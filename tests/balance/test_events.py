"""What a consumer is told, in which order, how much of it can wait, and how it ends."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import pytest

from conquiet.balance import StreamAdded, StreamTerminated
from conquiet.errors import ConfigError, StreamNotOwnedError
from tests.balance.crew import Crew, Member
from tests.rigs.proxy import Proxy
from tests.rigs.waiting import LONG, eventually, turns

pytestmark = pytest.mark.cluster_too


async def drained(member: Member) -> list[object]:
    """All that comes until the end."""
    async with asyncio.timeout(LONG):
        return [event async for event in member.balancer.events()]


# --- the end ------------------------------------------------------------------------------------------------------


async def test_closing_ends_the_events_with_exactly_one_that_says_so(crew: Crew) -> None:
    member = await crew.join()
    await member.balancer.add_stream("s")
    await member.owns("s")
    await member.balancer.aclose()
    await member.ended()
    assert member.events[-1] == StreamTerminated("closed")
    assert len(member.told(StreamTerminated)) == 1
    assert await drained(member) == []


async def test_stopping_ends_the_events_and_closing_adds_nothing(crew: Crew) -> None:
    member = await crew.join()
    member.balancer.stop()
    member.balancer.stop()
    await member.ended()
    await member.balancer.aclose()
    assert member.events == [StreamTerminated("stopped")]


async def test_what_waits_is_still_told_after_the_end(crew: Crew) -> None:
    member = await crew.join(listen=False)
    for number in range(3):
        await member.balancer.add_stream(f"s{number}")
    await member.owns("s0", "s1", "s2")
    await member.balancer.aclose()
    *told, last = await drained(member)
    assert [event.stream for event in told if isinstance(event, StreamAdded)] == ["s0", "s1", "s2"]
    assert (len(told), last) == (3, StreamTerminated("closed"))


async def test_closing_twice_or_many_times_at_once_is_fine(crew: Crew) -> None:
    member = await crew.join()
    await member.balancer.add_stream("s")
    await member.owns("s")
    await asyncio.gather(*(member.balancer.aclose() for _ in range(3)))
    await member.balancer.aclose()
    await member.ended()
    assert len(member.told(StreamTerminated)) == 1


async def test_closing_what_was_never_opened_is_fine(crew: Crew) -> None:
    balancer = crew.make()
    await balancer.aclose()
    await balancer.aclose()
    assert [type(event) async for event in balancer.events()] == [StreamTerminated]


async def test_closing_amid_the_events(crew: Crew) -> None:
    member = await crew.join(listen=False)
    for name in ("s1", "s2"):
        await member.balancer.add_stream(name)
    told: list[object] = []
    async with asyncio.timeout(LONG):
        async for event in member.balancer.events():
            told.append(event)
            await member.balancer.aclose()
    assert told[-1] == StreamTerminated("closed")
    assert isinstance(told[0], StreamAdded)


async def test_closing_does_not_wait_for_events_that_nobody_reads(crew: Crew) -> None:
    member = await crew.join(listen=False, event_buffer=2)
    for number in range(6):
        await member.balancer.add_stream(f"s{number}")
    await eventually(lambda: len(member.owned) == 2, "the buffer to be full")
    await asyncio.wait_for(member.balancer.aclose(), LONG)
    second = await crew.join("second", lease_ttl=600.0)
    await eventually(lambda: len(second.owned) == 6, "all")


async def test_a_close_that_was_cancelled_can_be_done_again(crew: Crew) -> None:
    member = await crew.join(lease_ttl=600.0)
    await member.balancer.add_stream("s")
    await member.owns("s")
    closing = asyncio.ensure_future(member.balancer.aclose())
    await asyncio.sleep(0)
    closing.cancel()
    await asyncio.wait([closing])
    await member.balancer.aclose()
    second = await crew.join("second", auto_claim=True)
    await second.owns("s")


@pytest.mark.slow
async def test_a_handler_that_closes_its_balancer_ends_it(crew: Crew) -> None:
    member = await crew.join(listen=False, lease_ttl=600.0)

    async def handle(stream: str, lease: object) -> None:
        await member.balancer.aclose()

    member.run(handle)
    await member.balancer.add_stream("s")
    await member.ended()
    await member.balancer.aclose()
    second = await crew.join("second", auto_claim=True)
    await second.owns("s")


@pytest.mark.slow
async def test_after_stop_nothing_more_is_taken(crew: Crew) -> None:
    member = await crew.join()
    await member.balancer.add_stream("s1")
    await member.owns("s1")
    member.balancer.stop()
    await member.ended()
    await member.balancer.add_stream("s2")
    await crew.lag_behind(8)  # longer than a consumer is polite
    assert member.owned == {"s1"}, "nobody will ever hear of s2"


async def test_a_balancer_is_opened_once(crew: Crew) -> None:
    member = await crew.join()
    with pytest.raises(ConfigError, match="once"):
        await member.balancer.open()
    await member.balancer.aclose()
    with pytest.raises(ConfigError, match="once"):
        await member.balancer.open()
    with pytest.raises(ConfigError, match="not open"):
        await member.balancer.claim("s")
    with pytest.raises(StreamNotOwnedError):
        await member.balancer.done_stream("s")


async def test_listening_can_be_left_and_taken_up_again(crew: Crew) -> None:
    member = await crew.join(listen=False)
    for number in range(4):
        await member.balancer.add_stream(f"s{number}")
    seen: list[str] = []
    for _ in range(2):
        async with asyncio.timeout(LONG), aclosing(member.balancer.events()) as events:  # type: ignore[type-var]
            async for event in events:
                seen.append(event.stream)
                if len(seen) % 2 == 0:
                    break
    assert seen == ["s0", "s1", "s2", "s3"]


async def test_waiting_for_an_event_can_be_cancelled_and_nothing_is_lost(crew: Crew) -> None:
    member = await crew.join(listen=False)
    waiting = asyncio.ensure_future(anext(member.balancer.events()))
    await turns()
    waiting.cancel()
    await asyncio.wait([waiting])
    await member.balancer.add_stream("s")
    async with asyncio.timeout(LONG):
        assert (await anext(member.balancer.events())).stream == "s"


# --- a slow listener ----------------------------------------------------------------------------------------------


@pytest.mark.slow
async def test_a_full_buffer_stops_new_streams_but_not_renewals(crew: Crew) -> None:
    slow = await crew.join("slow", listen=False, event_buffer=3)
    for number in range(7):
        await slow.balancer.add_stream(f"s{number}")
    await slow.owns("s0", "s1", "s2")
    await crew.lag_behind(40)
    assert slow.owned == {"s0", "s1", "s2"}
    assert all(lease.owned for lease in slow.balancer.owned.values())
    slow.listen()
    await eventually(lambda: len(slow.owned) == 7, "the rest")
    await eventually(lambda: sorted(slow.added) == [f"s{number}" for number in range(7)], "all to be told")
    assert slow.lost == []


@pytest.mark.slow
async def test_a_full_buffer_leaves_lost_streams_to_others(crew: Crew) -> None:
    first = await crew.join("first")
    for number in range(4):
        await first.balancer.add_stream(f"s{number}")
    await eventually(lambda: len(first.owned) == 4, "all")
    await crew.die(first)
    slow = await crew.join("slow", listen=False, event_buffer=1, auto_claim=True)
    await eventually(lambda: len(slow.owned) == 1, "one")
    await slow.looks_again()
    assert len(slow.owned) == 1
    keen = await crew.join("keen", auto_claim=True)
    await eventually(lambda: len(keen.owned) == 3, "the rest")


@pytest.mark.slow
async def test_a_full_buffer_tells_of_expired_streams_when_there_is_room_again(crew: Crew) -> None:
    first = await crew.join("first")
    names = [f"s{number}" for number in range(12)]
    for name in names:
        await first.balancer.add_stream(name)
    await eventually(lambda: len(first.owned) == 12, "all")
    slow = await crew.join("slow", listen=False, event_buffer=3)
    await crew.die(first)
    waiting = slow.balancer._consumer.event_buffer._waiting
    await eventually(lambda: len(waiting) > 0, "it to see that they expired")
    await slow.looks_again()
    assert len(waiting) == 3
    slow.listen()
    await eventually(lambda: sorted(slow.expired) == sorted(names), "all to be told, and each once")


async def test_an_addition_that_was_lost_before_anybody_heard_of_it_is_not_told(crew: Crew) -> None:
    # It seldom looks for lost streams, or it could find its own before the thief has it.
    slow = await crew.join("slow", listen=False, sweep_interval=60)
    await slow.balancer.add_stream("s1")
    await slow.balancer.add_stream("s2")
    await slow.owns("s1", "s2")
    await crew.ask("ZADD", crew.keys.leases, 1, "s1")
    thief = await crew.join("thief", max_streams=1)
    await thief.owns("s1")
    crew.clock.advance(5)
    await slow.owns("s2")
    slow.listen()
    await eventually(lambda: slow.added == ["s2"], "what is still owned")
    await turns()
    assert len(slow.events) == 1


async def test_a_stream_that_is_lost_is_told_of_once(crew: Crew) -> None:
    member = await crew.join("member")
    await member.balancer.add_stream("s", {"a": 1})
    await member.owns("s")
    await crew.ask("ZADD", crew.keys.leases, 1, "s")
    thief = await crew.join("thief")
    await thief.owns("s")
    crew.clock.advance(5)
    await eventually(lambda: member.lost == ["s"], "the owner to be told")
    await crew.lag_behind(12)
    [event] = member.events[1:]
    assert (event.stream, event.info) == ("s", {"a": 1})
    assert "another" in event.reason  # type: ignore[union-attr]
    assert crew.counted("ended_total", consumer="member", how="lost") == 1
    assert crew.counted("owned", consumer="member") == 0


@pytest.mark.one_node
@pytest.mark.any_server
async def test_nobody_is_told_that_its_own_stream_is_free(crew: Crew, proxy: Proxy) -> None:
    """Its lease has run out by the server's word, and it is about to renew it: it owns the stream all the same."""
    from conquiet.wire.scripts import Script

    member = await crew.join("member", url=proxy.url)
    await member.balancer.add_stream("s")
    await member.owns("s")
    await member.has_looked()
    await crew.ask("ZADD", crew.keys.leases, 1, "s")
    sweeps = proxy.count(Script.named("balance_sweep").sha.encode())
    await eventually(lambda: proxy.count(Script.named("balance_sweep").sha.encode()) > sweeps + 2, "it to look")
    assert member.expired == []
    crew.clock.advance(5)

    async def is_renewed() -> bool:
        return float(await crew.ask("ZSCORE", crew.keys.leases, "s")) > 1

    await eventually(is_renewed, "it to be renewed")
    assert (member.owned, member.lost, len(member.events)) == ({"s"}, [], 1)


# --- an answer that comes late ------------------------------------------------------------------------------------


@pytest.mark.one_node
@pytest.mark.parametrize("what", ["finish", "release"])
async def test_a_renewal_before_the_answer_to_the_end_is_no_loss(crew: Crew, proxy: Proxy, what: str) -> None:
    from conquiet.wire.scripts import Script

    member = await crew.join("member", url=proxy.url)
    await member.balancer.add_stream("s")
    await member.owns("s")
    warm = await crew.join("warm", max_streams=1)  # so that the server knows the script
    await warm.balancer.add_stream("w")
    await warm.owns("w")
    await (warm.balancer.done_stream("w") if what == "finish" else warm.balancer.release_stream("w"))
    hold = proxy.hold(Script.named(f"balance_{what}").sha.encode())
    end = member.balancer.done_stream if what == "finish" else member.balancer.release_stream
    ending = asyncio.ensure_future(end("s"))
    await asyncio.wait_for(hold.caught.wait(), LONG)
    await crew.lag_behind(8)  # the second renewal is after the answer to the first
    hold.release()
    await ending
    assert member.lost == []
    assert crew.counted("ended_total", consumer="member", how="lost") == 0
