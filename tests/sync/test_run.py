"""``QueueConsumer.run`` with plain functions: all on the calling thread, and nothing that must be awaited."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Self

import pytest

from conquiet.sync import ConfigError, QueueConsumer, QueueMessage, RedisStreamsQueue
from tests.sync.looking import LONG, Eye

pytestmark = pytest.mark.any_server


class Tx:
    """Notes what happens, and where."""

    def __init__(self) -> None:
        self.happened: list[str] = []
        self.threads: set[int] = set()

    def note(self, what: str) -> None:
        self.happened.append(what)
        self.threads.add(threading.get_ident())

    def begin(self) -> Self:
        self.note("begin")
        return self

    def commit(self) -> None:
        self.note("commit")

    def rollback(self) -> None:
        self.note("rollback")


def test_everything_of_a_run_happens_on_the_calling_thread(queue: RedisStreamsQueue, eye: Eye) -> None:
    queue.enqueue_many({"n": n} for n in range(3))
    tx = Tx()

    def run_it() -> int:
        consumer = QueueConsumer(queue)

        def handler(message: QueueMessage, got: Tx) -> None:
            assert got is tx
            got.note(f"handle {message.payload['n']}")
            queue.enqueue({"answer to": message.payload["n"]})  # the facade may be used in a handler
            if message.payload["n"] == 2:
                consumer.stop()

        consumer.run(handler=handler, db_factory=tx)
        return threading.get_ident()

    with ThreadPoolExecutor(1) as pool:
        caller = pool.submit(run_it).result(LONG)
    assert tx.happened == [what for n in range(3) for what in ("begin", f"handle {n}", "commit")]
    assert tx.threads == {caller}
    assert eye.pending(queue.config.stream_key) == []
    assert len(eye.payloads(queue.config.stream_key)) == 6


def test_sqlite_is_content(queue: RedisStreamsQueue) -> None:
    """It refuses any thread but the one that opened it."""
    queue.enqueue_many({"n": n} for n in range(3))
    database = sqlite3.connect(":memory:")
    database.execute("CREATE TABLE seen (n INTEGER)")

    class Database:
        def begin(self) -> sqlite3.Connection:
            database.execute("BEGIN")
            return database

    consumer = QueueConsumer(queue)

    def handler(message: QueueMessage, tx: sqlite3.Connection) -> None:
        tx.execute("INSERT INTO seen VALUES (?)", (message.payload["n"],))
        if message.payload["n"] == 2:
            raise LookupError

    with pytest.raises(LookupError):
        consumer.run(handler=handler, db_factory=Database())
    assert database.execute("SELECT n FROM seen").fetchall() == [(0,), (1,)]
    database.close()


@pytest.mark.parametrize(
    "error", [LookupError(), SystemExit(3), KeyboardInterrupt(), GeneratorExit(), asyncio.CancelledError()], ids=repr
)
def test_whatever_a_handler_raises_rolls_back_and_is_raised(
    queue: RedisStreamsQueue, eye: Eye, error: BaseException
) -> None:
    id = queue.enqueue({"n": 1})
    tx = Tx()

    def handler(message: QueueMessage, tx: Tx) -> None:
        raise error

    with pytest.raises(type(error)) as caught:
        QueueConsumer(queue).run(handler=handler, db_factory=tx)
    assert caught.value is error
    assert tx.happened == ["begin", "rollback"]
    assert tx.threads == {threading.get_ident()}
    assert eye.pending(queue.config.stream_key) == [id]


class StoppingTx(Tx):
    """Ends the run, should it come so far."""

    def __init__(self, consumer: QueueConsumer) -> None:
        super().__init__()
        self.consumer = consumer

    def commit(self) -> None:
        super().commit()
        self.consumer.stop()


def unfinished(queue: RedisStreamsQueue, eye: Eye, id: str) -> bool:
    """Whether the group will still get to see the entry: it is pending, or nobody has read it."""
    return id in eye.pending(queue.config.stream_key) or queue.backlog_stats().last_delivered_id < id


async def _handle(message: QueueMessage, tx: Any) -> None:
    """Would have to be awaited."""


class _AsyncCallable:
    async def __call__(self, message: QueueMessage, tx: Any) -> None:
        """Would have to be awaited."""


ASYNC_HANDLERS: dict[str, Callable[[QueueMessage, Any], Coroutine[Any, Any, None]]] = {
    "function": _handle,
    "partial": partial(_handle),
    "callable object": _AsyncCallable(),
    "method": _AsyncCallable().__call__,
    "lambda": lambda message, tx: _handle(message, tx),
}


@pytest.mark.parametrize("kind", ASYNC_HANDLERS)
@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning")
def test_an_async_handler_is_refused(queue: RedisStreamsQueue, eye: Eye, kind: str) -> None:
    """Its coroutine would never run, and the message would be acknowledged unhandled."""
    id = queue.enqueue({"n": 1})
    consumer = QueueConsumer(queue)
    tx = StoppingTx(consumer)
    with pytest.raises(ConfigError, match="plain function"):
        consumer.run(handler=ASYNC_HANDLERS[kind], db_factory=tx)  # type: ignore[arg-type]
    assert "commit" not in tx.happened
    assert unfinished(queue, eye, id)


class _AsyncBegin(Tx):
    async def begin(self) -> Self:  # type: ignore[override]
        return self


class _LambdaBegin(Tx):
    def begin(self) -> Any:
        return _AsyncBegin().begin()


class _AsyncCommit(Tx):
    async def commit(self) -> None:  # type: ignore[override]
        self.note("commit")


class _AsyncRollback(Tx):
    async def rollback(self) -> None:  # type: ignore[override]
        self.note("rollback")


@pytest.mark.parametrize("database", [_AsyncBegin, _LambdaBegin, _AsyncCommit])
@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning")
def test_an_async_database_is_refused(queue: RedisStreamsQueue, eye: Eye, database: type[Tx]) -> None:
    """Its commit would never run, and the message would be acknowledged all the same."""
    id = queue.enqueue({"n": 1})
    consumer = QueueConsumer(queue)

    def handler(message: QueueMessage, tx: Tx) -> None:
        consumer.stop()

    with pytest.raises(ConfigError, match="plain function"):
        consumer.run(handler=handler, db_factory=database())
    assert unfinished(queue, eye, id)


@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning")
def test_an_async_rollback_does_not_pass_silently(queue: RedisStreamsQueue) -> None:
    queue.enqueue({"n": 1})

    def handler(message: QueueMessage, tx: Tx) -> None:
        raise LookupError

    with pytest.raises((ConfigError, LookupError)) as caught:
        QueueConsumer(queue).run(handler=handler, db_factory=_AsyncRollback())
    told = [str(caught.value), *getattr(caught.value, "__notes__", ())]
    assert "rollback" in " ".join(told)
