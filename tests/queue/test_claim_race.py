"""What happens between the two questions of ``claim_stale``."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from conquiet import QueueConfig, RedisStreamsQueue
from tests.contracts.looking import Look
from tests.rigs.proxy import Proxy
from tests.rigs.waiting import LONG

OLD = 60_000


async def test_a_message_that_another_claims_meanwhile_is_not_taken_for_one_that_is_gone(
    url: str, config: QueueConfig, look: Look
) -> None:
    """Its entry is there: only a pending ID without an entry is taken off the list, and that on old servers."""
    async with (
        Proxy(url) as proxy,
        RedisStreamsQueue.connect(proxy.url, config) as queue,
        RedisStreamsQueue.connect(url, replace(config, consumer_name="consumer-2")) as rival,
        asyncio.timeout(LONG),
    ):
        gone, there = await queue.enqueue_many([{"n": 1}, {"n": 2}])
        await queue.read(count=2)
        await look.age([gone, there], OLD)
        await look.redis.xdel(look.stream, gone)
        hold = proxy.hold(b"XPENDING")
        claiming = asyncio.create_task(queue.claim_stale(min_idle_ms=OLD // 2))
        await hold.caught.wait()  # both are listed, and nobody has claimed them
        await look.redis.xclaim(look.stream, config.consumer_group, "consumer-2", 0, [there])
        hold.release()
        assert await claiming == []
        assert [(row.id, row.consumer) for row in await look.pending()] == [(there, "consumer-2")]
        [message] = await rival.claim_stale(min_idle_ms=0)
        assert message.payload == {"n": 2}
