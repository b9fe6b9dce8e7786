"""One connection on one event loop of one process, and the order in which calls go through it."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Final, cast

import anyio
from redis.asyncio.connection import AbstractConnection
from redis.exceptions import RedisError

from conquiet.kit.loopthread import forks, outlive_fork
from conquiet.kit.service import Background
from conquiet.wire.credentials import TRIED_AGAIN_AFTER, Credentials, credentials_of
from conquiet.wire.internals import replies_of, writer_of
from conquiet.wire.kernel import KernelView
from conquiet.wire.parser import Replies, Reply
from conquiet.wire.watchdog import Watchdog

__all__ = ["CLOSED", "LARGE", "Line"]

CLOSED: Final = "the connection was closed"
LARGE: Final = 1 << 16
"""More bytes than this take a while to send: they go over a connection of their own, and are followed on their way."""
_TOGETHER: Final = 1 << 20
"""How many bytes of several calls go out in one write."""
_HURRY: Final = 1.0
_A_MOMENT: Final = 0.01


class Line:
    """What a shared connection has on one loop of one process: of no use on another loop or after a fork.

    A caller that finds the line free talks at once. Calls that come meanwhile wait, and go out together
    in the next write, up to a number of bytes. An answer is overdue after so many seconds of *silence*: as long as
    bytes go out or come in, however slowly, no call is given up.
    """

    def __init__(
        self, dial: Callable[[], AbstractConnection], timeout: float | None, loop: asyncio.AbstractEventLoop
    ) -> None:
        self._dial = dial
        self._timeout = timeout
        self.loop = loop
        self.forks = forks()
        self._connection: AbstractConnection | None = None
        self._parser: Replies | None = None
        self._logged_out: Replies | None = None
        """The parser of a connection that has to log in again first."""
        self._login_timer: asyncio.TimerHandle | None = None
        self._kernel: KernelView | None = None
        self._asked = -math.inf
        self._busy = False
        self.opened = 0
        """How many connections there were so far."""
        self._waiting: deque[_Call] = deque()
        self._background = Background()
        self._watchdog = Watchdog(self._abort)
        self._closed = False

    @property
    def is_open(self) -> bool:
        """Whether there is a connection now."""
        return self._connection is not None

    @property
    def peer(self) -> object:
        """Which server it is connected to, if that is known."""
        return None if self._kernel is None else self._kernel.peer

    @property
    def is_ready(self) -> bool:
        """Whether there is a connection that the next call will use."""
        return self._parser is not None and self._is_quiet(self._parser, self.loop.time())

    @property
    def is_in_use(self) -> bool:
        """Whether there is a connection, or a caller that wants one."""
        return self._busy or self._connection is not None

    def call(self, commands: Sequence[bytes], size: int) -> Awaitable[list[Reply]]:
        """Send packed ``commands``, which have ``size`` bytes; their replies in order, error replies as values.

        To be awaited at once.
        """
        if not self._busy:
            return self._talk(commands, size)
        call = _Call(commands, size, self.loop)
        self._waiting.append(call)
        return call.answered

    async def _talk(self, commands: Sequence[bytes], size: int) -> list[Reply]:
        self._busy = True
        try:
            return await self.converse(commands, size, self._timeout)
        finally:
            self._hand_on()

    async def converse(
        self, commands: Sequence[bytes], size: int, timeout: float | None, hurry: Callable[[], None] | None = None
    ) -> list[Reply]:
        """One write and its replies, for a caller that knows that no other uses the line.

        ``timeout`` is for the beginning of the answer. ``hurry`` makes the server answer a blocked command at once.
        With it, a cancelled call still takes its answer in before it ends: torn off, the connection would go on being
        served for a moment.
        """
        now = self.loop.time()
        connection, parser = self._connection, self._parser
        if connection is None or parser is None or not self._is_quiet(parser, now):
            connection, parser = await self.connected()
            now = self.loop.time()
        self._asked = now
        watchdog = self._watchdog
        watchdog.expect(now, timeout, timeout if self._timeout is None else self._timeout)
        try:
            if size > LARGE and self._kernel is not None:
                watchdog.follow(self._kernel.unsent, size)
            await connection.send_packed_command(commands, check_health=False)
            replies = await parser.read_replies(len(commands), watchdog.moved)
            if parser.has_more():
                raise ConnectionError("the server sent more replies than it was asked for: which is whose is not known")
        except BaseException as error:
            await self._settle(error, hurry, parser)
            if watchdog.overdue and isinstance(error, Exception):
                raise TimeoutError(f"no answer within {watchdog.overdue:g} s") from error
            raise
        finally:
            watchdog.rest()
        return replies

    async def connected(self) -> tuple[AbstractConnection, Replies]:
        """The open connection, made now if there is none or if the server closed it while it was idle."""
        connection, parser = self._connection, self._parser or self._logged_out
        if connection is not None and parser is not None:
            if self._is_quiet(parser, self.loop.time()):
                if parser is self._logged_out:
                    await self._log_in(connection, parser)
                return connection, parser
            await self.drop()
        return await self._connect()

    def renew_login(self) -> None:
        """Log in again before the next call: there are new credentials."""
        if self._parser is not None:
            self._logged_out, self._parser = self._parser, None

    def _is_quiet(self, parser: Replies, now: float) -> bool:
        """Whether nothing was said since the last answer. Right after it, the kernel is not worth a question."""
        if not parser.is_quiet():
            return False
        return now < self._asked + _A_MOMENT or self._kernel is None or not self._kernel.has_news()

    def expect_within(self, seconds: float) -> None:
        """From now on, the answer that is waited for, if there is one, is overdue after so many seconds of silence."""
        if self._watchdog.is_expecting:
            self._watchdog.expect(self.loop.time(), seconds, seconds)

    async def drop(self) -> None:
        """Throw the connection away; the next call opens another."""
        connection, self._connection, self._parser, self._logged_out = self._connection, None, None, None
        if self._login_timer is not None:
            self._login_timer.cancel()
            self._login_timer = None
        kernel, self._kernel = self._kernel, None
        if kernel is not None and kernel.unsent():
            kernel.abort()  # closed, it would first wait until a server that may be frozen has taken the rest
        if connection is not None:
            await connection.disconnect(nowait=True)

    async def aclose(self) -> None:
        """Fail all calls that wait, and close the connection, also one that is just being made."""
        self._closed = True
        try:
            await self._background.aclose()
        finally:  # also when all tasks there are were cancelled, and this one among them
            self._hand_on()
            self._watchdog.cancel()
            await self.drop()

    # --- the connection ---------------------------------------------------------------------------------------

    async def _connect(self) -> tuple[AbstractConnection, Replies]:
        if self._closed:
            raise ConnectionError(CLOSED)
        connection = self._connection = self._dial()
        outlive_fork(connection)
        limit = asyncio.timeout(self._timeout)
        try:
            async with limit:
                await connection.connect()  # type: ignore[no-untyped-call]
            if self._closed:
                raise ConnectionError(CLOSED)
        except BaseException as error:
            self._connection = None
            await connection.disconnect(nowait=True)
            if limit.expired() and isinstance(error, TimeoutError):
                raise TimeoutError(f"no connection within {self._timeout:g} s") from error
            raise
        writer = writer_of(connection)
        self._kernel = None if writer is None else KernelView(writer)
        self._parser = parser = replies_of(connection)
        self.opened += 1
        if (credentials := credentials_of(connection)) is not None:
            credentials.follow(self)
            self._log_in_after(credentials.renewed_after)
        return connection, parser

    async def _log_in(self, connection: AbstractConnection, parser: Replies) -> None:
        credentials = cast("Credentials", credentials_of(connection))
        try:
            async with asyncio.timeout(self._timeout):
                is_done = await credentials.log_in(connection, parser)
        except BaseException:
            await self.drop()  # an answer may be on its way
            raise
        self._parser, self._logged_out = parser, None
        self._log_in_after(credentials.renewed_after if is_done else TRIED_AGAIN_AFTER)

    def _log_in_after(self, seconds: float | None) -> None:
        if self._login_timer is not None:
            self._login_timer.cancel()
        self._login_timer = None if seconds is None else self.loop.call_later(seconds, self.renew_login)

    def _abort(self) -> None:
        if self._kernel is not None:
            self._kernel.abort()
        elif self._connection is not None:
            self._background.start(self._connection.disconnect(nowait=True), "abort")

    async def _settle(self, error: BaseException, hurry: Callable[[], None] | None, parser: Replies) -> None:
        """After a failed or cancelled conversation: no reply is left on the connection, or no connection."""
        clean = False
        try:
            if hurry is not None and isinstance(error, asyncio.CancelledError):
                clean = await self._take_in(hurry, parser)
        finally:  # also when it is cancelled a second time
            if not clean:
                await self.drop()

    async def _take_in(self, hurry: Callable[[], None], parser: Replies) -> bool:
        with anyio.move_on_after(_HURRY, shield=True), suppress(RedisError, OSError):
            hurry()
            await parser.read_replies(1)
            return True
        return False

    # --- those who wait ---------------------------------------------------------------------------------------

    def _hand_on(self) -> None:
        waiting = self._waiting
        if self._closed:
            while waiting:
                waiting.popleft().fail(ConnectionError(CLOSED))
        while waiting and waiting[0].answered.done():
            waiting.popleft()  # its caller has left: at the end of a loop nothing would run any more
        if waiting:
            serving = self._background.start(self._serve_waiting(), "lane")
            serving.add_done_callback(self._served)
        else:
            self._busy = False

    def _served(self, serving: asyncio.Task[None]) -> None:
        # Not in the task itself: one that is cancelled before its first step runs nothing of its own.
        if serving.cancelled() or serving.exception() is not None:
            self._hand_on()

    async def _serve_waiting(self) -> None:
        # A task of its own, so that no caller's cancellation tears the answers of the others.
        while self._waiting:
            calls, size = self._next_write()
            if calls:
                await self._serve(calls, size)
            await asyncio.sleep(0)  # those just answered may have more to send: take it along
        self._busy = False

    def _next_write(self) -> tuple[list[_Call], int]:
        waiting = self._waiting
        calls: list[_Call] = []
        size = 0
        while waiting and (not calls or size + waiting[0].size <= _TOGETHER):
            call = waiting.popleft()
            if not call.answered.done():
                calls.append(call)
                size += call.size
        return calls, size

    async def _serve(self, calls: list[_Call], size: int) -> None:
        try:
            commands = [part for call in calls for part in call.commands]
            replies = await self.converse(commands, size, self._timeout)
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


class _Call:
    """Commands that wait for the next write, and the promise of their replies."""

    __slots__ = ("answered", "commands", "size")

    def __init__(self, commands: Sequence[bytes], size: int, loop: asyncio.AbstractEventLoop) -> None:
        self.commands = commands
        self.size = size
        self.answered: asyncio.Future[list[Reply]] = loop.create_future()

    def succeed(self, replies: list[Reply]) -> None:
        if not self.answered.done():
            self.answered.set_result(replies)

    def fail(self, error: BaseException) -> None:
        if not self.answered.done():
            cancelled = isinstance(error, asyncio.CancelledError)
            self.answered.set_exception(ConnectionError(CLOSED) if cancelled else error)
