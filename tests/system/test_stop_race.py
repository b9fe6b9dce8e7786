"""``stop()`` in the middle of a long block, with a message arriving at that very moment."""

from __future__ import annotations

import asyncio
import random
import secrets

import pytest
from redis.asyncio import Redis

from conquiet import QueueConfig, QueueConsumer, QueueMessage, RedisStreamsQueue
from tests.rigs.waiting import eventually

pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]

BLOCK_MS = 60_000
WELL_BEFORE = 10.0
"""Seconds: far more than a stop takes on the slowest machine, far less than the block."""


async def settle(queue: RedisStreamsQueue, given: QueueMessage | None, sent: str) -> None:
    """The message was handed out and returned, or was not handed out at all."""
    if given is None:
        assert (await queue.backlog_stats()).pending == 0, "handed out and dropped"
        [given] = await queue.read(BLOCK_MS, 1)
    assert given.id == sent
    await queue.ack(given)


async def test_stop_while_the_read_blocks(url: str, scale: float) -> None:
    chance = random.Random(20)
    config = QueueConfig(f"t:{secrets.token_hex(6)}", "group", "consumer", block_ms=BLOCK_MS)
    async with RedisStreamsQueue.connect(url, config) as queue, Redis.from_url(url, decode_responses=True) as eye:

        async def is_blocked() -> bool:
            return bool((await eye.info("clients"))["blocked_clients"])

        for _ in range(max(80, int(800 * scale))):
            consumer = QueueConsumer(queue, handle_signals=False)
            reading = asyncio.get_running_loop().create_task(consumer.next())
            await eventually(is_blocked, "the read blocks")
            sending = asyncio.get_running_loop().create_task(queue.enqueue({"n": 1}))
            for _ in range(chance.randrange(6)):
                await asyncio.sleep(0)
            consumer.stop()
            async with asyncio.timeout(WELL_BEFORE):
                await settle(queue, await reading, await sending)


async def test_stop_before_the_read_is_written(url: str, scale: float) -> None:
    chance = random.Random(10)
    for _ in range(max(20, int(200 * scale))):
        config = QueueConfig(f"t:{secrets.token_hex(6)}", "group", "consumer", block_ms=BLOCK_MS)
        # A queue that has yet to connect: the read is written several turns of the loop after it was asked for.
        async with RedisStreamsQueue.connect(url, config) as sender, RedisStreamsQueue.connect(url, config) as queue:
            consumer = QueueConsumer(queue, handle_signals=False)
            sent = await sender.enqueue({"n": 1})
            reading = asyncio.get_running_loop().create_task(consumer.next())
            for _ in range(chance.randrange(4)):
                await asyncio.sleep(0)
            consumer.stop()
            async with asyncio.timeout(WELL_BEFORE):
                given = await reading
                assert given is None, "read after the stop"
                await settle(sender, given, sent)


async def test_stop_at_any_moment_of_a_first_read(url: str, scale: float) -> None:
    """From before the connection is made until after the read is written: whatever the moment, nothing is dropped."""
    chance = random.Random(30)
    for _ in range(max(20, int(200 * scale))):
        config = QueueConfig(f"t:{secrets.token_hex(6)}", "group", "consumer", block_ms=BLOCK_MS)
        async with RedisStreamsQueue.connect(url, config) as sender, RedisStreamsQueue.connect(url, config) as queue:
            consumer = QueueConsumer(queue, handle_signals=False)
            reading = asyncio.get_running_loop().create_task(consumer.next())
            sending = asyncio.get_running_loop().create_task(sender.enqueue({"n": 1}))
            for _ in range(chance.randrange(60)):
                await asyncio.sleep(0)
            consumer.stop()
            async with asyncio.timeout(WELL_BEFORE):
                await settle(sender, await reading, await sending)
