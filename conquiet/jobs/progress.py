"""What a handler tells of its work while it runs, and what it can learn of it: whether it works for nothing."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Generator
from typing import TYPE_CHECKING, Any, Final, Protocol
from weakref import ref

from msgspec import Struct

from conquiet.errors import ConfigError, QueueError, StaleLeaseError
from conquiet.kit import rules
from conquiet.kit.loopthread import new_lock
from conquiet.kit.recent import Recent
from conquiet.kit.service import Background

if TYPE_CHECKING:
    from conquiet.jobs.store import JobStore

__all__ = ["DESKS", "Desk", "JobProgress", "Report", "Reports", "Told"]

_log = logging.getLogger("conquiet.jobs")
_PAUSE: Final = 0.5
"""Seconds that lie between two reports of one job, at least."""
_MOST: Final = 10_000
_MOST_MESSAGE: Final = 1000


class Told(Protocol):
    """What is known here of a job, as :class:`Job` has it."""

    @property
    def id(self) -> str:
        """Its ID."""
        ...

    @property
    def queue(self) -> str:
        """The name of its queue."""
        ...

    @property
    def lease_token(self) -> int:
        """The token of its last claim."""
        ...

    @property
    def claim_id(self) -> str:
        """The ID of its last claim."""
        ...

    @property
    def fraction(self) -> float | None:
        """How far it is."""
        ...

    @property
    def message(self) -> str:
        """What was said of that."""
        ...


class Report(Struct, frozen=True, gc=False):
    """How far a job is; it counts only with the token and the ID of its last claim."""

    job_id: str
    token: int
    claim_id: str
    fraction: float
    message: str = ""


class Desk(Protocol):
    """Who holds claimed jobs: a worker, or a queue from which they were claimed by hand."""

    @property
    def reports(self) -> Reports | None:
        """Where it takes reports, while it does."""
        ...

    def has(self, job: Told) -> bool:
        """Whether it has claimed that job."""
        ...

    def is_called_off(self, job: Told) -> bool:
        """Whether nobody waits for what becomes of the handler's work any more."""
        ...


class _Desks:
    """All of this process. There are few: a job looks for its own, so that those which need none pay nothing."""

    def __init__(self) -> None:
        self._lock = new_lock()
        self._known: tuple[ref[Desk], ...] = ()

    def add(self, desk: Desk) -> None:
        """Let jobs find ``desk`` as long as somebody has it."""
        with self._lock:
            self._known = (*(one for one in self._known if one() not in (None, desk)), ref(desk))

    def of(self, job: Told) -> Desk | None:
        """Who has claimed ``job``; from any thread."""
        return next((desk for one in self._known if (desk := one()) is not None and desk.has(job)), None)


DESKS: Final = _Desks()


class JobProgress:
    """How far a job is, as it was told last; called by a handler, it tells so.

    ``await job.progress(0.4, "40 of 100")`` stores it, under the token of the claim: ``StaleLeaseError`` if the job is
    not the caller's any more. Of what is told more often than twice a second, the latest is stored half a second after
    the one before. A plain function calls it without ``await``, from any thread, and it is stored soon.
    """

    __slots__ = ("_job", "fraction", "message")

    def __init__(self, job: Told) -> None:
        self._job = job
        self.fraction = job.fraction
        """From 0 to 1; ``None`` if nothing was told yet."""
        self.message = job.message

    def __call__(self, fraction: float, message: str = "") -> Awaitable[None]:
        """Tell how far it is: a number from 0 to 1, and some words of up to 1,000 characters."""
        if rules.number("fraction", fraction, least=0) > 1:
            raise ConfigError(f"fraction must be at most 1, not {fraction!r}")
        if not isinstance(message, str) or "\0" in message:
            raise ConfigError(f"message must be a string without NUL, not {message!r}")
        desk = DESKS.of(self._job)
        reports = None if desk is None else desk.reports
        if reports is None:
            raise StaleLeaseError(self._job.queue, [self._job.id])
        job, words = self._job, message[:_MOST_MESSAGE].encode(errors="backslashreplace").decode()
        return reports.tell(Report(job.id, job.lease_token, job.claim_id, float(fraction), words))

    def __repr__(self) -> str:
        return f"JobProgress(fraction={self.fraction!r}, message={self.message!r})"


