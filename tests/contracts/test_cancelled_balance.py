"""Every call of a balancer, cancelled at each of its suspensions: a stream is owned, free or finished, never stuck."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from conquiet import QueueMessage
from conquiet.balance import StreamAdded, StreamLease
from conquiet.errors import ConfigError, StreamNotOwnedError
from tests.balance.crew import Crew, Member
from tests.contracts.balance_scenes import FAR, SceneOf, cancelled_at_each_point, has_left, heir_gets, joined
from tests.contracts.cancellation_scenes import SERVERS, hows, hows_of_taking
from tests.rigs.cancelling import Call, How
from tests.rigs.proxy import Proxy
from tests.rigs.waiting import LONG, eventually

pytestmark = [*SERVERS]


@pytest.fixture
async def proxy(url: str) -> AsyncIterator[Proxy]:
    async with Proxy(url) as proxy:
        yield proxy


# --- the life of a balancer ---------------------------------------------------------------------------------------


@asynccontextmanager
async def entering(crew: Crew, url: str) -> AsyncGenerator[Call]:
    """There is a stream to be had. Whoever was cancelled on the way in has nothing, and gives no sign of life."""
    await crew.add("s")
    balancer = crew.make("member", url=url, lease_ttl=FAR)
    entered: list[object] = []

    async def call() -> None:
        entered.append(await balancer.__aenter__())

    yield call
    if entered:
        await balancer.aclose()
    await has_left(crew, balancer.consumer)
    with pytest.raises(ConfigError, match="not open"):
        await balancer.claim("s")
    await heir_gets(crew, "s")


@asynccontextmanager
async def living(crew: Crew, url: str) -> AsyncGenerator[Call]:
    """Entered, listened to, left, and not closed again by anybody."""
    balancer = crew.make("member", url=url, lease_ttl=FAR)
    await crew.add("s")

    async def call() -> None:
        async with balancer:
            async for event in balancer.events():
                assert isinstance(event, StreamAdded)
                break

    yield call
    await has_left(crew, balancer.consumer)
    assert balancer.owned == {}
    await heir_gets(crew, "s")


@asynccontextmanager
async def closing(crew: Crew, url: str) -> AsyncGenerator[Call]:
    """With streams to be given back, a read that waits, and all the connections that there can be."""
    member = await joined(crew, url, "s", "t", keyspace_hint="listen")
    reading = asyncio.ensure_future(member.balancer.owned["s"].read(block_ms=20_000))
    await eventually(lambda: bool(member.balancer.owned["s"].waiting), "the read waits")
    yield member.balancer.aclose
    await has_left(crew, member.balancer.consumer)
    with pytest.raises(StreamNotOwnedError):
        await reading
    with pytest.raises(ConfigError, match="not open"):
        await member.balancer.claim("s")
    await member.balancer.aclose()
    await heir_gets(crew, "s", "t")


@pytest.mark.parametrize("scene", [entering, living, closing], ids=lambda scene: scene.__name__)
@hows_of_taking
async def test_a_balancer_that_was_left_holds_nothing_however_it_was_cancelled(
    proxy: Proxy, url: str, scene: SceneOf, how: How
) -> None:
    await cancelled_at_each_point(proxy, url, scene, how, at_least=1 if scene is closing else 3)


# --- one call -----------------------------------------------------------------------------------------------------


@asynccontextmanager
async def adding(crew: Crew, url: str) -> AsyncGenerator[Call]:
    producer = crew.make("producer", url=url)
    yield lambda: producer.add_stream("s", {"a": 1})
    assert await crew.size() <= 1
    id = await producer.add_stream("s", {"a": 2})
    assert [one for one, _ in await crew.ask("XRANGE", crew.keys.input, "-", "+")] == [id]
    await producer.aclose()


@asynccontextmanager
async def listening(crew: Crew, url: str) -> AsyncGenerator[Call]:
    """The event comes while somebody waits for it: it is told to that one, or to the next who asks."""
    member = await joined(crew, url)
    told: list[str] = []

    async def call() -> None:
        told.append((await anext(member.balancer.events())).stream)

    adding = asyncio.ensure_future(crew.add("s"))
    yield call
    await adding
    if not told:
        await call()
    assert told == ["s"]


@asynccontextmanager
async def claiming(crew: Crew, url: str) -> AsyncGenerator[Call]:
    """It has no room, so that it owns the stream by the claim alone. Cancelled, it leaves it to others."""
    member = await joined(crew, url, "full", max_streams=1)
    await crew.add("s")
    async with is_owned_or_left(crew, member) as call:
        yield call
    assert member.owned == {"full"}


@asynccontextmanager
async def claiming_what_was_released(crew: Crew, url: str) -> AsyncGenerator[Call]:
    """It has room, and takes over nothing without being asked: the claim was its only wish for the stream."""
    donor = await joined(crew, crew.url, "s")
    member = await joined(crew, url)
    await member.has_looked()
    await donor.balancer.release_stream("s")
    await donor.balancer.aclose()
    async with is_owned_or_left(crew, member) as call:
        yield call
    assert member.owned == set()


@asynccontextmanager
async def is_owned_or_left(crew: Crew, member: Member) -> AsyncGenerator[Call]:
    claimed: list[StreamLease] = []

    async def call() -> None:
        claimed.append(await member.balancer.claim("s"))

    yield call
    if claimed:
        assert claimed[0].owned
        await claimed[0].commit("1-1")
        await member.balancer.release_stream("s")
    await heir_gets(crew, "s")


@asynccontextmanager
async def claiming_in_line(crew: Crew, url: str) -> AsyncGenerator[Call]:
    """One question is on its way at a time: another is before, which is not disturbed."""
    member = await joined(crew, url, "full", max_streams=1)
    await crew.add("s", "t")
    before = asyncio.ensure_future(member.balancer.claim("t"))
    await asyncio.sleep(0)
    yield lambda: member.balancer.claim("s")
    assert (await before).owned
    if "s" in member.owned:
        await member.balancer.release_stream("s")
    await heir_gets(crew, "s")
    assert member.owned == {"full", "t"}


@asynccontextmanager
async def claiming_again(crew: Crew, url: str) -> AsyncGenerator[Call]:
    """Whoever was cancelled asks once more, and is not told that the stream is somebody's: it is his."""
    member = await joined(crew, url, "full", max_streams=1)
    await crew.add("s")
    yield lambda: member.balancer.claim("s")
    if "s" not in member.owned:
        await member.balancer.claim("s")
    assert member.balancer.owned["s"].owned
    await member.balancer.owned["s"].commit("1-1")
    await member.balancer.done_stream("s")


