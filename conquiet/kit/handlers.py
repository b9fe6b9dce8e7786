"""Users' functions, which may be async or not: whether they can be called, and how to run those that block."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from contextvars import copy_context
from functools import partial
from types import MethodType
from typing import Any, Final, TypeVar, cast

from conquiet.errors import ConfigError
from conquiet.kit.loopthread import Threads

__all__ = ["checked", "in_thread", "is_async"]

_H = TypeVar("_H")
_MOST_LAYERS: Final = 100
"""Of decorators: a function may claim to wrap itself."""
_ANY: Final = inspect.Parameter.VAR_POSITIONAL
_UNKNOWN: Final = inspect.Signature([inspect.Parameter("args", _ANY)])


def checked(what: str, handler: _H, *given: str) -> _H:
    """``handler``, if it can be called with as many arguments as there are names in ``given``.

    ``ConfigError`` otherwise, and for generator functions, of which a call runs nothing. A decorated function is
    judged by the outermost of its layers that says what it takes. Beneath one that takes anything, that may be more
    than is given: a decorator may add to it. What has no signature passes. Nothing is called.
    """
    if not callable(handler):
        raise ConfigError(f"{what} must be callable, not {handler!r}")
    function = cast("Callable[..., Any]", handler)
    if _makes_generators(function) or _makes_generators(type(function).__call__):
        reason = "a call of it would end well and its body would never run"
        raise ConfigError(f"{what} must not be a generator function, as {_name(function)} is: {reason}")
    _check_signature(what, function, given)
    return handler


def _makes_generators(function: object) -> bool:
    return inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function)


def _check_signature(what: str, handler: Callable[..., Any], given: tuple[str, ...]) -> None:
    layer = handler
    for depth in range(_MOST_LAYERS):
        signature = _signature(layer)
        try:
            (signature.bind_partial if depth else signature.bind)(*given)
        except TypeError as error:
            asked, found = ", ".join(given), f"{_name(handler)}{_text(signature)}"
            raise ConfigError(f"{what} is called with ({asked}), but it is {found}: {error}") from None
        if all(parameter.kind is not _ANY for parameter in signature.parameters.values()):
            return
        beneath = _beneath(layer)  # it takes anything, to pass it on
        if beneath is None:
            return
        layer = beneath


def _signature(layer: Callable[..., Any]) -> inspect.Signature:
    try:
        return inspect.signature(layer, follow_wrapped=False)
    except (ValueError, TypeError):  # as of functions that are written in C
        return _UNKNOWN


def _beneath(handler: object) -> Callable[..., Any] | None:
    """What a decorator says that it wraps, to be called as what it made of it; ``None`` if nothing."""
    if isinstance(handler, partial):
        inner = _beneath(handler.func)
        return None if inner is None else partial(inner, *handler.args, **handler.keywords)
    if isinstance(handler, MethodType):
        inner = _beneath(handler.__func__)
        return None if inner is None else MethodType(inner, handler.__self__)
    inner = inspect.getattr_static(handler, "__wrapped__", None)
    if inner is None and not inspect.isroutine(handler):
        inner = _beneath(type(handler).__call__)
        return None if inner is None else MethodType(inner, handler)
    return inner if callable(inner) else None


def _name(handler: object) -> str:
    while isinstance(handler, partial):
        handler = handler.func
    named: Any = handler if hasattr(handler, "__qualname__") else type(handler)
    return f"{getattr(named, '__module__', None) or 'builtins'}.{named.__qualname__}"


def _text(signature: inspect.Signature) -> str:
    """Names alone: a value that an argument was bound to may be anything, also a secret."""
    empty = inspect.Parameter.empty
    return str(
        inspect.Signature(
            [
                parameter.replace(annotation=empty, default=empty if parameter.default is empty else _SOMETHING)
                for parameter in signature.parameters.values()
            ]
        )
    )


class _Something:
    def __repr__(self) -> str:
        return "..."


_SOMETHING: Final = _Something()


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
