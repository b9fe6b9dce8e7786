"""Claims in PostgreSQL: what has run out or fallen due first, then what is wanted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from conquiet.jobs.job import EXPIRED, HISTORY, Job, JobState
from conquiet.jobs.store import MOST_BYTES, Claimed, Expired, Wanted
from conquiet.jobs.stores.postgres.looking import Looks, Place
from conquiet.jobs.stores.postgres.records import NUMBER, PRIORITY, READY, job_of
from conquiet.kit.clock import Clock
from conquiet.kit.ids import nonce

if TYPE_CHECKING:
    from conquiet.jobs.stores.postgres.pool import Call, Pool, Rows

__all__ = ["Claiming"]

_MOST_EXPIRED: Final = 500
_MOST_PROMOTED: Final = 1000
_AGAIN: Final = 250
"""Milliseconds after which to look again for what should have run out or fallen due, but is locked by others."""
_HEAD: Final = 4
"""How many columns come before those of the job."""


class Claiming:
    """The claims of one store; remembers for each queue from where on they look."""

    def __init__(self, pool: Pool, channel: str, clock: Clock) -> None:
        self._pool = pool
        self._channel = channel
        self._clock = clock
        self._looks: dict[str, Looks] = {}

    async def claim(self, queue: str, wanted: Wanted, mark: str) -> Claimed:
        """Give up leases that have run out, then lease what is wanted; ``mark`` was taken before."""
        wanted = wanted.bounded()
        looks = self._looks.setdefault(queue, Looks())
        after = looks.begin(self._clock.monotonic())
        if after is not None:
            return await self._go_on(queue, wanted, mark, looks, after)
        return await self._begin(queue, wanted, mark, looks)

    async def _begin(self, queue: str, wanted: Wanted, mark: str, looks: Looks) -> Claimed:
        offset, id = self._clock.offset_ms, nonce()
        share = (wanted.count, wanted.retries, wanted.oldest)
        claim = (queue, offset, wanted.worker, wanted.ttl_ms, *share)
        [rows] = await self._run(queue, ("claim", (*claim, False, id, MOST_BYTES)))
        gone: Rows = []
        if rows[0][0] is not None and rows[0][0] <= 0:
            late = (queue, offset, self._channel, wanted.max_retries, _MOST_EXPIRED, EXPIRED, HISTORY)
            ripe = (queue, offset, _MOST_PROMOTED)
            calls: list[Call] = [("expire", late), ("promote", ripe), ("claim", (*claim, True, id, MOST_BYTES))]
            gone, _, rows = await self._run(queue, *calls)
        next_ms, store_ms = rows[0][0], rows[0][1]
        found = sorted((_place(row[_HEAD:]), row) for row in rows if row[_HEAD] is not None)
        jobs = [job_of(queue, row[_HEAD:]) for _, row in found]
        looks.looked(self._clock.monotonic(), max(row[2] for row in rows), len(jobs))
        rest = [place for place, row in found if row[3]]
        looks.found(rest[-1] if rest else None, _is_all(jobs, wanted), store_ms)
        times = [wanted.ttl_ms] * bool(jobs)
        if next_ms is not None:
            # Past, though it was just looked for: there is more than one call does, or others have it.
            times.append(next_ms if next_ms > 0 else 0 if gone else _AGAIN)
        return Claimed(jobs, _expired(gone), min(times, default=None), mark)

    async def _go_on(self, queue: str, wanted: Wanted, mark: str, looks: Looks, after: Place) -> Claimed:
        values = (queue, self._clock.offset_ms, wanted.worker, wanted.ttl_ms, wanted.count, nonce(), MOST_BYTES, *after)
        [rows] = await self._run(queue, ("claim_on", values))
        found = sorted((_place(row[1:]), row) for row in rows if row[1] is not None)
        jobs = [job_of(queue, row[1:]) for _, row in found]
        looks.found(found[-1][0] if found else None, _is_all(jobs, wanted), rows[0][0])
        return Claimed(jobs, (), round(looks.left(self._clock.monotonic()) * 1000), mark)

    async def _run(self, queue: str, *calls: Call) -> list[Rows]:
        return await self._pool.run(f"claiming jobs of queue {queue!r}", *calls)


def _place(row: Sequence[Any]) -> Place:
    return Place(-row[PRIORITY], row[READY], row[NUMBER])


def _is_all(jobs: Sequence[Job], wanted: Wanted) -> bool:
    """Whether nothing was left in line that could have been claimed."""
    return len(jobs) < wanted.count and sum(len(job.raw) for job in jobs) < MOST_BYTES


def _expired(rows: Rows) -> list[Expired]:
    return [Expired(id, state == JobState.FAILED) for _, id, state in sorted((row[2], row[0], row[1]) for row in rows)]
