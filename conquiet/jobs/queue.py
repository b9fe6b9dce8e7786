"""A queue of jobs: what producers, workers and operators call."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Unpack, cast

import anyio
from msgspec import structs

from conquiet.errors import ConfigError, ConquietError, DuplicateJobError, QueueError, StaleLeaseError, UnknownJobError
from conquiet.jobs.chunks import chunks
from conquiet.jobs.collector import Collector
from conquiet.jobs.dispatch import Dispatch
from conquiet.jobs.job import Job, JobState, NewJob, Settlement
from conquiet.jobs.options import JobQueueKeywords, JobQueueOptions
from conquiet.jobs.policy import MOST_DELAY
from conquiet.jobs.settling import written_before
from conquiet.jobs.store import Claimed, JobPage, JobStore
from conquiet.kit import codec, rules
from conquiet.kit.ids import process_name, sortable, sortables
from conquiet.kit.options import takes
from conquiet.kit.policy import RetryPolicy
from conquiet.kit.recent import Recent
from conquiet.kit.service import Background
from conquiet.metrics import JobsCollector

__all__ = ["JobQueue", "JobSpec"]

_log = logging.getLogger("conquiet.jobs")
_MOMENT: Final = 1.0
"""Seconds for which a claim that was cancelled waits for its answer, to give back what it got."""
_LONGEST_ID: Final = 200
_MOST_DOUBTFUL: Final = 10_000
"""Of how many settlements it is remembered that the store did not answer."""
_PRIORITIES: Final = range(-(2**31), 2**31)


@dataclass(frozen=True, slots=True)
class JobSpec:
    """A job to be enqueued, for :meth:`JobQueue.enqueue_many`; the names are those of ``enqueue``."""

    payload: Any
    job_id: str | None = None
    priority: int = 0
    delay: float = 0.0
    max_retries: int | None = None


class JobQueue:
    """The jobs of one name in a store.

    At least once: a job that was enqueued is claimed until a worker acknowledges it, it has failed ``max_retries`` + 1
    times, or it is cancelled. While its lease runs, no other worker can claim it; a worker that dies costs the job one
    attempt, and after ``lease_ttl`` seconds another may claim it. A worker without the lease can change nothing.

    Jobs are claimed by priority, then in the order in which they became claimable. One place in five goes to jobs that
    are tried again, and one to the job that has waited longest, so that none waits for ever. Finished jobs are kept as
    ``keep`` and ``keep_failed`` say, for as long as a worker or :meth:`purge` looks after that.
    """

    @takes(JobQueueOptions)
    def __init__(self, store: JobStore, name: str, **options: Unpack[JobQueueKeywords]) -> None:
        taken = JobQueueOptions(**options)
        if not callable(getattr(store, "claim", None)):
            raise ConfigError(f"store must be a JobStore, not {store!r}")
        self._store = store
        self._name = rules.name("name", name)
        self._keep = {JobState.SUCCEEDED: taken.keep, JobState.FAILED: taken.keep_failed}
        self._dispatch = Dispatch(store, name, float(taken.lease_ttl), taken.retry, taken.random)
        self._metrics = self._dispatch.metrics
        self._background = Background()
        self._doubtful: Recent[tuple[str, int], None] = Recent(_MOST_DOUBTFUL)

    @property
    def name(self) -> str:
        """Its name in the store."""
        return self._name

    @property
    def store(self) -> JobStore:
        """Where its jobs are kept."""
        return self._store

    @property
    def lease_ttl(self) -> float:
        """For how many seconds a claim or a heartbeat leases a job."""
        return self._dispatch.ttl

    @property
    def retry(self) -> RetryPolicy:
        """What happens after a failure."""
        return self._dispatch.retry

    @property
    def dispatch(self) -> Dispatch:
        """What workers need of it."""
        return self._dispatch

    # --- producing ----------------------------------------------------------------------------------------------

    async def enqueue(
        self,
        payload: Any,
        *,
        job_id: str | None = None,
        priority: int = 0,
        delay: float = 0.0,
        max_retries: int | None = None,
        connection: Any = None,
    ) -> str:
        """Add a job; its ID. Once this returns, the job is as durable as its store.

        ``payload`` is any JSON value. With an ID of one's own, a second call raises ``DuplicateJobError`` and adds
        nothing, also after the job has finished. A larger ``priority`` is claimed sooner; no worker can claim it before
        ``delay`` seconds have passed. ``max_retries`` overrides the policy's. ``connection`` is an open connection to
        the database of a ``PostgresStore``: the job is part of that connection's transaction.
        """
        if job_id is None and max_retries is None and _is_nothing(priority) and _is_nothing(delay):
            new = NewJob(sortable(), _encoded(payload))
        else:
            new = _checked(JobSpec(payload, job_id, priority, delay, max_retries), sortable())
        await self._store.add(self._name, [new], connection)
        self._metrics.enqueued(1)
        return new.id

    async def enqueue_many(self, jobs: Iterable[Any], *, connection: Any = None) -> list[str]:
        """Add many jobs, given as payloads or as ``JobSpec``; their IDs, in order.

        A thousand at a time, or 4 MiB if they are large, each such part as a whole or not at all. If one is refused,
        those before its part were added: ``DuplicateJobError.enqueued`` and ``QueueError.entry_ids`` tell which.
        """
        given = list(jobs)
        new = [
            _checked(job, id) if isinstance(job, JobSpec) else NewJob(id, _encoded(job))
            for job, id in zip(given, sortables(len(given)), strict=True)
        ]
        ids = [job.id for job in new]
        done = 0
        for chunk in chunks(new, _size, _words()):
            try:
                await self._store.add(self._name, chunk, connection)
            except DuplicateJobError as error:
                raise DuplicateJobError(self._name, error.job_ids, ids[:done]) from error
            except QueueError as error:
                error.entry_ids = (*ids[:done], *[None] * (len(ids) - done))
                raise
            done += len(chunk)
            self._metrics.enqueued(len(chunk))
        return ids

    # --- working ------------------------------------------------------------------------------------------------

    async def claim(self, count: int = 1, worker: str | None = None, *, timeout: float = 0.0) -> list[Job]:
        """Lease up to ``count`` jobs; fewer, or none, if there are no more, after waiting ``timeout`` seconds for one.

        Each must be settled by ``ack``, ``nack`` or ``release``, or kept by ``heartbeat``, within ``lease_ttl``. Of
        very many it gets what it can in a third of that. A call that is cancelled gives back what the store has leased
        to it: for a second it waits for that, and then it ends and the rest happens behind it. What the store has
        leased to a call that failed, because its answer was lost, the next call gives back first.
        """
        rules.number("timeout", timeout, least=0)
        clock = self._store.clock
        deadline = clock.monotonic() + timeout
        while True:
            waits = clock.monotonic() < deadline
            claimed = await self._claimed(count, process_name() if worker is None else worker, waits)
            left = deadline - clock.monotonic()
            if claimed.jobs or left <= 0:
                return list(claimed.jobs)
            await self._dispatch.news(claimed, left)

    async def _claimed(self, count: int, worker: str, waits: bool) -> Claimed:
        # A task of its own: torn off with the caller, the answer would be lost, and no worker would run the jobs.
        asking = self._background.start(self._dispatch.claim(count, worker, waits=waits), "claim")
        try:
            await asyncio.wait([asking])
        except asyncio.CancelledError:
            giving = self._background.start(self._give_back(asking), "release")
            with anyio.move_on_after(_MOMENT, shield=True):
                await asyncio.wait([giving])
            raise
        return asking.result()

    async def _give_back(self, asking: asyncio.Task[Claimed]) -> None:
        try:
            await self.release(*(await asking).jobs)
        except (ConquietError, asyncio.CancelledError) as error:
            _log.warning("queue %r: the jobs of a cancelled claim were not given back: %s", self._name, error)

    async def heartbeat(self, *jobs: Job) -> None:
        """Lease jobs for another ``lease_ttl`` seconds from now; ``StaleLeaseError`` for those that were lost."""
        stale = await self._dispatch.renew(self._held(jobs))
        if stale:
            self._metrics.stale("renew", len(stale))
            raise StaleLeaseError(self._name, [job.id for job in stale])

    async def ack(self, *jobs: Job, result: Any = None) -> None:
        """The work is done: jobs that are never run again. ``result``, any JSON value, is kept with them.

        A call that failed with ``QueueError`` may be repeated, whether the store did it or not; so may ``nack`` and
        ``release``.
        """
        kept = None if result is None else codec.encode(result)
        await self._settle([Settlement.of(job, "ack", result=kept) for job in self._held(jobs)])

    async def nack(self, *jobs: Job, error: BaseException | str = "", delay: float | None = None) -> None:
        """The work has failed: tried again after the policy's delay, or ``delay`` seconds; failed if no try is left.

        An exception as the ``error`` is held against the policy's rules, and kept with its traceback.
        """
        if not isinstance(error, BaseException | str):
            raise ConfigError(f"error must be an exception or a string, not {error!r}")
        if delay is not None:
            rules.number("delay", delay, least=0)
        verdicts = [self._dispatch.judge(job, error) for job in self._held(jobs)]
        if delay is not None:
            late = round(min(delay, MOST_DELAY) * 1000)
            verdicts = [structs.replace(v, delay_ms=late) for v in verdicts]
        await self._settle(verdicts)

    async def release(self, *jobs: Job) -> None:
        """Give jobs back that were not begun: at once claimable in their old place, at no cost."""
        await self._settle([Settlement.of(job, "release") for job in self._held(jobs)])

    async def _settle(self, settlements: Sequence[Settlement]) -> None:
        stale: list[str] = []
        for chunk in chunks(settlements, Settlement.size, Settlement.words):
            left = await self._unwritten(chunk) if self._doubtful else chunk
            try:
                done = await self._dispatch.settle(left) if left else []
            except QueueError:
                for one in left:
                    self._doubtful.keep((one.job_id, one.token), None)
                raise
            stale += [one.job_id for one, applied in zip(left, done, strict=True) if not applied]
        if stale:
            raise StaleLeaseError(self._name, stale)

    async def _unwritten(self, settlements: Sequence[Settlement]) -> Sequence[Settlement]:
        """Those that the store does not have yet: of one that was not answered before, it may."""
        doubtful = [one for one in settlements if (one.job_id, one.token) in self._doubtful]
        if not doubtful:
            return settlements
        written = await written_before(self._dispatch, doubtful)
        for one in doubtful:
            self._doubtful.pop((one.job_id, one.token), None)
        return [one for one in settlements if one not in written]

    def _held(self, jobs: Sequence[Job]) -> Sequence[Job]:
        for job in jobs:
            if not isinstance(job, Job):
                raise ConfigError(f"a claimed Job is needed, not {job!r}")
            if job.queue != self._name:
                raise ConfigError(f"job {job.id!r} is of queue {job.queue!r}, not of {self._name!r}")
        return jobs

    # --- looking after --------------------------------------------------------------------------------------------

    async def get(self, job_id: str) -> Job | None:
        """The job as it is now; ``None`` if there is none of that ID."""
        [job] = await self._store.find(self._name, [_job_id(job_id)])
        return job

    async def counts(self) -> Mapping[JobState, int]:
        """How many jobs are in each state. A job whose lease has run out is in flight until the next claim."""
        return await self._store.counts(self._name)

    async def list_jobs(self, state: JobState, count: int = 100, cursor: str | None = None) -> JobPage:
        """Up to ``count`` jobs in ``state``; go on with the page's ``cursor`` until it is ``None``."""
        rules.integer("count", count, least=1)
        if cursor is not None and not isinstance(cursor, str):
            raise ConfigError(f"cursor must be one that a page gave, not {cursor!r}")
        return await self._store.page(self._name, _state(state), count, cursor)

    async def wait(self, job_id: str, timeout: float | None = None) -> Job:
        """The job once it has succeeded or failed; ``TimeoutError`` after ``timeout`` seconds."""
        if timeout is not None:
            rules.number("timeout", timeout, least=0)
        job = await self._store.finished(self._name, _job_id(job_id), timeout)
        if job is None:
            self._known(job_id, await self.get(job_id))
            raise TimeoutError(f"job {job_id!r} of queue {self._name!r} has not finished in {timeout} seconds")
        return job

    async def replay(self, job_id: str) -> Job:
        """Make a failed job ready again, with all its attempts."""
        job = self._known(job_id, await self._store.replay(self._name, _job_id(job_id)))
        self._metrics.replayed(1)
        return job

    async def cancel(self, job_id: str) -> bool:
        """Fail a job that is not finished; a handler at work on it is cancelled. Whether it was not finished."""
        before = self._known(job_id, await self.get(job_id))
        if before.is_finished:
            return False
        job = self._known(job_id, await self._store.cancel(self._name, job_id))
        was_cancelled = job.state is JobState.FAILED and job.last_error == "cancelled"
        if was_cancelled:
            self._metrics.cancelled(1)
        return was_cancelled

    async def delete(self, job_id: str) -> None:
        """Remove a finished job; its ID may be used again."""
        self._known(job_id, await self._store.delete(self._name, _job_id(job_id)))

    async def purge(self) -> int:
        """Remove the finished jobs that are not to be kept; how many. Workers do so from time to time."""
        gone = 0
        for state, keep in self._keep.items():
            while removed := await self._store.purge(self._name, state, keep):
                gone += removed
        return gone

    def collector(self) -> JobsCollector:
        """Show how many jobs are in each state to Prometheus' default registry, from now until ``close``."""
        return Collector(self._store, [self._name])

    def _known(self, job_id: str, job: Job | None) -> Job:
        if job is None:
            raise UnknownJobError(f"queue {self._name!r} has no job with the ID {job_id!r}")
        return job


