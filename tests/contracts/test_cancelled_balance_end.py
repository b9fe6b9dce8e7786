"""How a balancer ends when others end it: its loop, whoever cancels all tasks, or a handler that does not hurry."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager

import pytest

from conquiet.balance import StreamBalancer, StreamLease
from conquiet.kit.clock import ManualClock
from conquiet.wire.scripts import Script
from tests.balance.crew import Crew, Handler
from tests.contracts.balance_scenes import cancelled_at_each_point, has_left, heir_gets, joined
from tests.contracts.cancellation_scenes import SERVERS, hows_of_taking
from tests.rigs.cancelling import Call, How, nothing_left
from tests.rigs.proxy import Proxy
from tests.rigs.waiting import LONG, eventually

pytestmark = [*SERVERS]

TTL = 15.0


@pytest.fixture
async def proxy(url: str) -> AsyncIterator[Proxy]:
    async with Proxy(url) as proxy:
        yield proxy


@pytest.fixture
async def crew(url: str) -> AsyncIterator[Crew]:
    crew = Crew(url, ManualClock())
    yield crew
    await crew.aclose()


async def left_by_its_loop(crew: Crew, url: str) -> StreamBalancer:
    """A consumer that owned a stream when the loop ended on which it was opened, and was not closed."""
    left: list[StreamBalancer] = []

    async def forgetful() -> None:
        balancer = crew.make("forgotten", url=url, lease_ttl=TTL)
        await balancer.open()
        await crew.add("s")
        await eventually(lambda: "s" in balancer.owned, "it owns the stream")
        await balancer._consumer._background.aclose()
        link = balancer._ledger.link
        waiting = [one._lane for pool in link._waiting.values() for one, _ in pool._idle]
        for lane in (*link._lanes.values(), *waiting):
            await lane.drop()  # Python warns of connections that a loop leaves behind
        left.append(balancer)

    await asyncio.to_thread(asyncio.run, forgetful())
    return left[0]


async def until(crew: Crew) -> object:
    return await crew.ask("ZSCORE", crew.keys.leases, "s")


async def test_a_balancer_whose_loop_has_ended_is_not_kept_alive(crew: Crew, proxy: Proxy) -> None:
    """As of a script or a notebook that never leaves the block: the stream is free when its lease is over."""
    await asyncio.to_thread(int)  # the thread in which the other loop will run stays for a while
    async with nothing_left(lambda: proxy.open_connections):
        balancer = await left_by_its_loop(crew, proxy.url)
        before = await until(crew)
        for _ in range(4):
            crew.clock.advance(TTL / 3)
        await eventually(lambda: not balancer._consumer.streams._keepalive._background._tasks, "the heartbeat ends")
        assert await until(crew) == before
    await heir_gets(crew, "s")


async def test_a_balancer_whose_loop_has_ended_can_be_closed_on_another(crew: Crew) -> None:
    balancer = await left_by_its_loop(crew, crew.url)
    await asyncio.wait_for(balancer.aclose(), LONG)
    await has_left(crew, balancer.consumer)
    await heir_gets(crew, "s")


async def test_a_close_is_over_for_the_heartbeat_though_all_tasks_are_cancelled(crew: Crew, proxy: Proxy) -> None:
    """As programs do at their end. What could not be given back is free when its lease is over, not later."""
    async with nothing_left(lambda: proxy.open_connections):
        mine = asyncio.all_tasks()
        member = await crew.join("member", url=proxy.url, listen=False, lease_ttl=TTL)
        await crew.add("s")
        await member.owns("s")
        hold = proxy.hold(Script.named("balance_release").sha.encode())
        closing = asyncio.ensure_future(member.balancer.aclose())
        await asyncio.wait_for(hold.caught.wait(), LONG)
        for task in asyncio.all_tasks() - mine:
            if task.get_name().startswith("conquiet") or task is closing:
                task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(closing, LONG)
        hold.release()
    before = await until(crew)
    for _ in range(4):
        crew.clock.advance(TTL / 3)
    assert await until(crew) == before
    await asyncio.wait_for(member.balancer.aclose(), LONG)
    await heir_gets(crew, "s")


# --- while a handler runs -----------------------------------------------------------------------------------------


@asynccontextmanager
async def closing_while_it_runs(crew: Crew, url: str) -> AsyncGenerator[Call]:
    """The handler takes a moment for its end; its stream is another's only after that."""
    member = await joined(crew, url, "s")

    async def careful(stream: str, lease: StreamLease) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.02)  # its end takes a moment

    handler = Handler(careful)
    running = asyncio.ensure_future(member.balancer.run(handler))
    await eventually(lambda: handler.streams == ["s"], "the handler runs")
    yield member.balancer.aclose
    assert handler.ended == ["s"], "it has ended before the close did"
    await has_left(crew, member.balancer.consumer)
    await asyncio.wait_for(running, LONG)
    await heir_gets(crew, "s")


@hows_of_taking
async def test_a_handler_ends_before_a_cancelled_close_does(proxy: Proxy, url: str, how: How) -> None:
    await cancelled_at_each_point(proxy, url, closing_while_it_runs, how, at_least=1)


# --- after a failure or a cancellation, the rest is handled -------------------------------------------------------


@pytest.mark.parametrize("way", ["messages", "read"])
async def test_a_handler_that_failed_is_called_again_with_what_it_did_not_commit(crew: Crew, way: str) -> None:
    name = f"data:{crew.service}"
    for number in range(3):
        await crew.ask("XADD", name, "*", "n", number)
    handled: list[int] = []

    async def clumsy(stream: str, lease: StreamLease) -> None:
        if way == "messages":
            async for message in lease.messages():
                fail_once(message.fields[1])
                if len(handled) == 3:
                    return
        for message in await lease.read():
            fail_once(message.fields[1])
            await lease.commit(message)

    failed: list[int] = []

    def fail_once(number: bytes) -> None:
        if number == b"1" and not failed:
            failed.append(1)
            raise ValueError("no good")
        handled.append(int(number))

    member = await crew.running("member", clumsy)
    await member.balancer.add_stream(name)
    await eventually(lambda: not member.owned and bool(handled), "the stream is finished")
    assert sorted({*handled}) == [0, 1, 2]
    assert failed


async def test_a_stream_that_was_claimed_before_the_run_is_handled(crew: Crew) -> None:
    member = await crew.join("member", listen=False, max_streams=1)
    await crew.add("full")
    await member.owns("full")
    await crew.add("s")
    await member.balancer.claim("s")
    handler = Handler()
    member.run(handler)
    await eventually(lambda: sorted(handler.streams) == ["full", "s"], "both are handled, once")


async def test_a_stream_whose_lease_has_run_out_before_its_handler_could_begin_is_not_begun(crew: Crew) -> None:
    """As after a pause between the two: it is given up, and handled under the lease that it is taken over with."""
    member = await crew.join("member", listen=False, progress_timeout=1.0)
    await crew.add("s")
    await member.owns("s")
    before = member.balancer.owned["s"].epoch
    begun: list[tuple[int, bool]] = []

    async def note(stream: str, lease: StreamLease) -> None:
        begun.append((lease.epoch, lease.owned))
        await asyncio.Event().wait()

    async def begin() -> None:
        crew.clock.advance(60)  # nobody on this loop hears of that before the handler could begin
        await member.balancer.run(note)

    member.task = asyncio.ensure_future(begin())
    await eventually(lambda: bool(begun), "it is handled")
    [(epoch, was_owned)] = begun
    assert was_owned
    assert epoch > before
