"""``run`` with SQLite, in plain threads and through the facade (spec 2 §11)."""

from __future__ import annotations

import asyncio
import sqlite3
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from conquiet import QueueConfig, QueueConsumer, QueueError, QueueMessage, RedisStreamsQueue, sync
from tests.contracts.looking import Look
from tests.queue.databases import run


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


@pytest.mark.slow
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
