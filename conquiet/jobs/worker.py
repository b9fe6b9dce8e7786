"""A worker: claims jobs, runs a handler on them, and tells the store what became of them."""

from __future__ import annotations

import asyncio
import inspect
import logging
import math
import random
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, TypeAlias, Unpack

from msgspec.structs import replace

from conquiet.errors import ConfigError, QueueError, Retry
from conquiet.jobs.dispatch import lease_key
from conquiet.jobs.job import Job, Settlement
from conquiet.jobs.options import JobWorkerKeywords, JobWorkerOptions
from conquiet.jobs.policy import judge
from conquiet.jobs.queue import JobQueue
from conquiet.jobs.settling import Settling
from conquiet.jobs.store import Claimed
from conquiet.kit import codec
from conquiet.kit.ids import process_name
from conquiet.kit.lifecycle import MOMENT, Life
from conquiet.kit.options import instance, takes
from conquiet.kit.policy import RetryPolicy
from conquiet.kit.retrying import Lines, Retrying
from conquiet.kit.runners import Handler, Runners
from conquiet.kit.service import Background
from conquiet.metrics import JobResult

__all__ = ["JobHandler", "JobHealth", "JobWorker"]

JobHandler: TypeAlias = Callable[[Job], Awaitable[Any]] | Callable[[Job], Any]

_log = logging.getLogger("conquiet.jobs")
_LINGER: Final = 0.001
"""How long a few free places wait for more of them, while most are taken."""
_TRIAL: Final = 1.0
"""Seconds after which a wait for news that failed before is known to work again."""
_AHEAD: Final = 3
"""For each place, how many outcomes may be on their way to a store that takes them."""
_PURGE: Final = 60.0
"""About how many seconds lie between two looks for finished jobs that are not to be kept."""
_RESULTS: Final[Mapping[str, JobResult]] = {"ack": "succeeded", "retry": "retried", "fail": "failed"}


@dataclass(frozen=True, slots=True)
class JobHealth:
    """How a worker is doing, for probes.

    ``healthy`` is false unless it runs, the store answers, and there is a place in which a job could be run.
    """

    healthy: bool
    inflight: int
    """Jobs whose handler is at work."""
    failures: int
    """How often in a row the store could not be asked or waited for jobs, or told what became of them."""
    stuck: int = 0
    """Handlers of those at work whose job is over: it took too long or was lost, and they have not ended yet."""


