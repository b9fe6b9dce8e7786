"""Notices from PostgreSQL: one connection listens for all waiters of a process."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias, cast

from psycopg import AsyncConnection, Notify, sql

from conquiet.errors import ConquietError, QueueError
from conquiet.jobs.stores.postgres import driver
from conquiet.jobs.stores.postgres.pool import Pool, is_elsewhere
from conquiet.jobs.stores.postgres.turns import Turns
from conquiet.kit import codec
from conquiet.kit.clock import Clock
from conquiet.kit.loopthread import forks, outlive_fork
from conquiet.kit.policy import Backoff
from conquiet.kit.retrying import Lines, Retrying
from conquiet.kit.service import Background

__all__ = ["PATIENCE", "Listener"]

PATIENCE: Final = 5.0
"""Seconds after which a waiter looks for itself, whatever was told or not."""
_DEAF: Final = 1.0
"""The same, while there is no connection to listen on."""
_RECOUNT: Final = 30.0
"""Seconds after which the listeners are counted again."""

_log: Final = logging.getLogger("conquiet.jobs")
_BACKOFF: Final = Backoff(base=0.2, cap=5.0)

Topic: TypeAlias = tuple[str, ...]
"""A queue, or a queue and a job's ID."""


@dataclass(slots=True)
class _State:
    """What belongs to one event loop of one process."""

    forks: int
    loop: asyncio.AbstractEventLoop | None = None
    background: Background = field(default_factory=Background)
    task: asyncio.Task[None] | None = None
    is_listening: bool = False
    tried: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once it was found out whether there can be a connection."""
    waiters: dict[Topic, set[asyncio.Event]] = field(default_factory=dict[Topic, set[asyncio.Event]])
    news: Counter[str] = field(default_factory=Counter[str])
    """How many notices each queue got."""

    turns: Turns = field(init=False)

    def __post_init__(self) -> None:
        self.turns = Turns(self.wake)

    def tell(self, notice: Notify) -> None:
        try:
            told = codec.decode(notice.payload.encode())
        except codec.UNREADABLE:  # not of this library
            return
        if isinstance(told, dict):  # jobs of a queue, by their IDs
            for queue, ids in cast("dict[str, object]", told).items():
                self.news[queue] += 1
                if isinstance(ids, list) and ids and self.waiters.get((queue,)):
                    self.turns.heard(queue, list(map(str, cast("list[object]", ids))))
        elif isinstance(told, list):
            self._tell(cast("list[object]", told))

    def _tell(self, told: Sequence[object]) -> None:
        if len(told) == 2 and isinstance(told[1], list):  # jobs that are taken
            self.turns.taken(str(told[0]), map(str, cast("list[object]", told[1])))
        elif len(told) == 1:  # there may be jobs for everyone
            self.news[str(told[0])] += 1
            self.wake(str(told[0]), None)
        else:  # the end of a job
            for event in self.waiters.get(tuple(map(str, told)), ()):
                event.set()

    def wake(self, queue: str, count: int | None) -> int:
        """Wake so many waiters of a queue, or all; how many it has woken."""
        waiting = [event for event in self.waiters.get((queue,), ()) if not event.is_set()][:count]
        for event in waiting:
            event.set()
        return len(waiting)

    def wake_all(self) -> None:
        self.tried.set()
        for waiters in self.waiters.values():
            for event in waiters:
                event.set()


class Listener:
    """Listens from the first waiter on until it is closed, and again after each loss of the connection.

    A notice may come for no reason, and each may be lost with the connection: a new connection counts as news on
    everything.
    """

    def __init__(self, pool: Pool, channel: str, clock: Clock) -> None:
        self._pool = pool
        self._channel = channel
        self._statement = sql.SQL("LISTEN {}").format(sql.Identifier(channel))
        self._clock = clock
        self._connections = 0
        self._left: list[_State] = []
        self._mine = _State(forks())
        outlive_fork(self)

    @property
    def patience(self) -> float:
        """How long to rely on notices alone."""
        return PATIENCE if self._mine.is_listening else _DEAF

    def mark(self, queue: str) -> str:
        """How far the notices of ``queue`` have been heard; empty while no connection listens."""
        mine = self._mine
        is_listening = mine.is_listening and mine.forks == forks()
        return f"{self._connections}.{mine.news[queue]}" if is_listening else ""

    async def news(self, queue: str, mark: str, seconds: float) -> None:
        """Return once the news of ``queue`` stand elsewhere than at ``mark``, or after ``seconds`` or ``PATIENCE``."""
        with self.waiting((queue,)) as event:
            await self.start(seconds)
            if not self._mine.is_listening or mark == self.mark(queue):
                await self._clock.wait(event, min(seconds, self.patience))

    def claims(self, queue: str) -> bool:
        """A worker claims; whether the other listeners are to hear which jobs it takes."""
        mine = self._mine
        return mine.forks == forks() and mine.turns.claims(queue)

    @contextmanager
    def waiting(self, topic: Topic) -> Generator[asyncio.Event]:
        """An event that is set at each notice on ``topic``, and when one may have been missed."""
        mine, event = self._here(), asyncio.Event()
        mine.waiters.setdefault(topic, set()).add(event)
        try:
            yield event
        finally:
            mine.waiters[topic].discard(event)
            if not mine.waiters[topic]:
                del mine.waiters[topic]

    async def start(self, seconds: float) -> None:
        """Return when the connection listens or its first attempt has failed, after ``seconds`` at the latest."""
        mine = self._here()
        if mine.task is None or mine.task.done():
            mine.tried.clear()
            mine.task = mine.background.start(self._listen(mine), f"listen-{self._channel}")
        if not mine.is_listening:
            await self._clock.wait(mine.tried, min(seconds, PATIENCE))

    async def aclose(self) -> None:
        """Stop listening."""
        mine = self._here()
        await mine.background.aclose()

    async def _listen(self, mine: _State) -> None:
        retrying = Retrying(Lines(_log), self._clock, _BACKOFF)
        while True:
            connection: AsyncConnection[Any] | None = None
            counting: asyncio.Task[None] | None = None
            try:
                connection = await self._pool.connect("listening")
                await connection.execute(self._statement)
                counting = mine.background.start(self._count(mine, connection.info.backend_pid), "listeners")
                retrying.succeeded()
                self._connections += 1
                mine.is_listening = True
                mine.wake_all()
                async for notice in connection.notifies():
                    mine.tell(notice)
                failure: Exception = QueueError("the connection has ended")
            except (*driver.FAILURES, ConquietError) as error:
                failure = error
            finally:
                mine.is_listening = False
                mine.wake_all()
                if counting is not None:
                    counting.cancel()
                if connection is not None:
                    with contextlib.suppress(*driver.FAILURES):
                        await connection.close()
            await retrying.failed(f"schema {self._channel}: notices are late, no connection to listen on", failure)

    async def _count(self, mine: _State, pid: int) -> None:
        """Know how many listen, and which place this connection has among them."""
        while True:
            with contextlib.suppress(QueueError):
                [rows] = await self._pool.run("listening", ("listeners", (self._statement.as_string(None),)))
                mine.turns.stand(pid, [row[0] for row in rows])
            await self._clock.sleep(_RECOUNT)

    def _here(self) -> _State:
        """The state for the running loop."""
        loop, mine = asyncio.get_running_loop(), self._mine
        if mine.forks != forks() or is_elsewhere(mine.loop, loop):
            self._left.append(mine)
            self._mine = mine = _State(forks())
        mine.loop = loop
        return mine
