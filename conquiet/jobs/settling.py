"""Writes the outcomes of jobs to the store: at once, and together with those that are ready at the same moment."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Final, TypeAlias

from conquiet.errors import ConfigError
from conquiet.jobs.dispatch import Dispatch
from conquiet.jobs.job import Job, JobState, Settlement
from conquiet.kit.retrying import Lines, Retrying
from conquiet.kit.service import Background

__all__ = ["Settling", "written_before"]

_log = logging.getLogger("conquiet.jobs")
_MOST: Final = 500
_MOST_BYTES: Final = 1 << 20
_BARE: Final = 50
"""About how many bytes an outcome has that is nothing but that."""
_STEP: Final = 8
"""How many times fewer go together after a failure, and more after a success."""
_STRIKES: Final = 3
"""How often an outcome is refused alone before the question is whether that is its own fault."""
_NOTHING: Final = Settlement("", 0, "release")
"""Of a job that is not there: a store that takes outcomes says so, and changes nothing."""

_Lease: TypeAlias = tuple[str, int]
Written: TypeAlias = Callable[[Sequence[tuple[Settlement, bool]]], None]
"""Told of settlements that the store has answered for, and whether each was applied."""


class Settling:
    """Writes settlements in the order in which they come; what comes while a write is under way goes with the next.

    A store that fails is asked again until it answers. Since the first write may have been done, the jobs are looked
    at before the second: what has left the flight under our token was written. Fewer and fewer go together while that
    fails, so that one that the store cannot keep holds up no others: it is found, goes behind them, is tried alone, and
    in the end given up with a word in the log. Its job's lease then runs out.
    """

    def __init__(self, dispatch: Dispatch, written: Written, lines: Lines) -> None:
        self._dispatch = dispatch
        self._told = written
        self._waiting: deque[Settlement] = deque()
        self._limit = _MOST
        self._doubtful: set[_Lease] = set()
        """Those of a write that has failed, which may have been done."""
        self._struck: Counter[_Lease] = Counter()
        """How often each was refused alone."""
        self._news = asyncio.Event()
        self._empty = asyncio.Event()
        self._empty.set()
        self._background = Background()
        self._writing: asyncio.Task[None] | None = None
        self._retrying = Retrying(lines, dispatch.store.clock)

    @property
    def failures(self) -> int:
        """How many writes have failed since the last one that did not."""
        return self._retrying.failures

    def __len__(self) -> int:
        """How many are not written yet."""
        return len(self._waiting)

    def start(self) -> asyncio.Task[None]:
        """Begin to write; the task ends only by :meth:`aclose`, or by a mistake in here."""
        self._writing = self._background.start(self._run(), "settling")
        return self._writing

    def put(self, settlement: Settlement) -> None:
        """Write this soon."""
        if not self._waiting:  # else it is known that some wait
            self._empty.clear()
            self._news.set()
        self._waiting.append(settlement)

    async def flush(self) -> None:
        """Return once all is written, also if all tasks of the loop were cancelled, as ``asyncio.run`` does."""
        if self._waiting and self._writing is not None and self._writing.done():
            self._news.set()
            self.start()
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
                batch = self._batch()
                try:
                    await self._write(batch)
                except asyncio.CancelledError:
                    self._doubtful.update(map(_lease, batch))
                    raise
                except ConfigError as error:
                    self._refused(batch, error)
                except Exception as error:
                    self._failed(batch)
                    what = f"queue {self._dispatch.queue!r}: {len(self._waiting)} results wait to be written"
                    await self._retrying.failed(what, error)
            self._empty.set()

    def _batch(self) -> list[Settlement]:
        """The next to go together: not too many, nor too much, and none that was refused alone before."""
        first = self._waiting[0]
        batch, size = [first], first.size()
        if self._struck and _lease(first) in self._struck:
            return batch
        for one in islice(self._waiting, 1, self._limit):
            size += one.size() if one.result or one.error else _BARE
            if size > _MOST_BYTES or (self._struck and _lease(one) in self._struck):
                break
            batch.append(one)
        return batch

    async def _write(self, batch: Sequence[Settlement]) -> None:
        written = await self._shown(batch) if self._doubtful else {}
        left = [one for one in batch if _lease(one) not in written] if written else batch
        if not left:
            done: list[bool] = []
        elif len(left) == 1 and _lease(left[0]) in self._doubtful:
            done = await self._write_alone(left[0])
        else:
            done = await self._dispatch.settle(left)
        outcomes = [*((one, True) for one in written.values()), *zip(left, done, strict=True)]
        self._retrying.succeeded()
        self._limit = min(_MOST, self._limit * _STEP)
        self._done(batch, outcomes)

    async def _write_alone(self, settlement: Settlement) -> list[bool]:
        """Write one of which the store has just told that it is not written: if that fails, it may be its own fault."""
        try:
            return await self._dispatch.settle([settlement])
        except Exception as error:
            self._struck[_lease(settlement)] += 1
            if self._struck[_lease(settlement)] < _STRIKES:
                raise
            await self._dispatch.store.settle(self._dispatch.queue, [_NOTHING])  # or none can be written now
            self._say_goodbye(settlement, error)
            return [False]

    async def _shown(self, batch: Sequence[Settlement]) -> dict[_Lease, Settlement]:
        """Which of a batch were written by a write that seemed to fail."""
        doubtful = [one for one in batch if _lease(one) in self._doubtful]
        return {_lease(one): one for one in await written_before(self._dispatch, doubtful)}

    def _failed(self, batch: Sequence[Settlement]) -> None:
        self._limit = max(1, len(batch) // _STEP)
        self._doubtful.update(map(_lease, batch))
        if len(batch) == 1:  # so that it does not stand in the way of others
            self._waiting.rotate(-1)

    def _refused(self, batch: Sequence[Settlement], error: ConfigError) -> None:
        """The store refuses something of these for ever: only that is given up."""
        if len(batch) == 1:
            self._say_goodbye(batch[0], error)
            self._done(batch, [(batch[0], False)])
        else:
            self._limit = max(1, len(batch) // _STEP)

    def _say_goodbye(self, settlement: Settlement, error: Exception) -> None:
        job = (self._dispatch.queue, settlement.job_id)
        _log.error("queue %r, job %r: its outcome cannot be kept, and its lease runs out: %s", *job, error)

    def _done(self, batch: Sequence[Settlement], outcomes: Sequence[tuple[Settlement, bool]]) -> None:
        """Forget a batch, which is what waits in front, and tell what became of it."""
        for _ in batch:
            self._waiting.popleft()
        for lease in map(_lease, batch) if self._doubtful or self._struck else ():
            self._doubtful.discard(lease)
            self._struck.pop(lease, None)
        try:
            self._told(outcomes)
        except Exception:
            _log.exception("queue %r: what became of %d jobs is written but not told", self._dispatch.queue, len(batch))


async def written_before(dispatch: Dispatch, doubtful: Sequence[Settlement]) -> list[Settlement]:
    """Those of settlements, whose write seemed to fail, that the store has: what left the flight under our token."""
    jobs = await dispatch.store.find(dispatch.queue, [one.job_id for one in doubtful])
    return [one for one, job in zip(doubtful, jobs, strict=True) if _shows(job, one)]


def _lease(settlement: Settlement) -> _Lease:
    return settlement.job_id, settlement.token


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
