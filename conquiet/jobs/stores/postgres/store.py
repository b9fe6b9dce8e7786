"""Jobs in PostgreSQL: durable, shared by any number of processes, added in the caller's own transaction if wanted."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Final, Self, Unpack

from conquiet.errors import ConfigError, DuplicateJobError
from conquiet.jobs.chunks import MOST, chunks
from conquiet.jobs.heartbeat_store import HeartbeatStore, SharesHeartbeats
from conquiet.jobs.job import CANCELLED, HISTORY, Job, JobState, NewJob, Settlement
from conquiet.jobs.options import PostgresStoreKeywords, PostgresStoreOptions
from conquiet.jobs.store import MOST_BYTES, Claimed, JobPage, JobRetention, Lease, Wanted, numbered
from conquiet.jobs.stores._gathering import Gathering, added
from conquiet.jobs.stores.postgres.arrays import Blobs, Integers, Texts
from conquiet.jobs.stores.postgres.records import NUMBER, WIDTH, job_of
from conquiet.kit import rules
from conquiet.kit.chunks import by_number
from conquiet.kit.clock import Clock
from conquiet.kit.opened import Opened
from conquiet.kit.options import takes
from conquiet.kit.service import MOMENT, to_its_end

if TYPE_CHECKING:
    from conquiet.jobs.stores.postgres.pool import Call

__all__ = ["PostgresStore"]

_MOST_PURGED: Final = 1000
_MOST_FOUND: Final = 100
_ROUND: Final = 10.0
"""For how many seconds what was found to be too many is known to be."""
_PATIENCE: Final = "50ms"
"""How long one connection waits for others who have an ID and have not decided whether they add it."""
_LARGEST: Final = 2**62
_HEARTBEATS: Final = 2
"""Connections for the heartbeats of all workers: more than one, lest a lock on one job's row delay all of them."""


