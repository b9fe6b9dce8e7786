"""``async with`` around a consumer is for signals and for the end: nothing waits for ever without it."""

from __future__ import annotations

import asyncio
import signal
from typing import Any

import pytest

from conquiet import QueueConfig, QueueConsumer, QueueMessage, RedisStreamsQueue
from tests.rigs.waiting import LONG, turns

pytestmark = pytest.mark.any_server


class NoDatabase:
    def begin(self) -> NoDatabase:
        return self

    def commit(self) -> None: ...

    def rollback(self) -> None: ...


async def test_a_consumer_and_its_queue_work_without_being_entered(url: str, config: QueueConfig) -> None:
    queue = RedisStreamsQueue.connect(url, config)
    ids = await queue.enqueue_many([{"n": number} for number in range(3)])
    seen: list[str] = []
    async with asyncio.timeout(LONG):
        message = await QueueConsumer(queue).next()
        assert message is not None
        seen.append(message.id)
        consumer = QueueConsumer(queue)
        async for message in consumer.iter_messages():
            seen.append(message.id)
            consumer.stop()
        running = QueueConsumer(queue)

        def handle(message: QueueMessage, tx: Any) -> None:
            seen.append(message.id)
            running.stop()

        await running.run(handler=handle, db_factory=NoDatabase())
    assert seen == ids
    await queue.aclose()


async def test_a_consumer_that_was_left_ends_at_once(queue: RedisStreamsQueue) -> None:
    await queue.enqueue({"n": 1})
    async with QueueConsumer(queue) as consumer:
        pass
    async with asyncio.timeout(LONG):
        assert await consumer.next(block_ms=60_000) is None
        assert [message async for message in consumer.iter_messages()] == []
        await consumer.run(handler=lambda message, tx: None, db_factory=NoDatabase())
    assert (await queue.backlog_stats()).pending == 0


async def test_a_run_after_an_iteration_that_was_broken_off_is_stopped_by_signals(queue: RedisStreamsQueue) -> None:
    """The iteration ends when the loop comes to it, while the run is under way: the signals stay with the run."""
    await queue.enqueue_many([{"n": number} for number in range(3)])
    consumer, seen = QueueConsumer(queue), list[str]()
    before = signal.getsignal(signal.SIGTERM)

    async def handle(message: QueueMessage, tx: Any) -> None:
        await turns()
        seen.append(message.id)
        signal.raise_signal(signal.SIGTERM)
        assert consumer.stopping, "known at once: no read is begun after it"

    async with asyncio.timeout(LONG):
        async for _ in consumer.iter_messages():
            break
        await consumer.run(handler=handle, db_factory=NoDatabase())
    assert len(seen) == 1
    assert (await queue.backlog_stats()).pending == 1
    assert signal.getsignal(signal.SIGTERM) is before
