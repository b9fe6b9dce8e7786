"""The one life of everything that runs: it begins, is asked to stop, leaves in good order, and is over.

Shields, deadlines, signals and the log lines of a life are here, and nowhere else.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Generator
from contextlib import ExitStack, contextmanager, suppress
from typing import Final

from conquiet.errors import ConfigError, ConquietError
from conquiet.kit import probe
from conquiet.kit.loopthread import forks
from conquiet.kit.service import MOMENT, Background, ended
from conquiet.kit.signals import stop_on_signals

__all__ = ["MOMENT", "Life"]

_CLOSING: Final = 0.25
"""Seconds of the moment beyond its drain time that are kept for closing what does not answer."""


class Life:
    """What ``name`` goes through: it may live once or several times, one after the other, on one loop each.

    :meth:`stop` asks it to end, from any thread or signal handler, also before it has begun. It calls ``at_once``
    there and then; if it has begun, its loop then calls ``on_stop``.
    """

    def __init__(
        self,
        name: str,
        log: logging.Logger,
        *,
        handle_signals: bool = False,
        on_stop: Callable[[], None] | None = None,
        at_once: Callable[[], None] | None = None,
    ) -> None:
        self.name = name
        self._log = log
        self.handles_signals = handle_signals
        self._on_stop = on_stop
        self._at_once = at_once
        self._shared, self._sharing = ExitStack(), 0
        self._background = Background()
        self._leaving: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._forks = forks()
        self.stopping = asyncio.Event()
        """Set once it was asked to stop; made anew by each life, which may be on another loop."""

    @property
    def is_lived(self) -> bool:
        """Whether it has begun and is not over."""
        return self._loop is not None

    @property
    def is_leaving(self) -> bool:
        """Whether it leaves, or has left."""
        return self._leaving is not None

    @property
    def is_inherited(self) -> bool:
        """Whether it was made, or last began, before a fork: then it is the parent's, and nothing here may touch it."""
        return self._forks != forks()

    def stop(self) -> None:
        """Ask it to end; returns at once."""
        if self._at_once is not None:
            self._at_once()
        self.do(self.stopping.set if self._loop is None else self._stop)

    def do(self, action: Callable[[], None]) -> None:
        """Call ``action`` on its loop, from any thread or signal handler; here and now while it does not live.

        In a child that was forked meanwhile nothing happens: its life is the parent's.
        """
        if self._loop is None:
            action()
        elif not self.is_inherited:
            with suppress(RuntimeError):  # that loop has been closed, and all is over
                self._loop.call_soon_threadsafe(action)

    def _stop(self) -> None:
        self.stopping.set()
        if self._on_stop is not None:
            self._on_stop()

    @contextmanager
    def lived(self) -> Generator[None]:
        """It lives within the block; SIGTERM and SIGINT stop it, if it handles signals."""
        if self._loop is not None:
            raise ConfigError(f"{self.name} runs already")
        self._loop, self._forks = asyncio.get_running_loop(), forks()
        self._leaving = None
        if not self.stopping.is_set():
            self.stopping = asyncio.Event()
        self._says("begins")
        try:
            with ExitStack() as signals:
                if self.handles_signals:
                    signals.enter_context(stop_on_signals(self.stop))
                yield
        finally:
            self._loop = None
            self.stopping = asyncio.Event()
            self._says("is over")

    @contextmanager
    def shared(self) -> Generator[None]:
        """It lives within the block, as :meth:`lived`, or within several at once: then it is over with the last."""
        if not self._sharing:
            self._shared.enter_context(self.lived())
        self._sharing += 1
        try:
            yield
        finally:
            self._sharing -= 1
            if not self._sharing:
                self._shared.close()

    async def asked_to_stop(self) -> None:
        """Return when it is asked to stop."""
        await self.stopping.wait()

    async def until_stopped(self, *work: asyncio.Task[None]) -> None:
        """Return when it is asked to stop. Raise what ended one of ``work`` before; none of these ends by itself."""
        stopping = asyncio.get_running_loop().create_task(self.asked_to_stop(), name="conquiet-stopping")
        try:
            await asyncio.wait([stopping, *work], return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopping.cancel()
        for task in work:
            if task.done():
                if not task.cancelled():
                    task.result()
                if not self.stopping.is_set():
                    raise ConquietError(f"{task.get_name()} of {self.name} has ended by itself")

    async def leave(
        self, drain: Callable[[], Awaitable[None]], close: Callable[[], Awaitable[None]], seconds: float
    ) -> None:
        """Leave in good order: ``drain`` has ``seconds`` and most of a moment, then ``close`` ends what is left.

        Both together take ``seconds`` and a moment at most, and are done though the caller is cancelled meanwhile,
        however often; that is raised afterwards. What is not done in time is cancelled and not waited for, with a line
        in the log. Who calls while it leaves waits with the first.
        """
        leaving = self._leaving
        if leaving is None or leaving.cancelled() or (not leaving.done() and leaving.get_loop().is_closed()):
            self.stopping.set()
            work = self._leave(drain, close, seconds)
            leaving = self._leaving = asyncio.get_running_loop().create_task(work, name="conquiet-leave")
        if not leaving.done():
            await ended(leaving)

    async def _leave(
        self, drain: Callable[[], Awaitable[None]], close: Callable[[], Awaitable[None]], seconds: float
    ) -> None:
        self._says("leaves")
        loop = asyncio.get_running_loop()
        until = loop.time() + seconds + MOMENT
        try:
            if not await self._done(drain, seconds + MOMENT - _CLOSING):
                self._log.warning("%s did not leave in time: what it still holds runs out by itself", self.name)
        finally:
            # However late it is: what is never closed would go on beating.
            if not await self._done(close, max(until - loop.time(), _CLOSING)):
                self._log.warning("%s did not close in time: its connections are left to end by themselves", self.name)
            self._says("has left")

    async def _done(self, work: Callable[[], Awaitable[None]], within: float) -> bool:
        """Whether ``work`` was done in time; if not, it was cancelled."""

        async def do() -> None:
            await work()

        return await ended(self._background.start(do(), "leave"), within)

    def _says(self, what: str) -> None:
        self._log.info("%s %s", self.name, what)
        probe.tell(self.name, what)
