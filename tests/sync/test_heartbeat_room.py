"""Plain code that computes leaves the private loop room to beat."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from typing import Any

import pytest

from conquiet.sync import QueueConsumer, QueueMessage, RedisStreamsQueue
from conquiet.sync._portal import call
from tests.sync.looking import LONG

pytestmark = pytest.mark.any_server

BUSY = 0.3
BEATS = 5  # of thirty that would fit


class Heart:
    """Beats every 10 ms for as long as it is held."""

    def __init__(self) -> None:
        self.beats = 0
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._beat())

    async def stop(self) -> None:
        assert self._task is not None
        self._task.cancel()
        await asyncio.wait([self._task])

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(0.01)  # what it is: something that is due every 10 ms
            self.beats += 1


@pytest.fixture
def heart() -> Iterator[Heart]:
    heart = Heart()
    call(heart.start)
    yield heart
    call(heart.stop)


def compute(heart: Heart) -> int:
    """Keep the interpreter busy for a while; how often the heart beat meanwhile."""
    before, started = heart.beats, time.monotonic()
    while (spent := time.monotonic() - started) < BUSY or (heart.beats - before < BEATS and spent < LONG):
        sum(range(1000))
    return heart.beats - before


def test_the_loop_beats_while_the_caller_computes(heart: Heart) -> None:
    assert compute(heart) >= BEATS


def test_the_loop_beats_while_a_handler_computes(heart: Heart, queue: RedisStreamsQueue) -> None:
    queue.enqueue({"n": 1})
    consumer = QueueConsumer(queue)
    beats: list[int] = []

    class Database:
        def begin(self) -> Database:
            return self

        def commit(self) -> None:
            consumer.stop()

        def rollback(self) -> None: ...

    def handler(message: QueueMessage, tx: Any) -> None:
        beats.append(compute(heart))

    consumer.run(handler=handler, db_factory=Database())
    assert beats >= [BEATS]


def test_the_loop_beats_between_the_messages_of_an_iteration(heart: Heart, queue: RedisStreamsQueue) -> None:
    queue.enqueue({"n": 1})
    consumer = QueueConsumer(queue)
    for message in consumer.iter_messages():
        assert compute(heart) >= BEATS
        consumer.ack(message)
        consumer.stop()
