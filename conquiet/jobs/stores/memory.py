"""Jobs in this process only: for tests and examples, and the oracle that other stores are compared with."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from heapq import heapify, heappop, heappush
from itertools import count, islice
from typing import Any, Final, TypeAlias

from conquiet.errors import ConfigError, DuplicateJobError
from conquiet.jobs.job import Job, JobState, NewJob, Settlement
from conquiet.jobs.store import MOST_BYTES, Claimed, Expired, JobPage, JobRetention, Lease, Wanted, numbered
from conquiet.kit.clock import SYSTEM_CLOCK, Clock
from conquiet.kit.ids import nonce
from conquiet.kit.loopthread import new_lock
from conquiet.kit.opened import Opened

__all__ = ["MemoryStore"]

_MOST_EXPIRED: Final = 500
_MOST_PURGED: Final = 1000
_SLACK: Final = 100
"""How many entries that no longer count a line keeps, beside as many as there are jobs."""


_Key: TypeAlias = tuple[int | str, ...]


class _Line:
    """Jobs in the order of ``key``: a heap. An entry counts only while the queue has that very job, unchanged."""

    def __init__(self, jobs: Mapping[str, Job], key: Callable[[Job], _Key]) -> None:
        self._jobs = jobs
        self._key = key
        self._entries: list[tuple[_Key, int, Job]] = []
        self._pushed = count()

    def __iter__(self) -> Iterator[Job]:
        return (job for _, _, job in self._entries if self._jobs.get(job.id) is job)

    def push(self, job: Job) -> None:
        if len(self._entries) > 2 * len(self._jobs) + _SLACK:
            self._entries = [entry for entry in self._entries if self._jobs.get(entry[2].id) is entry[2]]
            heapify(self._entries)
        # The number makes each entry different: jobs themselves cannot be compared.
        heappush(self._entries, (self._key(job), next(self._pushed), job))

    def first(self) -> Job | None:
        while self._entries:
            job = self._entries[0][2]
            if self._jobs.get(job.id) is job:
                return job
            heappop(self._entries)
        return None

    def until(self, time: Callable[[Job], int | None], now: int) -> Iterator[Job]:
        """Take out the first jobs, as long as their ``time`` has come."""
        while (job := self.first()) is not None and (time(job) or 0) <= now:
            heappop(self._entries)
            yield job


class _Queue:
    """The jobs of one queue, by ID, in the order of enqueueing, and the lines in which they wait."""

    def __init__(self) -> None:
        self.jobs: dict[str, Job] = {}
        self.numbers: dict[str, int] = {}
        self.added = 0
        self.token = 0
        """The highest token of any job that was removed: an ID that is used again must not bring old leases back."""
        self.news = 0
        self.waiting: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []
        self.leases = _Line(self.jobs, lambda job: (job.lease_ms or 0, job.id))
        self._scheduled = _Line(self.jobs, lambda job: (job.ready_ms, self.numbers[job.id]))
        self._due = _Line(self.jobs, self.order)
        self._retried = _Line(self.jobs, self.order)
        self._oldest = _Line(self.jobs, lambda job: (job.ready_ms, *self.order(job)))

    def order(self, job: Job) -> tuple[int, int, int]:
        return -job.priority, job.ready_ms, self.numbers[job.id]

    def put(self, job: Job) -> None:
        """Add a job, or put it in the place of what it was before."""
        self.jobs[job.id] = job
        if job.state is JobState.READY:
            self._scheduled.push(job)
        elif job.state is JobState.IN_FLIGHT:
            self.leases.push(job)

    def remove(self, id: str) -> None:
        self.token = max(self.token, self.jobs.pop(id).lease_token)
        del self.numbers[id]

    def take(self, wanted: Wanted, now: int) -> list[Job]:
        """Claim what is wanted: a share of what was tried before, one of what waits longest, then the rest."""
        for job in self._scheduled.until(lambda job: job.ready_ms, now):
            for line in (self._due, self._oldest, self._retried) if job.attempts else (self._due, self._oldest):
                line.push(job)
        claim_id, size, taken = wanted.claim_id or nonce(), 0, list[Job]()
        for line, most in ((self._retried, wanted.retries), (self._oldest, wanted.oldest), (self._due, wanted.count)):
            for _ in range(min(most, wanted.count - len(taken))):
                found = line.first()
                if found is None or size >= MOST_BYTES:
                    break
                size += len(found.raw)
                taken.append(found.claimed(wanted.worker, now, wanted.ttl_ms, claim_id, self.token))
                self.put(taken[-1])
        return sorted(taken, key=self.order)

    def next_ms(self, now: int) -> int | None:
        """In how many milliseconds the next job falls due, or the next lease runs out."""
        ready, leased = self._scheduled.first(), self.leases.first()
        times = [] if ready is None else [ready.ready_ms]
        times += [] if leased is None or leased.lease_ms is None else [leased.lease_ms]
        return max(0, min(times) - now) if times else None


class MemoryStore(Opened):
    """Keeps jobs as long as it lives, and not longer: nothing survives the process.

    May be shared by threads and event loops.
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
                mine.put(
                    Job(
                        id=new.id,
                        queue=queue,
                        raw=new.payload,
                        priority=new.priority,
                        max_retries=new.max_retries,
                        enqueued_ms=now,
                        ready_ms=now + new.delay_ms,
                    )
                )
            self._tell(mine)

    async def claim(self, queue: str, wanted: Wanted) -> Claimed:
        """Give up leases that have run out, then lease what is wanted."""
        with self._lock:
            mine, now, wanted = self._of(queue), self._now(), wanted.bounded()
            expired = self._expire(mine, now, wanted.max_retries)
            jobs = mine.take(wanted, now)
            return Claimed(jobs, expired, mine.next_ms(now), str(mine.news))

    async def leased(self, queue: str, claim_ids: Sequence[str], left_ms: int) -> list[Lease]:
        """What these claims have leased."""
        with self._lock:
            since = self._now() + left_ms
            held = [job for job in self._of(queue).leases if (job.lease_ms or 0) >= since]
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
            mine, after = self._of(queue), numbered(cursor)
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
                if waiter in mine.waiting:  # it was not woken, and need not be any more
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
        found: list[Expired] = []
        for job in islice(mine.leases.until(lambda job: job.lease_ms, now), _MOST_EXPIRED):
            after = job.expired(now, max_retries)
            mine.put(after)
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
        mine.put(change(job))
        return True

    def _alter(self, queue: str, id: str, change: Callable[[Job], Job]) -> Job | None:
        with self._lock:
            mine = self._of(queue)
            job = mine.jobs.get(id)
            if job is None:
                return None
            after = change(job)
            mine.put(after)
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


def _settled(settlement: Settlement, now: int, job: Job) -> Job:
    return job.settled(settlement, now)
