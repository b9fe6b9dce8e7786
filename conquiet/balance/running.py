"""A handler on every stream that is owned, for as long as it is."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import Any, Final, TypeAlias

from conquiet.balance.lease import StreamLease
from conquiet.kit.clock import Clock
from conquiet.kit.policy import Backoff
from conquiet.kit.retrying import Lines, Retrying
from conquiet.kit.runners import Handler, Runners
from conquiet.kit.service import Background

__all__ = ["Runner", "StreamHandler"]

StreamHandler: TypeAlias = Callable[[str, StreamLease], Awaitable[Any]] | Callable[[str, StreamLease], Any]
_log = logging.getLogger("conquiet.balance")
_AGAIN: Final = Backoff(base=0.5, cap=30.0)
_GRACE: Final = 2.0
"""Seconds that a handler has to end when its stream is given to others."""


class _Stopped(Exception):
    """The loop ends, and the calls with it."""


class Runner:
    """One call of the handler a stream, also if the stream is lost and given to this consumer anew.

    When it returns, the stream is finished; when it raises, it is called again after a while, and the stream stays
    owned meanwhile; when the stream is lost, it is cancelled, and a thread finds ``lease.owned`` false.
    """

    def __init__(
        self,
        handler: StreamHandler,
        limit: int,
        grace: float,
        clock: Clock,
        lines: Lines,
        finish: Callable[[StreamLease], Awaitable[None]],
        late: Callable[[StreamLease], None],
    ) -> None:
        self._grace = grace
        self._late = late
        self._lines = lines
        self._clock = clock
        self._finish = finish
        self._failures: dict[StreamLease, int] = {}
        self._background = Background()
        self._between: dict[StreamLease, asyncio.Task[None]] = {}
        """What is done for a stream while no handler is at work on it."""
        self._runners = Runners(
            Handler[StreamLease](handler, "stream", "lease", spread=lambda lease: (lease.stream, lease)),
            key=lambda lease: lease,
            limit=sys.maxsize,  # what is owned is limited elsewhere
            threads=limit,
            finished=self._finished,
            withdrawn=self._begin,
            is_held=self._is_held,
            stopped=_Stopped,
            name="stream",
        )

    def start(self, lease: StreamLease) -> None:
        """Begin with a stream, once a call of before, whose lease is over, has ended."""
        before = [other for other in self._runners.items if other.stream == lease.stream]
        if before:
            self._do_between(lease, self._begin_after(before, lease))
        else:
            self._begin(lease)

    def cancel(self, stream: str, epoch: int) -> None:
        """Stop with a stream."""
        self._cancel([lease for lease in self._known() if (lease.stream, lease.epoch) == (stream, epoch)])

    async def stop(self, lease: StreamLease) -> None:
        """Stop with a stream, and return when its handler has ended, or after a moment."""
        await self._stop([lease], _GRACE)

    async def aclose(self) -> None:
        """Stop with all; handlers have so many seconds to end as there were given."""
        await self._stop(self._known(), self._grace)
        await self._runners.aclose()

    def _is_held(self, lease: StreamLease) -> bool:
        """Whether to begin with a stream. One that is late by now is given up: renewed later, it would never begin."""
        if not lease.owned:
            self._late(lease)
        return lease.owned

    def _known(self) -> list[StreamLease]:
        return [*self._runners.items, *self._between]

    def _cancel(self, leases: Iterable[StreamLease]) -> None:
        for lease in leases:
            self._failures.pop(lease, None)
            self._runners.lose(lease)
            if (task := self._between.get(lease)) is not None:
                task.cancel()

    async def _stop(self, leases: list[StreamLease], grace: float) -> None:
        self._cancel(leases)
        between = [self._between[lease] for lease in leases if lease in self._between]
        ending = self._background.start(self._runners.ended(leases), "end")
        await asyncio.wait([ending, *between], timeout=grace)
        ending.cancel()

    # --- calls, and what comes between them ---------------------------------------------------------------------

    def _begin(self, lease: StreamLease) -> None:
        lease._rewind()  # what a call before has read, and failed with, is not passed over
        self._runners.begin([lease])

    def _finished(self, lease: StreamLease, result: Any, error: BaseException | None, seconds: float) -> None:
        if error is None:
            self._do_between(lease, self._finish_it(lease))
        elif lease.owned and not isinstance(error, _Stopped):  # else it was lost, which is told elsewhere
            _log.error("the handler of stream %r failed and is called again", lease.stream, exc_info=error)
            self._do_between(lease, self._begin_again(lease))

    def _do_between(self, lease: StreamLease, work: Coroutine[Any, Any, None]) -> None:
        task = self._between[lease] = self._background.start(work, "stream")
        task.add_done_callback(lambda _: self._is_between_no_more(lease, task))

    def _is_between_no_more(self, lease: StreamLease, task: asyncio.Task[None]) -> None:
        if self._between.get(lease) is task:  # else the next call has begun and ended already
            del self._between[lease]

    async def _begin_after(self, before: Iterable[StreamLease], lease: StreamLease) -> None:
        await self._runners.ended(before)
        self._begin(lease)

    async def _begin_again(self, lease: StreamLease) -> None:
        failures = self._failures.get(lease, 0)
        self._failures[lease] = failures + 1
        await self._clock.sleep(_AGAIN.delay(failures))
        self._begin(lease)

    async def _finish_it(self, lease: StreamLease) -> None:
        self._failures.pop(lease, None)
        retrying = Retrying(self._lines, self._clock, _AGAIN)
        while lease.owned:
            try:
                await self._finish(lease)
                return
            except Exception as error:
                await retrying.failed(f"stream {lease.stream!r} is finished, but Redis cannot be told yet", error)
