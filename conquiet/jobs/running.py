"""Running handlers: as many at once as allowed, each within its time, and none for a job that was lost."""

from __future__ import annotations

import asyncio
import inspect
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeAlias, cast

from conquiet.errors import Retry
from conquiet.jobs.job import Job
from conquiet.kit.handlers import checked, in_thread, is_async
from conquiet.kit.loopthread import PRIVATE_LOOP, Threads
from conquiet.kit.service import Background

__all__ = ["Handler", "Running"]

Handler: TypeAlias = Callable[[Job], Awaitable[Any]] | Callable[[Job], Any]
_log = logging.getLogger("conquiet.jobs")
_GRACE: Final = 1.0
"""Seconds that a handler has after it was cancelled, before its job goes on without it."""
_AT_A_STRETCH: Final = 100
"""How many jobs a handler that never waits may handle before others get a turn on the loop."""


class Finished(Protocol):
    """Told how each try went; ``result`` counts if ``error`` is ``None``."""

    def __call__(self, job: Job, result: Any, error: BaseException | None, seconds: float) -> None: ...


@dataclass(slots=True, eq=False)
class _Run:
    """One try of a job."""

    job: Job
    task: asyncio.Task[Any]
    started: float
    verdict: BaseException | None = None
    """Why it was cancelled, which is then how it went."""
    is_over: bool = False
    """Whether its outcome is decided, whatever the handler still does."""
    timer: asyncio.TimerHandle | None = None
    thread: asyncio.Future[Any] | None = None


