"""The connections of one store: opened when needed, up to a number, and given back only in a known state."""

from __future__ import annotations

import asyncio
import contextlib
import select
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from psycopg import AsyncRawCursor, pq

from conquiet.errors import ConfigError, QueueError
from conquiet.jobs.stores._gathering import HeldError
from conquiet.jobs.stores.postgres import driver
from conquiet.jobs.stores.postgres.statements import Statements
from conquiet.kit.loopthread import forks, outlive_fork

__all__ = ["Call", "Pool", "Rows", "is_elsewhere"]

Call: TypeAlias = tuple[str, Sequence[object]]
"""A statement by name, and its values."""
Rows: TypeAlias = list[tuple[Any, ...]]

_Connection: TypeAlias = driver.Connection


@dataclass(slots=True)
class _State:
    """What belongs to one event loop of one process."""

    places: asyncio.Semaphore
    adding: asyncio.Semaphore
    """For those who add, and may have to wait for others' transactions: they never have all connections."""
    forks: int
    loop: asyncio.AbstractEventLoop | None = None
    idle: list[_Connection] = field(default_factory=list[_Connection])
    closings: int = 0


class Pool:
    """Up to ``size`` connections on one event loop.

    A connection on which a call failed or was cancelled is thrown away, and with the first that turns out to be broken
    all that lie idle. No call is ever sent twice.
    """

    def __init__(self, dsn: str, schema: str, size: int) -> None:
        self.schema = schema
        self.statements = Statements(schema)
        self._dsn = driver.connection_string(dsn)
        self._planning_dsn = driver.with_plans(self._dsn)
        self._size = size
        self._left: list[_State] = []
        self._mine = self._state()
        outlive_fork(self)

    def limit(self, size: int) -> None:
        """Open no more than ``size`` connections; to be called before it is used."""
        self._size = min(self._size, size)
        self._mine = self._state()

    async def run(self, what: str, *calls: Call) -> list[Rows]:
        """The rows of each call, one after the other; each is a transaction of its own. ``what`` is for error texts.

        So no lock is ever held while the server waits for this process: it may be stopped between two calls, and
        other processes that need the same rows would wait as long as it stands still.
        """
        async with self._borrowed(what) as connection:
            return [await self._rows(connection, call) for call in calls]

    async def was_added(self, what: str, call: Call) -> bool:
        """Run one call; false if it failed as a whole because of others who write the same keys.

        ``HeldError`` if others have one of these keys and have not yet decided.
        """
        async with self._here().adding:
            try:
                await self.run(what, call)
            except QueueError as error:
                if isinstance(error.__cause__, driver.HELD):
                    raise HeldError from error
                if isinstance(error.__cause__, driver.CROSSED):
                    return False
                raise
            return True

    async def connect(self, what: str) -> _Connection:
        """A connection outside of the pool; to be closed by the caller."""
        return await self._connect(what, self._dsn)

    async def _connect(self, what: str, dsn: str) -> _Connection:
        try:
            connection = await driver.Connection.opened(dsn)
        except driver.FAILURES as error:
            raise driver.refused(what, self.schema, error) from error
        driver.teach(connection.adapters)
        return connection

    async def aclose(self) -> None:
        """Close what is idle; what is in use is closed when it comes back."""
        self._left_behind()
        self._mine.closings += 1
        await self._drop_idle(self._mine)

    async def _rows(self, connection: _Connection, call: Call) -> Rows:
        name, values = call
        cursor = AsyncRawCursor(connection)
        await cursor.execute(self.statements[name], values, prepare=True, binary=True)
        return await cursor.fetchall() if cursor.description else []

    @asynccontextmanager
    async def _borrowed(self, what: str) -> AsyncGenerator[_Connection]:
        mine = self._here()
        async with mine.places:
            closings = mine.closings
            connection = _idle_one(mine) or await self._fresh(what)
            try:
                yield connection
            except BaseException as error:
                await self._given_up(mine, connection, error)
                if isinstance(error, driver.FAILURES):
                    raise driver.refused(what, self.schema, error) from error
                raise
            if closings != mine.closings or not _is_at_rest(connection):
                await connection.close()
            else:
                mine.idle.append(connection)

    async def _given_up(self, mine: _State, connection: _Connection, error: BaseException) -> None:
        if isinstance(error, driver.HARMLESS) and _is_at_rest(connection):
            mine.idle.append(connection)
            return
        # A cancelled call's too: the server may take the request to cancel for one about the next call.
        await connection.close()
        if isinstance(error, driver.FAILURES):  # gone, or demoted; the others most likely as well
            await self._drop_idle(mine)

    async def _fresh(self, what: str) -> _Connection:
        dsn = self._planning_dsn
        try:
            return await self._connect(what, dsn)
        except QueueError as error:
            # Its own text has but the first line of the driver's, which tells of each host that it tried.
            if dsn == self._dsn or not driver.is_about_options(error.__cause__ or error):
                raise
            # A pooler that lets no settings through: the server plans as it sees fit.
            self._planning_dsn = self._dsn
            return await self._connect(what, self._dsn)

    async def _drop_idle(self, mine: _State) -> None:
        idle, mine.idle = mine.idle, []
        for connection in idle:
            with contextlib.suppress(*driver.FAILURES):
                await connection.close()

    def _here(self) -> _State:
        """The state for the running loop."""
        self._left_behind()
        loop = asyncio.get_running_loop()
        if is_elsewhere(self._mine.loop, loop):
            for connection in self._mine.idle:
                connection.pgconn.finish()
            self._mine = self._state()
        self._mine.loop = loop
        return self._mine

    def _left_behind(self) -> None:
        """In a forked child: leave what the parent uses; not even closed, lest it be closed for the parent as well."""
        if self._mine.forks != forks():
            self._left.append(self._mine)
            self._mine = self._state()

    def _state(self) -> _State:
        return _State(
            asyncio.Semaphore(self._size), asyncio.Semaphore(max(1, self._size - max(1, self._size // 4))), forks()
        )


def is_elsewhere(before: asyncio.AbstractEventLoop | None, loop: asyncio.AbstractEventLoop) -> bool:
    """Whether what was used on one loop is now used on another; ``ConfigError`` if the first is not closed."""
    if before is None or before is loop:
        return False
    if not before.is_closed():
        raise ConfigError("this PostgresStore is in use on another event loop: use store.clone() here")
    return True


def _idle_one(mine: _State) -> _Connection | None:
    while mine.idle:
        connection = mine.idle.pop()
        if not connection.closed and not _has_something_to_say(connection):
            return connection
        connection.pgconn.finish()
    return None


def _is_at_rest(connection: _Connection) -> bool:
    return not connection.closed and connection.pgconn.transaction_status == pq.TransactionStatus.IDLE


def _has_something_to_say(connection: _Connection) -> bool:
    """Whether the server has sent something unasked: in most cases, that it goes away."""
    poll = select.poll()
    poll.register(connection.pgconn.socket, select.POLLIN)
    return bool(poll.poll(0))
