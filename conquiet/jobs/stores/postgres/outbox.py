"""Adding jobs in a transaction of the caller's: written once, for plain and for asynchronous connections."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Final, TypeAlias, cast

import anyio
import anyio.to_thread
from psycopg import AsyncConnection, AsyncRawCursor, Connection, RawCursor, pq
from psycopg.rows import tuple_row

from conquiet.errors import ConfigError
from conquiet.jobs.stores.postgres import driver
from conquiet.jobs.stores.postgres.pool import Rows
from conquiet.kit.service import Background, to_its_end

__all__ = ["Adding", "run"]

Step: TypeAlias = tuple[bytes, Sequence[object]]
"""A statement and its values."""
Adding: TypeAlias = Generator[Step, Rows, list[str]]
"""Asks for statements and is sent their rows; returns the IDs that are taken, if nothing was added."""

_SAVE: Final = b"SAVEPOINT conquiet_add"
_KEEP: Final = b"RELEASE SAVEPOINT conquiet_add"
_UNDO: Final = b"ROLLBACK TO SAVEPOINT conquiet_add"
_TRIES: Final = 3
"""In a transaction that sees one moment only, the cause of a failure may never be seen to go."""
_AGAIN: Final = 0.05
"""Seconds after which the server is asked again to call a statement off."""


def _adding(add: Step, taken: Step, can_save: bool) -> Adding:
    """The way to add jobs such that a duplicate leaves the transaction usable.

    ``can_save`` is whether there is a transaction, or will be with the first statement: outside of one, the statement
    is a transaction by itself.
    """
    crossed: Exception | None = None
    for _ in range(_TRIES):
        if can_save:
            yield _SAVE, ()
        try:
            yield add
        except driver.CROSSED as error:
            crossed = error
            if can_save:
                yield _UNDO, ()
                yield _KEEP, ()
        else:
            if can_save:
                yield _KEEP, ()
            return []
        rows = yield taken
        if rows:
            return [row[0] for row in rows]
    assert crossed is not None
    raise crossed


async def run(connection: object, add: Step, taken: Step, what: str, schema: str) -> list[str]:
    """Go through the steps on the caller's connection, a plain or an asynchronous one; commits nothing."""
    if not isinstance(connection, AsyncConnection | Connection):
        kind = f"{type(connection).__module__}.{type(connection).__qualname__}"
        raise ConfigError(f"connection must be a psycopg.AsyncConnection or a psycopg.Connection, not a {kind}")
    theirs = cast("AsyncConnection[Any] | Connection[Any]", connection)
    steps = _adding(add, taken, _can_save(theirs))
    try:
        if isinstance(theirs, AsyncConnection):
            return await _run_async(theirs, steps)
        return await _run_beside(theirs, steps)
    except driver.FAILURES as error:
        raise driver.refused(what, schema, error) from error


async def _run_async(connection: AsyncConnection[Any], steps: Adding) -> list[str]:
    step = next(steps)
    while True:
        cursor = AsyncRawCursor(connection, row_factory=tuple_row)
        driver.teach(cursor.adapters)
        try:
            await cursor.execute(*step, binary=True)
            rows = await cursor.fetchall() if cursor.description else []
            step = steps.send(rows)
        except driver.CROSSED as error:
            step = steps.throw(error)
        except StopIteration as end:
            return list(end.value)


async def _run_beside(connection: Connection[Any], steps: Adding) -> list[str]:
    """Run it in a thread; cancelled, it ends when the thread has left the connection, or after a second.

    The caller is about to roll back, and what came after that would be part of the next transaction.
    """
    given_up = asyncio.Event()
    working = Background().start(anyio.to_thread.run_sync(_run_plain, connection, steps, given_up.is_set), "outbox")
    try:
        await asyncio.wait([working])
    except asyncio.CancelledError:
        given_up.set()
        await to_its_end(_called_off(connection, working), "outbox")
        raise
    return working.result()


async def _called_off(connection: Connection[Any], working: asyncio.Task[list[str]]) -> None:
    working.add_done_callback(lambda done: done.cancelled() or done.exception())  # its outcome is not needed any more
    with anyio.move_on_after(driver.GOODBYE):
        while not working.done():  # the thread may have been about to begin a statement
            with suppress(*driver.FAILURES):
                await anyio.to_thread.run_sync(partial(connection.cancel_safe, timeout=driver.GOODBYE))
            await asyncio.wait([working], timeout=_AGAIN)


def _run_plain(connection: Connection[Any], steps: Adding, is_given_up: Callable[[], bool]) -> list[str]:
    step = next(steps)
    while not is_given_up():
        cursor = RawCursor(connection, row_factory=tuple_row)
        driver.teach(cursor.adapters)
        try:
            cursor.execute(*step, binary=True)
            rows = cursor.fetchall() if cursor.description else []
            step = steps.send(rows)
        except driver.CROSSED as error:
            step = steps.throw(error)
        except StopIteration as end:
            return list(end.value)
    return []


def _can_save(connection: AsyncConnection[Any] | Connection[Any]) -> bool:
    is_idle = connection.info.transaction_status == pq.TransactionStatus.IDLE
    return not (connection.autocommit and is_idle)
