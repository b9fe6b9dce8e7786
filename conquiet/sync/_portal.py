"""The way from a blocked thread to the private loop and back."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from contextvars import ContextVar, copy_context
from queue import Empty, SimpleQueue
from typing import Any, Final, Generic, ParamSpec, TypeAlias, TypeVar, cast

from conquiet.errors import ConfigError, ConquietError
from conquiet.kit.handlers import checked, is_async
from conquiet.kit.loopthread import PRIVATE_LOOP

__all__ = ["Errand", "Inbox", "call", "current_inbox", "on_caller", "plain"]

P = ParamSpec("P")
R = TypeVar("R")

_GRACE: Final = 5.0
_ASYNC: Final = "{} must be a plain function, not an async one: those belong to the asynchronous API"
Inbox: TypeAlias = "SimpleQueue[Errand | _Call[Any]]"

_inbox: ContextVar[Inbox] = ContextVar("conquiet_caller")


def call(function: Callable[P, Awaitable[R]], *args: P.args, **kwargs: P.kwargs) -> R:
    """Run a coroutine function on the private loop, and wait for its result on this thread.

    Works inside a foreign running loop too (a notebook's), which then waits. Ctrl-C, or whatever else ends the
    waiting, cancels the coroutine and waits up to 5 s for its clean-up before it is raised; a second Ctrl-C
    gives that up. While this thread waits, it runs what the coroutine sends to it (:func:`on_caller`).
    """
    if PRIVATE_LOOP.is_current_thread():
        raise ConquietError("conquiet.sync was called from its own event loop: use the asynchronous API there")
    loop = PRIVATE_LOOP.loop()
    under_way = _Call(lambda: function(*args, **kwargs))
    loop.call_soon_threadsafe(under_way.start, loop)
    try:
        under_way.wait()
    except BaseException:
        loop.call_soon_threadsafe(under_way.cancel)
        with suppress(TimeoutError):
            under_way.wait(time.monotonic() + _GRACE)
        raise
    return under_way.result()


class _Call(Generic[R]):
    """One call under way: started and run on the loop, waited for on the caller's thread."""

    __slots__ = ("_context", "_error", "_function", "_inbox", "_result", "_task")

    def __init__(self, function: Callable[[], Awaitable[R]]) -> None:
        self._function = function
        self._inbox: Inbox = SimpleQueue()
        self._context = copy_context()
        self._context.run(_inbox.set, self._inbox)
        self._task: asyncio.Task[None] | None = None
        self._result: R | None = None
        self._error: BaseException | None = None

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        self._task = loop.create_task(self._run(), context=self._context)

    def cancel(self) -> None:
        assert self._task is not None  # started by an earlier callback of the same loop
        self._task.cancel()
        # A task that is cancelled before its first step never runs, so it cannot report by itself.
        self._task.add_done_callback(lambda _: self._inbox.put(self))

    async def _run(self) -> None:
        # Reports by itself: a callback on the task would run one turn of the loop later.
        try:
            self._result = await self._function()
        except BaseException as error:
            self._error = error
        # At exit only daemon threads can still wait here: they end where they are, without a word.
        if not PRIVATE_LOOP.ended:
            self._inbox.put(self)

    def wait(self, deadline: float | None = None) -> None:
        """Run errands until the coroutine has ended; with a deadline, give up there."""
        while True:
            try:
                item = self._inbox.get(timeout=None if deadline is None else max(0.0, deadline - time.monotonic()))
            except Empty:
                raise TimeoutError from None
            if isinstance(item, _Call):
                return
            item.run()

    def result(self) -> R:
        """What the coroutine returned, or raised."""
        error, self._error = self._error, None
        if isinstance(error, asyncio.CancelledError):
            raise ConquietError("the call was cancelled on the private loop") from None
        if error is not None:
            try:
                raise error
            finally:
                del error  # or the traceback would keep this frame, and so itself, alive
        return cast("R", self._result)


def on_caller(function: Callable[P, R]) -> Callable[P, Coroutine[Any, Any, R]]:
    """``function`` as a coroutine function that runs it on the thread that is blocked in :func:`call`.

    To be awaited by the coroutine of that call or by tasks that it started.
    """

    async def run_on_caller(*args: P.args, **kwargs: P.kwargs) -> R:
        errand: Errand = Errand(lambda: function(*args, **kwargs))
        _inbox.get().put(errand)
        return cast("R", await errand.done)

    return run_on_caller


def current_inbox() -> Inbox:
    """Where errands go that the thread behind the running call is to do."""
    return _inbox.get()


def _not_awaitable(result: R) -> R:
    if inspect.isawaitable(result):
        if inspect.iscoroutine(result):
            result.close()
        raise ConfigError(_ASYNC.format("what conquiet.sync calls"))
    return result


def plain(what: str, function: Callable[P, R], *given: str) -> Callable[P, R]:
    """``function``, unless it is a coroutine function, which nobody here would await, or cannot be called so."""
    if is_async(function):
        raise ConfigError(_ASYNC.format(what))
    return checked(what, function, *given)


class Errand:
    """Something to be run on the calling thread.

    Ctrl-C during it is no answer for the coroutine: it ends the waiting call, which cancels the coroutine.
    """

    def __init__(self, work: Callable[[], Any]) -> None:
        self.work = work
        self.loop = asyncio.get_running_loop()
        self.done: asyncio.Future[Any] = self.loop.create_future()

    def run(self) -> None:
        """Do it, and tell the coroutine how it went."""
        try:
            result = _not_awaitable(self.work())
        except Exception as error:
            self.loop.call_soon_threadsafe(self.fail, error)
        else:
            self.loop.call_soon_threadsafe(self._succeed, result)

    def _succeed(self, result: Any) -> None:
        if not self.done.done():
            self.done.set_result(result)

    def fail(self, error: Exception) -> None:
        """Tell the coroutine that it went wrong; on the loop."""
        if not self.done.done():
            # StopIteration cannot be set on a future; wrapped, as Python wraps it in coroutines.
            wrapped = RuntimeError("handler raised StopIteration") if isinstance(error, StopIteration) else error
            self.done.set_exception(wrapped)
