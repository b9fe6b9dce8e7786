"""Adding jobs in PostgreSQL: by the pool, or in a transaction of the caller's; and one job for a unique key."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from conquiet.errors import DuplicateJobError
from conquiet.jobs.job import REPLACED, NewJob
from conquiet.jobs.stores.postgres import outbox
from conquiet.jobs.stores.postgres.arrays import Blobs, Integers, Texts
from conquiet.jobs.stores.postgres.pool import Pool, Rows
from conquiet.jobs.unique import Hold
from conquiet.kit.clock import Clock

__all__ = ["Additions"]

_PATIENCE: Final = "50ms"
"""How long one connection waits for others who have an ID and have not decided whether they add it."""


@dataclass(frozen=True, slots=True)
class Additions:
    """How jobs are added to the queues of one store."""

    pool: Pool
    channel: str
    clock: Clock

    def of(self, queue: str, connection: Any = None) -> _Adding:
        """To one queue, in the transaction of ``connection`` if there is one."""
        return _Adding(self, queue, connection)


@dataclass(frozen=True, slots=True)
class _Entry:
    """What is known of a unique key: the job of it, whether that has it still and waits, and the version."""

    job_id: str
    is_held: bool
    waits: bool
    version: int


@dataclass(frozen=True, slots=True)
class _Adding:
    home: Additions
    queue: str
    connection: Any

    async def all(self, jobs: Sequence[NewJob]) -> None:
        """Add jobs without unique keys; ``DuplicateJobError`` names the IDs that are taken."""
        await self._add("add", self._values(jobs), [job.id for job in jobs])

    async def unique(self, jobs: Sequence[NewJob]) -> Mapping[str, str]:
        """Add jobs but for those whose unique key another has: the IDs of the others.

        First the keys are looked at, then taken, unless somebody else has taken one since: then they are looked at
        again. So nothing is locked while this process thinks, but for a transaction of the caller's.
        """
        holders: dict[str, str] = {}
        left = list(jobs)
        while left:
            known = await self._known([job.unique.key for job in left if job.unique is not None])
            chosen = _chosen(left, known, holders)
            if left == jobs and holders:
                await self._check([job.id for job in jobs])  # an ID that is taken counts, also of what is left out
            if not chosen:
                break
            values = (*self._values(chosen), *_uniques(chosen, known), REPLACED)
            rows = await self._add("add_unique", values, [job.id for job in chosen])
            there = {row[0] for row in rows}
            left = [job for job in chosen if job.id not in there]
        return holders

    async def taken(self, ids: Sequence[str]) -> list[str]:
        """Which of these IDs there are."""
        what = f"finding jobs of queue {self.queue!r}"
        [rows] = await self.home.pool.run(what, ("taken", (self.queue, Texts(ids), len(ids))))
        return [row[0] for row in rows]

    async def _check(self, ids: Sequence[str]) -> None:
        rows = await self._ask("taken", (self.queue, Texts(ids), len(ids)))
        if rows:
            self._refuse([row[0] for row in rows], ids)

    async def _known(self, keys: Sequence[str]) -> dict[str, _Entry]:
        different = list(dict.fromkeys(keys))
        values = (self.queue, self.home.clock.offset_ms, Texts(different), len(different))
        rows = await self._ask("holders", values)
        return {key: _Entry(*entry) for key, *entry in rows}

    async def _ask(self, name: str, values: tuple[object, ...]) -> Rows:
        what = f"adding jobs of queue {self.queue!r}"
        if self.connection is None:
            [rows] = await self.home.pool.run(what, (name, values))
            return rows
        return (await self._within(name, values, []))[0]

    async def _add(self, name: str, values: tuple[object, ...], ids: Sequence[str]) -> Rows:
        if self.connection is not None:
            rows, taken = await self._within(name, values, ids)
            if taken:
                self._refuse(taken, ids)
            return rows
        while True:
            added = await self.home.pool.added(f"adding jobs of queue {self.queue!r}", (name, values))
            if added is not None:
                return added
            taken = await self.taken(ids)
            if taken:
                self._refuse(taken, ids)
            # The other transaction is gone. Nothing was added, that is certain: so this repeats nothing.

    def _refuse(self, taken: Sequence[str], ids: Sequence[str]) -> None:
        raise DuplicateJobError(self.queue, [id for id in ids if id in set(taken)])

    async def _within(self, name: str, values: tuple[object, ...], ids: Sequence[str]) -> outbox.Added:
        pool = self.home.pool
        add, taken = (
            (pool.statements[name], values),
            (pool.statements["taken"], (self.queue, Texts(ids), len(ids))),
        )
        return await outbox.run(self.connection, add, taken, f"adding jobs of queue {self.queue!r}", pool.schema)

    def _values(self, jobs: Sequence[NewJob]) -> tuple[object, ...]:
        return (
            self.queue,
            self.home.clock.offset_ms,
            self.home.channel,
            Texts([job.id for job in jobs]),
            Blobs([job.payload for job in jobs]),
            Integers([job.priority for job in jobs]),
            Integers([job.delay_ms for job in jobs]),
            Integers([job.max_retries for job in jobs]),
            _PATIENCE if self.connection is None else None,
            *_fields(jobs),
        )


def _chosen(jobs: Sequence[NewJob], known: Mapping[str, _Entry], holders: dict[str, str]) -> list[NewJob]:
    """Those that may be added; of the others, ``holders`` gets who has their keys. One a key: the first."""
    chosen: list[NewJob] = []
    first: dict[str, str] = {}
    for job in jobs:
        holder = None if job.unique is None else _holder(job.unique, known, first)
        if holder is not None:
            holders[job.id] = holder
            continue
        if job.unique is not None:
            first[job.unique.key] = job.id
        chosen.append(job)
    return chosen


def _holder(hold: Hold, known: Mapping[str, _Entry], first: Mapping[str, str]) -> str | None:
    """The job that keeps its unique key from another, if there is one."""
    if hold.key in first:
        return first[hold.key]
    entry = known.get(hold.key)
    if entry is None or not entry.is_held or (hold.replaces and entry.waits):
        return None
    return entry.job_id


def _uniques(jobs: Sequence[NewJob], known: Mapping[str, _Entry]) -> tuple[object, ...]:
    """Unique keys, modes, windows, the jobs to be replaced, and the versions of the keys."""
    holds = [job.unique for job in jobs]
    entries = [None if hold is None else known.get(hold.key) for hold in holds]
    return (
        Texts([None if hold is None else hold.key for hold in holds]),
        Texts([None if hold is None else hold.mode for hold in holds]),
        Integers([None if hold is None else hold.within_ms for hold in holds]),
        Texts([entry.job_id if entry is not None and entry.is_held else None for entry in entries]),
        Integers([entry.version for entry in entries if entry is not None]),
    )


def _fields(jobs: Sequence[NewJob]) -> tuple[object, ...]:
    """What few jobs have: as arrays, or nothing where none has it."""
    ats, tasks = [job.at_ms for job in jobs], [job.task for job in jobs]
    keys, headers = [job.key for job in jobs], [job.headers or None for job in jobs]
    return (
        None if ats.count(None) == len(ats) else Integers(ats),
        None if tasks.count(None) == len(tasks) else Texts(tasks),
        None if keys.count(None) == len(keys) else Texts(keys),
        None if headers.count(None) == len(headers) else Blobs(headers),
    )
