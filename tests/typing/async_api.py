"""What type checkers must see of the asynchronous API; read by them, never run.

Lines that must be errors carry a comment that becomes an error itself, for mypy and for pyright, when they are not.
"""

# pyright: reportUnnecessaryTypeIgnoreComment=error

from __future__ import annotations

import datetime as dt
import sqlite3
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, assert_type

from redis.asyncio import Redis, RedisCluster

import conquiet.sync
from conquiet import (
    Address,
    BacklogStats,
    Backoff,
    ConsistentHashPartitioner,
    DbFactory,
    DbTx,
    DeadLetter,
    DeadLetterPolicy,
    EmbeddedRedis,
    HashPartitioner,
    Message,
    Partitioner,
    QueueConfig,
    QueueConsumer,
    QueueMessage,
    RedisStreamsQueue,
    RetryPolicy,
)


async def the_server(path: Path) -> None:
    async with EmbeddedRedis(
        appendonly=True, unix_socket=False, port=None, directory=path, binary="redis-server"
    ) as server:
        assert_type(server, EmbeddedRedis)
        assert_type(server.url, str)
        assert_type(server.version, str)
        assert_type(server.software, str)
        assert_type(server.pid, int)
        assert_type(server.directory, Path)
    assert_type(await EmbeddedRedis(settings={"maxmemory": "64mb"}).open(), None)
    assert_type(await server.aclose(), None)


def ways_to_a_queue(config: QueueConfig, client: Redis, cluster: RedisCluster, address: Address) -> None:
    assert_type(RedisStreamsQueue.connect("redis://localhost", config), RedisStreamsQueue)
    assert_type(RedisStreamsQueue.connect(url="redis://localhost", config=config), RedisStreamsQueue)
    assert_type(RedisStreamsQueue("redis://localhost", config), RedisStreamsQueue)
    assert_type(RedisStreamsQueue(client, config), RedisStreamsQueue)
    assert_type(RedisStreamsQueue(cluster, config), RedisStreamsQueue)
    assert_type(RedisStreamsQueue(address, config), RedisStreamsQueue)
    assert_type(Address.of("redis://localhost"), Address)
    assert_type(str(address), str)


async def the_queue(queue: RedisStreamsQueue, payload: Mapping[str, Any]) -> None:
    async with queue as entered:
        assert_type(entered, RedisStreamsQueue)
    assert_type(queue.config, QueueConfig)
    assert_type(await queue.open(), None)
    assert_type(await queue.aclose(), None)
    assert_type(await queue.enqueue(payload), str)
    assert_type(await queue.enqueue(payload={"n": 1}), str)
    assert_type(await queue.enqueue_many([payload]), list[str])
    assert_type(await queue.enqueue_many({"n": n} for n in range(3)), list[str])
    assert_type(await queue.read(), list[QueueMessage])
    assert_type(await queue.read(1000, 10), list[QueueMessage])
    assert_type(await queue.read(block_ms=None, count=10), list[QueueMessage])
    messages = await queue.read()
    assert_type(await queue.ack(*messages), None)
    assert_type(await queue.ack(), None)
    assert_type(await queue.claim_stale(min_idle_ms=60_000, count=10), list[QueueMessage])
    assert_type(await queue.claim_stale(), list[QueueMessage])
    assert_type(await queue.backlog_stats(), BacklogStats)


async def a_bound_method(queue: RedisStreamsQueue) -> None:
    enqueue: Callable[[Mapping[str, Any]], Awaitable[str]] = queue.enqueue
    assert_type(await enqueue({}), str)


async def a_subclass(config: QueueConfig) -> None:
    class Orders(RedisStreamsQueue):
        """Somebody's own."""

    assert_type(Orders.connect("redis://localhost", config), Orders)
    async with Orders("redis://localhost", config) as orders:
        assert_type(orders, Orders)


async def the_consumer(queue: RedisStreamsQueue) -> None:
    async with QueueConsumer(queue, handle_signals=False) as consumer:
        assert_type(consumer, QueueConsumer)
    assert_type(consumer.config, QueueConfig)
    assert_type(consumer.stopping, bool)
    assert_type(consumer.stop(), None)
    assert_type(await consumer.next(), QueueMessage | None)
    assert_type(await consumer.next(block_ms=None), QueueMessage | None)
    assert_type(consumer.iter_messages(), AsyncIterator[QueueMessage])
    async for message in consumer.iter_messages():
        assert_type(message, QueueMessage)
        assert_type(await consumer.ack(message), None)


class Database:
    """Begins SQLite's transactions."""

    def begin(self) -> sqlite3.Connection:
        """One of them."""
        return sqlite3.connect(":memory:")


class AsyncTx:
    """A transaction of some asynchronous driver."""

    async def execute(self, statement: str) -> None:
        """Do something."""

    async def commit(self) -> None:
        """Keep it."""

    async def rollback(self) -> None:
        """Undo it."""


