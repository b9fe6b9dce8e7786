"""The one way to call a user's handler: async or plain, in a context of its own, within its time.

Whatever a handler raises becomes an outcome here, and nowhere else.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Generator, Hashable, Iterable
from contextlib import suppress
from contextvars import Context, copy_context
from types import CoroutineType, coroutine
from typing import Any, Final, Generic, Protocol, TypeVar

from msgspec import Struct

from conquiet.kit.handlers import checked, is_async
from conquiet.kit.loopthread import PRIVATE_LOOP, Threads
from conquiet.kit.service import Background

__all__ = ["Handler", "Run", "Runners"]

_T = TypeVar("_T")
_T_contra = TypeVar("_T_contra", contravariant=True)
_log = logging.getLogger("conquiet.kit")
_GRACE: Final = 1.0
"""Seconds that a handler has to end after it was cancelled."""
_AT_A_STRETCH: Final = 100
"""How many items a handler that never waits handles before others get a turn on the loop."""


class Handler(Generic[_T]):
    """A user's function, checked when it is given.

    ``given`` names the arguments of its call; ``spread`` makes them of an item if that is not the argument itself.
    """

    def __init__(
        self, function: Callable[..., Any], *given: str, spread: Callable[[_T], tuple[Any, ...]] | None = None
    ) -> None:
        checked("handler", function, *given)
        self.is_async = is_async(function)
        self.call: Callable[[_T], Any] = function if spread is None else lambda item: function(*spread(item))


class Finished(Protocol[_T_contra]):
    """Hears how each call ended; ``result`` counts if ``error`` is ``None``."""

    def __call__(self, item: _T_contra, result: Any, error: BaseException | None, seconds: float, /) -> None: ...


class Run(Struct, Generic[_T], eq=False):
    """One call of the handler."""

    item: _T
    task: asyncio.Task[Any]
    started: float
    verdict: BaseException | None = None
    """Why it was cancelled; this is then its outcome."""
    is_over: bool = False
    """Whether its outcome is decided, whatever the handler still does."""
    timer: asyncio.TimerHandle | None = None
    thread: asyncio.Future[Any] | None = None
    ticket: list[None] | None = None
    """Of a call in a thread. One side takes it: the thread, which then begins, or the caller that calls it off."""

    def call_off(self) -> bool:
        """Whether the call has not begun, and now never will."""
        return self.ticket is not None and _took(self.ticket)


class Runners(Generic[_T]):
    """Runs a handler on items, up to ``limit`` at a time.

    A few long-lived tasks take one item after the other: while the handler never really waits, one of them does
    everything; as soon as it waits, more start. Each call has context variables of its own. Plain functions run in
    threads. A call that takes longer than ``timeout`` is cancelled; if that does not end it, its item goes on without
    it, but the call keeps its place until it ends; with ``to_its_end`` the item waits for that. ``finished`` hears each
    outcome once, ``withdrawn`` of an item whose thread had not begun when its call was cancelled. An item for which
    ``is_held`` is false is passed over.
    """

    def __init__(
        self,
        handler: Handler[_T],
        *,
        key: Callable[[_T], Hashable] | None = None,
        limit: int,
        threads: int | None = None,
        finished: Finished[_T],
        withdrawn: Callable[[_T], None],
        is_held: Callable[[_T], bool],
        stopped: Callable[[], BaseException],
        timeout: float | None = None,
        to_its_end: bool = False,
        name: str = "handler",
    ) -> None:
        self.is_open = True
        """Whether calls may begin; what is ready waits otherwise."""
        self._handler = handler.call
        self._key: Callable[[_T], Hashable] = key or _itself
        self._limit = limit
        self._finished = finished
        self._withdrawn = withdrawn
        self._is_held = is_held
        self._stopped = stopped
        self._timeout = timeout
        self._to_its_end = to_its_end
        self._name = name
        self._threads = None if handler.is_async else Threads(threads or limit, f"conquiet-{name}")
        self._ready: deque[_T] = deque()
        self._runs: dict[Hashable, Run[_T]] = {}
        self._call = _Call()
        self._tasks = 0
        self._is_due = self._closing = False
        self._background = Background()
        self.freed = asyncio.Event()
        """Set whenever a place becomes free."""

    @property
    def free(self) -> int:
        """How many more items may be begun."""
        return self._limit - len(self._runs) - len(self._ready)

    @property
    def has_ready(self) -> bool:
        """Whether an item waits to be begun."""
        return bool(self._ready)

    @property
    def busy(self) -> int:
        """How many calls are under way."""
        return len(self._runs)

    @property
    def stuck(self) -> int:
        """How many of them are over, but have not ended, and keep their place."""
        return sum(run.is_over for run in list(self._runs.values()))  # others' threads may ask

    @property
    def items(self) -> list[_T]:
        """What calls are under way on."""
        return [run.item for run in self._runs.values()]

    def put(self, items: Iterable[_T]) -> None:
        """Keep these ready, for :meth:`begin` or :meth:`withdraw`."""
        self._ready.extend(items)

    def begin(self, items: Iterable[_T]) -> None:
        """Call the handler on these as soon as possible."""
        self.put(items)
        self._wake()

    def withdraw(self) -> list[_T]:
        """The items whose call has not begun; it never will."""
        left = list(self._ready)
        self._ready.clear()
        return left

    def lose(self, key: Hashable) -> float | None:
        """Cancel the call on an item that now belongs to others: its outcome does not count.

        The seconds that it took so far; ``None`` if there is none.
        """
        run = self._runs.get(key)
        if run is None or run.is_over:
            return None
        run.is_over = True
        run.call_off()
        run.task.cancel()
        return time.perf_counter() - run.started

    async def ended(self, keys: Iterable[Hashable]) -> None:
        """Return once no call is under way on any of these but the caller's own, if it is one."""
        mine = asyncio.current_task()
        while any(run.task is not mine for key in keys if (run := self._runs.get(key)) is not None):
            self.freed.clear()
            await self.freed.wait()

    async def drain(self, seconds: float) -> None:
        """Return once every call has an outcome; calls that still run after ``seconds`` are cancelled.

        They have half a moment to end; then they are given up.
        """
        if await self._all_over(seconds):
            return
        for run in list(self._runs.values()):
            self._cancel(run, self._stopped())
        if not await self._all_over(_GRACE / 2):
            for run in list(self._runs.values()):
                self._give_up(run)

    async def aclose(self) -> None:
        """Cancel what still runs. What does not end by that, as a thread never does, is left behind."""
        self._closing = True
        with suppress(TimeoutError):
            async with asyncio.timeout(_GRACE / 4):
                await self._background.aclose()
        if self._threads is not None:
            self._threads.close()

    async def _all_over(self, seconds: float) -> bool:
        try:
            async with asyncio.timeout(seconds):
                while any(not run.is_over for run in self._runs.values()):
                    self.freed.clear()
                    await self.freed.wait()
        except TimeoutError:
            return False
        return True

    # --- tasks ------------------------------------------------------------------------------------------------

    def _wake(self) -> None:
        if self._ready and self.is_open and not self._is_due and self._tasks < self._limit:
            self._is_due = True
            if not self._tasks:
                self._start()
            asyncio.get_running_loop().call_soon(self._start_more)

    def _start_more(self) -> None:
        # By now the first task has had its turn: what is still ready waits because the handler does, or because the
        # task lets others have theirs.
        self._is_due = False
        if len(self._runs) >= self._tasks:
            for _ in range(min(len(self._ready), self._limit - self._tasks)):
                self._start()

    def _start(self) -> None:
        self._tasks += 1
        self._background.start(self._work(), self._name)

    async def _work(self) -> None:
        turns, task = 0, asyncio.current_task()
        assert task is not None
        try:
            while self._ready and self.is_open:
                item = self._ready.popleft()
                if not self._is_held(item):
                    self.freed.set()
                    continue
                if self._threads is not None:
                    await self._run(item, task, time.perf_counter())
                elif not self._ran(item, task, started := time.perf_counter()):
                    await self._run(item, task, started)
                turns += 1
                if turns % _AT_A_STRETCH == 0:
                    await asyncio.sleep(0)
                    self._wake()  # if the next call waits, the others need not wait for it
        finally:
            self._tasks -= 1
            self._wake()

    def _ran(self, item: _T, task: asyncio.Task[Any], started: float) -> bool:
        """Begin a call in a context of its own; whether it was over at once and well, as most are. Else it goes on."""
        self._call = _Call()
        try:
            called: Any = self._handler(item)
            if called.__class__ is not CoroutineType:
                called = _awaited(called)
            context = copy_context()
        except BaseException as error:
            self._call.error = error
            return False
        try:
            waits = context.run(called.send, None)
        except StopIteration as done:
            self._call.result = done.value
            if task.cancelling():
                return False
        except BaseException as error:
            self._call.error = error
            return False
        else:
            self._call.goes_on(called, context, waits)
            return False
        try:
            self._finished(item, self._call.result, None, time.perf_counter() - started)
        except Exception as mistake:
            self._misjudged(item, mistake, started)
        self.freed.set()
        return True

    async def _run(self, item: _T, task: asyncio.Task[Any], started: float) -> None:
        run = Run(item, task, started)
        key = self._key(item)
        self._runs[key] = run
        if self._timeout is not None:
            run.timer = asyncio.get_running_loop().call_later(self._timeout, self._overtime, run)
        try:
            if self._threads is None:
                result, error = await self._call.outcome()
            else:
                result, error = await self._in_thread(run, self._threads)
            self._end_cancellation(run, error)
            if self._to_its_end and run.thread is not None and not run.is_over:
                await self._thread_ended(run)
            self._report(run, result, run.verdict or error)
            if isinstance(error, KeyboardInterrupt):
                raise error  # it is an outcome, and the user's wish to end the program
            if run.thread is not None and not run.thread.done():
                await asyncio.wait([run.thread])
        finally:
            if run.timer is not None:
                run.timer.cancel()
            del self._runs[key]
            self.freed.set()

    async def _thread_ended(self, run: Run[_T]) -> None:
        """Return once the thread of a call that was cancelled has ended, unless it never began."""
        while run.thread is not None and not run.thread.done() and not run.ticket:
            try:
                await asyncio.wait([run.thread])
            except asyncio.CancelledError as error:
                self._end_cancellation(run, error)

    def _end_cancellation(self, run: Run[_T], error: BaseException | None) -> None:
        """Raise a cancellation that ends all that runs here. Any other is this call's, and not that of the next."""
        if isinstance(error, asyncio.CancelledError):
            if self._closing or PRIVATE_LOOP.ended:
                raise error
            if run.task.cancelling() and run.verdict is None:
                # Nobody here did that: the loop ends and cancels every task. It says nothing of the item.
                run.verdict = self._stopped()
        while run.task.cancelling() and not self._closing:  # also if the handler returned or raised something else
            run.task.uncancel()

    def _report(self, run: Run[_T], result: Any, error: BaseException | None) -> None:
        if not run.is_over:
            run.is_over = True
            if error is not None and run.call_off():
                self._withdrawn(run.item)
                return
            try:
                self._finished(run.item, result, error, time.perf_counter() - run.started)
            except Exception as mistake:
                self._misjudged(run.item, mistake, run.started)

    def _misjudged(self, item: _T, mistake: Exception, started: float) -> None:
        """Whatever went wrong with an outcome: the item must not be held for ever."""
        _log.error("the outcome of %s %r could not be judged", self._name, self._key(item), exc_info=mistake)
        judging = RuntimeError(f"{type(mistake).__name__} in judging the outcome")
        self._finished(item, None, judging, time.perf_counter() - started)

    # --- ends that are not the handler's ----------------------------------------------------------------------

    def _overtime(self, run: Run[_T]) -> None:
        self._cancel(run, TimeoutError(f"the handler took longer than {self._timeout:g} seconds"))
        if not self._to_its_end:
            run.timer = asyncio.get_running_loop().call_later(_GRACE, self._give_up, run)

    def _cancel(self, run: Run[_T], verdict: BaseException) -> None:
        if not run.is_over and run.verdict is None:
            run.verdict = verdict
            run.task.cancel()

    def _give_up(self, run: Run[_T]) -> None:
        if not run.is_over:
            _log.error("the handler does not end, though it was cancelled: %s %r", self._name, self._key(run.item))
            self._report(run, None, run.verdict)
            self.freed.set()

    # --- calling ----------------------------------------------------------------------------------------------

    async def _in_thread(self, run: Run[_T], threads: Threads) -> tuple[Any, BaseException | None]:
        run.ticket = [None]
        context = copy_context()
        run.thread = threads.run(lambda: context.run(self._begun, run))
        try:
            await asyncio.wait([run.thread])
            found = run.thread.result()
            # A callable that gives an awaitable was async in disguise: a lambda, a partial.
            return (await found if inspect.isawaitable(found) else found), None
        except BaseException as error:
            return None, error

    def _begun(self, run: Run[_T]) -> Any:
        # A thread may start so late that the call was called off, and the item belongs to others.
        if run.ticket is None or not _took(run.ticket):
            return None
        try:
            return self._handler(run.item)
        except Exception:
            raise
        except BaseException as error:  # it would end a program; in a thread it ends this call only
            raise RuntimeError(f"the handler raised {type(error).__name__}") from error


