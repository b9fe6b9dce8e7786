"""A worker: claims jobs, runs a handler on them, and tells the store what became of them."""

from __future__ import annotations

import asyncio
import inspect
import logging
import random
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any, Final

from conquiet.errors import ConfigError, PayloadError, QueueError
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
from conquiet.kit.service import Background
from conquiet.kit.signals import stop_on_signals
from conquiet.metrics import JobResult

__all__ = ["JobHealth", "JobWorker"]

_log = logging.getLogger("conquiet.jobs")
_LINGER: Final = 0.001
"""How long a few free places wait for more of them, while most are taken."""
_LOOK: Final = 5.0
"""Seconds after which an idle worker looks without being told."""
_PURGE: Final = 60.0
"""About how many seconds lie between two looks for finished jobs that are not to be kept."""
_RESULTS: Final[Mapping[str, JobResult]] = {"ack": "succeeded", "retry": "retried", "fail": "failed"}


@dataclass(frozen=True, slots=True)
class JobHealth:
    """How a worker is doing, for probes. ``healthy`` is false unless it runs and the store answers."""

    healthy: bool
    inflight: int
    """Jobs whose handler is at work."""
    failures: int
    """How often in a row the store could not be asked for jobs."""


class JobWorker:
    """Runs ``handler`` on the jobs of a queue, up to ``concurrency`` at a time.

    What the handler returns is kept as the job's result; if it raises, the job is tried again by the queue's policy
    (``Reject``: not again; ``Retry``: after its delay). No job is claimed before there is a place for it. Its lease is
    renewed, from the claim until the store has the outcome, in a way that a handler which blocks the event loop cannot
    hold up; if the lease is lost all the same, the handler is cancelled. Handlers are ``async`` or plain functions,
    which run in threads. After ``execution_timeout`` seconds a try has failed, and its handler is cancelled.

    While the store cannot be reached, the worker goes on trying. A process that dies loses nothing: its jobs are
    claimed by others when their leases have run out.
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
        runs = self._running is not None and not self._stopping.is_set()
        return JobHealth(runs and not self._failures, self.inflight, self._failures)

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
        If the call is cancelled, there is no such time.
        """
        if self._running is not None:
            raise ConfigError("the worker runs already")
        self._loop = asyncio.get_running_loop()
        if not self._stopping.is_set():
            self._stopping = asyncio.Event()
        self._holdings = Holdings(self._dispatch, self._lost)
        self._running = Running(*self._how, self._holdings.has)
        self._settling = Settling(self._dispatch, self._written)
        background, patience = Background(), 0.0
        with ExitStack() as signals:
            if self._handle_signals:
                signals.enter_context(stop_on_signals(self.stop))
            try:
                await self._holdings.open()
                self._settling.start()
                background.start(self._purge(), "purge")
                claiming = background.start(self._claim(self._running), "claim")
                background.start(self._cut_off(claiming), "stop")
                await asyncio.wait([claiming])
                if not claiming.cancelled():
                    claiming.result()
                patience = self._drain_timeout
            finally:
                await background.aclose()
                await self._end(self._running, patience)

    async def _end(self, running: Running, patience: float) -> None:
        try:
            for job in running.withdraw():
                self._settling.put(Settlement.of(job, "release"))
            await running.drain(patience)
            with suppress(TimeoutError):
                async with asyncio.timeout(max(patience, 1.0)):
                    await self._settling.flush()
        finally:
            # Side by side: a store that does not answer may take its time with each.
            await asyncio.gather(running.aclose(), self._settling.aclose(), self._holdings.aclose())
            self._running = self._loop = None
            self._stopping = asyncio.Event()

    async def _cut_off(self, claiming: asyncio.Task[None]) -> None:
        """A claim under way is waited for, since what it leases is given back; but not for ever."""
        await self._stopping.wait()
        await asyncio.wait([claiming], timeout=max(self._drain_timeout, 1.0))
        claiming.cancel()

    # --- claiming ---------------------------------------------------------------------------------------------

    async def _claim(self, running: Running) -> None:
        while not self._stopping.is_set():
            running.freed.clear()
            if running.free <= 0:
                await self._until(running.freed.wait())
                continue
            if 0 < running.free < self._concurrency // 4:
                await asyncio.sleep(_LINGER)
            free = running.free
            claimed = await self._claim_once(free)
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

    async def _claim_once(self, count: int) -> Claimed | None:
        try:
            await self._holdings.catch_up()
            asked = self._dispatch.store.clock.monotonic()
            claimed = await self._dispatch.claim(count, self._name)
            await self._holdings.add(claimed.jobs, asked)
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
            except QueueError as error:
                _log.warning("queue %r: finished jobs could not be removed: %s", self._dispatch.queue, error)

    # --- what becomes of jobs -----------------------------------------------------------------------------------

    def _finished(self, job: Job, result: Any, error: BaseException | None, seconds: float) -> None:
        kept = None
        if error is None and result is not None:
            kept, error = self._kept(job, result)
        settlement = Settlement.of(job, "ack", result=kept) if error is None else self._judged(job, error)
        self._seconds[job.id, job.lease_token] = seconds
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
        for result, seconds_each in took.items():
            self._dispatch.metrics.ran(result, seconds_each)

    def _lost(self, job_id: str, token: int) -> None:
        seconds = None if self._running is None else self._running.lose(job_id, token)
        if seconds is not None:
            self._dispatch.metrics.stale("renew", 1)
            self._dispatch.metrics.ran("lost", [seconds])
            _log.warning("queue %r, job %r: lost, its handler is cancelled", self._dispatch.queue, job_id)
