"""Facades of consumers that SIGTERM and SIGINT stop."""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack, nullcontext
from types import TracebackType
from typing import Protocol, Self, TypeVar

from conquiet.kit.signals import stop_on_signals
from conquiet.sync._bridge import Facade

__all__ = ["StoppedBySignals"]


class _Stoppable(Protocol):
    def stop(self) -> None: ...

    async def __aenter__(self) -> object: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> bool | None: ...


S = TypeVar("S", bound=_Stoppable)


class StoppedBySignals(Facade[S]):  # pyright: ignore[reportInvalidTypeArguments]
    """While it is entered by the main thread, a signal stops the consumer instead of ending the process.

    The core cannot see to that: it does not run on the main thread, where alone handlers can be installed.
    """

    def __enter__(self) -> Self:
        self._signals_held = ExitStack()
        self._signals_held.enter_context(self._signals())  # before anything runs that a signal would have to end
        try:
            return super().__enter__()
        except BaseException:
            self._signals_held.close()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._signals_held.close()
        super().__exit__(kind, error, trace)

    def _signals(self) -> AbstractContextManager[None]:
        return stop_on_signals(lambda: self._core().stop()) if self._wants_signals() else nullcontext()

    def _wants_signals(self) -> bool:
        """Whether signals are left to it; facades whose user can say otherwise look that up."""
        return True
