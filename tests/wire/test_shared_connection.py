"""One connection that many share: who gets which answer, and what becomes of it when somebody leaves."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import suppress

import pytest

from conquiet import Address, ConfigError, QueueConfig, QueueError, QueueMessage, RedisStreamsQueue
from tests.rigs.asking import blocked, entries, pending
from tests.rigs.proxy import Proxy
from tests.rigs.waiting import eventually, turns

FOREVER = 30_000


@pytest.fixture
async def proxy(url: str) -> AsyncIterator[Proxy]:
    async with Proxy(url) as proxy:
        yield proxy


@pytest.fixture
async def queue(proxy: Proxy, config: QueueConfig) -> AsyncIterator[RedisStreamsQueue]:
    async with RedisStreamsQueue.connect(proxy.url, config) as queue:
        yield queue


# --- a crowd ---------------------------------------------------------------------------------------


async def test_everybody_in_a_crowd_gets_their_own(
    url: str, proxy: Proxy, queue: RedisStreamsQueue, config: QueueConfig
) -> None:
    singles = [queue.enqueue({"caller": number, "part": 0}) for number in range(100)]
    batches = [queue.enqueue_many([{"caller": 100 + n, "part": part} for part in range(n)]) for n in range(20)]
    ids = [[id] for id in await asyncio.gather(*singles)] + await asyncio.gather(*batches)
    written = await entries(url, config.stream_key)
    for caller, own in enumerate(ids):
        assert [written[id] for id in own] == [{"caller": caller, "part": part} for part in range(len(own))]
    assert len(written) == 100 + sum(range(20))
    assert proxy.accepted == 1


@pytest.mark.parametrize("seed", range(5))
async def test_everybody_who_stays_gets_their_own_however_many_leave(
    url: str, proxy: Proxy, queue: RedisStreamsQueue, config: QueueConfig, seed: int
) -> None:
    chance = random.Random(seed)

    async def call(caller: int) -> list[str]:
        await turns(chance.randrange(20))
        if chance.random() < 0.2:
            await queue.backlog_stats()
        size = chance.randrange(1, 4)
        return await queue.enqueue_many([{"caller": caller, "part": part, "of": size} for part in range(size)])

    tasks = [asyncio.create_task(call(caller)) for caller in range(150)]
    leaving = chance.sample(tasks, 60)
    for task in leaving:
        await turns(chance.randrange(4))
        task.cancel()
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    written = await entries(url, config.stream_key)
    seen = [(payload["caller"], payload["part"]) for payload in written.values()]
    assert len(seen) == len(set(seen))
    for caller, outcome in enumerate(outcomes):
        if isinstance(outcome, list):
            assert [written[id]["part"] for id in outcome] == list(range(written[outcome[0]]["of"]))
            assert {written[id]["caller"] for id in outcome} == {caller}
        else:
            assert tasks[caller] in leaving
            assert isinstance(outcome, asyncio.CancelledError)
    assert (await queue.backlog_stats()).length == len(written)


@pytest.mark.parametrize("seed", range(3))
async def test_no_message_is_lost_between_readers_who_come_and_go(
    url: str, queue: RedisStreamsQueue, config: QueueConfig, seed: int
) -> None:
    chance = random.Random(seed)
    ids = await queue.enqueue_many([{"n": number} for number in range(100)])
    delivered: list[QueueMessage] = []

    async def read() -> None:
        delivered.extend(await queue.read(1, chance.randrange(1, 5)))

    for _ in range(10):
        readers = [asyncio.create_task(read()) for _ in range(4)]
        for reader in chance.sample(readers, 2):
            await turns(chance.randrange(12))
            reader.cancel()
        await asyncio.gather(*readers, return_exceptions=True)
    # Whatever a reader who left had been given is still pending; nothing was given to two of them.
    while messages := await queue.read(1, 100):
        delivered.extend(messages)
    own = [message.id for message in delivered]
    assert len(own) == len(set(own))
    assert all(message.payload == {"n": ids.index(message.id)} for message in delivered)

    async def all_pending() -> bool:
        return await pending(url, config.stream_key, config.consumer_group) == ids

    await eventually(all_pending, "every entry is pending with the group")


# --- reads that block, beside everything else ------------------------------------------------------


async def test_a_blocked_read_delays_nobody(url: str, queue: RedisStreamsQueue) -> None:
    await queue.enqueue({"n": 1})
    [message] = await queue.read(FOREVER)
    readings = [asyncio.create_task(queue.read(FOREVER)) for _ in range(3)]
    await blocked(url, 3)
    await queue.ack(message)
    assert (await queue.backlog_stats()).pending == 0
    assert await queue.claim_stale(0) == []
    assert not any(reading.done() for reading in readings)
    ids = await queue.enqueue_many([{"n": number} for number in range(3)])
    # One entry each, or what was there when a reader woke: in any case every entry once.
    messages = [message for reading in readings for message in await reading]
    assert sorted(message.id for message in messages) == ids


async def test_a_hundred_callers_share_one_connection(proxy: Proxy, queue: RedisStreamsQueue) -> None:
    await asyncio.gather(*(queue.enqueue({"n": number}) for number in range(100)))
    assert (proxy.accepted, proxy.count(b"XADD")) == (1, 100)


# --- the end ---------------------------------------------------------------------------------------


async def test_a_closed_queue_has_no_connection_and_makes_none(proxy: Proxy, config: QueueConfig) -> None:
    queue = RedisStreamsQueue.connect(proxy.url, config)
    await queue.enqueue({"n": 1})
    await queue.read(FOREVER)
    await queue.aclose()
    await eventually(lambda: proxy.open_connections == 0, "all connections are closed", seconds=5)
    accepted = proxy.accepted
    for call in (queue.enqueue({"n": 2}), queue.read(FOREVER), queue.backlog_stats(), queue.claim_stale(0)):
        with pytest.raises(QueueError, match="closed"):
            await call
    await queue.aclose()
    assert proxy.accepted == accepted


async def test_a_close_ends_the_calls_that_are_on_their_way(url: str, proxy: Proxy, config: QueueConfig) -> None:
    queue = RedisStreamsQueue.connect(proxy.url, config)
    await queue.open()
    reading = asyncio.create_task(queue.read(FOREVER))
    await blocked(url)
    hold = proxy.hold(b"XINFO")
    looking = [asyncio.create_task(queue.backlog_stats()) for _ in range(3)]
    await hold.caught.wait()
    await queue.aclose()
    outcomes = await asyncio.gather(reading, *looking, return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [QueueError] * 4
    await eventually(lambda: proxy.open_connections == 0, "all connections are closed", seconds=5)


@pytest.mark.parametrize("what", ["enqueue", "read"])
async def test_a_close_while_a_call_connects_leaves_no_connection(proxy: Proxy, config: QueueConfig, what: str) -> None:
    hold = proxy.hold(b"SELECT")
    queue = RedisStreamsQueue.connect(f"{proxy.url}/3", config)
    call = queue.enqueue({"n": 1}) if what == "enqueue" else queue.read(50)
    calling = asyncio.create_task(call)
    await hold.caught.wait()
    await queue.aclose()
    hold.release()
    with suppress(QueueError):  # it was there before the close, so either outcome will do
        await calling
    await eventually(lambda: proxy.open_connections == 0, "all connections are closed", seconds=5)


async def test_a_close_while_a_read_opens_its_own_connection_leaves_none(proxy: Proxy, config: QueueConfig) -> None:
    queue = RedisStreamsQueue.connect(proxy.url, config)
    await queue.open()
    hold = proxy.hold(b"$2\r\nID\r\n")  # CLIENT ID, the first thing that a reader asks
    reading = asyncio.create_task(queue.read(50))
    await hold.caught.wait()
    await queue.aclose()
    hold.release()
    with suppress(QueueError):
        await reading
    await eventually(lambda: proxy.open_connections == 0, "all connections are closed", seconds=5)


# --- without asyncio -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "url", ["redis://127.0.0.1:1", "redis+sentinel://127.0.0.1:1/m", "redis+cluster://127.0.0.1:1"]
)
@pytest.mark.parametrize("what", ["enqueue", "enqueue_many", "open", "read", "claim_stale", "backlog_stats"])
def test_without_an_asyncio_loop_every_call_says_so(url: str, what: str, config: QueueConfig) -> None:
    queue = RedisStreamsQueue(Address.of(url), config)
    arguments: dict[str, tuple[object, ...]] = {"enqueue": ({},), "enqueue_many": ([{}],)}
    call = getattr(queue, what)(*arguments.get(what, ()))
    # As trio, or anybody else who is not asyncio, would run it.
    with pytest.raises(ConfigError, match="asyncio"):
        call.send(None)