def _is_nothing(number: object) -> bool:
    """Whether it is the number 0, which needs no further check."""
    return not number and type(number) in (int, float)


def _words() -> Callable[[NewJob], int]:
    """How many words each of some jobs is in a request: those that are like the one before share a head of four."""
    before: tuple[object, ...] = ()

    def count(job: NewJob) -> int:
        nonlocal before
        last, before = before, (job.priority, job.delay_ms, job.max_retries)
        return 2 if before == last else 6

    return count


def _size(job: NewJob) -> int:
    return len(job.payload)


def _encoded(payload: Any) -> bytes:
    is_object = type(payload) is dict
    return codec.encode_object(cast("object", payload)) if is_object else codec.encode(payload)


def _checked(spec: JobSpec, new_id: str) -> NewJob:
    id = new_id if spec.job_id is None else _job_id(spec.job_id)
    if isinstance(spec.priority, bool) or not isinstance(spec.priority, int) or spec.priority not in _PRIORITIES:
        raise ConfigError(f"priority must be an integer of 32 bits, not {spec.priority!r}")
    if rules.number("delay", spec.delay, least=0) > MOST_DELAY:
        raise ConfigError(f"delay must be at most ten years, not {spec.delay!r} seconds")
    if spec.max_retries is not None:
        rules.integer("max_retries", spec.max_retries, least=0)
    return NewJob(id, _encoded(spec.payload), spec.priority, round(spec.delay * 1000), spec.max_retries)


def _job_id(value: object) -> str:
    id = rules.text("job_id", value)
    if len(id) > _LONGEST_ID or "\0" in id:
        raise ConfigError(f"job_id must be at most {_LONGEST_ID} characters without NUL, not {id!r}")
    return id


def _state(value: object) -> JobState:
    return JobState(rules.one_of("state", value, [state.value for state in JobState]))