@asynccontextmanager
async def can_be_asked_again(end: Call) -> AsyncGenerator[Call]:
    """Once it is answered the stream is gone; until then, asking again is no error."""
    answered: list[bool] = []

    async def call() -> None:
        await end()
        answered.append(True)

    yield call
    if not answered:
        await call()
    with pytest.raises(StreamNotOwnedError):
        await end()


@asynccontextmanager
async def finishing(crew: Crew, url: str) -> AsyncGenerator[Call]:
    """Cancelled, it can be asked for again, and is content if it was done; the other stream stays."""
    member = await joined(crew, url, "s", "t")
    async with can_be_asked_again(lambda: member.balancer.done_stream("s")) as call:
        yield call
    assert await crew.size() == 1
    assert member.owned == {"t"}
    await member.balancer.owned["t"].commit("1-1")


@asynccontextmanager
async def releasing(crew: Crew, url: str) -> AsyncGenerator[Call]:
    member = await joined(crew, url, "s", "t")
    async with can_be_asked_again(lambda: member.balancer.release_stream("s")) as call:
        yield call
    assert member.owned == {"t"}
    await heir_gets(crew, "s")


@pytest.mark.parametrize("scene", [adding], ids=lambda scene: scene.__name__)
@hows
async def test_a_stream_that_is_added_by_a_cancelled_call_is_there_once_or_not_at_all(
    proxy: Proxy, url: str, scene: SceneOf, how: How
) -> None:
    await cancelled_at_each_point(proxy, url, scene, how)


