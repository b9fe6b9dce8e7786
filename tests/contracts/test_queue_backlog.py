"""Looking at the backlog (spec 2 §12.2)."""

from __future__ import annotations

import pytest

from conquiet import BacklogStats
from tests.conftest import Server
from tests.contracts.flavours import Consumer, Queue
from tests.contracts.looking import Look, recorded


async def test_backlog_stats_of_an_empty_queue(queue: Queue, server: Server) -> None:
    """spec 2 §12.2: backlog_stats() as an explicit query."""
    lag = 0 if server.release >= (7, 0) else None
    assert await queue.backlog_stats() == BacklogStats(0, 0, {}, None, None, "0-0", lag)


async def test_backlog_stats_tells_what_waits_and_with_whom(
    queue: Queue, rival: Queue, server: Server, look: Look
) -> None:
    """spec 2 §12.2: backlog and staleness: length, pending by consumer, the oldest and its idle time, lag."""
    ids = await queue.enqueue_many({"n": n} for n in range(10))
    first, *_ = await queue.read(block_ms=50, count=3)
    await rival.read(block_ms=50, count=2)
    await queue.ack(first)
    await look.age([ids[1]], 5_000_000)
    stats = await queue.backlog_stats()
    assert (stats.length, stats.pending) == (10, 4)
    assert stats.pending_by_consumer == {"consumer-1": 2, "consumer-2": 2}
    assert (stats.oldest_pending_id, stats.last_delivered_id) == (ids[1], ids[4])
    assert stats.oldest_pending_idle_ms is not None
    assert 5_000_000 <= stats.oldest_pending_idle_ms < 6_000_000
    assert stats.lag == (5 if server.release >= (7, 0) else None)


async def test_backlog_stats_has_no_side_effects(queue: Queue, look: Look) -> None:
    """spec 2 §12.2: must have no side effects: nothing is delivered, claimed, touched or written."""
    await queue.enqueue_many({"n": n} for n in range(4))
    await queue.read(block_ms=50, count=2)
    await look.age(await look.pending_ids(), 5_000_000)
    changes = (await look.redis.info("persistence"))["rdb_changes_since_last_save"]
    before = [(row.id, row.consumer, row.deliveries) for row in await look.pending()]
    groups = await look.groups()
    for _ in range(3):
        await queue.backlog_stats()
    assert [(row.id, row.consumer, row.deliveries) for row in await look.pending()] == before
    assert all(row.idle_ms >= 5_000_000 for row in await look.pending())
    assert await look.groups() == groups
    assert (await look.redis.info("persistence"))["rdb_changes_since_last_save"] == changes


@pytest.mark.parametrize("messages", [0, 300])
async def test_backlog_stats_is_bounded(messages: int, queue: Queue, url: str) -> None:
    """spec 2 §12.2: must be bounded: the same few questions, each of bounded answer, however long the backlog."""
    if messages:
        await queue.enqueue_many({"n": n} for n in range(messages))
        await queue.read(block_ms=50, count=messages)
    async with recorded(url) as commands:
        await queue.backlog_stats()
        seen = await commands.of()
    assert sorted(words[0] for words in seen) == ["XINFO", "XLEN", "XPENDING", "XPENDING"]
    assert [words[-3:] for words in seen if "-" in words] == [["-", "+", "1"]]


async def test_backlog_stats_never_runs_by_itself(consumer: Consumer, queue: Queue, url: str) -> None:
    """spec 2 §12.1, §12.2: must not run automatically, and Redis is not polled for observability."""
    await queue.enqueue_many({"n": n} for n in range(3))
    async with recorded(url) as commands:
        for _ in range(3):
            message = await consumer.next(block_ms=50)
            assert message is not None
            await consumer.ack(message)
        await consumer.next(block_ms=5)
        assert {words[0] for words in await commands.of()} == {"XREADGROUP", "XACK"}
