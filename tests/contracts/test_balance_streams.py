"""Balanced streams as a user sees them, awaited or not."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from typing import Any

import pytest

from conquiet.balance import StreamAdded, StreamDisowned, StreamExpired, StreamTerminated
from conquiet.errors import AlreadyClaimedError, ConfigError, StreamNotOwnedError
from conquiet.kit.clock import ManualClock
from tests.contracts.balance_flavours import FLAVOURS, Crew, Member
from tests.rigs.asking import ask, round_trips
from tests.rigs.lanes import chosen
from tests.rigs.waiting import LONG, eventually

pytestmark = pytest.mark.cluster_too


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture(params=chosen(FLAVOURS))
async def crew(request: pytest.FixtureRequest, url: str, clock: ManualClock) -> AsyncIterator[Crew]:
    async with Crew.of(request.param, url, clock) as crew:
        yield crew


async def snatch(crew: Crew, stream: str, **options: Any) -> Member:
    """Another consumer that has the stream now, since its owner was late."""
    await ask(crew.url, "ZADD", f"lease:{{{crew.service}-input}}", 1, stream)
    thief = await crew.join("thief", **options)
    await thief.owns(stream)
    return thief


async def is_empty(crew: Crew) -> bool:
    return bool(await ask(crew.url, "XLEN", f"{crew.service}-input") == 0)


async def test_a_stream_is_told_of_owned_and_finished(crew: Crew) -> None:
    member = await crew.join()
    id = await member.balancer.add_stream("s", {"tenant": "a"})
    assert await member.balancer.add_stream("s") == id
    await member.owns("s")
    lease = member.balancer.owned["s"]
    assert (lease.stream, lease.info, lease.entry_id, lease.owned) == ("s", {"tenant": "a"}, id, True)
    added = StreamAdded("s", {"tenant": "a"}, lease.epoch, id)
    await eventually(lambda: member.events == [added], "to be told")
    await member.balancer.done_stream("s")
    assert (member.owned, lease.owned) == (set(), False)
    assert await is_empty(crew)
    with pytest.raises(StreamNotOwnedError, match="'s'"):
        await member.balancer.done_stream("s")


async def test_two_consumers_share(crew: Crew) -> None:
    one, other = await crew.join("one"), await crew.join("other")
    for name in ("s1", "s2"):
        await one.balancer.add_stream(name)
    await eventually(lambda: len(one.owned) == len(other.owned) == 1, "one each")
    assert one.owned | other.owned == {"s1", "s2"}
    assert one.balancer.consumer.startswith("one#")


async def test_what_is_released_is_told_of_and_can_be_claimed_once(crew: Crew) -> None:
    one, other = await crew.join("one"), await crew.join("other")
    await one.balancer.add_stream("s", {"a": 1})
    await eventually(lambda: bool(one.owned or other.owned), "an owner")
    first, second = (one, other) if one.owned else (other, one)
    with pytest.raises(AlreadyClaimedError, match=first.balancer.consumer):
        await second.balancer.claim("s")
    before = first.balancer.owned["s"].epoch
    await first.balancer.release_stream("s")
    await eventually(lambda: bool(second.told(StreamExpired)), "the other to be told")
    lease = await second.balancer.claim("s")
    assert (lease.info, lease.owned) == ({"a": 1}, True)
    assert lease.epoch > before
    with pytest.raises(AlreadyClaimedError, match=second.balancer.consumer):
        await first.balancer.claim("s")
    with pytest.raises(ConfigError, match="'unknown'"):
        await first.balancer.claim("unknown")


async def test_closing_hands_over_at_once_and_ends_the_events(crew: Crew) -> None:
    first = await crew.join("first", lease_ttl=600.0)
    await first.balancer.add_stream("s")
    await first.owns("s")
    second = await crew.join("second", auto_claim=True, lease_ttl=600.0)
    await first.balancer.aclose()
    await first.balancer.aclose()
    await first.ended()
    assert first.events[-1] == StreamTerminated("closed")
    assert len(first.told(StreamTerminated)) == 1
    await second.owns("s")


async def test_stop_ends_the_events(crew: Crew) -> None:
    member = await crew.join()
    member.balancer.stop()
    await member.ended()
    assert member.events == [StreamTerminated("stopped")]


async def test_who_was_replaced_is_told_and_can_change_nothing(crew: Crew, clock: ManualClock) -> None:
    member = await crew.join()
    await member.balancer.add_stream("s")
    await member.owns("s")
    lease = member.balancer.owned["s"]
    await snatch(crew, "s")
    with pytest.raises(StreamNotOwnedError, match="'s'"):
        await lease.commit("1-1")
    clock.advance(5)
    await eventually(lambda: [event.stream for event in member.told(StreamDisowned)] == ["s"], "to be told")
    with pytest.raises(StreamNotOwnedError):
        await lease.read()
    assert not await is_empty(crew)


async def test_the_data_of_a_stream_is_read_and_committed(crew: Crew) -> None:
    data = f"data:{crew.service}"
    ids = [str(await ask(crew.url, "XADD", data, "*", "n", number)) for number in range(4)]
    first = await crew.join("first")
    await first.balancer.add_stream(data)
    await first.owns(data)
    lease = first.balancer.owned[data]
    messages = await lease.read(3)
    assert [(message.id, message.fields) for message in messages] == [
        (id, (b"n", str(number).encode())) for number, id in enumerate(ids[:3])
    ]
    await lease.commit(messages[1])
    second = await snatch(crew, data)
    seen: list[str] = []
    async with asyncio.timeout(LONG):
        async for message in second.balancer.owned[data].messages():
            seen.append(message.id)
            if len(seen) == 2:
                await second.balancer.release_stream(data)
    assert seen == ids[2:]
    await ask(crew.url, "DEL", data)


async def test_a_read_that_waits_ends_when_the_stream_is_released(crew: Crew) -> None:
    member = await crew.join()
    await member.balancer.add_stream("nothing-there")
    await member.owns("nothing-there")
    lease = member.balancer.owned["nothing-there"]
    assert await lease.read(block_ms=5) == []
    reading = asyncio.ensure_future(lease.read(block_ms=60_000))
    await round_trips(crew.url)
    await member.balancer.release_stream("nothing-there")
    with pytest.raises(StreamNotOwnedError):
        await asyncio.wait_for(reading, LONG)


async def test_a_handler_that_returns_finishes_and_stop_ends_the_run(crew: Crew) -> None:
    calls: list[tuple[str, Any]] = []
    member = await crew.join(listen=False)
    member.run(lambda stream, lease: calls.append((stream, lease.info)))
    await member.balancer.add_stream("s", {"a": 1})
    await eventually(lambda: is_empty(crew), "it to be finished")
    assert calls == [("s", {"a": 1})]
    member.balancer.stop()
    await member.ended()


async def test_a_handler_that_cannot_take_a_stream_and_its_lease_is_refused_when_it_is_given(crew: Crew) -> None:
    member = await crew.join(listen=False)
    with pytest.raises(ConfigError, match=r"handler is called with \(stream, lease\)"):
        await asyncio.wait_for(member.balancer.run(lambda stream: None), LONG)  # type: ignore[arg-type]


async def test_a_forgotten_with_is_said_and_nothing_hangs(crew: Crew) -> None:
    balancer = crew.make("forgetful")
    async with asyncio.timeout(LONG):
        with pytest.raises(ConfigError, match="not open"):
            await anext(balancer.events())
        with pytest.raises(ConfigError, match="not open"):
            await balancer.claim("s")
    await balancer.aclose()


async def test_a_handler_that_raises_is_called_again(crew: Crew, clock: ManualClock) -> None:
    calls: list[int] = []

    def handle(stream: str, lease: Any) -> None:
        calls.append(lease.epoch)
        if len(calls) < 3:
            raise ValueError(stream)

    member = await crew.join(listen=False, lease_ttl=600.0)
    member.run(handle)
    await member.balancer.add_stream("s")

    async def is_finished() -> bool:
        clock.advance(0.5)
        return await is_empty(crew)

    await eventually(is_finished, "it to be finished in the end")
    assert len(calls) == 3
    assert len(set(calls)) == 1


async def test_handlers_run_side_by_side_and_see_the_loss_of_their_stream(crew: Crew, clock: ManualClock) -> None:
    together, lost = threading.Barrier(2), threading.Event()

    def handle(stream: str, lease: Any) -> None:
        together.wait(LONG)
        while lease.owned and not done.is_set():
            done.wait(0.01)
        if not done.is_set():
            lost.set()

    done = threading.Event()
    member = await crew.join(listen=False)
    member.run(handle)
    for name in ("s1", "s2"):
        await member.balancer.add_stream(name)
    await eventually(lambda: together.n_waiting == 0 and len(member.owned) == 2, "both to run")
    await snatch(crew, "s1", max_streams=1)
    clock.advance(5)
    await eventually(lost.is_set, "the handler to see it")
    assert member.owned == {"s2"}
    done.set()


@pytest.mark.any_server
async def test_bad_arguments_are_said_at_once(crew: Crew) -> None:
    with pytest.raises(ConfigError, match=r"lease_ttl .*-1"):
        crew.make("a", lease_ttl=-1)
    with pytest.raises(ConfigError, match=r"consumer .*'a b'"):
        crew.make("a b")
    member = await crew.join()
    with pytest.raises(ConfigError, match=r"stream .*''"):
        await member.balancer.add_stream("")
    with pytest.raises(ConfigError, match="info must be a mapping, not 7"):
        await member.balancer.add_stream("s", 7)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"handler .*7"):
        await member.balancer.run(7)  # type: ignore[arg-type]