class Running:
    """Runs a handler on jobs, up to ``concurrency`` at a time.

    A few long-lived runners take one job after the other: while the handler never really waits, one of them does
    everything; as soon as it waits, more start. A handler that takes longer than ``timeout`` is cancelled, and if that
    does not end it, its job goes on without it; its place is taken until it ends, for it still uses it.
    """

    def __init__(
        self,
        handler: Handler,
        concurrency: int,
        timeout: float | None,
        finished: Finished,
        is_held: Callable[[Job], bool],
    ) -> None:
        checked("handler", handler, "job")
        self._concurrency = concurrency
        self._timeout = timeout
        self._finished = finished
        self._is_held = is_held
        self._threads: Threads | None = None
        self._call = self._awaitable(handler)
        self._ready: deque[Job] = deque()
        self._runs: dict[tuple[str, int], _Run] = {}
        self._runners = 0
        self._is_due = self._closing = False
        self._background = Background()
        self.freed = asyncio.Event()
        """Set whenever a place becomes free."""

    @property
    def free(self) -> int:
        """How many more jobs may be begun."""
        return self._concurrency - len(self._runs) - len(self._ready)

    @property
    def busy(self) -> int:
        """How many handlers are at work."""
        return len(self._runs)

    @property
    def stuck(self) -> int:
        """How many of them are at work on a job that is over, and keep a place all the same."""
        return sum(run.is_over for run in list(self._runs.values()))  # others' threads may ask

    def put(self, jobs: Iterable[Job]) -> None:
        """Have these ready, for :meth:`begin` or :meth:`withdraw`."""
        self._ready.extend(jobs)

    def begin(self, jobs: Iterable[Job]) -> None:
        """Run the handler on these as soon as may be; not on those that are lost by then."""
        self.put(jobs)
        self._wake()

    def withdraw(self) -> list[Job]:
        """The jobs that were not begun; they will not be."""
        left = list(self._ready)
        self._ready.clear()
        return left

    def lose(self, job_id: str, token: int) -> float | None:
        """Cancel the handler of a job that is not ours any more: how it ends does not count.

        The seconds for which it had run; ``None`` if it was not at work.
        """
        run = self._runs.get((job_id, token))
        if run is None or run.is_over:
            return None
        run.is_over = True
        run.task.cancel()
        return time.perf_counter() - run.started

    async def drain(self, seconds: float) -> None:
        """Return once no handler is at work; those that still are after ``seconds`` are cancelled."""
        if await self._ended(seconds):
            return
        for run in list(self._runs.values()):
            self._cancel(run, Retry("the worker was stopped", delay=0))
        if not await self._ended(_GRACE):
            for run in list(self._runs.values()):
                self._give_up(run)

    async def aclose(self) -> None:
        """Cancel what still runs; a thread cannot be cancelled, and is left behind."""
        self._closing = True
        await self._background.aclose()
        if self._threads is not None:
            self._threads.close()

    async def _ended(self, seconds: float) -> bool:
        try:
            async with asyncio.timeout(seconds):
                while any(not run.is_over for run in self._runs.values()):
                    self.freed.clear()
                    await self.freed.wait()
        except TimeoutError:
            return False
        return True

    # --- runners ----------------------------------------------------------------------------------------------

    def _wake(self) -> None:
        if self._ready and not self._is_due and self._runners < self._concurrency:
            self._is_due = True
            if not self._runners:
                self._start()
            asyncio.get_running_loop().call_soon(self._add_runners)

    def _add_runners(self) -> None:
        # By now the first runner has had its turn: what is still ready waits because the handler does.
        self._is_due = False
        for _ in range(min(len(self._ready), self._concurrency - self._runners)):
            self._start()

    def _start(self) -> None:
        self._runners += 1
        self._background.start(self._work(), "job")

    async def _work(self) -> None:
        turns, task = 0, asyncio.current_task()
        assert task is not None
        try:
            while self._ready:
                job = self._ready.popleft()
                if not self._is_held(job):
                    self.freed.set()
                    continue
                await self._run(job, task)
                turns += 1
                if turns % _AT_A_STRETCH == 0:
                    await asyncio.sleep(0)
        finally:
            self._runners -= 1
            self._wake()

    async def _run(self, job: Job, task: asyncio.Task[Any]) -> None:
        run = _Run(job, task, time.perf_counter())
        key = (job.id, job.lease_token)
        self._runs[key] = run
        if self._timeout is not None:
            run.timer = asyncio.get_running_loop().call_later(self._timeout, self._overtime, run)
        try:
            result, error = await self._outcome(run)
            self._report(run, result, run.verdict or error)
            if run.thread is not None and not run.thread.done():
                await asyncio.wait([run.thread])
        finally:
            if run.timer is not None:
                run.timer.cancel()
            del self._runs[key]
            self.freed.set()

    async def _outcome(self, run: _Run) -> tuple[Any, BaseException | None]:
        try:
            return await self._call(run), None
        except (Exception, asyncio.CancelledError) as error:
            if isinstance(error, asyncio.CancelledError):
                if self._closing or PRIVATE_LOOP.ended:
                    raise
                while run.task.cancelling():
                    run.task.uncancel()
            return None, error

    def _report(self, run: _Run, result: Any, error: BaseException | None) -> None:
        if not run.is_over:
            run.is_over = True
            self._finished(run.job, result, error, time.perf_counter() - run.started)

    # --- ends that are not the handler's --------------------------------------------------------------------------

    def _overtime(self, run: _Run) -> None:
        self._cancel(run, TimeoutError(f"the handler took longer than {self._timeout:g} seconds"))
        run.timer = asyncio.get_running_loop().call_later(_GRACE, self._give_up, run)

    def _cancel(self, run: _Run, verdict: BaseException) -> None:
        if not run.is_over and run.verdict is None:
            run.verdict = verdict
            run.task.cancel()

    def _give_up(self, run: _Run) -> None:
        if not run.is_over:
            _log.error("job %r of queue %r: its handler does not end", run.job.id, run.job.queue)
            self._report(run, None, run.verdict)
            self.freed.set()

    # --- calling ------------------------------------------------------------------------------------------------

    def _awaitable(self, handler: Handler) -> Callable[[_Run], Awaitable[Any]]:
        if is_async(handler):
            return lambda run: cast("Callable[[Job], Awaitable[Any]]", handler)(run.job)
        threads = self._threads = Threads(self._concurrency, "conquiet-job")

        async def handle(run: _Run) -> Any:
            run.thread = in_thread(threads, handler, run.job)
            await asyncio.wait([run.thread])
            found = run.thread.result()
            # A callable that gives an awaitable was async in disguise (a lambda, a partial).
            return await found if inspect.isawaitable(found) else found

        return handle
