"""What type checkers must see of the synchronous API; read by them, never run.

Lines that must be errors carry a comment that becomes an error itself, for mypy and for pyright, when they are not.
"""

# pyright: reportUnnecessaryTypeIgnoreComment=error

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, assert_type

from redis.asyncio import Redis, RedisCluster

import conquiet
from conquiet.sync import (
    Address,
    BacklogStats,
    ConfigError,
    ConquietError,
    DbFactory,
    DbTx,
    EmbeddedRedis,
    MalformedMessageError,
    PayloadError,
    QueueConfig,
    QueueConsumer,
    QueueError,
    QueueMessage,
    RedisStreamsQueue,
)


def the_config() -> None:
    config = QueueConfig("orders", "billing", "billing-1", block_ms=1, max_read_count=2, claim_idle_ms=3)
    assert_type(config, QueueConfig)
    assert_type(config.stream_key, str)
    assert_type(config.consumer_group, str)
    assert_type(config.consumer_name, str)
    assert_type(config.block_ms, int)
    assert_type(config.max_read_count, int)
    assert_type(config.claim_idle_ms, int)


def the_server(path: Path) -> None:
    with EmbeddedRedis(appendonly=True, unix_socket=False, port=None, directory=path, binary="redis-server") as server:
        assert_type(server, EmbeddedRedis)
        assert_type(server.url, str)
        assert_type(server.version, str)
        assert_type(server.software, str)
        assert_type(server.pid, int)
        assert_type(server.directory, Path)
    assert_type(EmbeddedRedis(settings={"maxmemory": "64mb"}).open(), None)
    assert_type(server.close(), None)


def ways_to_a_queue(config: QueueConfig, client: Redis, cluster: RedisCluster, address: Address) -> None:
    assert_type(RedisStreamsQueue.connect("redis://localhost", config), RedisStreamsQueue)
    assert_type(RedisStreamsQueue.connect(url="redis://localhost", config=config), RedisStreamsQueue)
    assert_type(RedisStreamsQueue("redis://localhost", config), RedisStreamsQueue)
    assert_type(RedisStreamsQueue(client, config), RedisStreamsQueue)
    assert_type(RedisStreamsQueue(cluster, config), RedisStreamsQueue)
    assert_type(RedisStreamsQueue(address, config), RedisStreamsQueue)
    assert_type(Address.of(client), Address)


def the_queue(queue: RedisStreamsQueue, payload: Mapping[str, Any]) -> None:
    with queue as entered:
        assert_type(entered, RedisStreamsQueue)
    assert_type(queue.config, QueueConfig)
    assert_type(queue.open(), None)
    assert_type(queue.close(), None)
    assert_type(queue.enqueue(payload), str)
    assert_type(queue.enqueue(payload={"n": 1}), str)
    assert_type(queue.enqueue_many([payload]), list[str])
    assert_type(queue.enqueue_many({"n": n} for n in range(3)), list[str])
    assert_type(queue.read(), list[QueueMessage])
    assert_type(queue.read(1000, 10), list[QueueMessage])
    assert_type(queue.read(block_ms=None, count=10), list[QueueMessage])
    messages = queue.read()
    assert_type(queue.ack(*messages), None)
    assert_type(queue.ack(), None)
    assert_type(queue.claim_stale(min_idle_ms=60_000, count=10), list[QueueMessage])
    assert_type(queue.claim_stale(), list[QueueMessage])
    assert_type(queue.backlog_stats(), BacklogStats)


def a_bound_method(queue: RedisStreamsQueue) -> None:
    enqueue: Callable[[Mapping[str, Any]], str] = queue.enqueue
    assert_type([*map(enqueue, [{"n": 1}])], list[str])


def a_subclass(config: QueueConfig) -> None:
    class Orders(RedisStreamsQueue):
        """Somebody's own."""

    assert_type(Orders.connect("redis://localhost", config), Orders)
    with Orders("redis://localhost", config) as orders:
        assert_type(orders, Orders)
        assert_type(orders.enqueue({}), str)


def the_consumer(queue: RedisStreamsQueue) -> None:
    with QueueConsumer(queue, handle_signals=False) as consumer:
        assert_type(consumer, QueueConsumer)
    assert_type(consumer.config, QueueConfig)
    assert_type(consumer.stopping, bool)
    assert_type(consumer.stop(), None)
    assert_type(consumer.next(), QueueMessage | None)
    assert_type(consumer.next(block_ms=None), QueueMessage | None)
    assert_type(consumer.iter_messages(), Iterator[QueueMessage])
    for message in consumer.iter_messages():
        assert_type(message, QueueMessage)
        assert_type(consumer.ack(message), None)


