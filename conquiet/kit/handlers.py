"""Users' functions, which may be async or not: how to tell, and how to run those that block."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from contextvars import copy_context
from typing import Any

from conquiet.kit.loopthread import Threads

__all__ = ["in_thread", "is_async"]


def is_async(function: object) -> bool:
    """Whether calling ``function`` gives something to be awaited, as far as can be told without calling it."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004


def in_thread(threads: Threads, handler: Callable[[Any], Any], argument: Any) -> asyncio.Future[Any]:
    """The outcome of ``handler(argument)``, run in one of ``threads`` with the caller's context variables.

    What would end a program ends only this call, as it ends only a thread elsewhere.
    """
    context = copy_context()
    return threads.run(lambda: context.run(_call, handler, argument))


def _call(handler: Callable[[Any], Any], argument: Any) -> Any:
    try:
        return handler(argument)
    except Exception:
        raise
    except BaseException as error:
        raise RuntimeError(f"the handler raised {type(error).__name__}") from error