class AsyncDatabase:
    """Begins them."""

    async def begin(self) -> AsyncTx:
        """One of them."""
        return AsyncTx()


async def running(consumer: QueueConsumer, anything: DbFactory[DbTx]) -> None:
    def handler(message: QueueMessage, tx: sqlite3.Connection) -> None:
        tx.execute("SELECT 1", (message.payload["n"],))

    async def async_handler(message: QueueMessage, tx: AsyncTx) -> None:
        await tx.execute("SELECT 1")

    async def mixed_handler(message: QueueMessage, tx: sqlite3.Connection) -> None: ...

    def any_handler(message: QueueMessage, tx: DbTx) -> None: ...

    assert_type(await consumer.run(handler=handler, db_factory=Database()), None)
    await consumer.run(handler=async_handler, db_factory=AsyncDatabase())
    await consumer.run(handler=mixed_handler, db_factory=Database())
    await consumer.run(handler=any_handler, db_factory=anything)
    await consumer.run(handler=any_handler, db_factory=AsyncDatabase())


class OtherTx:
    """A transaction of another database."""

    def commit(self) -> None:
        """Keep it."""

    def rollback(self) -> None:
        """Undo it."""


def a_message(message: Message, letter: DeadLetter) -> None:
    assert_type(message.id, str)
    assert_type(message.topic, str)
    assert_type(message.partition, int)
    assert_type(message.group, str)
    assert_type(message.key, str | None)
    assert_type(message.payload, Any)
    assert_type(message.headers, Mapping[str, str])
    assert_type(message.timestamp, dt.datetime)
    assert_type(message.retry_count, int)
    assert_type(message.max_retries, int | None)
    assert_type(message.original_id, str)
    assert_type(message.replayed_from, str | None)
    assert_type(message.message_id, str | None)
    assert_type(message.epoch, int)
    assert_type(message.raw, bytes)
    assert_type(message.fields, Mapping[bytes, bytes])
    assert_type(letter.original_id, str)
    assert_type(letter.attempts, int)
    assert_type(letter.payload, Any)
    assert_type(letter.headers, Mapping[str, str])
    assert_type(letter.fields, tuple[bytes, ...])
    assert_type(letter.failed_at, dt.datetime | None)


def the_policies(partitioner: Partitioner) -> None:
    assert_type(Backoff(base=0.5, cap=30.0, kind="full_jitter").delay(3), float)
    assert_type(RetryPolicy(retry_on=(OSError, ValueError)).retries(OSError()), bool)
    assert_type(DeadLetterPolicy(drop_headers=("token",), transform=lambda fields: fields).include_traceback, bool)
    partitioners: list[Partitioner] = [HashPartitioner(), ConsistentHashPartitioner(virtual_nodes=8)]
    assert_type(partitioners[0]("key", 8), int)
    assert_type(partitioner(None, 8), int)


# --- what must be refused ---------------------------------------------------------------------------------------------


async def wrong_arguments(queue: RedisStreamsQueue, config: QueueConfig) -> None:
    await queue.read(block_ms="1000")  # type: ignore[arg-type]
    await queue.read(1, 2, 3)  # type: ignore[call-arg]
    await queue.read(blok_ms=1)  # type: ignore[call-arg]
    await queue.enqueue()  # type: ignore[call-arg]
    await queue.enqueue([1])  # type: ignore[arg-type]
    await queue.ack("1-0")  # type: ignore[arg-type]
    await queue.claim_stale(count=None)  # type: ignore[arg-type]
    RedisStreamsQueue.connect("redis://localhost")  # type: ignore[call-arg]
    RedisStreamsQueue(b"redis://", config)  # type: ignore[arg-type]
    EmbeddedRedis(True)  # type: ignore[call-arg]
    QueueConfig("orders", "billing")  # type: ignore[call-arg]
    config.block_ms = 1  # type: ignore[misc]
    queue.config = config  # type: ignore[misc]


def a_message_is_read_only(message: QueueMessage) -> None:
    message.id = "1-0"  # type: ignore[misc]


async def forgotten_await(queue: RedisStreamsQueue, consumer: QueueConsumer) -> None:
    queue.enqueue({})  # type: ignore[unused-coroutine]
    id: str = queue.enqueue({})  # type: ignore[assignment]
    with queue:  # type: ignore[attr-defined]
        pass
    for _ in consumer.iter_messages():  # type: ignore[attr-defined]
        print(id)
    await consumer.stop()  # type: ignore[func-returns-value, misc]


async def another_databases_handler(consumer: QueueConsumer) -> None:
    def handler(message: QueueMessage, tx: OtherTx) -> None: ...

    await consumer.run(handler=handler, db_factory=Database())  # type: ignore[arg-type]
    await consumer.run(handler=handler)  # type: ignore[call-arg]


def mixed_apis(queue: conquiet.sync.RedisStreamsQueue) -> None:
    QueueConsumer(queue)  # type: ignore[arg-type]
