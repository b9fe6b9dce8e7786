"""The one way to call a user's handler: async or plain, in a context of its own, within its time.

Whatever a handler raises becomes an outcome here, and nowhere else.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterable
from contextlib import suppress
from contextvars import Context, copy_context
from typing import Any, Final, Generic, Protocol, TypeVar

from conquiet.kit.calls import Call, Run, took
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
_SOON: Final = 50e-6
"""Seconds: a call that is over so soon has not waited, since the loop takes longer for a turn."""


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


class Runners(Generic[_T]):
    """Runs a handler on items, up to ``limit`` at a time.

    While the handler never really waits, one task takes one item after the other; as soon as it waits, more tasks do.
    Each call has context variables of its own. Plain functions run in threads. A call that takes longer than
    ``timeout`` is cancelled; if that does not end it, its item goes on without it, but the call keeps its place until
    it ends; with ``to_its_end`` the item waits for that. ``finished`` hears each outcome once, ``withdrawn`` of an item
    whose thread had not begun when its call was cancelled. An item for which ``is_held`` is false is passed over.
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
        self._key = key
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
        self._in_threads: dict[asyncio.Future[Any], _T] = {}
        self._tasks = 0
        self._is_due = self._closing = self._waits = False
        self._context: Context | None = None
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

    @property
    def in_threads(self) -> list[_T]:
        """What calls in threads are under way on, also after :meth:`aclose`, which leaves them behind."""
        return list(self._in_threads.values())

    def put(self, items: Iterable[_T]) -> None:
        """Keep these ready, for :meth:`begin` or :meth:`withdraw`."""
        self._ready.extend(items)

    def begin(self, items: Iterable[_T]) -> None:
        """Call the handler on these as soon as possible."""
        self.put(items)
        if self._context is None:
            self._context = copy_context()
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
                self._start(1)
            asyncio.get_running_loop().call_soon(self._start_more)

    def _start_more(self) -> None:
        # By now the first task has had its turn: what is still ready waits because the handler does, or because the
        # task lets others have theirs.
        self._is_due = False
        if len(self._runs) >= self._tasks:
            self._start(min(len(self._ready), self._limit - self._tasks))

    def _start(self, count: int) -> None:
        assert self._context is not None
        self._tasks += count
        loop = asyncio.get_running_loop()
        for _ in range(count):
            # Not the context of the caller, which may be that of a call that is over.
            self._background.begin(loop, self._work(), self._name, self._context.copy())

    async def _work(self) -> None:
        turns, task, context = 0, asyncio.current_task(), self._context
        assert task is not None
        assert context is not None
        is_first = self._waits  # a call that waits costs less in this task's own context, which only the first can have
        try:
            while self._ready and self.is_open:
                item = self._ready.popleft()
                if not self._is_held(item):
                    self.freed.set()
                    continue
                started = time.perf_counter()
                call = None if is_first or self._threads is not None else Call(self._handler, item, context.copy())
                is_first = False
                is_over = call is not None and not task.cancelling() and self._ran(item, call, started)
                if not is_over and not await self._run(Run(item, task, started), call):
                    return
                turns += 1
                if turns % _AT_A_STRETCH == 0:
                    await asyncio.sleep(0)
                    self._wake()  # if the next call waits, the others need not wait for it
        finally:
            self._background.over(task)
            self._tasks -= 1
            if self._ready:
                self._wake()

    def _ran(self, item: _T, call: Call, started: float) -> bool:
        """Whether a call was over at once and well, as most are. Then its outcome is told."""
        if not call.is_over or call.error is not None:
            return False
        try:
            self._finished(item, call.result, None, time.perf_counter() - started)
        except Exception as mistake:
            self._misjudged(item, mistake, started)
        self.freed.set()
        return True

    async def _run(self, run: Run[_T], call: Call | None) -> bool:
        """Whether the task may go on: no cancellation can be on its way to it, which another call would get."""
        result, error, is_free = None, None, True
        key = run.item if self._key is None else self._key(run.item)
        self._runs[key] = run
        if self._timeout is not None:
            run.timer = asyncio.get_running_loop().call_later(self._timeout, self._overtime, run)
        try:
            try:
                if call is not None:
                    result = await call.outcome()
                else:
                    result = await (self._handler(run.item) if self._threads is None else self._in_thread(run))
            except BaseException as raised:
                if isinstance(raised, GeneratorExit) and not run.is_current:
                    raise  # the loop is gone, and no outcome can be heard
                error = raised
            if error is not None or run.task.cancelling():
                is_free = not run.task.cancelling()
                self._end_cancellation(run, error)
            if self._to_its_end and run.thread is not None and not run.is_over:
                await self._thread_ended(run)
            self._report(run, result, run.verdict or error)
            if error is not None and isinstance(error, KeyboardInterrupt):
                raise error  # it is an outcome, and the user's wish to end the program
            if run.thread is not None and not run.thread.done():
                await asyncio.wait([run.thread])
            return is_free
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
                self._left_thread(run.thread)
                self._withdrawn(run.item)
                return
            seconds = time.perf_counter() - run.started
            self._waits = seconds > _SOON
            try:
                self._finished(run.item, result, error, seconds)
            except Exception as mistake:
                self._misjudged(run.item, mistake, run.started)

    def _misjudged(self, item: _T, mistake: Exception, started: float) -> None:
        """Whatever went wrong with an outcome: the item must not be held for ever."""
        _log.error("the outcome of %s %r could not be judged", self._name, self._named(item), exc_info=mistake)
        judging = RuntimeError(f"{type(mistake).__name__} in judging the outcome")
        self._finished(item, None, judging, time.perf_counter() - started)

    def _named(self, item: _T) -> Hashable:
        return item if self._key is None else self._key(item)

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
            _log.error("the handler does not end, though it was cancelled: %s %r", self._name, self._named(run.item))
            self._report(run, None, run.verdict)
            self.freed.set()

    # --- calling ----------------------------------------------------------------------------------------------

    async def _in_thread(self, run: Run[_T]) -> Any:
        assert self._threads is not None
        run.ticket = [None]
        context = copy_context()
        run.thread = self._threads.run(lambda: context.run(self._begun, run))
        self._in_threads[run.thread] = run.item
        run.thread.add_done_callback(self._left_thread)
        await asyncio.wait([run.thread])
        found = run.thread.result()
        # A callable that gives an awaitable was async in disguise: a lambda, a partial.
        return await found if inspect.isawaitable(found) else found

    def _left_thread(self, thread: asyncio.Future[Any] | None) -> None:
        if thread is not None:
            self._in_threads.pop(thread, None)

    def _begun(self, run: Run[_T]) -> Any:
        # A thread may start so late that the call was called off, and the item belongs to others.
        if run.ticket is None or not took(run.ticket):
            return None
        try:
            return self._handler(run.item)
        except Exception:
            raise
        except BaseException as error:  # it would end a program; in a thread it ends this call only
            raise RuntimeError(f"the handler raised {type(error).__name__}") from error
