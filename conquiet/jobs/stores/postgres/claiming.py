"""Claims in PostgreSQL: what has run out or fallen due first, then what is wanted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from conquiet.jobs.job import EXPIRED, HISTORY, Job, JobState
from conquiet.jobs.store import MOST_BYTES, Claim, Claimed, Expired, Wanted
from conquiet.jobs.stores.postgres.looking import Looks, Place
from conquiet.jobs.stores.postgres.records import claimed_job, urgency
from conquiet.kit.clock import Clock
from conquiet.kit.ids import nonce

if TYPE_CHECKING:
    from conquiet.jobs.stores.postgres.pool import Call, Pool, Rows

__all__ = ["Claiming"]

_MOST_EXPIRED: Final = 500
_MOST_PROMOTED: Final = 1000
_AGAIN: Final = 250
"""Milliseconds after which to look again for what should have run out or fallen due, but is locked by others."""
_HEAD: Final = 5
"""How many columns come before those of the job."""


class Claiming:
    """The claims of one store; remembers for each queue from where on they look."""

    def __init__(self, pool: Pool, channel: str, clock: Clock) -> None:
        self._pool = pool
        self._channel = channel
        self._clock = clock
        self._looks: dict[str, Looks] = {}

    async def claim(self, queue: str, wanted: Wanted, mark: str, *, tells: bool = False) -> Claimed:
        """Give up leases that have run out, then lease what is wanted; ``mark`` was taken before.

        If it ``tells``, the other listeners hear which jobs it has taken, and need not look for them.
        """
        wanted = wanted.bounded()
        looks = self._looks.setdefault(queue, Looks())
        after = looks.begin(self._clock.monotonic())
        if after is not None:
            return await self._go_on(queue, wanted, mark, looks, after)
        return await self._begin(queue, wanted, mark, looks, self._channel if tells else None)

    async def _begin(self, queue: str, wanted: Wanted, mark: str, looks: Looks, channel: str | None) -> Claimed:
        offset, claim = self._clock.offset_ms, Claim(queue, wanted.worker, wanted.ttl_ms, wanted.claim_id or nonce())
        share = (wanted.count, wanted.retries, wanted.oldest)
        values = (queue, offset, wanted.worker, wanted.ttl_ms, *share)
        bounds = (claim.id, MOST_BYTES, channel)
        [rows] = await self._run(queue, ("claim", (*values, False, *bounds)))
        gone: Rows = []
        if rows[0][0] is not None and rows[0][0] <= 0:
            late = (queue, offset, self._channel, wanted.max_retries, _MOST_EXPIRED, EXPIRED, HISTORY)
            ripe = (queue, offset, _MOST_PROMOTED)
            calls: list[Call] = [("expire", late), ("promote", ripe), ("claim", (*values, True, *bounds))]
            gone, _, rows = await self._run(queue, *calls)
        next_ms, store_ms = rows[0][0], rows[0][1]
        found = _in_line(rows, _HEAD)
        jobs = [claimed_job(claim, store_ms, row[_HEAD:]) for row in found]
        looks.looked(self._clock.monotonic(), max(row[2] for row in rows), len(jobs))
        last = next((row for row in reversed(found) if row[4]), None)
        looks.found(None if last is None else urgency(last[_HEAD:]), _is_all(jobs, wanted), store_ms)
        times = [wanted.ttl_ms] * bool(jobs)
        if next_ms is not None:
            # Past, though it was just looked for: there is more than one call does, or others have it.
            times.append(next_ms if next_ms > 0 else 0 if gone else _AGAIN)
        return Claimed(jobs, _expired(gone), min(times, default=None), mark)

    async def _go_on(self, queue: str, wanted: Wanted, mark: str, looks: Looks, after: Place) -> Claimed:
        claim = Claim(queue, wanted.worker, wanted.ttl_ms, wanted.claim_id or nonce())
        bounds = (wanted.count, claim.id, MOST_BYTES)
        values = (queue, self._clock.offset_ms, wanted.worker, wanted.ttl_ms, *bounds, *after)
        [rows] = await self._run(queue, ("claim_on", values))
        found, store_ms = _in_line(rows, 1), rows[0][0]
        jobs = [claimed_job(claim, store_ms, row[1:]) for row in found]
        looks.found(urgency(found[-1][1:]) if found else None, _is_all(jobs, wanted), store_ms)
        # One millisecond more: who comes back then must not be a fraction too early.
        return Claimed(jobs, (), int(looks.left(self._clock.monotonic()) * 1000) + 1, mark)

    async def _run(self, queue: str, *calls: Call) -> list[Rows]:
        return await self._pool.run(f"claiming jobs of queue {queue!r}", *calls)


def _in_line(rows: Rows, head: int) -> Rows:
    """The rows with a job, whose columns come after ``head`` others, as the jobs are in line."""
    return sorted((row for row in rows if row[head] is not None), key=lambda row: urgency(row[head:]))


def _is_all(jobs: Sequence[Job], wanted: Wanted) -> bool:
    """Whether nothing was left in line that could have been claimed."""
    return len(jobs) < wanted.count and sum(len(job.raw) for job in jobs) < MOST_BYTES


def _expired(rows: Rows) -> list[Expired]:
    return [Expired(id, state == JobState.FAILED) for _, id, state in sorted((row[2], row[0], row[1]) for row in rows)]
