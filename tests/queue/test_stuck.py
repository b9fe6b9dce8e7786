"""What a consumer of a queue costs while nothing can move, and how it ends: one error, and no connection is left."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Final

import pytest

from conquiet import QueueConfig, QueueConsumer, QueueError, QueueMessage, RedisStreamsQueue
from conquiet.wire import blocking_connection
from tests.rigs.asking import blocked
from tests.rigs.cancelling import nothing_left
from tests.rigs.troubles import TROUBLES, Crowded
from tests.rigs.waiting import LONG, eventually

pytestmark = [pytest.mark.any_server, pytest.mark.slow]

BLOCK: Final = 0.2
"""Seconds for which a read blocks."""
READERS: Final = 5


class Tx:
    """A transaction of no database, and what begins it."""

    async def begin(self) -> Tx:
        return self

    async def commit(self) -> None: ...

    async def rollback(self) -> None: ...


async def iterate(consumer: QueueConsumer, seen: list[str]) -> None:
    async for message in consumer.iter_messages():
        seen.append(message.id)
        await consumer.ack(message)


async def run(consumer: QueueConsumer, seen: list[str]) -> None:
    async def handler(message: QueueMessage, tx: Tx) -> None:
        seen.append(message.id)

    await consumer.run(handler=handler, db_factory=Tx())


Way = Callable[[QueueConsumer, list[str]], Awaitable[None]]


@asynccontextmanager
async def consuming(queue: RedisStreamsQueue, way: Way, seen: list[str]) -> AsyncIterator[None]:
    """A consumer that is stopped at the end, also when the test has failed."""
    consumer = QueueConsumer(queue, handle_signals=False)
    task = asyncio.ensure_future(way(consumer, seen))
    try:
        yield
    finally:
        consumer.stop()
        await asyncio.wait_for(task, LONG)


both_ways = pytest.mark.parametrize("way", [iterate, run])


@pytest.fixture
def brief(config: QueueConfig) -> QueueConfig:
    return replace(config, block_ms=round(BLOCK * 1000))


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What the log says, beside that a consumer begins and is over."""
    told = [record.getMessage() for record in caplog.records if record.name.startswith("conquiet")]
    return [line for line in told if not line.endswith((" begins", " is over"))]


@both_ways
@pytest.mark.parametrize(
    ("trouble", "when"),
    [
        ("XREADGROUP is denied", "at first"),
        ("XREADGROUP is denied", "midway"),
        ("too many clients", "at first"),
        ("all is closed at once", "at first"),
        ("all is closed at once", "midway"),
        ("nothing is answered", "midway"),
    ],
)
async def test_a_consumer_that_cannot_go_on_ends_with_one_error_and_leaves_no_connection(
    url: str,
    brief: QueueConfig,
    way: Way,
    trouble: str,
    when: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(blocking_connection, "_WATCHDOG", 1.0)
    caplog.set_level(logging.INFO, "conquiet")
    async with Crowded(url) as proxy:
        async with RedisStreamsQueue.connect(proxy.url, brief) as queue:
            consumer = QueueConsumer(queue, handle_signals=False)
            if when == "at first":
                TROUBLES[trouble](proxy)
            before = len(proxy.received), proxy.accepted
            async with nothing_left():  # nothing goes on by itself
                task = asyncio.ensure_future(way(consumer, []))
                if when == "midway":
                    await eventually(lambda: proxy.count(b"XREADGROUP") > 1, "it reads")
                    before = len(proxy.received), proxy.accepted
                    TROUBLES[trouble](proxy)
                with pytest.raises(QueueError):
                    await asyncio.wait_for(task, LONG)
            assert sum(b"XREADGROUP" in command for command in proxy.received[before[0] :]) <= 1
            assert proxy.accepted - before[1] <= 1
            assert lines(caplog) == []
        await eventually(lambda: proxy.open_connections == 0, "no connection is left")


@both_ways
@pytest.mark.parametrize("trouble", ["nothing happens", "CLIENT is denied"])
async def test_an_idle_consumer_costs_one_command_a_block_and_says_nothing(
    url: str, brief: QueueConfig, way: Way, trouble: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "conquiet")
    seen: list[str] = []
    async with Crowded(url) as proxy, RedisStreamsQueue.connect(proxy.url, brief) as queue:
        TROUBLES[trouble](proxy)
        async with consuming(queue, way, seen):
            await eventually(lambda: proxy.count(b"XREADGROUP") > 0, "it reads")
            loop = asyncio.get_running_loop()
            began, before, opened = loop.time(), len(proxy.received), proxy.accepted
            await eventually(lambda: len(proxy.received) >= before + 5, "it reads again and again")
            asked = proxy.received[before:]
            assert len(asked) <= (loop.time() - began) / BLOCK + 1
            assert all(b"XREADGROUP" in command for command in asked)
            assert proxy.accepted == opened
            id = await queue.enqueue({"n": 1})
            await eventually(lambda: seen == [id], "it still reads")
            assert lines(caplog) == []


async def test_each_blocking_read_has_a_connection_of_its_own(url: str, config: QueueConfig) -> None:
    async with Crowded(url) as proxy, RedisStreamsQueue.connect(proxy.url, config) as queue:
        readings = [asyncio.create_task(queue.read(block_ms=60_000)) for _ in range(READERS)]
        await blocked(url, READERS)
        assert proxy.open_connections == READERS + 1  # one is for all commands that answer at once
        for reading in readings:
            reading.cancel()
        await asyncio.gather(*readings, return_exceptions=True)
