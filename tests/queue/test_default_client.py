"""A client and a configuration with all their defaults: redis-py's time-out is as long as the block."""

from __future__ import annotations

import secrets
import time
from urllib.parse import urlparse

import pytest
from redis.asyncio import Redis

from conquiet import QueueConfig, RedisStreamsQueue

pytestmark = pytest.mark.slow


@pytest.mark.any_server
async def test_a_read_blocks_its_five_seconds_without_a_time_out(url: str) -> None:
    place = urlparse(url)
    async with Redis(host=place.hostname or "", port=place.port or 0) as client:
        config = QueueConfig(f"t:{secrets.token_hex(6)}", "group", "consumer")
        async with RedisStreamsQueue(client, config) as queue:
            started = time.monotonic()
            assert await queue.read() == []
            assert time.monotonic() - started >= 0.99 * config.block_ms / 1000
            sent = await queue.enqueue({"n": 1})
            [message] = await queue.read()
            await queue.ack(message)
            assert message.id == sent
