"""Running handlers: as many at once as allowed, and no task for a message that does not need one."""

from __future__ import annotations

import asyncio
import inspect
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final, Protocol, TypeAlias, cast

from conquiet.errors import ConfigError
from conquiet.kit.clock import Clock
from conquiet.kit.handlers import checked, in_thread, is_async
from conquiet.kit.loopthread import PRIVATE_LOOP, Threads
from conquiet.kit.service import Background
from conquiet.message import Message
from conquiet.topics.consume.delivery import Delivery
from conquiet.topics.consume.standstill import Standstill
from conquiet.topics.options import SubscribeOptions

__all__ = ["BatchHandler", "Handler", "Handling", "Pulling"]

Handler: TypeAlias = Callable[[Message], Awaitable[None]] | Callable[[Message], None]
BatchHandler: TypeAlias = (
    Callable[[Sequence[Message]], Awaitable[Sequence[BaseException | None] | None]]
    | Callable[[Sequence[Message]], Sequence[BaseException | None] | None]
)
_log = logging.getLogger("conquiet.topics")
_AT_A_STRETCH: Final = 100
"""How many messages a handler that never waits may handle before others get a turn on the loop."""


class Finished(Protocol):
    """Told what became of each delivery."""

    def __call__(self, delivery: Delivery, error: BaseException | None, seconds: float) -> None: ...


