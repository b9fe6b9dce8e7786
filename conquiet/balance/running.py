"""Running a handler on every stream that is owned, for as long as it is."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, Final, TypeAlias, cast

from conquiet.balance.lease import StreamLease
from conquiet.kit.clock import Clock
from conquiet.kit.handlers import checked, in_thread, is_async
from conquiet.kit.loopthread import Threads
from conquiet.kit.policy import Backoff
from conquiet.kit.service import Background

__all__ = ["Runner", "StreamHandler"]

StreamHandler: TypeAlias = Callable[[str, StreamLease], Awaitable[Any]] | Callable[[str, StreamLease], Any]
_log = logging.getLogger("conquiet.balance")
_AGAIN: Final = Backoff(base=0.5, cap=30.0)
_GRACE: Final = 2.0


class Runner:
    """One call of the handler a stream.

    When it returns, the stream is finished; when it raises, it is called again after a while, and the stream stays
    owned meanwhile; when the stream is lost, it is cancelled, and a thread finds ``lease.owned`` false.
    """

    def __init__(
        self, handler: StreamHandler, most: int, clock: Clock, finish: Callable[[StreamLease], Awaitable[None]]
    ) -> None:
        checked("handler", handler, "stream", "lease")
        self._threads = None if is_async(handler) else Threads(most, "conquiet-stream")
        self._handler = handler
        self._clock = clock
        self._finish = finish
        self._background = Background()
        self._tasks: dict[StreamLease, asyncio.Task[None]] = {}
        self._work: dict[StreamLease, asyncio.Future[Any]] = {}
        """What runs in threads, which end when they please."""

    def start(self, lease: StreamLease) -> None:
        """Begin with a stream."""
        task = self._tasks[lease] = self._background.start(self._run(lease), "stream")
        task.add_done_callback(lambda _: self._tasks.pop(lease, None))

    def cancel(self, stream: str, epoch: int) -> None:
        """Stop with a stream."""
        for lease, task in list(self._tasks.items()):
            if (lease.stream, lease.epoch) == (stream, epoch):
                task.cancel()

    async def stop(self, lease: StreamLease) -> None:
        """Stop with a stream, and return when its handler has ended, or after a moment."""
        await self._stop([lease])

    async def aclose(self) -> None:
        """Stop with all."""
        await self._stop({**self._tasks, **self._work})
        if self._threads is not None:
            self._threads.close()

    async def _stop(self, leases: Iterable[StreamLease]) -> None:
        ending: list[asyncio.Future[Any]] = []
        for lease in leases:
            task, work = self._tasks.get(lease), self._work.get(lease)
            if task is not None and task is not asyncio.current_task():
                if not task.cancelling():  # once, or its clean-up would be cut off
                    task.cancel()
                ending.append(task)
            if work is not None:
                ending.append(work)
        if ending:
            await asyncio.wait(ending, timeout=_GRACE)

    async def _run(self, lease: StreamLease) -> None:
        failures, is_done, task = 0, False, asyncio.current_task()
        while self._is_held(lease):
            try:
                if not is_done:
                    await self._call(lease)
                    is_done, failures = True, 0
                await self._finish(lease)
                return
            except (Exception, asyncio.CancelledError) as error:
                if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
                    raise
                if not self._is_held(lease):
                    return  # it was lost, which somebody else is told of
                if is_done:
                    _log.warning("stream %r is done, which cannot be told yet: %s", lease.stream, error)
                else:
                    _log.exception("the handler of stream %r failed and is called again", lease.stream)
            await self._clock.sleep(_AGAIN.delay(failures))
            failures += 1

    @staticmethod
    def _is_held(lease: StreamLease) -> bool:
        return lease.owned

    async def _call(self, lease: StreamLease) -> None:
        if self._threads is None:
            await cast("Callable[[str, StreamLease], Awaitable[Any]]", self._handler)(lease.stream, lease)
            return
        work = self._work[lease] = in_thread(self._threads, lambda one: self._handler(one.stream, one), lease)
        work.add_done_callback(lambda _: self._work.pop(lease, None))
        await asyncio.wait([work])
        found = work.result()
        if inspect.isawaitable(found):
            await found
