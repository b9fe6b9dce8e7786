"""A read that is cancelled while it blocks leaves nothing behind that the next message could be given to."""

from __future__ import annotations

import asyncio

import anyio
import pytest
from redis.asyncio import Redis

from conquiet import QueueConfig, RedisStreamsQueue
from tests.rigs.waiting import eventually

BLOCK_MS = 60_000


async def until_blocked(eye: Redis) -> None:
    async def is_blocked() -> bool:
        return bool((await eye.info("clients"))["blocked_clients"])

    await eventually(is_blocked, "the read blocks")


async def test_the_message_after_a_cancelled_read_goes_to_the_next_read(url: str, queue: RedisStreamsQueue) -> None:
    async with Redis.from_url(url) as eye:
        for number in range(40):
            reading = asyncio.get_running_loop().create_task(queue.read(BLOCK_MS))
            await until_blocked(eye)
            reading.cancel()
            with pytest.raises(asyncio.CancelledError):
                await reading
            sent = await queue.enqueue({"n": number})
            messages = await queue.read(BLOCK_MS)
            assert [message.id for message in messages] == [sent]
            await queue.ack(*messages)
        assert (await queue.backlog_stats()).pending == 0


async def test_a_timeout_around_a_read_is_a_cancellation_like_any_other(queue: RedisStreamsQueue) -> None:
    for number in range(20):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.005):
                await queue.read(BLOCK_MS)
        with anyio.move_on_after(0.005) as scope:
            await queue.read(BLOCK_MS)
        assert scope.cancelled_caught
        sent = await queue.enqueue({"n": number})
        messages = await queue.read(BLOCK_MS)
        assert [message.id for message in messages] == [sent]
        await queue.ack(*messages)


async def test_cancelled_reads_do_not_pile_connections_up(
    url: str, queue: RedisStreamsQueue, config: QueueConfig
) -> None:
    async with Redis.from_url(url, decode_responses=True) as eye:
        before = len(await eye.client_list())
        for _ in range(10):
            reading = asyncio.get_running_loop().create_task(queue.read(BLOCK_MS))
            await until_blocked(eye)
            reading.cancel()
            await asyncio.wait([reading])

        async def few() -> bool:
            return len(await eye.client_list()) <= before + 1

        await eventually(few, "the connections of cancelled reads are gone or in use again")
