"""Jobs that callers add one by one at the same time, added together."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from copy import copy
from typing import Final, TypeAlias

from conquiet.errors import ConfigError, DuplicateJobError, QueueError
from conquiet.jobs.job import NewJob
from conquiet.kit.clock import SYSTEM_CLOCK
from conquiet.kit.policy import Backoff
from conquiet.kit.retrying import patiently
from conquiet.kit.service import Background

__all__ = ["Gathering", "HeldError", "added"]

_MOST: Final = 500
_MOST_BYTES: Final = 1 << 20

_BACKOFF: Final = Backoff(base=0.02, cap=0.5)
"""How long to wait before an ID is tried again that another transaction holds."""


class HeldError(Exception):
    """Others have one of the IDs, in a transaction that has not ended; nothing was added. Never leaves a store."""


async def added(add: Callable[[], Awaitable[None]]) -> None:
    """Add, again and again while others hold an ID. No connection is kept meanwhile: that would keep it from others."""
    await patiently(SYSTEM_CLOCK, add, on=HeldError, backoff=_BACKOFF, retries=None)


_Place: TypeAlias = tuple[NewJob, "asyncio.Future[None]"]


class _Batch:
    """Those who have come in one turn of the loop; the first of them is not among them, since it may stay alone."""

    def __init__(self, first: NewJob) -> None:
        self._loop = asyncio.get_running_loop()
        self._ids = {first.id}
        self._size = len(first.payload)
        self.others: list[_Place] = []

    def takes(self, job: NewJob) -> bool:
        """Whether a job can go with the others. Of two with one ID, the store has to see both."""
        has_room = len(self.others) < _MOST and self._size + len(job.payload) <= _MOST_BYTES
        return has_room and job.id not in self._ids and asyncio.get_running_loop() is self._loop

    def join(self, job: NewJob) -> asyncio.Future[None]:
        self._ids.add(job.id)
        self._size += len(job.payload)
        future = self._loop.create_future()
        self.others.append((job, future))
        return future


class Gathering:
    """Adds what comes in the same turn of the loop to one queue by one call.

    Each caller is told of its own job: an ID that is taken fails the job that has it, and none of the others. A caller
    that comes alone does not wait for others.
    """

    def __init__(self, add: Callable[[str, Sequence[NewJob]], Awaitable[None]]) -> None:
        self._add = add
        self._open: dict[str, _Batch] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._background = Background()

    async def add(self, queue: str, job: NewJob) -> None:
        """Add a job; as the store's own ``add`` of that job alone."""
        batch = self._open.get(queue)
        if batch is not None and batch.takes(job):
            await batch.join(job)
            return
        is_behind = batch is not None
        batch = self._open[queue] = _Batch(job)
        try:
            await asyncio.sleep(0)
        except BaseException:
            self._close(queue, batch)
            self._start(queue, batch.others)
            raise
        self._close(queue, batch)
        if not batch.others and not is_behind:
            await added(lambda: self._add(queue, [job]))
            return
        mine: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._start(queue, [(job, mine), *batch.others])
        await mine

    async def aclose(self) -> None:
        """Give up what is under way: its callers get a ``QueueError``."""
        if self._loop is asyncio.get_running_loop():
            await self._background.aclose()

    def _close(self, queue: str, batch: _Batch) -> None:
        if self._open.get(queue) is batch:
            del self._open[queue]

    def _start(self, queue: str, places: list[_Place]) -> None:
        if not places:
            return
        if self._loop is not asyncio.get_running_loop():
            self._loop, self._background = asyncio.get_running_loop(), Background()
        # A task of its own, so that the cancellation of one caller does not cancel the others.
        sending = self._background.start(self._send(queue, places), "jobs-add")
        # Cancelled before its first step, it never came to tell them.
        sending.add_done_callback(lambda task: _abandon(places) if task.cancelled() else None)

    async def _send(self, queue: str, places: list[_Place]) -> None:
        try:
            await self._add_all(queue, places)
        except BaseException as error:
            for _, future in places:
                if not future.done():
                    future.set_exception(_own(error))
            if not isinstance(error, Exception):
                raise

    async def _add_all(self, queue: str, places: list[_Place]) -> None:
        tries = 0
        while places := [place for place in places if not place[1].done()]:
            try:
                await self._add(queue, [job for job, _ in places])
            except DuplicateJobError as error:
                _refuse(queue, places, error)
            except HeldError:
                if len(places) > 1:  # only the caller of that ID has to wait
                    for place in places:
                        self._start(queue, [place])
                    return
                await asyncio.sleep(_BACKOFF.delay(tries))  # and then looks whether its caller still wants it
                tries += 1
            except ConfigError:
                if len(places) == 1:
                    raise
                for place in places:  # which of them is wrong, each finds out for itself
                    await self._send(queue, [place])
            else:
                _tell(places)


def _abandon(places: Sequence[_Place]) -> None:
    for _, future in places:
        if not future.done():
            future.set_exception(_closed())


def _tell(places: Sequence[_Place]) -> None:
    for _, future in places:
        if not future.done():
            future.set_result(None)


def _refuse(queue: str, places: Sequence[_Place], error: DuplicateJobError) -> None:
    """Nothing was added: those whose ID is taken hear of it, and the others are tried again."""
    taken = set(error.job_ids)
    if not any(job.id in taken for job, _ in places):
        raise error
    for job, future in places:
        if job.id in taken and not future.done():
            future.set_exception(DuplicateJobError(queue, [job.id]))


def _own(error: BaseException) -> BaseException:
    """The same for one of several callers: each adds its own way to it."""
    if not isinstance(error, Exception):
        return _closed()
    mine = copy(error)
    mine.__cause__ = error.__cause__
    return mine


def _closed() -> QueueError:
    return QueueError("the store was closed while a job was being added")
