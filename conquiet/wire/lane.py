"""One connection, and the order in which calls go through it."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final, cast

import anyio
from redis.asyncio.connection import AbstractConnection
from redis.exceptions import RedisError

from conquiet.errors import ConfigError
from conquiet.kit.loopthread import forks, outlive_fork
from conquiet.kit.service import Background
from conquiet.wire.parser import Reply, ReplyParser
from conquiet.wire.watchdog import Watchdog

__all__ = ["Lane", "running_loop"]

_HURRY: Final = 1.0
_CLOSED: Final = "the connection was closed"


class Lane:
    """A connection that many callers share, opened by the first call and again after it was lost.

    A caller who finds the lane free talks at once. Whoever comes meanwhile waits, and all who wait go out
    together in the next write: fifty concurrent callers cost one round trip, not fifty. Nothing is sent twice.
    When a call fails or is cancelled between its write and its last reply, the connection is thrown away, so
    that no reply is ever taken for the answer to another call.
    """

    def __init__(self, dial: Callable[[], AbstractConnection], timeout: float | None) -> None:
        self._dial = dial
        self._timeout = timeout
        self._connection: AbstractConnection | None = None
        self._parser: ReplyParser | None = None
        self._busy = False
        self._waiting: deque[_Call] = deque()
        self._background = Background()
        self._watchdog = Watchdog(self._abort)
        self._forks = forks()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closed = False

    async def call(self, commands: Sequence[bytes]) -> list[Reply]:
        """Send packed ``commands`` in one write; their replies in order, error replies as values."""
        if self._busy:
            call = _Call(commands)
            self._waiting.append(call)
            return await call.answered
        self._busy = True
        try:
            return await self.converse(commands, self._timeout)
        finally:
            self._hand_on()

    async def converse(
        self, commands: Sequence[bytes], timeout: float | None, hurry: Callable[[], None] | None = None
    ) -> list[Reply]:
        """One write and its replies, for a caller who knows that nobody else is using the lane.

        ``hurry`` makes the server answer a blocked command at once. With it, a cancelled call still takes its
        answer in before it ends: torn off, the connection would go on being served for a moment.
        """
        connection, parser = await self.connected()
        self._watchdog.expect(timeout)
        try:
            await connection.send_packed_command(commands, check_health=False)
            replies = await parser.read_replies(len(commands))
        except BaseException as error:
            await self._settle(error, hurry, parser)
            if self._watchdog.overdue and isinstance(error, Exception):
                raise TimeoutError(f"no answer within {timeout:g} s") from error
            raise
        finally:
            self._watchdog.rest()
        return replies

    async def _settle(self, error: BaseException, hurry: Callable[[], None] | None, parser: ReplyParser) -> None:
        """After a failed or cancelled conversation: no reply is left on the connection, or no connection."""
        clean = False
        try:
            if hurry is not None and isinstance(error, asyncio.CancelledError):
                clean = await self._take_in(hurry, parser)
        finally:  # also when it is cancelled a second time
            if not clean:
                await self._drop()

    async def _take_in(self, hurry: Callable[[], None], parser: ReplyParser) -> bool:
        with anyio.move_on_after(_HURRY, shield=True), suppress(RedisError, OSError):
            hurry()
            await parser.read_replies(1)
            return True
        return False

    async def connected(self) -> tuple[AbstractConnection, ReplyParser]:
        """The open connection, made now if there is none or if the server closed it while it was idle."""
        loop = running_loop()
        if self._loop is not loop or self._forks != forks():
            self._start_over(loop)
        connection, parser = self._connection, self._parser
        if connection is not None and parser is not None:
            if parser.is_quiet():
                return connection, parser
            await self._drop()
        return await self._connect()

    @property
    def is_open(self) -> bool:
        """Whether there is a connection now."""
        return self._connection is not None

    async def aclose(self) -> None:
        """Fail whoever still waits, and close the connection, also one that is just being made."""
        self._closed = True
        await self._background.aclose()
        while self._waiting:
            self._waiting.popleft().fail(ConnectionError(_CLOSED))
        self._watchdog.cancel()
        await self._drop()

    async def _connect(self) -> tuple[AbstractConnection, ReplyParser]:
        if self._closed:
            raise ConnectionError(_CLOSED)
        connection = self._connection = self._dial()
        outlive_fork(connection)
        try:
            async with asyncio.timeout(self._timeout):
                await connection.connect()  # type: ignore[no-untyped-call]
            if self._closed:
                raise ConnectionError(_CLOSED)
        except BaseException as error:
            self._connection = None
            await connection.disconnect(nowait=True)
            if isinstance(error, TimeoutError):
                raise TimeoutError(f"no connection within {self._timeout:g} s") from error
            raise
        parser = cast("ReplyParser", connection._parser)  # pyright: ignore[reportUnknownMemberType]
        self._parser = parser
        return connection, parser

    def _start_over(self, loop: asyncio.AbstractEventLoop) -> None:
        """Leave a connection behind that the parent process, or a loop that has ended, had open."""
        ours = self._forks == forks()
        if ours and self._connection is not None and self._loop is not None and not self._loop.is_closed():
            raise ConfigError("opened on another event loop, which is still there: make one object for each loop")
        self._connection = self._parser = None
        self._watchdog = Watchdog(self._abort)
        self._loop, self._forks = loop, forks()

    async def _drop(self) -> None:
        connection, self._connection, self._parser = self._connection, None, None
        if connection is not None:
            await connection.disconnect(nowait=True)

    def _abort(self) -> None:
        writer = self._connection and self._connection._writer
        if writer:
            writer.transport.abort()

    def _hand_on(self) -> None:
        if self._waiting:
            self._background.start(self._serve_waiting(), "lane")
        else:
            self._busy = False

    async def _serve_waiting(self) -> None:
        # A task of its own, so that no caller's cancellation tears the answers of the others.
        try:
            while self._waiting:
                calls = [call for call in self._waiting if not call.answered.done()]
                self._waiting.clear()
                await self._serve(calls)
                await asyncio.sleep(0)  # those just answered may have more to send: take it along
        finally:
            self._busy = False

    async def _serve(self, calls: list[_Call]) -> None:
        if not calls:
            return
        try:
            replies = await self.converse([part for call in calls for part in call.commands], self._timeout)
        except BaseException as error:
            for call in calls:
                call.fail(error)
            if not isinstance(error, Exception):
                raise
            return
        start = 0
        for call in calls:
            end = start + len(call.commands)
            call.succeed(replies[start:end])
            start = end


def running_loop() -> asyncio.AbstractEventLoop:
    """The caller's event loop; ``ConfigError`` if that is not asyncio's."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        raise ConfigError("conquiet runs on asyncio: it cannot be used from trio or without an event loop") from None


class _Call:
    """Commands that wait for the next write, and the promise of their replies."""

    __slots__ = ("answered", "commands")

    def __init__(self, commands: Sequence[bytes]) -> None:
        self.commands = commands
        self.answered: asyncio.Future[list[Reply]] = asyncio.get_running_loop().create_future()

    def succeed(self, replies: list[Reply]) -> None:
        if not self.answered.done():
            self.answered.set_result(replies)

    def fail(self, error: BaseException) -> None:
        if not self.answered.done():
            cancelled = isinstance(error, asyncio.CancelledError)
            self.answered.set_exception(ConnectionError(_CLOSED) if cancelled else error)
