"""Objects that are sent to processes which share nothing with their sender."""

from __future__ import annotations

import multiprocessing
from typing import Any

from redis.asyncio import Redis

from conquiet.sync import QueueConsumer, QueueMessage, RedisStreamsQueue
from tests.sync.looking import LONG, looking, whatever
from tests.sync.scripts import say

__all__ = ["by_client", "by_url"]


def by_url(url: str, plain_url: str, name: str, stream: str) -> None:
    """A queue that was made from a URL."""
    _send(RedisStreamsQueue.connect(url, whatever(stream)), plain_url, name)


def by_client(url: str, plain_url: str, name: str, stream: str) -> None:
    """A queue that was made from a client."""
    _send(RedisStreamsQueue(Redis.from_url(url), whatever(stream)), plain_url, name)


def _send(queue: RedisStreamsQueue, url: str, name: str) -> None:
    with queue, looking(url) as eye:
        queue.enqueue_many({"n": n} for n in range(3))
        with QueueConsumer(queue, handle_signals=False) as consumer:
            first = consumer.next()
            assert first is not None
            before = set(eye.clients(name))
            context = multiprocessing.get_context("spawn")
            results: Any = context.SimpleQueue()
            child = context.Process(target=_receive, args=(queue, consumer, first, results))
            child.start()
            child.join(LONG)
            assert child.exitcode == 0
            assert results.get() == [1, 2]
            assert set(eye.clients(name)) == before
        assert queue.backlog_stats().pending == 0
        assert queue.backlog_stats().length == 4
    say("fine")


def _receive(queue: RedisStreamsQueue, consumer: QueueConsumer, first: QueueMessage, results: Any) -> None:
    assert first.payload == {"n": 0}
    queue.ack(first)
    seen = []
    for message in consumer.iter_messages():
        consumer.ack(message)
        seen.append(message.payload["n"])
        if message.payload["n"] == 2:
            consumer.stop()
    queue.enqueue({"n": "from the child"})
    results.put(seen)