class _Stored:
    """Waits until a report is stored, if it is stored at once and the waiter is on the loop of the store."""

    def __init__(self, stored: asyncio.Future[None] | None) -> None:
        self._stored = stored

    def __await__(self) -> Generator[Any, None, None]:
        if self._stored is None:
            return (yield from asyncio.sleep(0).__await__())
        return (yield from asyncio.shield(self._stored).__await__())


class Reports:
    """Stores what handlers tell, for each job twice a second at most, together with what others tell at that time.

    To be made on the loop of the store. A report that cannot be stored is forgotten: the next one tells more.
    """

    def __init__(self, store: JobStore, queue: str) -> None:
        self._store = store
        self._queue = queue
        self._loop = asyncio.get_running_loop()
        self._waiting: dict[tuple[str, int], Report] = {}
        self._stored: dict[tuple[str, int], asyncio.Future[None]] = {}
        self._told: Recent[tuple[str, int], float] = Recent(_MOST)
        self._background = Background()
        self._writing: asyncio.Task[None] | None = None

    def tell(self, report: Report) -> Awaitable[None]:
        """Take a report, from any thread."""
        if _is_here(self._loop):
            return _Stored(self._take(report))
        try:
            self._loop.call_soon_threadsafe(self._take, report)
        except RuntimeError:  # the loop is closed
            raise StaleLeaseError(self._queue, [report.job_id]) from None
        return _Stored(None)

    @property
    def is_here(self) -> bool:
        """Whether it is of the running loop."""
        return _is_here(self._loop)

    async def aclose(self) -> None:
        """Store nothing more."""
        await self._background.aclose()

    def _take(self, report: Report) -> asyncio.Future[None] | None:
        key = (report.job_id, report.token)
        self._waiting[key] = report
        if self._writing is None or self._writing.done():
            self._writing = self._background.start(self._write(), "progress")
        if self._left(key) > 0:
            return None
        if key not in self._stored:
            self._stored[key] = self._loop.create_future()
            self._stored[key].add_done_callback(lambda done: done.cancelled() or done.exception())
        return self._stored[key]

    def _left(self, key: tuple[str, int]) -> float:
        return self._told.get(key, -math.inf) + _PAUSE - self._store.clock.monotonic()

    async def _write(self) -> None:
        while self._waiting:
            left = min(map(self._left, self._waiting))
            if left > 0:
                await self._store.clock.sleep(left)
                continue
            due = {key: report for key, report in self._waiting.items() if self._left(key) <= 0}
            for key in due:
                del self._waiting[key]
                self._told.keep(key, self._store.clock.monotonic())
            await self._write_some(due)

    async def _write_some(self, due: dict[tuple[str, int], Report]) -> None:
        try:
            done = await self._store.progress(self._queue, list(due.values()))
        except QueueError as error:
            _log.warning("queue %r: how far %d jobs are could not be stored: %s", self._queue, len(due), error)
            failed = error
            self._answer(due, lambda _: failed)
            return
        stale = {key for key, applied in zip(due, done, strict=True) if not applied}
        self._answer(due, lambda key: StaleLeaseError(self._queue, [key[0]]) if key in stale else None)

    def _answer(
        self, due: dict[tuple[str, int], Report], failure: Callable[[tuple[str, int]], Exception | None]
    ) -> None:
        for key in due:
            future, error = self._stored.pop(key, None), failure(key)
            if future is None or future.done():
                continue
            if error is None:
                future.set_result(None)
            else:
                future.set_exception(error)


def _is_here(loop: asyncio.AbstractEventLoop) -> bool:
    try:
        return asyncio.get_running_loop() is loop
    except RuntimeError:
        return False