class Database:
    """Begins SQLite's transactions."""

    def begin(self) -> sqlite3.Connection:
        """One of them."""
        return sqlite3.connect(":memory:")


def running(consumer: QueueConsumer, anything: DbFactory[DbTx]) -> None:
    def handler(message: QueueMessage, tx: sqlite3.Connection) -> None:
        tx.execute("SELECT 1", (message.payload["n"],))

    def any_handler(message: QueueMessage, tx: DbTx) -> None: ...

    assert_type(consumer.run(handler=handler, db_factory=Database()), None)
    consumer.run(handler=any_handler, db_factory=anything)
    consumer.run(handler=any_handler, db_factory=Database())


def the_records(message: QueueMessage, stats: BacklogStats) -> None:
    assert_type(message.stream, str)
    assert_type(message.group, str)
    assert_type(message.id, str)
    assert_type(message.payload, dict[str, Any])
    assert_type(message.raw, bytes)
    assert_type(message.fields, tuple[bytes, ...])
    assert_type(message.delivery_count, int | None)
    assert_type(stats.length, int)
    assert_type(stats.pending, int)
    assert_type(stats.pending_by_consumer, Mapping[str, int])
    assert_type(stats.oldest_pending_id, str | None)
    assert_type(stats.oldest_pending_idle_ms, int | None)
    assert_type(stats.last_delivered_id, str)
    assert_type(stats.lag, int | None)


def the_errors(error: ConquietError) -> None:
    if isinstance(error, MalformedMessageError):
        assert_type(error.fields, tuple[bytes, ...])
        assert_type(error.entry_ids, tuple[str | None, ...])
    elif isinstance(error, QueueError):
        assert_type(error.entry_ids, tuple[str | None, ...])
    elif isinstance(error, PayloadError):
        assert_type(error.path, str)
    elif isinstance(error, ConfigError):
        value_error: ValueError = error
        assert_type(value_error.args, tuple[Any, ...])


class OtherTx:
    """A transaction of another database."""

    def commit(self) -> None:
        """Keep it."""

    def rollback(self) -> None:
        """Undo it."""


# --- what must be refused ---------------------------------------------------------------------------------------------


def wrong_arguments(queue: RedisStreamsQueue, config: QueueConfig) -> None:
    queue.read(block_ms="1000")  # type: ignore[arg-type]
    queue.read(1, 2, 3)  # type: ignore[call-arg]
    queue.read(blok_ms=1)  # type: ignore[call-arg]
    queue.enqueue()  # type: ignore[call-arg]
    queue.enqueue([1])  # type: ignore[arg-type]
    queue.enqueue({1: 1})  # type: ignore[dict-item]
    queue.enqueue_many({"n": 1})  # type: ignore[dict-item]
    queue.ack("1-0")  # type: ignore[arg-type]
    queue.ack(queue.read())  # type: ignore[arg-type]
    queue.claim_stale(count=None)  # type: ignore[arg-type]
    RedisStreamsQueue.connect("redis://localhost")  # type: ignore[call-arg]
    RedisStreamsQueue(b"redis://", config)  # type: ignore[arg-type]
    EmbeddedRedis(True)  # type: ignore[call-arg]
    queue.config = config  # type: ignore[misc]


async def awaiting_what_is_there(queue: RedisStreamsQueue, consumer: QueueConsumer) -> None:
    await queue.enqueue({})  # type: ignore[misc]
    async with queue:  # type: ignore[attr-defined]
        pass
    async for _ in consumer.iter_messages():  # type: ignore[attr-defined]
        pass


async def an_async_handler(message: QueueMessage, tx: sqlite3.Connection) -> None:
    """Belongs to the other API."""


def mixed_apis(queue: conquiet.RedisStreamsQueue, consumer: QueueConsumer) -> None:
    QueueConsumer(queue)  # type: ignore[arg-type]
    consumer.run(handler=an_async_handler, db_factory=Database())  # type: ignore[arg-type]


def another_databases_handler(consumer: QueueConsumer) -> None:
    def handler(message: QueueMessage, tx: OtherTx) -> None: ...

    consumer.run(handler=handler, db_factory=Database())  # type: ignore[arg-type]
    consumer.run(handler=handler)  # type: ignore[call-arg]


def names_of_the_other_api(queue: RedisStreamsQueue) -> None:
    queue.aclose()  # type: ignore[attr-defined]
