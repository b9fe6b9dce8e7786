"""Jobs in this process only: for tests and examples, and the oracle that other stores are compared with."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import Any, Final, Self

from conquiet.errors import ConfigError, DuplicateJobError
from conquiet.jobs.job import Job, JobState, NewJob, Settlement
from conquiet.jobs.store import MOST_BYTES, Claimed, Expired, JobPage, JobRetention, Lease, Wanted
from conquiet.kit.clock import SYSTEM_CLOCK, Clock
from conquiet.kit.ids import nonce
from conquiet.kit.loopthread import new_lock

__all__ = ["MemoryStore"]

_MOST_EXPIRED: Final = 500
_MOST_PURGED: Final = 1000


@dataclass(slots=True)
class _Queue:
    """The jobs of one queue, by ID, in the order of enqueueing."""

    jobs: dict[str, Job] = field(default_factory=dict)
    numbers: dict[str, int] = field(default_factory=dict)
    added: int = 0
    token: int = 0
    """The highest token of any job that was removed: an ID that is used again must not bring old leases back."""
    news: int = 0
    waiting: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = field(default_factory=list)

    def remove(self, id: str) -> None:
        self.token = max(self.token, self.jobs.pop(id).lease_token)
        del self.numbers[id]

    def order(self, job: Job) -> tuple[int, int, int]:
        return -job.priority, job.ready_ms, self.numbers[job.id]


class MemoryStore:
    """Keeps jobs as long as it lives, and not longer: nothing survives the process.

    May be shared by threads and event loops. Looks at every job for each claim: not made for many.
    """

    def __init__(self, *, clock: Clock = SYSTEM_CLOCK) -> None:
        self._clock = clock
        self._lock = new_lock()
        self._queues: dict[str, _Queue] = {}

    @property
    def clock(self) -> Clock:
        """Moves time in tests."""
        return self._clock

    async def open(self) -> None:
        """Nothing has to be done."""

    async def aclose(self) -> None:
        """Nothing has to be done: the jobs stay until the store is dropped."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    def clone(self) -> MemoryStore:
        """The store itself: it belongs to no loop."""
        return self

    def apart(self) -> MemoryStore:
        """The former name of :meth:`clone`."""
        return self.clone()

    async def add(self, queue: str, jobs: Sequence[NewJob], connection: Any = None) -> None:
        """Add all of ``jobs`` or none."""
        if connection is not None:
            raise ConfigError("a MemoryStore has no transactions: connection must be None")
        with self._lock:
            mine, now = self._of(queue), self._now()
            given = Counter(job.id for job in jobs)
            taken = [id for id, times in given.items() if times > 1 or id in mine.jobs]
            if taken:
                raise DuplicateJobError(queue, taken)
            for new in jobs:
                mine.numbers[new.id] = mine.added = mine.added + 1
                mine.jobs[new.id] = Job(
                    id=new.id,
                    queue=queue,
                    raw=new.payload,
                    priority=new.priority,
                    max_retries=new.max_retries,
                    enqueued_ms=now,
                    ready_ms=now + new.delay_ms,
                )
            self._tell(mine)

    async def claim(self, queue: str, wanted: Wanted) -> Claimed:
        """Give up leases that have run out, then lease what is wanted."""
        with self._lock:
            mine, now, wanted = self._of(queue), self._now(), wanted.bounded()
            expired = self._expire(mine, now, wanted.max_retries)
            due = [job for job in mine.jobs.values() if job.state is JobState.READY and job.ready_ms <= now]
            chosen = _chosen(sorted(due, key=mine.order), wanted)
            claim = partial(_claimed, wanted, now, wanted.claim_id or nonce(), mine.token)
            jobs = [claim(job) for job in sorted(chosen, key=mine.order)]
            mine.jobs.update((job.id, job) for job in jobs)
            times = [job.ready_ms for job in mine.jobs.values() if job.state is JobState.READY and job.ready_ms > now]
            times += [job.lease_ms for job in mine.jobs.values() if job.lease_ms is not None]
            next_ms = max(0, min(times) - now) if times else None
            return Claimed(jobs, expired, next_ms, str(mine.news))

    async def leased(self, queue: str, claim_ids: Sequence[str], left_ms: int) -> list[Lease]:
        """What these claims have leased."""
        with self._lock:
            jobs, since = self._of(queue).jobs.values(), self._now() + left_ms
            held = [job for job in jobs if job.lease_ms is not None and job.lease_ms >= since]
            return [Lease.of(job) for job in held if job.claim_id in claim_ids]

    async def renew(self, queue: str, leases: Sequence[Lease], ttl_ms: int) -> list[bool]:
        """Extend leases; false for each that is stale."""
        with self._lock:
            mine, now = self._of(queue), self._now()
            return [self._change(mine, lease, lambda job: job.renewed(now, ttl_ms)) for lease in leases]

    async def settle(self, queue: str, settlements: Sequence[Settlement]) -> list[bool]:
        """Apply each settlement; false for each that is stale."""
        with self._lock:
            mine, now = self._of(queue), self._now()
            done = [self._change(mine, one, partial(_settled, one, now)) for one in settlements]
            self._tell(mine)
            return done

    async def find(self, queue: str, ids: Sequence[str]) -> list[Job | None]:
        """The jobs of these IDs."""
        with self._lock:
            return [self._of(queue).jobs.get(id) for id in ids]

    async def counts(self, queue: str) -> Mapping[JobState, int]:
        """How many jobs are in each state."""
        with self._lock:
            found = Counter(job.state for job in self._of(queue).jobs.values())
            return {state: found[state] for state in JobState}

    async def page(self, queue: str, state: JobState, count: int, cursor: str | None) -> JobPage:
        """Jobs in ``state``, in the order of enqueueing."""
        with self._lock:
            mine, after = self._of(queue), _number(cursor)
            found = [job for job in mine.jobs.values() if job.state is state and mine.numbers[job.id] > after]
            page = found[:count]
            return JobPage(page, str(mine.numbers[page[-1].id]) if len(found) > count else None)

    async def replay(self, queue: str, id: str) -> Job | None:
        """Make a failed job ready again."""
        return self._alter(queue, id, lambda job: job.replayed(self._now()))

    async def cancel(self, queue: str, id: str) -> Job | None:
        """Fail a job that is not finished."""
        return self._alter(queue, id, lambda job: job if job.is_finished else job.cancelled(self._now()))

    async def delete(self, queue: str, id: str) -> Job | None:
        """Remove a finished job."""
        with self._lock:
            mine = self._of(queue)
            job = mine.jobs.get(id)
            if job is not None:
                job.check("delete")
                mine.remove(id)
            return job

    async def purge(self, queue: str, state: JobState, keep: JobRetention) -> int:
        """Remove finished jobs that are not to be kept."""
        with self._lock:
            mine, now = self._of(queue), self._now()
            found = [(job.finished_ms, job.id) for job in mine.jobs.values() if job.state is state and job.is_finished]
            old = sorted((ended, id) for ended, id in found if ended is not None)
            surplus = 0 if keep.count is None else max(0, len(old) - keep.count)
            limit = float("-inf") if keep.age is None else now - keep.age * 1000
            gone = [id for at, (ended, id) in enumerate(old) if at < surplus or ended < limit][:_MOST_PURGED]
            for id in gone:
                mine.remove(id)
            return len(gone)

    async def news(self, queue: str, mark: str, seconds: float) -> None:
        """Return once something may be claimable, or after ``seconds``."""
        waiter = (asyncio.get_running_loop(), asyncio.Event())
        with self._lock:
            mine = self._of(queue)
            if str(mine.news) != mark:
                return
            mine.waiting.append(waiter)
        try:
            await self._clock.wait(waiter[1], seconds)
        finally:
            with self._lock:
                if waiter in mine.waiting:  # nobody has told it, and nobody needs to any more
                    mine.waiting.remove(waiter)

    async def finished(self, queue: str, id: str, seconds: float | None) -> Job | None:
        """The job once it is finished."""
        deadline = None if seconds is None else self._clock.monotonic() + seconds
        while True:
            with self._lock:
                mine = self._of(queue)
                job, mark = mine.jobs.get(id), str(mine.news)
            left = float("inf") if deadline is None else deadline - self._clock.monotonic()
            if job is None or job.is_finished or left <= 0:
                return job if job is not None and job.is_finished else None
            await self.news(queue, mark, min(left, 60.0))

    # --- under the lock ---------------------------------------------------------------------------------------

    def _of(self, queue: str) -> _Queue:
        return self._queues.setdefault(queue, _Queue())

    def _now(self) -> int:
        return time.time_ns() // 1_000_000 + self._clock.offset_ms

    def _expire(self, mine: _Queue, now: int, max_retries: int) -> list[Expired]:
        late = [job for job in mine.jobs.values() if job.lease_ms is not None and job.lease_ms <= now]
        found: list[Expired] = []
        for job in sorted(late, key=lambda job: (job.lease_ms or 0, job.id))[:_MOST_EXPIRED]:
            mine.jobs[job.id] = after = job.expired(now, max_retries)
            found.append(Expired(job.id, after.state is JobState.FAILED))
        if found:
            self._tell(mine)
        return found

    def _change(self, mine: _Queue, by: Lease | Settlement, change: Callable[[Job], Job]) -> bool:
        job = mine.jobs.get(by.job_id)
        if job is None or job.state is not JobState.IN_FLIGHT:
            return False
        if (job.lease_token, job.claim_id) != (by.token, by.claim_id):
            return False
        mine.jobs[by.job_id] = change(job)
        return True

    def _alter(self, queue: str, id: str, change: Callable[[Job], Job]) -> Job | None:
        with self._lock:
            mine = self._of(queue)
            job = mine.jobs.get(id)
            if job is None:
                return None
            mine.jobs[id] = after = change(job)
            self._tell(mine)
            return after

    def _tell(self, mine: _Queue) -> None:
        mine.news += 1
        waiting, mine.waiting = mine.waiting, []
        for loop, event in waiting:
            try:
                loop.call_soon_threadsafe(event.set)
            except RuntimeError:  # its loop was closed over its head
                continue