class JobWorker:
    """Runs ``handler`` on the jobs of a queue, up to ``concurrency`` at a time.

    What the handler returns is kept as the job's result; if it raises, the job is tried again by the queue's policy
    (``Reject``: not again; ``Retry``: after its delay). No job is claimed before there is a place for it. Its lease is
    renewed, from the claim until the store has the outcome, in a way that a handler which blocks the event loop cannot
    hold up; only a call into C that lets no other thread of the process run for longer than the lease can. If the lease
    is lost all the same, the handler is cancelled. Handlers are ``async`` or plain functions, which run in threads.
    After ``execution_timeout`` seconds a try has failed, and its handler is cancelled.

    While the store cannot be reached, the worker goes on trying, and begins no more than it can tell the store of. A
    process that dies loses nothing: its jobs are claimed by others when their leases have run out.
    """

    @takes(JobWorkerOptions)
    def __init__(self, queue: JobQueue, handler: JobHandler, **options: Unpack[JobWorkerKeywords]) -> None:
        instance("queue", queue, of=JobQueue)
        taken = JobWorkerOptions(**options)
        self._queue = queue
        self._dispatch = queue.dispatch
        self._name = process_name() if taken.name is None else taken.name
        self._concurrency = taken.concurrency
        self._drain_timeout = taken.drain_timeout
        self._timeout = taken.execution_timeout
        self._handler = Handler[Job](handler, "job")
        self._running: Runners[Job] | None = None
        self._settling: Settling | None = None
        self._life = Life(f"the worker of queue {queue.name!r}", _log, handle_signals=taken.handle_signals)
        self._lines = Lines(_log)
        self._claiming = Retrying(self._lines, self._dispatch.store.clock)
        self._waiting = Retrying(self._lines, self._dispatch.store.clock)

    @property
    def name(self) -> str:
        """Under which jobs are claimed."""
        return self._name

    @property
    def inflight(self) -> int:
        """How many handlers are at work."""
        return 0 if self._running is None else self._running.busy

    def health(self) -> JobHealth:
        """How it is doing, without asking the store."""
        running, settling = self._running, self._settling
        failures = self._claiming.failures + self._waiting.failures
        if running is None or settling is None:
            return JobHealth(False, 0, failures)
        failures += settling.failures
        is_well = not self._life.stopping.is_set() and not failures and running.stuck < self._concurrency
        return JobHealth(is_well, running.busy, failures, running.stuck)

    def stop(self) -> None:
        """Ask it to end; returns at once, safe from any thread and from signal handlers."""
        self._life.stop()

    async def run(self) -> None:
        """Work until :meth:`stop`, or until SIGTERM or SIGINT where those are handled.

        Then nothing more is claimed; jobs that were not begun are given back at no cost; handlers that are at work
        have ``drain_timeout`` seconds to finish, and what is still not done by then is given back as a failed try.
        If the call is cancelled, there is no such time. Either way the store has about a second more for what is to be
        given back; of what it could not be told by then, the leases run out. A handler that does not end though it was
        cancelled is left behind, as a thread is.
        """
        with self._life.lived():
            self._claiming.succeeded()
            self._waiting.succeeded()
            self._holder = self._dispatch.holder(self._lost, self._lines)
            running, settling = self._runners(), Settling(self._dispatch, self._written, self._lines)
            self._running, self._settling = running, settling
            background, seconds = Background(), 0.0
            claiming: list[asyncio.Task[None]] = []
            try:
                await self._holder.open()
                background.start(self._purge(), "purge")
                claiming.append(background.start(self._claim(running, settling), "claim"))
                await self._life.until_stopped(*claiming, settling.start())
                seconds = self._drain_timeout
            finally:
                drain = partial(self._drain, running, settling, background, claiming, seconds)
                await self._life.leave(drain, partial(self._close, running, settling, background), seconds)

    def _runners(self) -> Runners[Job]:
        return Runners(
            self._handler,
            key=lease_key,
            limit=self._concurrency,
            finished=self._finished,
            withdrawn=self._withdrawn,
            is_held=self._holder.has,
            stopped=_stopped,
            timeout=self._timeout,
            name="job",
        )

    async def _drain(
        self,
        running: Runners[Job],
        settling: Settling,
        background: Background,
        claiming: Sequence[asyncio.Task[None]],
        seconds: float,
    ) -> None:
        self._give_back(running.withdraw(), settling)
        await asyncio.gather(self._end_claims(running, settling, claiming, seconds), running.drain(seconds))
        await background.aclose()
        await settling.flush()
        await self._give_back_unanswered()

    async def _end_claims(
        self, running: Runners[Job], settling: Settling, claiming: Sequence[asyncio.Task[None]], seconds: float
    ) -> None:
        """What a claim under way leases is given back too: its answer is waited for, but not for ever."""
        for task in claiming:
            await asyncio.wait([task], timeout=max(seconds, MOMENT / 2))
            task.cancel()
            await asyncio.wait([task])
        self._give_back(running.withdraw(), settling)

    async def _close(self, running: Runners[Job], settling: Settling, background: Background) -> None:
        self._running = self._settling = None
        # Side by side: a store that does not answer may take its time with each.
        await asyncio.gather(background.aclose(), running.aclose(), settling.aclose(), self._holder.aclose())

    def _give_back(self, jobs: Iterable[Job], settling: Settling) -> None:
        for job in jobs:
            settling.put(Settlement.of(job, "release"))

    async def _give_back_unanswered(self) -> None:
        try:
            await self._dispatch.unanswered.give_back()
        except QueueError as error:
            _log.warning("queue %r: a claim without an answer was not given back: %s", self._dispatch.queue, error)

    # --- claiming ---------------------------------------------------------------------------------------------

    async def _claim(self, running: Runners[Job], settling: Settling) -> None:
        while not self._life.stopping.is_set():
            running.freed.clear()
            free = self._free(running, settling)
            if 0 < free < self._concurrency // 4:
                await asyncio.sleep(_LINGER)
                free = self._free(running, settling)
            if free <= 0:
                await self._until(running.freed.wait())
                continue
            claimed = await self._claim_once(free, settling)
            if claimed is None:
                continue
            if self._life.stopping.is_set():  # they are not begun, and given back
                running.put(claimed.jobs)
                return
            running.begin(claimed.jobs)
            if len(claimed.jobs) < free:
                await self._until(self._news(claimed))
            else:
                self._waiting.succeeded()  # as long as it need not wait, it cannot fail to
                await asyncio.sleep(0)

    def _free(self, running: Runners[Job], settling: Settling) -> int:
        """For how many more jobs there is a place.

        Outcomes on their way take no place, up to a few for each, lest handlers wait for the store. But what cannot be
        written keeps its place: else a store that takes no outcomes would have all jobs run for nothing.
        """
        unwritten, most = len(settling), 0 if settling.failures else _AHEAD * self._concurrency
        return running.free - max(0, unwritten - most)

    async def _claim_once(self, count: int, settling: Settling) -> Claimed | None:
        try:
            await self._holder.catch_up()
            asked = self._dispatch.store.clock.monotonic()
            claimed = await self._dispatch.claim(count, self._name, waits=not self._waiting.failures)
            self._holder.add(claimed.jobs, asked)
            try:
                await self._holder.catch_up(asked)  # the answer may have been a long time coming
            except BaseException:
                for job in claimed.jobs:
                    self._holder.drop(job)
                self._give_back(claimed.jobs, settling)
                raise
        except QueueError as error:
            what = f"queue {self._dispatch.queue!r}: no jobs could be claimed"
            await self._claiming.failed(what, error, self._life.stopping)
            return None
        self._claiming.succeeded()
        return claimed

    async def _news(self, claimed: Claimed) -> None:
        try:
            await self._dispatch.news(claimed, _TRIAL if self._waiting.failures else math.inf)
        except QueueError as error:
            what = f"queue {self._dispatch.queue!r}: new jobs are noticed late"
            await self._waiting.failed(what, error, self._life.stopping)
        else:
            self._waiting.succeeded()

    async def _until(self, event: Any) -> None:
        """Wait for ``event``, but not longer than until the end is asked for."""
        background = Background()
        waiting = background.start(event, "wait")
        stopping = background.start(self._life.asked_to_stop(), "wait")
        try:
            await asyncio.wait([waiting, stopping], return_when=asyncio.FIRST_COMPLETED)
        finally:
            await background.aclose()

    async def _purge(self) -> None:
        while True:
            await self._dispatch.store.clock.sleep(_PURGE * (0.5 + random.random()))
            try:
                await self._queue.purge()
            except Exception as error:
                _log.warning("queue %r: finished jobs could not be removed: %s", self._dispatch.queue, error)

    # --- what becomes of jobs -----------------------------------------------------------------------------------

    def _finished(self, job: Job, result: Any, error: BaseException | None, seconds: float) -> None:
        kept = None
        if error is None and result is not None:
            kept, error = self._kept(job, result)
        if error is None:
            settlement = Settlement(job.id, job.lease_token, "ack", result=kept, claim_id=job.claim_id, seconds=seconds)
        else:
            settlement = replace(self._judged(job, error), seconds=seconds)
        assert self._settling is not None
        self._settling.put(settlement)

    def _withdrawn(self, job: Job) -> None:
        assert self._settling is not None
        self._give_back([job], self._settling)

    def _judged(self, job: Job, error: BaseException) -> Settlement:
        try:
            verdict = self._dispatch.judge(job, error)
        except Exception as mistake:  # whatever it is, the job must not be held for ever
            _log.exception("job %r of queue %r could not be judged", job.id, job.queue)
            verdict = judge(job, f"{type(mistake).__name__} in judging the outcome", RetryPolicy())
        what = "failed" if verdict.kind == "fail" else "will be tried again"
        _log.warning("queue %r, job %r, attempt %d %s: %s", job.queue, job.id, job.attempts, what, type(error).__name__)
        return verdict

    def _kept(self, job: Job, result: Any) -> tuple[bytes | None, Exception | None]:
        """A result as it is kept, if it can be; or what is wrong with the handler that gave it."""
        try:
            return codec.encode(result), None
        except Exception as error:
            if inspect.isgenerator(result) or inspect.isasyncgen(result):
                return None, ConfigError(f"the handler gave a generator, of which nothing has run: {result!r}")
            # The work is done, and must not be done again for the sake of a value that cannot be read.
            _log.error("queue %r, job %r: its result is not kept: %s", job.queue, job.id, error)
            return None, None

    def _written(self, outcomes: Sequence[tuple[Settlement, bool]]) -> None:
        took: defaultdict[JobResult, list[float]] = defaultdict(list)
        for settlement, applied in outcomes:
            self._holder.forget((settlement.job_id, settlement.token))
            if not applied:
                job = (self._dispatch.queue, settlement.job_id)
                _log.warning("queue %r, job %r: lost before its outcome was kept", *job)
            if settlement.seconds is not None:
                took[_RESULTS[settlement.kind] if applied else "lost"].append(settlement.seconds)
        if self._running is not None:
            self._running.freed.set()
        for result, seconds_each in took.items():
            self._dispatch.metrics.ran(result, seconds_each)

    def _lost(self, job: Job, reason: str) -> None:
        seconds = None if self._running is None else self._running.lose(lease_key(job))
        if seconds is not None:
            self._dispatch.metrics.stale("renew", 1)
            self._dispatch.metrics.ran("lost", [seconds])
            _log.warning("queue %r, job %r: lost, its handler is cancelled", self._dispatch.queue, job.id)


def _stopped() -> Retry:
    return Retry("the worker was stopped", delay=0)
