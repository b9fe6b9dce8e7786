"""Keeping one call of a worker on its way to the store or back, and workers that run in the test's own process.

On Redis a proxy keeps the call. In PostgreSQL a lock on a table does, for which the worker's server process waits.
"""

from __future__ import annotations

import asyncio
from argparse import Namespace
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import TracebackType
from typing import Final, Protocol, Self, cast

import psycopg

from conquiet import Backoff, JobQueue, JobStore, JobWorker, RetryPolicy
from tests.rigs.freezing import Freezer, Side, freeze, freezer, thaw
from tests.rigs.waiting import LONG, eventually
from tests.system.jobs_check import MAX_RETRIES
from tests.system.jobs_crew import Home, PostgresHome
from tests.system.jobs_log import Log, Pen
from tests.system.jobs_process import QUEUE, Witness, Work, store_at

__all__ = ["AtPostgres", "AtRedis", "Place", "place_at", "worker_here"]


class Place(Protocol):
    """Keeps one call of the worker, before the store has done it or after."""

    @property
    def url(self) -> str: ...
    async def is_known(self, call: str) -> None:
        """Return once such a call is nothing new to the store, which may ask for more than one step at first."""
        ...

    async def keep(self, call: str, side: Side) -> None:
        """Keep the next such call."""
        ...

    async def kept(self) -> None:
        """Return once it is there."""
        ...

    async def stopped(self) -> None:
        """The worker stands still: everybody else may go on."""
        ...

    async def release(self) -> None:
        """Let it go on; returns when the store has done it."""
        ...

    def release_soon(self) -> None:
        """Let it go on, whether or not the store answers; in PostgreSQL, once the server goes on itself."""
        ...


class AtRedis:
    """By a proxy."""

    def __init__(self, proxy: Freezer) -> None:
        self._proxy = proxy
        self.url = proxy.url

    async def is_known(self, call: str) -> None:
        return

    async def keep(self, call: str, side: Side) -> None:
        self._proxy.keep(f"jobs_{call}", side)

    async def kept(self) -> None:
        await self._proxy.kept()

    async def stopped(self) -> None:
        return

    async def release(self) -> None:
        await self._proxy.release()

    def release_soon(self) -> None:
        self._proxy.release_soon()


class AtPostgres:
    """By a lock on the table, for which the worker's server process waits; before it has it, that one is stopped."""

    _TEXTS: Final = {"claim": "again AS MATERIALIZED", "renew": "renewed_ms = moment.now", "settle": "settled AS ("}
    _OURS: Final = "SELECT pid FROM pg_stat_activity WHERE position(%s in query) > 0 AND position(%s in query) > 0"
    _WAITING: Final = f"{_OURS} AND wait_event_type = 'Lock'"
    _PREPARED: Final = f"{_OURS} AND state = 'idle'"
    _BUSY: Final = "SELECT pid FROM pg_stat_activity WHERE pid = %s AND state = 'active'"

    def __init__(self, home: PostgresHome, space: str) -> None:
        self.url = home.url
        self._space = space
        self._call, self._side = "", cast("Side", "before")
        self._pid = 0
        self._is_frozen = False
        self._lock = psycopg.connect(home.url)
        self._look = psycopg.connect(home.url, autocommit=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._is_frozen:
            thaw(self._pid)
        self._lock.close()
        self._look.close()

    async def is_known(self, call: str) -> None:
        await eventually(
            lambda: self._pid_of(self._PREPARED, self._space, self._TEXTS[call]) != 0, f"{call} is prepared"
        )

    async def keep(self, call: str, side: Side) -> None:
        self._call, self._side = self._TEXTS[call], side
        table = "queues" if call == "claim" else "jobs"  # adding a job must not wait
        self._lock.execute(f'LOCK TABLE "{self._space}".{table} IN ACCESS EXCLUSIVE MODE'.encode())

    async def kept(self) -> None:
        def is_waiting() -> bool:
            self._pid = self._pid_of(self._WAITING, self._space, self._call)
            return self._pid != 0

        await eventually(is_waiting, "the call waits for the lock")

    def _pid_of(self, question: str, *values: object) -> int:
        row = self._look.execute(question.encode(), values).fetchone()
        return 0 if row is None else int(row[0])

    async def stopped(self) -> None:
        if self._side == "before":
            await freeze(self._pid)
            self._is_frozen = True
        self._lock.commit()
        if self._side == "after":
            await self._done()

    async def release(self) -> None:
        if self._is_frozen:
            thaw(self._pid)
            self._is_frozen = False
            await self._done()

    def release_soon(self) -> None:
        self._lock.commit()

    async def _done(self) -> None:
        await eventually(lambda: self._pid_of(self._BUSY, self._pid) == 0, "the call is done")


@asynccontextmanager
async def place_at(home: Home, space: str) -> AsyncIterator[Place]:
    if isinstance(home, PostgresHome):
        with AtPostgres(home, space) as place:
            yield place
        return
    async with freezer(home.url) as proxy:
        yield AtRedis(proxy)


# --- a worker here -----------------------------------------------------------------------------------------------


@asynccontextmanager
async def worker_here(
    url: str, space: str, log: Log, name: str, gate: Path, lease: float, drain: float = 30.0
) -> AsyncIterator[JobWorker]:
    """A worker that runs here, and notes what the processes note; its handlers end once there is a gate."""
    async with store_at(url, space) as store:
        pen = Pen(log.path(name))
        retry = RetryPolicy(max_retries=MAX_RETRIES, backoff=Backoff(base=0.02, cap=0.2))
        queue = JobQueue(cast("JobStore", Witness(store, pen, "")), QUEUE, lease_ttl=lease, retry=retry)
        work = Work(Namespace(gate=str(gate), hang=False), pen)
        worker = JobWorker(queue, work.handle, name=name, handle_signals=False, drain_timeout=drain)
        running = asyncio.ensure_future(worker.run())
        try:
            yield worker
        finally:
            gate.touch()
            worker.stop()
            await asyncio.wait_for(running, LONG)
