"""The queue, and writes that may be repeated, on a server that lost its last writes: Redis Streams as they are."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Final

import pytest

from conquiet import QueueConfig, QueueError, RedisStreamsQueue
from conquiet.kit.clock import ManualClock
from conquiet.topics.produce.once import Appended, Write
from conquiet.topics.server.instance import Instance
from conquiet.topics.server.topics import Registry
from conquiet.wire.address import Address
from conquiet.wire.connections import Connections
from conquiet.wire.keys import Keys
from tests.rigs.asking import entries, pending
from tests.rigs.rollback import Rollback
from tests.topics.repeating import append, by_ids, chunk, payloads
from tests.topics.staging import Stage

pytest_plugins = ("tests.contracts.rollback_fixtures",)

pytestmark = pytest.mark.guarantee

CONFIG: Final = QueueConfig("orders", "billing", "one", block_ms=100)


@pytest.fixture
async def queue(rollback: Rollback) -> AsyncIterator[RedisStreamsQueue]:
    async with RedisStreamsQueue.connect(rollback.url, CONFIG) as queue:
        yield queue


async def test_an_acknowledgment_that_was_forgotten_leaves_the_message_pending(
    queue: RedisStreamsQueue, rollback: Rollback
) -> None:
    """Nobody is given it by a read: it is there for whoever claims what nobody has touched for a while."""
    await queue.enqueue({"n": 1})
    [message] = await queue.read(block_ms=1_000)
    await rollback.keep()
    await queue.ack(message)
    await rollback.lose()
    assert await pending(rollback.url, "orders", "billing") == [message.id]
    assert await queue.read(block_ms=1) == []
    [again] = await queue.claim_stale(min_idle_ms=0)
    assert (again.id, again.payload, again.delivery_count) == (message.id, {"n": 1}, 2)
    await queue.ack(again)
    assert await pending(rollback.url, "orders", "billing") == []


async def test_a_delivery_that_was_forgotten_is_made_again(queue: RedisStreamsQueue, rollback: Rollback) -> None:
    """To say that the first one is done, before that, changes nothing: it was never pending."""
    await queue.enqueue({"n": 1})
    await rollback.keep()
    [message] = await queue.read(block_ms=1_000)
    await rollback.lose()
    await queue.ack(message)
    [again] = await queue.read(block_ms=1_000)
    assert (again.id, again.payload, again.delivery_count) == (message.id, {"n": 1}, 1)
    await queue.ack(again)


async def test_a_claim_that_was_forgotten_leaves_the_message_with_the_one_before(
    queue: RedisStreamsQueue, rollback: Rollback
) -> None:
    await queue.enqueue({"n": 1})
    [message] = await queue.read(block_ms=1_000)
    await rollback.keep()
    other = QueueConfig("orders", "billing", "two", block_ms=100)
    async with RedisStreamsQueue.connect(rollback.url, other) as rival:
        await rival.claim_stale(min_idle_ms=0)
    await rollback.lose()
    stats = await queue.backlog_stats()
    assert (stats.pending, stats.oldest_pending_id) == (1, message.id)
    await queue.ack(message)


async def test_a_message_that_was_forgotten_is_lost_and_all_others_are_not(
    queue: RedisStreamsQueue, rollback: Rollback
) -> None:
    kept = await queue.enqueue({"n": 1})
    await rollback.keep()
    await queue.enqueue({"n": 2})
    await rollback.lose()
    after = await queue.enqueue({"n": 3})
    assert await entries(rollback.url, "orders") == {kept: {"n": 1}, after: {"n": 3}}
    assert [message.payload for message in await queue.read(block_ms=1_000, count=10)] == [{"n": 1}, {"n": 3}]


async def test_a_group_that_was_forgotten_is_an_error_and_made_by_whoever_connects_again(rollback: Rollback) -> None:
    """It begins with the first message that is there."""
    await rollback.keep()
    async with RedisStreamsQueue.connect(rollback.url, CONFIG) as queue:
        await queue.enqueue({"n": 1})
        await rollback.lose()
        await queue.enqueue({"n": 2})
        for _ in range(2):
            with pytest.raises(QueueError, match="NOGROUP"):
                await queue.read(block_ms=1)
    async with RedisStreamsQueue.connect(rollback.url, CONFIG) as queue:
        assert [message.payload for message in await queue.read(block_ms=1_000)] == [{"n": 2}]


# --- writes that may be repeated --------------------------------------------------------------------------------


@pytest.fixture
async def stage(rollback: Rollback, clock: ManualClock) -> AsyncIterator[Stage]:
    link = Connections(Address.of(rollback.url))
    instance = Instance(link, Keys("t"), clock)
    yield Stage(instance, Registry(instance))
    await link.aclose()


@pytest.mark.parametrize("is_by_id", [False, True], ids=["by place", "by ID"])
async def test_a_batch_that_is_repeated_adds_just_what_was_forgotten(
    stage: Stage, rollback: Rollback, is_by_id: bool
) -> None:
    """What is remembered of a write is lost along with its rows, and kept along with them."""
    topic, write = await stage.topic(), Write("export", by_id=is_by_id)
    chunks = [by_ids("a", "b"), by_ids("c", number=1)] if is_by_id else [chunk(0, 1, 2), chunk(1, 3)]
    everything = ['"a"', '"b"', '"c"'] if is_by_id else ["1", "2", "3"]
    await append(stage.instance, topic, write, chunks[:1])
    await rollback.keep()
    assert await append(stage.instance, topic, write, chunks) == Appended(rows=1, repeated=2)
    await rollback.lose()
    assert await payloads(stage, topic) == everything[:2]
    assert await append(stage.instance, topic, write, chunks) == Appended(rows=1, repeated=2)
    assert await append(stage.instance, topic, write, chunks) == Appended(repeated=3)
    assert await payloads(stage, topic) == everything


async def test_a_batch_that_was_forgotten_as_a_whole_is_begun_anew(stage: Stage, rollback: Rollback) -> None:
    """Nor does the server still think that a later one has begun: the last that it knows can be repeated."""
    topic = await stage.topic()
    first, second = Write("stream", 0, goes_on=True), Write("stream", 1, goes_on=True)
    await append(stage.instance, topic, first, [chunk(0, 1)])
    await rollback.keep()
    await append(stage.instance, topic, second, [chunk(0, 2)])
    await rollback.lose()
    assert await append(stage.instance, topic, first, [chunk(0, 1)]) == Appended(repeated=1)
    assert await append(stage.instance, topic, second, [chunk(0, 2)]) == Appended(rows=1)
    assert await payloads(stage, topic) == ["1", "2"]