class _Call:
    """A call of an async function after its first step. No task is made for it."""

    __slots__ = ("_called", "_context", "_is_over", "_waits", "error", "result")

    def __init__(self) -> None:
        self.error: BaseException | None = None
        self.result: Any = None
        self._is_over = True

    def goes_on(self, called: Coroutine[Any, Any, Any], context: Context, waits: Any) -> None:
        """It waits for something."""
        self._called, self._context, self._waits, self._is_over = called, context, waits, False

    @coroutine
    def outcome(self) -> Generator[Any, Any, tuple[Any, BaseException | None]]:
        """What it returns or raises in the end."""
        if self._is_over:
            return self.result, self.error
        called, context, waits = self._called, self._context, self._waits
        while True:
            step: Callable[[Any], Any] = called.send
            sent: Any = None
            try:
                sent = yield waits
            except GeneratorExit:  # thrown in from outside: the loop is gone, and no outcome can be heard
                context.run(called.close)
                raise
            except BaseException as thrown:
                sent, step = thrown, called.throw
            try:
                waits = context.run(step, sent)
            except StopIteration as done:
                return done.value, None
            except BaseException as error:
                return None, error


async def _awaited(awaitable: Awaitable[Any]) -> Any:
    return await awaitable


def _itself(item: Hashable) -> Hashable:
    return item


def _took(ticket: list[None]) -> bool:
    try:
        ticket.pop()  # in one step, whichever thread does it
    except IndexError:
        return False
    return True
