"""A worker: claims jobs, runs a handler on them, and tells the store what became of them."""

from __future__ import annotations

import asyncio
import inspect
import logging
import random
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any, Final

from conquiet.errors import ConfigError, ConquietError, PayloadError, QueueError
from conquiet.jobs.holding import Holdings
from conquiet.jobs.job import Job, Settlement
from conquiet.jobs.policy import judge
from conquiet.jobs.queue import JobQueue
from conquiet.jobs.running import Handler, Running
from conquiet.jobs.settling import AFTER_ERROR, Settling
from conquiet.jobs.store import Claimed
from conquiet.kit import codec, rules
from conquiet.kit.ids import process_name
from conquiet.kit.policy import RetryPolicy
from conquiet.kit.service import Background, to_its_end
from conquiet.kit.signals import stop_on_signals
from conquiet.metrics import JobResult

__all__ = ["JobHealth", "JobWorker"]

_log = logging.getLogger("conquiet.jobs")
_LINGER: Final = 0.001
"""How long a few free places wait for more of them, while most are taken."""
_LOOK: Final = 5.0
"""Seconds after which an idle worker looks without being told."""
_AHEAD: Final = 3
"""For each place, how many outcomes may be on their way to a store that takes them."""
_MOMENT: Final = 1.0
"""Seconds that a store has at least for what must not be lost, when the worker leaves."""
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
    """How often in a row the store could not be asked for jobs, or told what became of them."""
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

    def __init__(
        self,
        queue: JobQueue,
        handler: Handler,
        *,
        concurrency: int = 10,
        execution_timeout: float | None = None,
        drain_timeout: float = 30.0,
        name: str | None = None,
        handle_signals: bool = True,
    ) -> None:
        if not isinstance(queue, JobQueue):
            raise ConfigError(f"queue must be a JobQueue, not {queue!r}")
        if execution_timeout is not None:
            rules.seconds("execution_timeout", execution_timeout)
        self._queue = queue
        self._dispatch = queue.dispatch
        self._name = process_name() if name is None else rules.text("name", name)
        self._concurrency = rules.integer("concurrency", concurrency, least=1)
        self._drain_timeout = rules.number("drain_timeout", drain_timeout, least=0)
        self._handle_signals = rules.flag("handle_signals", handle_signals)
        self._how = (handler, concurrency, execution_timeout, self._finished)
        Running(*self._how, lambda job: True)  # a bad handler is the caller's to see now
        self._running: Running | None = None
        self._settling: Settling | None = None
        self._stopping = asyncio.Event()
        """Made anew by each run, which may be on another loop."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._failures = 0
        self._seconds: dict[tuple[str, int], float] = {}
        """How long the handlers took whose outcomes are on their way."""

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
        if running is None or settling is None:
            return JobHealth(False, 0, self._failures)
        failures = self._failures + settling.failures
        is_well = not self._stopping.is_set() and not failures and running.stuck < self._concurrency
        return JobHealth(is_well, running.busy, failures, running.stuck)

    def stop(self) -> None:
        """Ask it to end; returns at once, safe from any thread and from signal handlers."""
        if self._loop is None:
            self._stopping.set()
        else:
            with suppress(RuntimeError):  # that loop has been closed, and all is over
                self._loop.call_soon_threadsafe(self._stopping.set)

    async def run(self) -> None:
        """Work until :meth:`stop`, or until SIGTERM or SIGINT where those are handled.

        Then nothing more is claimed; jobs that were not begun are given back at no cost; handlers that are at work
        have ``drain_timeout`` seconds to finish, and what is still not done by then is given back as a failed try.
        If the call is cancelled, there is no such time. Either way the store has a few seconds more for what is to be
        given back; of what it could not be told by then, the leases run out.
        """
        if self._running is not None:
            raise ConfigError("the worker runs already")
        self._loop = asyncio.get_running_loop()
        if not self._stopping.is_set():
            self._stopping = asyncio.Event()
        self._failures = 0
        self._holdings = Holdings(self._dispatch, self._lost)
        running = self._running = Running(*self._how, self._holdings.has)
        settling = self._settling = Settling(self._dispatch, self._written)
        background, patience = Background(), 0.0
        claiming: asyncio.Task[None] | None = None
        with ExitStack() as signals:
            if self._handle_signals:
                signals.enter_context(stop_on_signals(self.stop))
            try:
                await self._holdings.open()
                background.start(self._purge(), "purge")
                claiming = background.start(self._claim(running, settling), "claim")
                stopping = background.start(self._asked_to_stop(), "stop")
                await self._first_end(stopping, claiming, settling.start())
                patience = self._drain_timeout
            finally:
                self._stopping.set()
                await to_its_end(self._leave(background, claiming, patience), "leave")

    async def _first_end(self, stopping: asyncio.Task[None], *work: asyncio.Task[None]) -> None:
        """Return when the end is asked for; raise what has ended one of the others, which go on until then."""
        await asyncio.wait([stopping, *work], return_when=asyncio.FIRST_COMPLETED)
        for task in work:
            if task.done():
                if not task.cancelled():
                    task.result()
                if not self._stopping.is_set():
                    raise ConquietError(f"{task.get_name()} of queue {self._dispatch.queue!r} has ended by itself")

    async def _leave(self, background: Background, claiming: asyncio.Task[None] | None, patience: float) -> None:
        running, settling = self._running, self._settling
        assert running is not None
        assert settling is not None
        until = time.monotonic() + patience
        try:
            self._give_back(running.withdraw(), settling)
            # What a claim under way leases is given back too: its answer is waited for, but not for ever.
            if claiming is not None:
                await asyncio.wait([claiming], timeout=max(patience, _MOMENT))
            await background.aclose()
            self._give_back(running.withdraw(), settling)
            await running.drain(max(0.0, until - time.monotonic()))
            with suppress(TimeoutError):
                async with asyncio.timeout(max(until - time.monotonic(), _MOMENT)):
                    await settling.flush()
        finally:
            # Side by side: a store that does not answer may take its time with each.
            await asyncio.gather(running.aclose(), settling.aclose(), self._holdings.aclose())
            self._running = self._settling = self._loop = None
            self._stopping = asyncio.Event()

    def _give_back(self, jobs: Iterable[Job], settling: Settling) -> None:
        for job in jobs:
            settling.put(Settlement.of(job, "release"))

    # --- claiming ---------------------------------------------------------------------------------------------

    async def _claim(self, running: Running, settling: Settling) -> None:
        while not self._stopping.is_set():
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
            if self._stopping.is_set():  # they are not begun, and given back
                running.put(claimed.jobs)
                return
            running.begin(claimed.jobs)
            if len(claimed.jobs) < free:
                await self._until(self._news(claimed))
            else:
                await asyncio.sleep(0)

    def _free(self, running: Running, settling: Settling) -> int:
        """For how many more jobs there is a place.

        Outcomes on their way take no place, up to a few for each, lest handlers wait for the store. But what cannot be
        written keeps its place: else a store that takes no outcomes would have all jobs run for nothing.
        """
        unwritten, most = len(settling), 0 if settling.failures else _AHEAD * self._concurrency
        return running.free - max(0, unwritten - most)

    async def _claim_once(self, count: int, settling: Settling) -> Claimed | None:
        try:
            await self._holdings.catch_up()
            asked = self._dispatch.store.clock.monotonic()
            claimed = await self._dispatch.claim(count, self._name)
            try:
                await self._holdings.add(claimed.jobs, asked)
            except BaseException:
                self._give_back(claimed.jobs, settling)
                raise
        except QueueError as error:
            _log.warning("queue %r: no jobs could be claimed: %s", self._dispatch.queue, error)
            await self._dispatch.store.clock.wait(self._stopping, AFTER_ERROR.delay(self._failures))
            self._failures += 1
            return None
        self._failures = 0
        return claimed

    async def _news(self, claimed: Claimed) -> None:
        try:
            await self._dispatch.news(claimed, _LOOK)
        except QueueError as error:
            _log.warning("queue %r: cannot wait for jobs: %s", self._dispatch.queue, error)

    async def _until(self, event: Any) -> None:
        """Wait for ``event``, but not longer than until the end is asked for."""
        background = Background()
        waiting = background.start(event, "wait")
        stopping = background.start(self._asked_to_stop(), "wait")
        try:
            await asyncio.wait([waiting, stopping], return_when=asyncio.FIRST_COMPLETED)
        finally:
            await background.aclose()

    async def _asked_to_stop(self) -> None:
        await self._stopping.wait()

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
            settlement = Settlement(job.id, job.lease_token, "ack", result=kept, claim_id=job.claim_id)
        else:
            settlement = self._judged(job, error)
        self._seconds[job.id, job.lease_token] = seconds
        assert self._settling is not None
        self._settling.put(settlement)

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
        except PayloadError as error:
            if inspect.isgenerator(result) or inspect.isasyncgen(result):
                return None, ConfigError(f"the handler gave a generator, of which nothing has run: {result!r}")
            # The work is done, and must not be done again for the sake of a value that nobody can read.
            _log.error("queue %r, job %r: its result is not kept: %s", job.queue, job.id, error)
            return None, None

    def _written(self, outcomes: Sequence[tuple[Settlement, bool]]) -> None:
        took: defaultdict[JobResult, list[float]] = defaultdict(list)
        for settlement, applied in outcomes:
            lease = (settlement.job_id, settlement.token)
            self._holdings.drop(*lease)
            if not applied:
                _log.warning("queue %r, job %r: lost before its outcome was kept", self._dispatch.queue, lease[0])
            if (seconds := self._seconds.pop(lease, None)) is not None:
                took[_RESULTS[settlement.kind] if applied else "lost"].append(seconds)
        if self._running is not None:
            self._running.freed.set()
        for result, seconds_each in took.items():
            self._dispatch.metrics.ran(result, seconds_each)

    def _lost(self, job_id: str, token: int) -> None:
        seconds = None if self._running is None else self._running.lose(job_id, token)
        if seconds is not None:
            self._dispatch.metrics.stale("renew", 1)
            self._dispatch.metrics.ran("lost", [seconds])
            _log.warning("queue %r, job %r: lost, its handler is cancelled", self._dispatch.queue, job_id)