def _chosen(due: Sequence[Job], wanted: Wanted) -> list[Job]:
    """Those of ``due``, which is in claim order, that are to be claimed."""
    chosen: dict[str, Job] = {}

    def take(jobs: list[Job], most: int) -> None:
        left = [job for job in jobs if job.id not in chosen]
        chosen.update((job.id, job) for job in left[: max(0, most)])

    take([job for job in due if job.attempts], wanted.retries)
    take(sorted(due, key=lambda job: job.ready_ms), wanted.oldest)
    take(list(due), wanted.count - len(chosen))
    return list(_within_bounds(chosen.values()))


def _within_bounds(jobs: Iterable[Job]) -> Iterator[Job]:
    size = 0
    for job in jobs:
        if size >= MOST_BYTES:
            return
        yield job
        size += len(job.raw)


def _claimed(wanted: Wanted, now: int, claim_id: str, above: int, job: Job) -> Job:
    return job.claimed(wanted.worker, now, wanted.ttl_ms, claim_id, above)


def _settled(settlement: Settlement, now: int, job: Job) -> Job:
    return job.settled(settlement, now)


def _number(cursor: str | None) -> int:
    if cursor is None:
        return 0
    try:
        return int(cursor)
    except ValueError:
        raise ConfigError(f"cursor must be one that a page gave, not {cursor!r}") from None
