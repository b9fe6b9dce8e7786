"""Jobs in both their forms and on every store, seen through one awaitable shape, so that a suite is written once.

The core has that shape by itself. The sync facade gets it here: what the core awaits runs on a thread, the rest as it
is. Handlers are plain functions, which both take.
"""

from __future__ import annotations

import asyncio
import inspect
import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias, cast

import pytest

import conquiet
from conquiet import Backoff, Job, JobQueue, JobState, JobStore, JobWorker, RetryPolicy, sync
from conquiet.kit.clock import ManualClock
from tests.rigs.waiting import eventually

__all__ = [
    "CHECKED_FIRST",
    "DELAY",
    "FLAVOURS",
    "TTL",
    "Backend",
    "Flavour",
    "Recorder",
    "Site",
    "every",
    "ids_of",
    "only",
    "opened",
    "serving",
    "tally",
]

TTL: Final = 30.0
"""The lease of the suites' queues, in seconds of their own time."""
DELAY: Final = 10.0
"""What their retries wait."""
_RETRY: Final = RetryPolicy(max_retries=3, backoff=Backoff(base=DELAY, cap=DELAY, kind="fixed"))

CHECKED_FIRST: Final = pytest.mark.parametrize("backend", ["memory"], indirect=True, scope="session")
"""Of arguments that a queue checks before it asks any store: one store is enough."""

Flavour: TypeAlias = Literal["core", "sync"]
FLAVOURS: Final[tuple[Flavour, ...]] = ("core", "sync")


@dataclass(frozen=True)
class Backend:
    """A store that can be made again and again: its class, by name, and what it is made with."""

    name: str
    store: str
    where: tuple[str, ...] = ()
    options: tuple[tuple[str, Any], ...] = ()

    def make(self, flavour: Flavour, clock: ManualClock) -> Any:
        room = conquiet if flavour == "core" else sync
        return getattr(room, self.store)(*self.where, **dict(self.options), clock=clock)


class Site:
    """A store, and what works on it; ``clock`` moves its time."""

    def __init__(self, flavour: Flavour, store: JobStore, clock: ManualClock, threads: ThreadPoolExecutor) -> None:
        self.flavour = flavour
        self.store = store
        self.clock = clock
        self._threads = threads

    def queue(self, name: str | None = None, **options: Any) -> JobQueue:
        """A queue that no other test has, unless it is named."""
        given = {"lease_ttl": TTL, "retry": _RETRY, **options}
        return self.plain_queue(name or f"q-{secrets.token_hex(6)}", **given)

    def plain_queue(self, name: Any, **options: Any) -> JobQueue:
        """A queue with no settings but these."""
        return cast("JobQueue", self._make("JobQueue", self.store, name, **options))

    def worker(self, queue: JobQueue, handler: Callable[[Job], Any], **options: Any) -> JobWorker:
        return cast("JobWorker", self._make("JobWorker", queue, handler, **{"handle_signals": False, **options}))

    def _make(self, kind: str, first: Any, *args: Any, **options: Any) -> Any:
        if self.flavour == "core":
            return getattr(conquiet, kind)(first, *args, **options)
        facade = first.facade if isinstance(first, _Awaited) else first
        return _Awaited(getattr(sync, kind)(facade, *args, **options), getattr(conquiet, kind), self._threads)


@asynccontextmanager
async def opened(backend: Backend, flavour: Flavour, clock: ManualClock) -> AsyncIterator[Site]:
    """A site of that flavour on that store."""
    store = backend.make(flavour, clock)
    with ThreadPoolExecutor(16) as threads:
        if flavour == "sync":
            store = _Awaited(store, getattr(conquiet, backend.store), threads)
        async with store:
            yield Site(flavour, store, clock, threads)


class _Awaited:
    """A facade that is awaited where its core is."""

    def __init__(self, facade: Any, core: type, threads: ThreadPoolExecutor) -> None:
        self.facade = facade
        self._core = core
        self._threads = threads

    def __getattr__(self, name: str) -> Any:
        member = getattr(self.facade, {"aclose": "close"}.get(name, name))
        if inspect.iscoroutinefunction(inspect.getattr_static(self._core, name, None)):
            return lambda *args, **kwargs: self._hop(member, *args, **kwargs)
        return member

    async def _hop(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._threads, lambda: function(*args, **kwargs))

    async def __aenter__(self) -> _Awaited:
        await self._hop(self.facade.__enter__)
        return self

    async def __aexit__(self, *error: Any) -> None:
        await self._hop(self.facade.__exit__, *error)


# --- what the suites share ------------------------------------------------------------------------------------------


async def only(queue: JobQueue, **options: Any) -> Job:
    """The job that a claim of one gets."""
    [job] = await queue.claim(**options)
    return job


async def every(queue: JobQueue, **options: Any) -> list[Job]:
    """All that can be claimed, however many: one claim gives no more than a thousand."""
    claimed: list[Job] = []
    while jobs := await queue.claim(1000, **options):
        claimed += jobs
    return claimed


def ids_of(claimed: Sequence[Job]) -> list[str]:
    return [job.id for job in claimed]


async def tally(queue: JobQueue) -> tuple[int, int, int, int]:
    """How many jobs are ready, in flight, succeeded and failed."""
    counts = await queue.counts()
    return (
        counts[JobState.READY],
        counts[JobState.IN_FLIGHT],
        counts[JobState.SUCCEEDED],
        counts[JobState.FAILED],
    )


class Recorder:
    """A plain handler that remembers what it got, and then does as ``act`` says."""

    def __init__(self, act: Callable[[Job], Any] | None = None) -> None:
        self.jobs: list[Job] = []
        self._act = act

    def __call__(self, job: Job) -> Any:
        self.jobs.append(job)
        return None if self._act is None else self._act(job)

    @property
    def payloads(self) -> list[Any]:
        return [job.payload for job in self.jobs]

    async def saw(self, count: int) -> None:
        """Return once it was called so many times, and no more often."""
        await eventually(lambda: len(self.jobs) >= count, f"{count} calls of the handler")
        assert len(self.jobs) == count, self.jobs


@asynccontextmanager
async def serving(worker: JobWorker) -> AsyncIterator[JobWorker]:
    """A worker that runs until the block has ended."""
    running = asyncio.ensure_future(worker.run())
    try:
        yield worker
    finally:
        worker.stop()
        await running
