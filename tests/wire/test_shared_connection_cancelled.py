"""Calls on a shared connection that are cancelled: their answers are for nobody else."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import aclosing
from typing import Any

import pytest

from conquiet import QueueConfig, RedisStreamsQueue
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


async def cancelled(task: asyncio.Task[Any]) -> None:
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_cancelled_enqueue_leaves_its_answer_to_nobody(
    url: str, proxy: Proxy, queue: RedisStreamsQueue, config: QueueConfig
) -> None:
    hold = proxy.hold(b'{"n":"cancelled"}')
    writing = asyncio.create_task(queue.enqueue({"n": "cancelled"}))
    await hold.caught.wait()
    await cancelled(writing)
    hold.release()
    second = await queue.enqueue({"n": "second"})
    written = await entries(url, config.stream_key)
    assert [payload["n"] for payload in written.values()] == ["cancelled", "second"]
    assert written[second] == {"n": "second"}
    assert (await queue.backlog_stats()).length == 2


async def test_a_cancelled_enqueue_leaves_its_answer_to_nobody_who_waited_either(
    url: str, proxy: Proxy, queue: RedisStreamsQueue, config: QueueConfig
) -> None:
    hold = proxy.hold(b'{"n":"cancelled"}')
    writing = asyncio.create_task(queue.enqueue({"n": "cancelled"}))
    await hold.caught.wait()
    waiting = [asyncio.create_task(queue.enqueue({"n": number})) for number in range(5)]
    looking = asyncio.create_task(queue.backlog_stats())
    await asyncio.sleep(0)  # so that they stand in line
    await cancelled(writing)
    hold.release()
    ids = await asyncio.gather(*waiting)
    assert (await looking).length == 6
    written = await entries(url, config.stream_key)
    assert [written[id] for id in ids] == [{"n": number} for number in range(5)]


async def test_a_caller_who_leaves_the_line_sends_nothing(
    url: str, proxy: Proxy, queue: RedisStreamsQueue, config: QueueConfig
) -> None:
    hold = proxy.hold(b'{"n":0}')
    calls = [asyncio.create_task(queue.enqueue({"n": number})) for number in range(3)]
    await hold.caught.wait()
    await cancelled(calls[1])
    hold.release()
    first, third = await asyncio.gather(calls[0], calls[2])
    assert await entries(url, config.stream_key) == {first: {"n": 0}, third: {"n": 2}}
    assert proxy.accepted == 1  # the connection was never in doubt


async def test_a_caller_who_leaves_a_shared_write_does_not_tear_the_others(
    url: str, proxy: Proxy, queue: RedisStreamsQueue, config: QueueConfig
) -> None:
    first = proxy.hold(b'{"n":0}')
    shared = proxy.hold(b'{"n":1}')
    calls = [asyncio.create_task(queue.enqueue({"n": number})) for number in range(4)]
    await first.caught.wait()
    first.release()
    await shared.caught.wait()  # 1, 2 and 3 are on their way together
    await cancelled(calls[2])
    shared.release()
    ids = await asyncio.gather(calls[0], calls[1], calls[3])
    written = await entries(url, config.stream_key)
    assert [written[id]["n"] for id in ids] == [0, 1, 3]
    assert [payload["n"] for payload in written.values()] == [0, 1, 2, 3]
    assert proxy.accepted == 1


async def test_a_cancelled_enqueue_of_many_leaves_its_answers_to_nobody(
    url: str, proxy: Proxy, queue: RedisStreamsQueue, config: QueueConfig
) -> None:
    hold = proxy.hold(b'{"n":400}')  # so that the answers before it have arrived
    writing = asyncio.create_task(queue.enqueue_many([{"n": number} for number in range(450)]))
    await hold.caught.wait()
    await cancelled(writing)
    hold.release()
    ids = await queue.enqueue_many([{"m": number} for number in range(10)])
    written = await entries(url, config.stream_key)
    assert [written[id] for id in ids] == [{"m": number} for number in range(10)]


@pytest.mark.slow
async def test_a_cancelled_read_leaves_its_messages_pending_and_to_nobody_else(
    url: str, proxy: Proxy, queue: RedisStreamsQueue, config: QueueConfig
) -> None:
    first, second = await queue.enqueue_many([{"n": 1}, {"n": 2}])
    hold = proxy.hold(b"XREADGROUP")
    reading = asyncio.create_task(queue.read(FOREVER))
    await hold.caught.wait()
    await cancelled(reading)
    hold.release()
    assert [message.id for message in await queue.read(FOREVER)] == [second]
    assert await pending(url, config.stream_key, config.consumer_group) == [first, second]
    assert {message.id for message in await queue.claim_stale(0)} == {first, second}


async def test_a_read_that_is_cancelled_twice_leaves_its_answer_to_nobody_either(
    url: str, proxy: Proxy, queue: RedisStreamsQueue, config: QueueConfig
) -> None:
    first, second = await queue.enqueue_many([{"n": 1}, {"n": 2}])
    hold = proxy.hold(b"XREADGROUP")
    reading = asyncio.create_task(queue.read(FOREVER))
    await hold.caught.wait()
    reading.cancel()
    await turns(3)
    await cancelled(reading)  # as a task group does to those who take their time
    hold.release()
    assert [message.id for message in await queue.read(FOREVER)] == [second]
    assert await queue.read(1) == []
    assert await pending(url, config.stream_key, config.consumer_group) == [first, second]


async def test_a_read_that_is_cancelled_while_it_waits_takes_nothing(
    url: str, proxy: Proxy, queue: RedisStreamsQueue, config: QueueConfig
) -> None:
    reading = asyncio.create_task(queue.read(FOREVER))
    await blocked(url)
    await cancelled(reading)
    await blocked(url, 0)
    entry_id = await queue.enqueue({"n": 1})
    assert await pending(url, config.stream_key, config.consumer_group) == []
    assert [message.id for message in await queue.read(FOREVER)] == [entry_id]


async def test_a_read_that_is_timed_out_by_its_caller_is_no_different(
    url: str, queue: RedisStreamsQueue, config: QueueConfig
) -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await queue.read(FOREVER)
    await blocked(url, 0)
    entry_id = await queue.enqueue({"n": 1})
    assert [message.id for message in await queue.read(FOREVER)] == [entry_id]


@pytest.mark.parametrize("command", [b"XACK", b"XPENDING", b"XCLAIM", b"XINFO"])
async def test_other_calls_that_are_cancelled(proxy: Proxy, queue: RedisStreamsQueue, command: bytes) -> None:
    await queue.enqueue({"n": 1})
    [message] = await queue.read(FOREVER)
    hold = proxy.hold(command)
    calls: dict[bytes, Callable[[], Coroutine[Any, Any, object]]] = {
        b"XACK": lambda: queue.ack(message),
        b"XPENDING": lambda: queue.claim_stale(0),
        b"XCLAIM": lambda: queue.claim_stale(0),
        b"XINFO": queue.backlog_stats,
    }
    calling = asyncio.create_task(calls[command]())
    await hold.caught.wait()
    await cancelled(calling)
    hold.release()
    stats = await queue.backlog_stats()
    assert (stats.length, stats.pending) == (1, 0 if command == b"XACK" else 1)
    assert await queue.enqueue({"n": 2})


async def test_a_call_that_is_cancelled_while_it_connects(url: str, proxy: Proxy, config: QueueConfig) -> None:
    hold = proxy.hold(b"SELECT")
    async with aclosing(RedisStreamsQueue.connect(f"{proxy.url}/3", config)) as queue:
        calling = asyncio.create_task(queue.enqueue({"n": 1}))
        await hold.caught.wait()
        await cancelled(calling)
        await eventually(lambda: proxy.open_connections == 0, "the connection is closed")
        hold.release()
        entry_id = await queue.enqueue({"n": 2})
        assert await entries(f"{url}/3", config.stream_key) == {entry_id: {"n": 2}}