@pytest.mark.parametrize(
    "scene",
    [listening, claiming, claiming_what_was_released, claiming_in_line, claiming_again, finishing, releasing],
    ids=lambda scene: scene.__name__,
)
@hows_of_taking
async def test_a_stream_that_is_taken_or_given_back_by_a_cancelled_call_is_not_stuck(
    proxy: Proxy, url: str, scene: SceneOf, how: How
) -> None:
    await cancelled_at_each_point(proxy, url, scene, how, at_least=1)


# --- reading ------------------------------------------------------------------------------------------------------


async def of_three(crew: Crew, url: str) -> StreamLease:
    """A stream with three entries."""
    name = f"data:{crew.service}"
    for number in range(3):
        await crew.ask("XADD", name, "*", "n", number)
    return (await joined(crew, url, name)).balancer.owned[name]


def numbers(messages: list[QueueMessage]) -> list[int]:
    return [int(message.fields[1]) for message in messages]


@asynccontextmanager
async def reading(crew: Crew, url: str) -> AsyncGenerator[Call]:
    lease = await of_three(crew, url)
    found: list[QueueMessage] = []

    async def call() -> None:
        found.extend(await lease.read(2, block_ms=20_000))

    yield call
    assert not lease.waiting
    found.extend(await lease.read(block_ms=20_000))
    assert numbers(found) == [0, 1, 2]


@asynccontextmanager
async def committing(crew: Crew, url: str) -> AsyncGenerator[Call]:
    lease = await of_three(crew, url)
    messages = await lease.read()
    yield lambda: lease.commit(messages[0])
    assert await crew.positions() in ({}, {lease.stream: messages[0].id})
    await lease.commit(messages[1])
    assert await crew.positions() == {lease.stream: messages[1].id}


@asynccontextmanager
async def iterating(crew: Crew, url: str) -> AsyncGenerator[Call]:
    """What was read and not committed is read again: by the same owner, too."""
    lease = await of_three(crew, url)
    handled: list[QueueMessage] = []

    async def call() -> None:
        async for message in lease.messages():
            await asyncio.sleep(0)  # its work
            handled.append(message)
            if numbers([message]) == [2]:
                return

    yield call
    if 2 not in numbers(handled):
        async with asyncio.timeout(LONG):
            await call()
    assert sorted({*numbers(handled)}) == [0, 1, 2]


@pytest.mark.parametrize("scene", [reading, committing, iterating], ids=lambda scene: scene.__name__)
@hows_of_taking
async def test_no_entry_is_passed_over_after_a_cancelled_call(proxy: Proxy, url: str, scene: SceneOf, how: How) -> None:
    await cancelled_at_each_point(proxy, url, scene, how, at_least=1)


# --- running ------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def running(crew: Crew, url: str, *, is_plain: bool) -> AsyncGenerator[Call]:
    """Two streams. After a run that was cancelled the next one finishes what is left."""
    member = await joined(crew, url, "s", "t")
    inside: list[str] = []
    done: set[str] = set()

    async def handle(stream: str, lease: StreamLease) -> None:
        inside.append(stream)
        try:
            await asyncio.sleep(0.01)  # the work itself
        finally:
            inside.remove(stream)
        done.add(stream)

    def handle_plainly(stream: str, lease: StreamLease) -> None:
        done.add(stream)

    async def call() -> None:
        running = asyncio.ensure_future(until_finished())
        try:
            await member.balancer.run(handle_plainly if is_plain else handle)
        finally:
            running.cancel()

    async def until_finished() -> None:
        await eventually(lambda: not member.owned, "all streams are finished")
        member.balancer.stop()

    yield call
    assert not inside, "a handler has outlived its run"
    if member.owned:
        async with asyncio.timeout(LONG):
            await call()
    assert done == {"s", "t"}
    assert await crew.size() == 0


def running_on_the_loop(crew: Crew, url: str) -> Any:
    return running(crew, url, is_plain=False)


def running_on_threads(crew: Crew, url: str) -> Any:
    return running(crew, url, is_plain=True)


@pytest.mark.parametrize("scene", [running_on_the_loop, running_on_threads], ids=lambda scene: scene.__name__)
@hows_of_taking
async def test_what_a_cancelled_run_left_is_handled_by_the_next(
    proxy: Proxy, url: str, scene: SceneOf, how: How
) -> None:
    await cancelled_at_each_point(proxy, url, scene, how, at_least=1)
