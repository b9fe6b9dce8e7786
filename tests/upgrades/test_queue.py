"""A stream of an earlier version: what was pending is claimed, what was unread is read."""

from __future__ import annotations

import pytest

from conquiet import MalformedMessageError, QueueConfig, RedisStreamsQueue
from tests.upgrades.conftest import Home
from tests.upgrades.scenes.queue import GROUP, STREAM


@pytest.fixture
def room() -> str:
    return "queue"


async def test_nothing_is_lost_and_nothing_comes_twice(home: Home) -> None:
    facts, numbers = home.facts, {id: n for n, id in enumerate(home.facts["sent"])}
    pending = [id for ids in facts["pending"].values() for id in ids]
    async with RedisStreamsQueue.connect(home.url, QueueConfig(STREAM, GROUP, "billing-1")) as queue:
        stats = await queue.backlog_stats()
        held = {name: len(ids) for name, ids in facts["pending"].items()}
        assert (stats.length, stats.pending, stats.pending_by_consumer) == (11, 3, held)
        assert stats.oldest_pending_id == pending[0]
        stale = await queue.claim_stale(min_idle_ms=1, count=100)
        unread = await queue.read(block_ms=1_000, count=100)
        assert [message.id for message in stale] == pending
        assert [message.id for message in unread] == facts["unread"]
        for message in (*unread[:-1], *stale):
            assert message.payload == {"n": numbers[message.id], "name": "Zoë", "deep": [None, 1.5, 2**53]}
        with pytest.raises(MalformedMessageError, match="data"):
            _ = unread[-1].payload
        await queue.ack(*unread, *stale)
        id = await queue.enqueue({"n": 11})
        [last] = await queue.read(block_ms=1_000)
        assert (last.id, last.payload) == (id, {"n": 11})
        await queue.ack(last)
        assert (await queue.backlog_stats()).pending == 0
