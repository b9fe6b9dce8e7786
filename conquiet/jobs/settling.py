"""What became of jobs, on its way to the store: at once, and together with whatever is ready at the same moment."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Final, Protocol

from conquiet.errors import ConfigError, QueueError
from conquiet.jobs.dispatch import Dispatch
from conquiet.jobs.job import Job, JobState, Settlement
from conquiet.kit.policy import Backoff
from conquiet.kit.service import Background

__all__ = ["AFTER_ERROR", "Settling"]

_log = logging.getLogger("conquiet.jobs")
_MOST: Final = 500
AFTER_ERROR: Final = Backoff(base=0.05, cap=2.0)
"""How long to wait before a store that failed is asked again."""


class Written(Protocol):
    """Told of settlements that the store has answered for, and whether each was applied."""

    def __call__(self, outcomes: Sequence[tuple[Settlement, bool]]) -> None: ...


class Settling:
    """Writes settlements in the order in which they come; what comes while a write is under way goes with the next.

    A store that fails is asked again until it answers. Since the first write may have been done, the jobs are looked
    at before the second: what has left the flight under our token was written.
    """

    def __init__(self, dispatch: Dispatch, written: Written) -> None:
        self._dispatch = dispatch
        self._written = written
        self._waiting: list[Settlement] = []
        self._news = asyncio.Event()
        self._empty = asyncio.Event()
        self._empty.set()
        self._background = Background()

    def start(self) -> None:
        """Begin to write."""
        self._background.start(self._run(), "settling")

    def put(self, settlement: Settlement) -> None:
        """Write this soon."""
        self._waiting.append(settlement)
        self._empty.clear()
        self._news.set()

    async def flush(self) -> None:
        """Return once all is written."""
        await self._empty.wait()

    async def aclose(self) -> None:
        """Stop; what is not written yet never will be, and its lease runs out."""
        if self._waiting:
            _log.warning("queue %r: %d results could not be written", self._dispatch.queue, len(self._waiting))
        await self._background.aclose()

    async def _run(self) -> None:
        while True:
            await self._news.wait()
            self._news.clear()
            while self._waiting:
                await self._write(self._waiting[:_MOST])
            self._empty.set()

    async def _write(self, batch: Sequence[Settlement]) -> None:
        left, failures = list(batch), 0
        done: list[bool] = []
        while True:
            try:
                if failures:
                    left = await self._unwritten(left)
                done = await self._dispatch.settle(left) if left else []
                break
            except QueueError as error:
                _log.warning("queue %r: %d results wait to be written: %s", self._dispatch.queue, len(left), error)
                await self._dispatch.store.clock.sleep(AFTER_ERROR.delay(failures))
                failures += 1
            except ConfigError as error:
                done = await self._write_each(left, error)
                break
        del self._waiting[: len(batch)]
        self._written(list(zip(left, done, strict=True)))

    async def _write_each(self, batch: Sequence[Settlement], error: ConfigError) -> list[bool]:
        """The store refuses something of these for ever: only that is given up, and its job's lease runs out."""
        if len(batch) == 1:
            _log.error("queue %r, job %r: its outcome cannot be kept: %s", self._dispatch.queue, batch[0].job_id, error)
            return [False]
        done: list[bool] = []
        for settlement in batch:
            try:
                done += await self._dispatch.settle([settlement])
            except ConfigError as refused:
                done += await self._write_each([settlement], refused)
        return done

    async def _unwritten(self, batch: Sequence[Settlement]) -> list[Settlement]:
        jobs = await self._dispatch.store.find(self._dispatch.queue, [one.job_id for one in batch])
        written = [_shows(job, settlement) for settlement, job in zip(batch, jobs, strict=True)]
        self._written([(settlement, True) for settlement, done in zip(batch, written, strict=True) if done])
        return [settlement for settlement, done in zip(batch, written, strict=True) if not done]


def _shows(job: Job | None, settlement: Settlement) -> bool:
    """Whether a job has become what ``settlement`` says, and not by a lease that ran out."""
    if job is None or (job.lease_token, job.claim_id) != (settlement.token, settlement.claim_id):
        return False
    if settlement.kind == "ack":
        return job.state is JobState.SUCCEEDED
    if settlement.kind == "release":
        return job.state is JobState.READY and job.claimed_ms is None
    state = JobState.FAILED if settlement.kind == "fail" else JobState.READY
    return job.state is state and job.last_error == settlement.error
