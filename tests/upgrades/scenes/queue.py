"""A stream and a group: entries that are acknowledged, pending at two consumers, or unread; one is not ours."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from conquiet import QueueConfig, RedisStreamsQueue
from tests.rigs.asking import ask

STREAM = "app:orders"
GROUP = "billing"


@asynccontextmanager
async def queue(url: str) -> AsyncIterator[dict[str, Any]]:
    """Play it."""
    first = RedisStreamsQueue.connect(url, QueueConfig(STREAM, GROUP, "billing-1"))
    second = RedisStreamsQueue.connect(url, QueueConfig(STREAM, GROUP, "billing-2"))
    async with first, second:
        sent = await first.enqueue_many([{"n": n, "name": "Zoë", "deep": [None, 1.5, 2**53]} for n in range(10)])
        sent.append(await ask(url, "XADD", STREAM, "*", "foreign", "entry"))
        done = await first.read(block_ms=100, count=4)
        await first.ack(*done[:2])
        also = await second.read(block_ms=100, count=2)
        await second.ack(also[0])
        pending = {"billing-1": [message.id for message in done[2:]], "billing-2": [also[1].id]}
        yield {"sent": sent, "pending": pending, "unread": sent[6:]}