class Handling:
    """Runs the user's handler on deliveries that are ready.

    A few long-lived runners take one delivery after the other: while the handler never really waits, one runner
    does everything and no task is made; as soon as it waits, more runners start, up to ``max_inflight``.
    """

    finishes = True

    def __init__(
        self,
        handler: Handler | BatchHandler,
        options: SubscribeOptions,
        ready: deque[Delivery],
        finished: Finished,
        clock: Clock,
    ) -> None:
        checked("handler", handler, "messages" if options.batch_handler else "message")
        self.is_open = True
        """Whether handlers may begin; what is ready waits otherwise, as if nobody had taken it."""
        self._closing = False
        self._threads: Threads | None = None
        self._in_threads: dict[asyncio.Future[Any], str] = {}
        self._call = self._awaitable(cast("Callable[..., Any]", handler), options)
        self._timeout = options.handler_timeout
        self._most = options.max_inflight
        self._batch = options.batch_size if options.batch_handler else 0
        self._busy: set[object] = set()
        self._ready = ready
        self._finished = finished
        self._clock = clock
        self._background = Background()
        self._runners = 0
        self._is_due = False
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def busy(self) -> frozenset[str]:
        """The streams of which a handler runs in a thread."""
        return frozenset(self._in_threads.values())

    @property
    def running(self) -> int:
        """How many runners there are now."""
        return self._runners

    def wake(self) -> None:
        """There may be something ready."""
        if self._ready and self.is_open and not self._is_due and self._runners < self._most:
            self._is_due = True
            if self._loop is None:
                self._loop = asyncio.get_running_loop()
            if self._runners:
                self._loop.call_soon(self._add_runners)
            else:
                self._start()
                self._loop.call_soon(self._add_runners)

    async def aclose(self) -> None:
        """Cancel what still runs; a thread cannot be cancelled, and is left behind."""
        self._closing = True
        await self._background.aclose()
        if self._threads is not None:
            self._threads.close()

    def _add_runners(self) -> None:
        # By now the first runner has had its turn: what is still ready waits because the handler does.
        self._is_due = False
        for _ in range(min(len(self._ready), self._most - self._runners)):
            self._start()

    def _start(self) -> None:
        self._runners += 1
        self._background.start(self._run_batches() if self._batch else self._run(), "handler")

    async def _run(self) -> None:
        ready, turns = self._ready, 0
        try:
            while ready and self.is_open:
                delivery = ready.popleft()
                if not delivery.owner.may_handle(delivery, self._clock.monotonic()):
                    continue
                started = time.perf_counter()
                error: BaseException | None = None
                try:
                    if self._timeout is None:
                        await self._call(delivery)
                    else:
                        async with asyncio.timeout(self._timeout):
                            await self._call(delivery)
                except (Exception, asyncio.CancelledError) as raised:
                    if self._is_ending(raised):
                        raise
                    error = raised
                self._report(delivery, error, time.perf_counter() - started)
                turns += 1
                if turns % _AT_A_STRETCH == 0:
                    await asyncio.sleep(0)
        finally:
            self._runners -= 1

    async def _run_batches(self) -> None:
        try:
            while self.is_open and (batch := self._next_batch()):
                owner = batch[0].owner
                self._busy.add(owner)
                started = time.perf_counter()
                try:
                    errors = await self._handle_batch(batch)
                finally:
                    self._busy.discard(owner)
                seconds = (time.perf_counter() - started) / len(batch)
                for delivery, error in zip(batch, errors, strict=True):
                    self._report(delivery, error, seconds)
        finally:
            self._runners -= 1

    def _report(self, delivery: Delivery, error: BaseException | None, seconds: float) -> None:
        try:
            self._finished(delivery, error, seconds)
        except Exception as mistake:  # whatever it is, the message must not be held for ever
            _log.exception("message %s could not be judged", delivery.id)
            self._finished(delivery, RuntimeError(f"{type(mistake).__name__} in judging the outcome"), seconds)

    def _next_batch(self) -> list[Delivery]:
        """Deliveries of one partition that no other runner is busy with, in order."""
        batch: list[Delivery] = []
        rest: list[Delivery] = []
        now = self._clock.monotonic()
        while self._ready and len(batch) < self._batch:
            delivery = self._ready.popleft()
            if delivery.owner in self._busy or (batch and delivery.owner is not batch[0].owner):
                rest.append(delivery)
            elif delivery.owner.may_handle(delivery, now):
                batch.append(delivery)
        self._ready.extendleft(reversed(rest))
        return batch

    async def _handle_batch(self, batch: list[Delivery]) -> Sequence[BaseException | None]:
        try:
            async with asyncio.timeout(self._timeout):
                outcomes = await self._call(batch)
        except (Exception, asyncio.CancelledError) as error:
            if self._is_ending(error):
                raise
            return [error] * len(batch)
        if outcomes is None:
            return [None] * len(batch)
        if not isinstance(outcomes, Sequence) or len(cast("Sequence[Any]", outcomes)) != len(batch):
            wrong = ConfigError(f"a batch handler returns None or one outcome for each message, not {outcomes!r}")
            return [wrong] * len(batch)
        return [_outcome(outcome) for outcome in cast("Sequence[object]", outcomes)]

    def _awaitable(self, handler: Callable[..., Any], options: SubscribeOptions) -> Callable[[Any], Awaitable[Any]]:
        """``handler`` if it is async; else a function that runs it in a thread, so that it cannot block the loop."""
        if is_async(handler):
            return cast("Callable[[Any], Awaitable[Any]]", handler)
        threads = self._threads = Threads(options.max_inflight, "conquiet-handler")

        async def handle(message: Any) -> Any:
            work = in_thread(threads, handler, message)
            first: Delivery = message[0] if options.batch_handler else message
            self._in_threads[work] = first.owner.stream
            work.add_done_callback(self._in_threads.pop)
            found = await self._to_its_end(work)
            # A callable that gives an awaitable was async in disguise (a lambda, a partial).
            return await found if inspect.isawaitable(found) else found

        return handle

    async def _to_its_end(self, work: asyncio.Future[Any]) -> Any:
        """Wait for a thread. One that takes too long has failed, but not before it has ended: a second attempt beside
        the first would be two of one message at once."""
        cancelled: asyncio.CancelledError | None = None
        while not work.done():
            try:
                await asyncio.wait([work])
            except asyncio.CancelledError as error:
                cancelled = error
                if self._closing or PRIVATE_LOOP.ended:
                    break
        if cancelled is not None:
            raise cancelled
        return work.result()

    def _is_ending(self, error: BaseException) -> bool:
        """Whether the runner is being cancelled because all ends, and not by something inside the handler."""
        if not isinstance(error, asyncio.CancelledError):
            return False
        if self._closing or PRIVATE_LOOP.ended:
            return True
        task = asyncio.current_task()
        while task is not None and task.cancelling():
            task.uncancel()
        return False


class Pulling:
    """The place of handlers where the user pulls: deliveries wait until they are asked for.

    Who leaves with messages in hand has no more occasion to settle them, so the end does not wait for that.
    """

    finishes = False
    busy: frozenset[str] = frozenset()

    def __init__(self, ready: deque[Delivery], standstill: Standstill, clock: Clock) -> None:
        self._ready = ready
        self._standstill = standstill
        self._clock = clock
        self._news = asyncio.Event()

    def wake(self) -> None:
        """There may be something ready, or an end."""
        self._news.set()

    async def next(self, ending: asyncio.Event) -> Delivery | None:
        """The next delivery, waiting for one; ``None`` once ``ending`` is set."""
        while not ending.is_set():
            while self._ready:
                delivery = self._ready.popleft()
                if delivery.owner.may_handle(delivery, self._clock.monotonic()):
                    self._standstill.end()
                    return delivery
            self._news.clear()
            await self._standstill.wait(self._news)
        return None

    async def aclose(self) -> None:
        """Nothing runs here; whoever waits is told."""
        self._standstill.end()
        self._news.set()


def _outcome(outcome: object) -> BaseException | None:
    if outcome is None or isinstance(outcome, BaseException):
        return outcome
    return ConfigError(f"the outcome of a message is None or an exception, not {outcome!r}")
