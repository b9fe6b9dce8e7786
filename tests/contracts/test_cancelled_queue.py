"""Every call of a queue, cancelled at each of its suspensions: nothing is lost, torn, mixed up or left behind."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace

import pytest

from conquiet import QueueError, QueueMessage, RedisStreamsQueue
from tests.contracts.cancellation_scenes import (
    SERVERS,
    Place,
    SceneAt,
    cancelled_at_each_point,
    hows,
    hows_of_taking,
)
from tests.rigs.cancelling import Call, How
from tests.rigs.proxy import Proxy
from tests.rigs.waiting import LONG, eventually

pytestmark = [*SERVERS]


@pytest.fixture
async def place(url: str) -> AsyncIterator[Place]:
    async with Proxy(url) as proxy:
        yield Place(url, proxy)


async def works_on(queue: RedisStreamsQueue, place: Place) -> None:
    """Each call is answered, with its own answer and not with that of the call that was cancelled."""
    async with asyncio.timeout(LONG):
        sent = await queue.enqueue({"n": 99})
        stats = await queue.backlog_stats()
        written = await place.entries()
        assert written[sent] == {"n": 99}
        assert 1 <= stats.length <= len(written)  # what was cancelled may still be on its way to the server
        messages = [message async for message in until(queue, sent)]
        await queue.ack(*messages)
        await queue.ack(*await queue.claim_stale(0, count=100))
        assert await place.pending() == []


async def until(queue: RedisStreamsQueue, last: str) -> AsyncIterator[QueueMessage]:
    """What the group was not given yet, up to an entry."""
    while True:
        for message in await queue.read(count=100):
            yield message
            if message.id == last:
                return


async def is_closed(queue: RedisStreamsQueue) -> None:
    for call in (queue.enqueue({"n": 99}), queue.read(50), queue.backlog_stats(), queue.claim_stale(0)):
        with pytest.raises(QueueError, match="closed"):
            await call
    await queue.aclose()


def is_prefix(part: list[int], whole: list[int]) -> bool:
    return part == whole[: len(part)]


# --- one call ---------------------------------------------------------------------------------------------------


@asynccontextmanager
async def opening(place: Place) -> AsyncGenerator[Call]:
    async with place.queue(is_open=False) as queue:
        yield queue.open
        await works_on(queue, place)


@asynccontextmanager
async def opening_in_line(place: Place) -> AsyncGenerator[Call]:
    """Somebody else creates the group at the moment."""
    async with place.queue(is_open=False) as queue:
        before = asyncio.create_task(queue.open())
        await asyncio.sleep(0)
        yield queue.open
        await before
        await works_on(queue, place)


@asynccontextmanager
async def enqueueing_first(place: Place) -> AsyncGenerator[Call]:
    """The call also opens the connection."""
    async with place.queue(is_open=False) as queue:
        sent: list[str] = []

        async def call() -> None:
            sent.append(await queue.enqueue({"n": 1}))

        yield call
        written = await place.entries()
        assert list(written.values()) in ([], [{"n": 1}])
        assert not sent or list(written) == sent
        await works_on(queue, place)


@asynccontextmanager
async def enqueueing(place: Place) -> AsyncGenerator[Call]:
    async with place.queue(is_open=True) as queue:
        yield lambda: queue.enqueue({"n": 1})
        assert list((await place.entries()).values()) in ([], [{"n": 1}])
        await works_on(queue, place)


@asynccontextmanager
async def enqueueing_in_line(place: Place) -> AsyncGenerator[Call]:
    """Others are before and behind; they get their own."""
    async with place.queue(is_open=True) as queue:
        before = [asyncio.create_task(queue.enqueue({"n": number})) for number in (10, 11)]
        await asyncio.sleep(0)  # so that the first is on its way and the second stands in line
        behind: list[asyncio.Task[str]] = []

        async def call() -> None:
            asyncio.get_running_loop().call_soon(lambda: behind.append(asyncio.create_task(queue.enqueue({"n": 12}))))
            await queue.enqueue({"n": 1})

        yield call
        await eventually(lambda: bool(behind), "somebody stands behind")
        ids = await asyncio.gather(*before, *behind)
        written = await place.entries()
        assert [written[id] for id in ids] == [{"n": 10}, {"n": 11}, {"n": 12}]
        assert sum(payload == {"n": 1} for payload in written.values()) <= 1
        await works_on(queue, place)


@asynccontextmanager
async def enqueueing_many(place: Place) -> AsyncGenerator[Call]:
    """Of two round trips."""
    async with place.queue(is_open=False) as queue:
        yield lambda: queue.enqueue_many([{"n": number} for number in range(501)])
        written = [payload["n"] for payload in (await place.entries()).values()]
        assert is_prefix(written, list(range(501)))
        sent = await queue.enqueue_many([{"n": -1}, {"n": -2}])
        assert [(await place.entries())[id] for id in sent] == [{"n": -1}, {"n": -2}]


@asynccontextmanager
async def enqueueing_much(place: Place) -> AsyncGenerator[Call]:
    """More than the socket takes at once, over the connection for large writes."""
    async with place.queue(is_open=True) as queue:
        yield lambda: queue.enqueue({"n": 1, "text": "x" * (4 << 20)})
        await works_on(queue, place)
        assert sum(payload["n"] == 1 for payload in (await place.entries()).values()) <= 1


@asynccontextmanager
async def acking(place: Place) -> AsyncGenerator[Call]:
    first, second, third = await place.given(1, 2, 3)
    async with place.queue(is_open=False) as queue:
        yield lambda: queue.ack(first, second)
        assert await place.pending() in ([third.id], [first.id, second.id, third.id])
        await queue.ack(first, second)
        assert await place.pending() == [third.id]
        await works_on(queue, place)


@asynccontextmanager
async def looking(place: Place) -> AsyncGenerator[Call]:
    messages = await place.given(1, 2)
    async with place.queue(is_open=False) as queue:
        yield queue.backlog_stats
        assert await place.pending() == [message.id for message in messages]
        await works_on(queue, place)


@pytest.mark.parametrize(
    ("scene", "at_least"),
    [
        (opening, 3),
        (opening_in_line, 1),
        (enqueueing_first, 3),
        (enqueueing, 1),
        (enqueueing_in_line, 1),
        (enqueueing_many, 3),
        (enqueueing_much, 3),
        (acking, 3),
        (looking, 3),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
@hows
async def test_a_call_that_is_cancelled_does_its_work_once_or_not_at_all(
    place: Place, scene: SceneAt, how: How, at_least: int
) -> None:
    await cancelled_at_each_point(place, scene, how, at_least=at_least)


# --- what takes messages ------------------------------------------------------------------------------------------


@asynccontextmanager
async def reading_first(place: Place) -> AsyncGenerator[Call]:
    """There is a message, and the call opens both connections."""
    [id] = await place.send(1)
    async with place.queue(is_open=False) as queue:
        found: list[QueueMessage] = []

        async def call() -> None:
            found.extend(await queue.read())

        yield call
        assert await place.pending() in ([], [id])
        assert not found or await place.pending() == [id]
        await is_delivered_once_more(queue, place, id)


@asynccontextmanager
async def reading_while_it_comes(place: Place) -> AsyncGenerator[Call]:
    """The read blocks until somebody sends; cancelled meanwhile, it takes nothing that is sent later."""
    async with place.queue(is_open=True) as queue:
        asked, ended = place.proxy.count(b"XREADGROUP"), asyncio.Event()

        def is_asked() -> bool:
            return place.proxy.count(b"XREADGROUP") > asked

        async def feed() -> list[str]:
            await eventually(lambda: is_asked() or ended.is_set(), "the read blocks")
            return [] if ended.is_set() else await place.send(1)

        found: list[str] = []

        async def call() -> None:
            found.extend(message.id for message in await queue.read())

        feeding = asyncio.create_task(feed())
        yield call
        ended.set()
        assert (await feeding)[: len(found)] == found
        later = await queue.enqueue({"n": 2})
        async with asyncio.timeout(LONG):  # else a read that is gone has taken it
            assert later in [message.id async for message in until(queue, later)]
        assert await place.pending() == [*(await place.entries())]
        await works_on(queue, place)


@asynccontextmanager
async def claiming(place: Place) -> AsyncGenerator[Call]:
    messages = await place.given(1, 2)
    ids = [message.id for message in messages]
    place.config = replace(place.config, consumer_name="consumer-2")
    async with place.queue(is_open=False) as queue:
        yield lambda: queue.claim_stale(0)
        assert await place.pending() == ids
        assert [message.id for message in await queue.claim_stale(0)] == ids
        await works_on(queue, place)


@asynccontextmanager
async def claiming_what_is_gone(place: Place) -> AsyncGenerator[Call]:
    """One of the entries was deleted: it goes off the list, and its neighbour stays."""
    gone, kept = [message.id for message in await place.given(1, 2)]
    await place.ask("XDEL", place.config.stream_key, gone)
    place.config = replace(place.config, consumer_name="consumer-2")
    async with place.queue(is_open=False) as queue:
        yield lambda: queue.claim_stale(0)
        assert await place.pending() in ([kept], [gone, kept])
        assert [message.id for message in await queue.claim_stale(0)] == [kept]
        assert await place.pending() == [kept]


async def is_delivered_once_more(queue: RedisStreamsQueue, place: Place, id: str) -> None:
    """What a cancelled call may have been given waits for whoever looks for it, or for the next read."""
    if not await place.pending():
        [message] = await queue.read()
        assert message.id == id
    assert [message.id for message in await queue.claim_stale(0)] == [id]
    await works_on(queue, place)


@pytest.mark.parametrize(
    "scene",
    [reading_first, reading_while_it_comes, claiming, claiming_what_is_gone],
    ids=lambda scene: scene.__name__,
)
@hows_of_taking
async def test_a_message_that_a_cancelled_call_was_given_stays_pending(place: Place, scene: SceneAt, how: How) -> None:
    await cancelled_at_each_point(place, scene, how, at_least=2)


# --- the life of a queue ------------------------------------------------------------------------------------------


@asynccontextmanager
async def living(place: Place) -> AsyncGenerator[Call]:
    """Entered, used and left."""
    queue = RedisStreamsQueue.connect(place.proxy.url, place.config)
    has_entered: list[str] = []

    async def call() -> None:
        async with queue:
            has_entered.append(await queue.enqueue({"n": 1}))
            await queue.read()

    yield call
    await is_closed(queue)
    assert not has_entered or list(await place.entries()) == has_entered


@asynccontextmanager
async def closing_while_busy(place: Place) -> AsyncGenerator[Call]:
    """A read blocks, a call is on its way and others stand in line; there is a connection for large writes, too."""
    queue = RedisStreamsQueue.connect(place.proxy.url, place.config)
    await queue.enqueue({"n": 0, "text": "x" * (1 << 17)})
    [message] = await queue.read()
    blocked = place.proxy.count(b"XREADGROUP")
    reading = asyncio.create_task(queue.read())
    await eventually(lambda: place.proxy.count(b"XREADGROUP") > blocked, "the read blocks")
    first, line = place.proxy.hold(b"XACK", once=True), place.proxy.hold(b"XPENDING", once=True)
    acking = asyncio.create_task(queue.ack(message))
    claims = [asyncio.create_task(queue.claim_stale(60_000)) for _ in range(3)]
    await first.caught.wait()
    first.release()
    await line.caught.wait()  # those in line are on their way, sent by whoever serves them
    yield queue.aclose
    line.release()
    outcomes = await asyncio.gather(reading, *claims, return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [QueueError] * 4, "all who waited are told"
    await acking
    await eventually(lambda: place.proxy.open_connections == 0, "no connection is left, though nobody closes again")
    await is_closed(queue)


@pytest.mark.parametrize(
    ("scene", "at_least"), [(living, 3), (closing_while_busy, 1)], ids=lambda value: getattr(value, "__name__", "")
)
@hows_of_taking
async def test_a_queue_that_was_left_is_closed_however_it_was_cancelled(
    place: Place, scene: SceneAt, how: How, at_least: int
) -> None:
    await cancelled_at_each_point(place, scene, how, at_least=at_least)


async def test_a_close_that_was_cancelled_can_be_made_again(place: Place) -> None:
    """Also if whoever closes is cancelled before its first step."""
    async with place.queue(is_open=True) as queue:
        closing = asyncio.create_task(queue.aclose())
        closing.cancel()
        with suppress(asyncio.CancelledError):
            await closing
        await works_on(queue, place)
