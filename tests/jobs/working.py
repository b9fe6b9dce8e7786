"""What the tests of workers share: handlers that wait to be let go, and what is counted of a queue."""

from __future__ import annotations

import asyncio
import secrets
import threading
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from conquiet import Backoff, Job, JobQueue, JobState, JobStore, JobWorker, MemoryStore, QueueError, RetryPolicy
from conquiet.jobs.store import Claimed, Wanted
from tests.contracts.jobs_flavours import serving
from tests.rigs.scraping import samples
from tests.rigs.waiting import LONG, eventually

__all__ = [
    "AT_ONCE",
    "Deaf",
    "Gate",
    "Holding",
    "Late",
    "Silent",
    "Watched",
    "counted",
    "outlived",
    "queue_in",
    "ran",
    "settled",
    "working",
]

AT_ONCE = RetryPolicy(max_retries=3, backoff=Backoff(base=0, cap=0, kind="fixed"))


def queue_in(store: JobStore | None = None, **options: Any) -> JobQueue:
    """A queue that no other test has; retries come at once."""
    name = options.pop("name", None) or f"w-{secrets.token_hex(6)}"
    return JobQueue(store or MemoryStore(), name, **{"lease_ttl": 30.0, "retry": AT_ONCE, **options})


class Gate:
    """An async handler whose calls wait until they are let go; knows how many there were, and are."""

    def __init__(self) -> None:
        self.began: list[Job] = []
        self.cancelled: list[Job] = []
        self.done: list[Job] = []
        self.inside = self.most = 0
        self._open = asyncio.Event()

    async def __call__(self, job: Job) -> str:
        self.began.append(job)
        self.inside += 1
        self.most = max(self.most, self.inside)
        try:
            await self._open.wait()
        except asyncio.CancelledError:
            self.cancelled.append(job)
            raise
        finally:
            self.inside -= 1
        self.done.append(job)
        return "done"

    def open(self) -> None:
        self._open.set()

    async def entered(self, count: int) -> None:
        """Return once so many calls have begun in all."""
        await eventually(lambda: len(self.began) >= count, f"{count} calls")
        assert len(self.began) == count


class Holding:
    """As ``Gate``, as a plain function that holds its thread."""

    def __init__(self) -> None:
        self.began: list[Job] = []
        self.threads: set[str] = set()
        self.done: list[Job] = []
        self._open = threading.Event()

    def __call__(self, job: Job) -> str:
        self.began.append(job)
        self.threads.add(threading.current_thread().name)
        assert self._open.wait(LONG)
        self.done.append(job)
        return "done"

    def open(self) -> None:
        self._open.set()

    async def entered(self, count: int) -> None:
        await eventually(lambda: len(self.began) >= count, f"{count} calls")


async def settled(queue: JobQueue, **expected: int) -> None:
    """Return once exactly so many jobs are in those states, and none in others."""
    wanted = {state: expected.get(state.value, 0) for state in JobState}

    async def is_so() -> bool:
        return await queue.counts() == wanted

    try:
        await eventually(is_so, f"{expected}")
    except AssertionError as error:
        raise AssertionError(f"{error}; instead {await queue.counts()}") from None


def counted(queue: JobQueue, what: str, **labels: str) -> float:
    """A counter of the queue."""
    wanted = {"queue": queue.name, **labels}
    return next((value for found, value in _shown(what) if found == wanted), 0.0)


def ran(queue: JobQueue) -> dict[str, float]:
    """How many handler calls had which result, those with none left out."""
    found = ((labels, value) for labels, value in _shown("run_seconds_count") if labels["queue"] == queue.name)
    return {labels["result"]: value for labels, value in found if value}


def _shown(what: str) -> Iterator[tuple[dict[str, str], float]]:
    return ((sample.labels, sample.value) for sample in samples(f"conquiet_jobs_{what}"))


class Watched(MemoryStore):
    """A store that notes how many jobs each claim asks for."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.asked: list[int] = []
        self.got = 0

    async def claim(self, queue: str, wanted: Wanted) -> Claimed:
        self.asked.append(wanted.count)
        claimed = await super().claim(queue, wanted)
        self.got += len(claimed.jobs)
        return claimed


class Late(MemoryStore):
    """A store whose answer to a claim comes when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.claimed = asyncio.Event()
        self.answer = asyncio.Event()

    async def claim(self, queue: str, wanted: Wanted) -> Claimed:
        claimed = await super().claim(queue, wanted)
        if claimed.jobs:
            self.claimed.set()
            await self.answer.wait()
        return claimed


class Silent(MemoryStore):
    """Never answers a claim, as a server that is there but stands still."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = asyncio.Event()

    async def claim(self, queue: str, wanted: Wanted) -> Claimed:
        self.asked.set()
        await asyncio.Event().wait()
        raise AssertionError


class Deaf(MemoryStore):
    """Answers no call for jobs, and does not let go of one that is cancelled either, until it may."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = asyncio.Event()
        self.may_go = asyncio.Event()
        self.gone = 0

    async def claim(self, queue: str, wanted: Wanted) -> Claimed:
        self.asked.set()
        while not self.may_go.is_set():
            with suppress(asyncio.CancelledError):
                await self.may_go.wait()
        self.gone += 1
        raise QueueError("it was cancelled long ago")


async def outlived(queue: JobQueue, id: str) -> None:
    """Return once somebody has held a job for longer than one lease lasts; meanwhile nobody else gets it."""
    first = await queue.get(id)
    assert first is not None
    assert first.lease_ms is not None
    until = first.lease_ms + queue.lease_ttl * 1000

    async def is_leased_on() -> bool:
        assert await queue.claim(worker="thief") == []
        job = await queue.get(id)
        return job is not None and job.lease_ms is not None and job.lease_ms > until

    await eventually(is_leased_on, "the lease is renewed again and again")


def working(queue: JobQueue, handler: Any, **options: Any) -> Any:
    """A worker that runs until the block has ended."""
    return serving(JobWorker(queue, handler, **{"handle_signals": False, **options}))
