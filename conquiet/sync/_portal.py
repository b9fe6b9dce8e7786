"""The way from a blocked thread to the private loop and back."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from contextvars import ContextVar, copy_context
from queue import Empty, SimpleQueue
from typing import Any, Final, ParamSpec, TypeAlias, TypeVar, cast

from conquiet.errors import ConfigError, ConquietError
from conquiet.kit.loopthread import PRIVATE_LOOP

__all__ = ["call", "on_caller", "plain"]

P = ParamSpec("P")
R = TypeVar("R")

_GRACE: Final = 5.0
_Inbox: TypeAlias = "SimpleQueue[_Errand | asyncio.Task[Any]]"

_inbox: ContextVar[_Inbox] = ContextVar("conquiet_caller")


def call(function: Callable[P, Awaitable[R]], *args: P.args, **kwargs: P.kwargs) -> R:
    """Run a coroutine function on the private loop, and wait for its result on this thread.

    Works inside a foreign running loop too (a notebook's), which then waits. Ctrl-C, or whatever else ends the
    waiting, cancels the coroutine and waits up to 5 s for its clean-up before it is raised; a second Ctrl-C
    gives that up. While this thread waits, it runs what the coroutine sends to it (:func:`on_caller`).
    """
    if PRIVATE_LOOP.is_current_thread():
        raise ConquietError("conquiet.sync was called from its own event loop: use the asynchronous API there")
    loop = PRIVATE_LOOP.loop()
    inbox: _Inbox = SimpleQueue()
    context = copy_context()
    context.run(_inbox.set, inbox)
    started: list[asyncio.Task[R]] = []

    async def work() -> R:
        return await function(*args, **kwargs)

    def start() -> None:
        task = loop.create_task(work(), context=context)
        started.append(task)
        task.add_done_callback(inbox.put)

    loop.call_soon_threadsafe(start, context=context)
    try:
        return cast("R", _await(inbox).result())
    except asyncio.CancelledError:
        raise ConquietError("the call was cancelled: the interpreter is shutting down") from None
    except BaseException:
        if not (started and started[0].done()):
            loop.call_soon_threadsafe(_cancel, started)
            with suppress(TimeoutError):
                _await(inbox, time.monotonic() + _GRACE)
        raise


def on_caller(function: Callable[P, R]) -> Callable[P, Coroutine[Any, Any, R]]:
    """``function`` as a coroutine function that runs it on the thread that is blocked in :func:`call`.

    To be awaited by the coroutine of that call or by tasks that it started.
    """

    async def run_on_caller(*args: P.args, **kwargs: P.kwargs) -> R:
        errand: _Errand = _Errand(lambda: function(*args, **kwargs))
        _inbox.get().put(errand)
        return cast("R", await errand.done)

    return run_on_caller


def plain(what: str, function: Callable[P, R]) -> Callable[P, R]:
    """``function``, unless it is a coroutine function, which nobody here would await."""
    if inspect.iscoroutinefunction(function):
        raise ConfigError(f"{what} must be a plain function in conquiet.sync: use the asynchronous API for async ones")
    return function


class _Errand:
    """Something to be run on the calling thread.

    Ctrl-C during it is no answer for the coroutine: it ends the waiting call, which cancels the coroutine.
    """

    def __init__(self, work: Callable[[], Any]) -> None:
        self.work = work
        self.loop = asyncio.get_running_loop()
        self.done: asyncio.Future[Any] = self.loop.create_future()

    def run(self) -> None:
        try:
            result = self.work()
        except Exception as error:
            self.loop.call_soon_threadsafe(self._fail, error)
        else:
            self.loop.call_soon_threadsafe(self._succeed, result)

    def _succeed(self, result: Any) -> None:
        if not self.done.done():
            self.done.set_result(result)

    def _fail(self, error: Exception) -> None:
        if not self.done.done():
            # StopIteration cannot be set on a future; wrapped, as Python wraps it in coroutines.
            wrapped = RuntimeError("handler raised StopIteration") if isinstance(error, StopIteration) else error
            self.done.set_exception(wrapped)


def _await(inbox: _Inbox, deadline: float | None = None) -> asyncio.Task[Any]:
    """Run errands until the call's own task has ended; with a deadline, give up there."""
    while True:
        try:
            item = inbox.get(timeout=None if deadline is None else max(0.0, deadline - time.monotonic()))
        except Empty:
            raise TimeoutError from None
        if isinstance(item, _Errand):
            item.run()
        else:
            return item


def _cancel(started: list[asyncio.Task[Any]]) -> None:
    for task in started:
        task.cancel()