class PostgresStore(SharesHeartbeats, Opened):
    """Keeps jobs in tables of one schema of a database, which ``await store.migrate()`` makes.

    What a call has done is committed when it returns, as durably as the server is set to. A call that fails says so
    with ``QueueError`` and is not sent again; the next one finds a new connection. Belongs to one event loop at a
    time; may be pickled, as its DSN, and used after a fork.
    """

    @takes(PostgresStoreOptions)
    def __init__(self, dsn: str, **options: Unpack[PostgresStoreKeywords]) -> None:
        taken = PostgresStoreOptions(**options)
        self._recipe = (dsn, options)
        try:
            from conquiet.jobs.stores.postgres import migrating, outbox
            from conquiet.jobs.stores.postgres.claiming import Claiming
            from conquiet.jobs.stores.postgres.listening import Listener
            from conquiet.jobs.stores.postgres.pool import Pool
        except ImportError as error:
            raise ConfigError("PostgresStore needs psycopg: pip install 'conquiet[postgres]'") from error
        self._migrating, self._outbox = migrating, outbox
        self._clock = taken.clock
        self._channel = taken.schema
        self._pool = Pool(dsn, taken.schema, taken.pool_size)
        self._listener = Listener(self._pool, self._channel, self._clock)
        self._claiming = Claiming(self._pool, self._channel, self._clock)
        self._gathering = Gathering(self._add)
        self.heartbeats = HeartbeatStore(self, self._clone_for_heartbeats)
        self._bounds: dict[tuple[str, JobState, int | None], tuple[float, int, str]] = {}
        """Up to which job finished ones are over a number, and until when to believe that."""

    @classmethod
    @takes(PostgresStoreOptions)
    def connect(cls, dsn: str, **options: Unpack[PostgresStoreKeywords]) -> Self:
        """A store for ``async with``."""
        return cls(dsn, **options)

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuilt, (type(self), *self._recipe)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(schema={self._channel!r})"

    @property
    def clock(self) -> Clock:
        """Moves time in tests."""
        return self._clock

    async def open(self) -> None:
        """Make sure that the tables are there, in the version that this library knows."""
        await self._migrating.check(self._pool)

    async def aclose(self) -> None:
        """Close all connections; a call that is cancelled does so all the same. Takes a second at most."""
        await to_its_end(self._close(), "close", MOMENT)

    async def _close(self) -> None:
        # Side by side: a server that does not answer may take its time with each.
        await asyncio.gather(self._gathering.aclose(), self._listener.aclose(), self._pool.aclose())

    async def __aenter__(self) -> Self:
        await self._migrating.check(self._pool, is_new_fine=True)  # ``migrate`` may be what follows
        return self

    def clone(self) -> PostgresStore:
        """The same store over connections of its own."""
        return _rebuilt(type(self), *self._recipe)

    def _clone_for_heartbeats(self) -> PostgresStore:
        store = self.clone()
        store._pool.limit(_HEARTBEATS)
        return store

    def apart(self) -> PostgresStore:
        """The former name of :meth:`clone`."""
        return self.clone()

    async def migrate(self) -> int:
        """Make the schema and its tables, or bring them up to date; the version after it.

        One transaction. Safe to repeat, and to run by many processes at once: they wait for each other.
        """
        return await self._migrating.migrate(self._pool)

    def sql(self, since: int = 0) -> str:
        """What :meth:`migrate` does to a database of version ``since``, to be applied by hand."""
        return self._migrating.script(self._pool.statements, rules.integer("since", since, least=0))

    # --- the life of a job ------------------------------------------------------------------------------------

    async def add(self, queue: str, jobs: Sequence[NewJob], connection: Any = None) -> None:
        """Add all of ``jobs`` or none; single ones of callers at the same time share a transaction.

        ``connection`` is a ``psycopg.AsyncConnection`` or a ``psycopg.Connection``: the jobs are there, and workers
        are told, when the caller commits. A duplicate leaves its transaction as it was before the call.
        """
        if len(jobs) == 1 and connection is None:
            await self._gathering.add(queue, jobs[0])
        elif jobs:
            await added(lambda: self._add(queue, jobs, connection))

    async def _add(self, queue: str, jobs: Sequence[NewJob], connection: Any = None) -> None:
        ids = [job.id for job in jobs]
        if len(set(ids)) < len(ids):
            given = Counter(ids)
            taken = set(await self._taken(queue, list(given))) if connection is None else set[str]()
            raise DuplicateJobError(queue, [id for id, times in given.items() if times > 1 or id in taken])
        values = self._new(queue, jobs, ids, _PATIENCE if connection is None else None)
        if connection is None:
            taken_ids = await self._added(queue, values, ids)
        else:
            taken_ids = await self._added_in(connection, queue, values, ids)
        if taken_ids:
            raise DuplicateJobError(queue, [id for id in ids if id in set(taken_ids)])

    async def claim(self, queue: str, wanted: Wanted) -> Claimed:
        """Give up leases that have run out, then lease what is wanted."""
        mark, tells = self._listener.mark(queue), self._listener.claims(queue)
        return await self._claiming.claim(queue, wanted, mark, tells=tells)

    async def leased(self, queue: str, claim_ids: Sequence[str], left_ms: int) -> list[Lease]:
        """What these claims have leased."""
        values = (queue, self._clock.offset_ms, left_ms, Texts(claim_ids))
        [rows] = await self._run("finding leases", queue, ("leased", values))
        return [Lease(id, token, claim_id) for id, token, claim_id in rows]

    async def renew(self, queue: str, leases: Sequence[Lease], ttl_ms: int) -> list[bool]:
        """Extend leases; false for each that is stale."""
        return [done for some in chunks(leases, lambda _: 0) for done in await self._renew(queue, some, ttl_ms)]

    async def _renew(self, queue: str, leases: Sequence[Lease], ttl_ms: int) -> list[bool]:
        # In one order everywhere, so that calls which hold some of each other's rows never wait in a circle.
        order = sorted({_claim_of(lease) for lease in leases})
        ids, tokens = Texts([id for id, _, _ in order]), Integers([token for _, token, _ in order])
        claims = Texts([claim_id for _, _, claim_id in order])
        values = (queue, self._clock.offset_ms, ttl_ms, ids, tokens, claims, len(order))
        [rows] = await self._run("renewing leases", queue, ("renew", values))
        held = {order[int(row[0]) - 1] for row in rows}
        return [_claim_of(lease) in held for lease in leases]

    async def settle(self, queue: str, settlements: Sequence[Settlement]) -> list[bool]:
        """Apply each settlement; false for each that is stale."""
        parts = chunks(settlements, Settlement.size)
        return [done for some in parts for done in await self._settle(queue, some)]

    async def _settle(self, queue: str, settlements: Sequence[Settlement]) -> list[bool]:
        # Of several for one claim the first counts: after it, the job is not in flight any more.
        firsts: dict[tuple[str, int, str], int] = {}
        for at, one in enumerate(settlements):
            firsts.setdefault(_claim_of(one), at)
        order = [at for _, at in sorted(firsts.items())]
        done = [False] * len(settlements)
        values = self._settlements(queue, [settlements[at] for at in order])
        [rows] = await self._run("settling jobs", queue, ("settle", values))
        for row in rows:
            done[order[row[0] - 1]] = True
        return done

    # --- looking and managing ---------------------------------------------------------------------------------

    async def find(self, queue: str, ids: Sequence[str]) -> list[Job | None]:
        """The jobs of these IDs."""
        different, found = list(dict.fromkeys(ids)), dict[str, Job]()
        for some in by_number(different, _MOST_FOUND):
            [rows] = await self._run("finding jobs", queue, ("find", (queue, Texts(some), len(some))))
            found.update((row[0], job_of(queue, row)) for row in rows)
        return [found.get(id) for id in ids]

    async def counts(self, queue: str) -> Mapping[JobState, int]:
        """How many jobs are in each state."""
        [rows] = await self._run("counting jobs", queue, ("counts", (queue, Texts(JobState))))
        found: dict[str, int] = dict(rows)
        return {state: found.get(state, 0) for state in JobState}

    async def page(self, queue: str, state: JobState, count: int, cursor: str | None) -> JobPage:
        """Jobs in ``state``, in the order of enqueueing: a thousand at most, and fewer if they are large."""
        count = min(count, MOST)
        values = (queue, str(state), numbered(cursor), count + 1, MOST_BYTES)
        [rows] = await self._run("listing jobs", queue, ("page", values))
        # They come so from the plan that the statement is meant to have; behind a pooler it may have another.
        page = sorted(rows, key=itemgetter(NUMBER))[:count]
        is_more = bool(rows) and rows[0][WIDTH] > len(page)
        return JobPage([job_of(queue, row) for row in page], str(page[-1][NUMBER]) if is_more else None)

    async def replay(self, queue: str, id: str) -> Job | None:
        """Make a failed job ready again."""
        call = ("replay", (queue, self._clock.offset_ms, self._channel, id))
        while True:
            job, is_changed = await self._changed("replaying a job", queue, id, call)
            if is_changed or job is None:
                return job
            job.check("replay")  # else it has failed in between

    async def cancel(self, queue: str, id: str) -> Job | None:
        """Fail a job that is not finished."""
        call = ("cancel", (queue, self._clock.offset_ms, self._channel, id, CANCELLED, HISTORY))
        while True:
            job, is_changed = await self._changed("cancelling a job", queue, id, call)
            if is_changed or job is None or job.is_finished:
                return job

    async def delete(self, queue: str, id: str) -> Job | None:
        """Remove a finished job."""
        while True:
            job, is_changed = await self._changed("deleting a job", queue, id, ("delete", (queue, id)))
            if is_changed or job is None:
                return job
            job.check("delete")

    async def purge(self, queue: str, state: JobState, keep: JobRetention) -> int:
        """Remove finished jobs that are not to be kept."""
        age = None if keep.age is None else math.floor(min(keep.age * 1000, _LARGEST))
        bound = await self._surplus(queue, state, keep.count)
        values = (queue, self._clock.offset_ms, str(state), *bound, age, _MOST_PURGED)
        [[(gone,)]] = await self._run("purging jobs", queue, ("purge", values))
        if gone < _MOST_PURGED:
            self._bounds.pop((queue, state, keep.count), None)
        return int(gone)

    async def _surplus(self, queue: str, state: JobState, keep: int | None) -> tuple[int | None, str | None]:
        """The last job that is over a number, which is found by counting: once for all calls that remove up to it."""
        if keep is None:
            return None, None
        key, now = (queue, state, keep), self._clock.monotonic()
        known = self._bounds.get(key)
        if known is not None and known[0] > now:
            return known[1:]
        [rows] = await self._run("purging jobs", queue, ("surplus", (queue, str(state), min(keep, _LARGEST))))
        if not rows:
            return None, None
        [(ended, id)] = rows
        self._bounds[key] = (now + _ROUND, ended, id)
        return ended, id

    # --- waiting ----------------------------------------------------------------------------------------------

    async def news(self, queue: str, mark: str, seconds: float) -> None:
        """Return once something may be claimable, or after ``seconds``; after a few in any case."""
        await self._listener.news(queue, mark, seconds)

    async def finished(self, queue: str, id: str, seconds: float | None) -> Job | None:
        """The job once it is finished."""
        deadline = math.inf if seconds is None else self._clock.monotonic() + seconds
        with self._listener.waiting((queue, id)) as event:
            while True:
                left = deadline - self._clock.monotonic()
                await self._listener.start(max(0.0, left))
                event.clear()
                calls: list[Call] = [("watch", (queue, id, self._channel)), ("find", (queue, Texts([id]), 1))]
                _, rows = await self._run("waiting for a job", queue, *calls)
                job = job_of(queue, rows[0]) if rows else None
                if job is None or job.is_finished or left <= 0:
                    return job if job is not None and job.is_finished else None
                left = deadline - self._clock.monotonic()  # to listen and to look has taken a while
                await self._clock.wait(event, min(left, self._listener.patience))

    # --- statements -------------------------------------------------------------------------------------------

    async def _run(self, what: str, queue: str, *calls: Call) -> list[list[tuple[Any, ...]]]:
        return await self._pool.run(f"{what} of queue {queue!r}", *calls)

    async def _taken(self, queue: str, ids: Sequence[str]) -> list[str]:
        [rows] = await self._run("finding jobs", queue, ("taken", (queue, Texts(ids), len(ids))))
        return [row[0] for row in rows]

    async def _added(self, queue: str, values: tuple[object, ...], ids: Sequence[str]) -> list[str]:
        """Add, or tell which of ``ids`` are taken."""
        while True:
            if await self._pool.was_added(f"adding jobs of queue {queue!r}", ("add", values)):
                return []
            taken = await self._taken(queue, ids)
            if taken:
                return taken
            # The other transaction is gone. Nothing was added, that is certain: so this repeats nothing.

    async def _added_in(
        self, connection: object, queue: str, values: tuple[object, ...], ids: Sequence[str]
    ) -> list[str]:
        statements = self._pool.statements
        add, taken = (statements["add"], values), (statements["taken"], (queue, Texts(ids), len(ids)))
        return await self._outbox.run(connection, add, taken, f"adding jobs of queue {queue!r}", self._pool.schema)

    async def _changed(self, what: str, queue: str, id: str, call: Call) -> tuple[Job | None, bool]:
        """The job after a change, and true; or, if it could not be changed, as it is."""
        [rows] = await self._run(what, queue, call)
        if rows:
            return job_of(queue, rows[0][:WIDTH]), True
        [job] = await self.find(queue, [id])
        return job, False

    def _new(self, queue: str, jobs: Sequence[NewJob], ids: Sequence[str], patience: str | None) -> tuple[object, ...]:
        return (
            queue,
            self._clock.offset_ms,
            self._channel,
            Texts(ids),
            Blobs([job.payload for job in jobs]),
            Integers([job.priority for job in jobs]),
            Integers([job.delay_ms for job in jobs]),
            Integers([job.max_retries for job in jobs]),
            patience,
        )

    def _settlements(self, queue: str, given: Sequence[Settlement]) -> tuple[object, ...]:
        return (
            queue,
            self._clock.offset_ms,
            self._channel,
            HISTORY,
            len(given),
            Texts([one.job_id for one in given]),
            Integers([one.token for one in given]),
            Texts([one.claim_id for one in given]),
            Texts([one.kind for one in given]),
            Integers([one.delay_ms for one in given]),
            Texts([one.error for one in given]),
            Texts([one.brief for one in given]),
            Blobs([one.result for one in given]),
        )


def _claim_of(one: Lease | Settlement) -> tuple[str, int, str]:
    return one.job_id, one.token, one.claim_id


def _rebuilt(kind: type[PostgresStore], dsn: str, options: PostgresStoreKeywords) -> PostgresStore:
    return kind(dsn, **options)
