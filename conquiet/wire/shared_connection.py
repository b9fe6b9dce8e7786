"""A connection that many callers share, wherever the object that has it is used."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from redis.asyncio.connection import AbstractConnection

from conquiet.errors import ConfigError
from conquiet.kit.loopthread import forks, leave_behind
from conquiet.wire.line import CLOSED, Line
from conquiet.wire.parser import Replies, Reply

__all__ = ["SharedConnection", "running_loop"]


class SharedConnection:
    """Opened by the first call, and again after it was lost, on another loop or in a forked child.

    Fifty concurrent callers cost one round trip, not fifty. Nothing is sent twice. When a call fails or is cancelled
    between its write and its last reply, the connection is thrown away, so that no reply is ever taken for the answer
    to another call.
    """

    def __init__(self, dial: Callable[[], AbstractConnection], timeout: float | None) -> None:
        self._dial = dial
        self._timeout = timeout
        self._line: Line | None = None
        self._closed = False

    def call(self, commands: Sequence[bytes], size: int) -> Awaitable[list[Reply]]:
        """Send packed ``commands``, which have ``size`` bytes; their replies in order, error replies as values."""
        return self._here().call(commands, size)

    def converse(
        self, commands: Sequence[bytes], size: int, timeout: float | None, hurry: Callable[[], None] | None = None
    ) -> Awaitable[list[Reply]]:
        """As :meth:`Line.converse`."""
        return self._here().converse(commands, size, timeout, hurry)

    def connected(self) -> Awaitable[tuple[AbstractConnection, Replies]]:
        """As :meth:`Line.connected`."""
        return self._here().connected()

    @property
    def is_open(self) -> bool:
        """Whether there is a connection now."""
        return self._line is not None and self._line.is_open

    @property
    def peer(self) -> object:
        """As :attr:`Line.peer`."""
        return None if self._line is None else self._line.peer

    @property
    def is_ready(self) -> bool:
        """As :attr:`Line.is_ready`, where it is used."""
        return self._here().is_ready

    def expect_within(self, seconds: float) -> None:
        """As :meth:`Line.expect_within`."""
        if self._line is not None:
            self._line.expect_within(seconds)

    @property
    def opened(self) -> int:
        """How many connections there were so far, on the loop where it is used."""
        return 0 if self._line is None else self._line.opened

    async def drop(self) -> None:
        """Throw the connection away; the next call opens another."""
        if self._line is not None:
            await self._line.drop()

    async def aclose(self) -> None:
        """Fail all calls that wait, and close the connection, also one that is just being made."""
        self._closed = True
        line, self._line = self._line, None
        if line is None:
            return
        if line.forks != forks():
            leave_behind(line)  # closed here, it would be closed for the parent as well
        elif not line.loop.is_closed():  # with that loop it has ended, and so have its callers
            await line.aclose()

    def _here(self) -> Line:
        """The line of the running loop, looked up before anything that a former loop or the parent may have left."""
        line = self._line
        if line is not None and line.loop is running_loop() and line.forks == forks():
            return line
        loop = running_loop()
        if self._closed:
            raise ConnectionError(CLOSED)
        if line is not None:
            _leave(line, loop)
        self._line = line = Line(self._dial, self._timeout, loop)
        return line


def _leave(line: Line, loop: asyncio.AbstractEventLoop) -> None:
    """Part with what the parent process, or a loop that has ended, had open."""
    if line.forks != forks():
        if line.loop is loop:
            raise ConfigError("this event loop is the parent's, which both would disturb: run another in the child")
        leave_behind(line)
    elif line.is_in_use and not line.loop.is_closed():
        raise ConfigError("opened on another event loop, which is still there: make one object for each loop")


def running_loop() -> asyncio.AbstractEventLoop:
    """The caller's event loop; ``ConfigError`` if that is not asyncio's."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        raise ConfigError("conquiet runs on asyncio: it cannot be used from trio or without an event loop") from None
