"""SIGTERM and SIGINT as a request to stop, put back as they were afterwards."""

from __future__ import annotations

import asyncio
import functools
import signal
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager, suppress
from types import FrameType
from typing import Any, cast

__all__ = ["stop_on_signals"]


@contextmanager
def stop_on_signals(stop: Callable[[], None]) -> Generator[None]:
    """Within the block, SIGTERM and SIGINT call ``stop`` instead of ending the process.

    A handler of the user's that was there before runs too, after ``stop``. A second signal of the kind finds
    what was there before, so an impatient Ctrl-C still interrupts. Outside the main thread, where Python
    allows no handlers, and for a signal that the process ignores, nothing is installed.
    """
    with ExitStack() as stack:
        for number in (signal.SIGTERM, signal.SIGINT):
            request = _StopRequest(number, stop)
            if request.install():
                stack.callback(request.remove)
        yield


class _StopRequest:
    """One installed handler; passes signals through once it is spent or removed."""

    def __init__(self, number: signal.Signals, stop: Callable[[], None]) -> None:
        self._number = number
        self._stop: Callable[[], None] | None = stop
        self._previous: Any = None

    def install(self) -> bool:
        self._previous = _unspent(signal.getsignal(self._number))  # else it would pass the signal on as a second
        if self._previous in (None, signal.SIG_IGN):
            return False
        try:
            signal.signal(self._number, self)
        except ValueError:  # not the main thread of the main interpreter
            return False
        return True

    def _is_installed(self) -> bool:
        return cast("object", signal.getsignal(self._number)) is self

    def remove(self) -> None:
        self._stop = None
        # A handler that was installed later may be on top: then this one stays below, and only passes on.
        if self._is_installed():
            with suppress(ValueError):  # an iterator that ended in another thread than it began in
                signal.signal(self._number, _unspent(self._previous))

    def __call__(self, number: int, frame: FrameType | None) -> None:
        stop, self._stop = self._stop, None
        if stop is not None:
            stop()
            if self._is_installed():
                signal.signal(self._number, self._previous)
        elif self._previous == signal.SIG_DFL and self._is_installed():
            signal.signal(self._number, signal.SIG_DFL)
            signal.raise_signal(self._number)
        if callable(self._previous) and (stop is None or not _ends_the_program(self._previous)):
            self._previous(number, frame)


def _unspent(handler: Any) -> Any:
    """``handler``, or what was there before it if it is a request that is spent or was removed."""
    while isinstance(handler, _StopRequest) and handler._stop is None:
        handler = handler._previous
    return handler


def _ends_the_program(handler: Callable[..., Any]) -> bool:
    """Whether ``handler`` is Python's or asyncio's own answer to Ctrl-C, which a graceful stop replaces."""
    if handler is signal.default_int_handler:
        return True
    target = handler.func if isinstance(handler, functools.partial) else handler
    return isinstance(getattr(target, "__self__", None), asyncio.Runner)
