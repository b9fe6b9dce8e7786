"""One call of a handler: what is known of it while it runs, and one for which no task is made."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Generator
from contextvars import Context
from types import CoroutineType, coroutine
from typing import Any, Generic, TypeVar, cast

from msgspec import Struct

__all__ = ["Call", "Run", "took"]

_T = TypeVar("_T")


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
        return self.ticket is not None and took(self.ticket)

    @property
    def is_current(self) -> bool:
        """Whether its task is the one that runs now; what is thrown into it otherwise comes from the end of a loop."""
        try:
            return asyncio.current_task() is self.task
        except RuntimeError:  # no loop runs
            return False


class Call:
    """Calls an async ``function`` on ``item`` at once, in the context given, up to the moment at which it waits.

    Whatever it raises is kept as its ``error``. Most handlers never wait: then the call ``is_over`` right away.
    """

    __slots__ = ("_called", "_context", "_waits", "error", "is_over", "result")

    def __init__(self, function: Callable[[_T], Any], item: _T, context: Context) -> None:
        self.result: Any = None
        self.error: BaseException | None = None
        self.is_over = True
        try:
            given: Any = function(item)
            called = cast("Coroutine[Any, Any, Any]", given if type(given) is CoroutineType else _awaited(given))
            waits: Any = context.run(called.send, None)
        except StopIteration as done:
            self.result = done.value
        except BaseException as error:
            self.error = error
        else:
            self.is_over = False
            self._called, self._context, self._waits = called, context, waits

    @coroutine
    def outcome(self) -> Generator[Any, Any, Any]:
        """What it returns or raises in the end. To be awaited by the task in which it was begun."""
        if self.error is not None:
            raise self.error
        if self.is_over:
            return self.result
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
                return done.value


async def _awaited(awaitable: Awaitable[Any]) -> Any:
    return await awaitable


def took(ticket: list[None]) -> bool:
    """Whether this was the side that took it."""
    try:
        ticket.pop()  # in one step, whichever thread does it
    except IndexError:
        return False
    return True
