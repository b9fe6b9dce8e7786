"""One call of an async function, in a context of its own, for which no task is made."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Generator
from contextvars import Context, copy_context
from types import CoroutineType, coroutine
from typing import Any, TypeVar, cast

__all__ = ["Call"]

_T = TypeVar("_T")


class Call:
    """Calls ``function`` on ``item`` at once, up to the first moment at which it waits.

    Whatever it raises is kept as its ``error``. Most handlers never wait: then the call ``is_over`` right away.
    """

    __slots__ = ("_called", "_context", "_waits", "error", "is_over", "result")

    def __init__(self, function: Callable[[_T], Any], item: _T) -> None:
        self.result: Any = None
        self.error: BaseException | None = None
        self.is_over = True
        try:
            given: Any = function(item)
            called = cast("Coroutine[Any, Any, Any]", given if type(given) is CoroutineType else _awaited(given))
            context: Context = copy_context()
            waits: Any = context.run(called.send, None)
        except StopIteration as done:
            self.result = done.value
        except BaseException as error:
            self.error = error
        else:
            self.is_over = False
            self._called, self._context, self._waits = called, context, waits

    @coroutine
    def outcome(self) -> Generator[Any, Any, tuple[Any, BaseException | None]]:
        """What it returns or raises in the end. To be awaited by the task in which it was begun."""
        if self.is_over:
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
