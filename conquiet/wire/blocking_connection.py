"""Commands that block on the server, on a connection of their own, and the way to wake them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import anyio
from redis.asyncio.connection import AbstractConnection
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError

from conquiet.kit.service import Background
from conquiet.wire.capabilities import Capabilities
from conquiet.wire.interrupt import Interrupt
from conquiet.wire.parser import Reply
from conquiet.wire.shared_connection import SharedConnection
from conquiet.wire.streams import pack

__all__ = ["Blocking", "BlockingConnection"]

_log = logging.getLogger("conquiet.wire")
_AGAIN: Final = 0.02
_PING: Final = pack("PING")
_WHO: Final = pack("CLIENT", "ID")
_FAILURES: Final = (RedisError, OSError)
_LOST: Final = (RedisConnectionError, OSError)
_WATCHDOG: Final = 5.0
_ENDING: Final = 1.0
"""Seconds for which the answer to an UNBLOCK is waited for when the command has ended."""
_SILENCE: Final = 0.95
"""Seconds of silence after which an interrupted command is torn off; with what that takes, one second."""


@dataclass(frozen=True, slots=True)
class Blocking:
    """How a command blocks, and how it is ended early."""

    seconds: float
    interrupt: Interrupt
    unsent: Reply | None = None
    """The reply to a command that was not sent, since the interrupt was requested before.

    If there is such a one, it is also the reply of a server that is silent for a second after the request.
    """
    harmless: bool = False
    """Whether the command changes nothing on the server, so that it may be torn off."""

    def may_be_left(self, error: Exception) -> bool:
        """Whether ``error`` is the silence of a server after a request that waits no longer."""
        return self.unsent is not None and self.interrupt.requested and isinstance(error, TimeoutError)


class BlockingConnection:
    """One blocking command at a time.

    A request on the interrupt makes the server answer the blocked command at once, with ``CLIENT UNBLOCK`` from
    another connection to the same node: the command is never torn off, so whatever the server handed out at
    that moment still arrives. A cancelled call is ended on the server in the same way, so that nothing more is
    handed to it. Where the server forbids it, or the other connection leads to another server of the same host name,
    the command runs to its own end. Only from a server that is silent the command is torn off, after a second.
    """

    def __init__(
        self,
        dial: Callable[[], AbstractConnection],
        timeout: float | None,
        control: SharedConnection,
        node: Capabilities,
    ) -> None:
        self._lane = SharedConnection(dial, timeout)
        self._timeout = timeout
        self._control = control
        self._node = node
        self._client_id: int | None = None
        self._identified: AbstractConnection | None = None
        self._is_torn = False
        self._background = Background()

    @property
    def is_open(self) -> bool:
        """Whether there is a connection now."""
        return self._lane.is_open

    async def call(self, commands: Sequence[bytes], how: Blocking) -> Reply | None:
        """The reply to the last of ``commands``, which blocks.

        A server that is silent for five seconds longer than the command blocks is given up (``TimeoutError``). When a
        harmless command is cancelled, or the server forbids to wake it, its connection is closed; an interrupted one
        answers ``None`` then.
        """
        if how.unsent is None or self._lane.is_ready:
            await self._identify()
        elif not await how.interrupt.ends(self._identify):
            return how.unsent
        self._is_torn = False
        answered = asyncio.Event()
        wakers: list[asyncio.Task[None]] = []

        def wake() -> None:
            if how.unsent is not None:
                self._lane.expect_within(_SILENCE)
            wakers.append(self._background.start(self._wake(answered, how), "unblock"))

        with how.interrupt.waking(wake):
            if how.interrupt.requested:
                return how.unsent
            try:
                # A cancelled call of several commands is torn off: which answer is due is not known then.
                is_sure = len(commands) == 1 and self._client_id is not None and not how.harmless
                size = sum(map(len, commands))
                replies = await self._lane.converse(commands, size, how.seconds + _WATCHDOG, wake if is_sure else None)
            except _FAILURES as error:
                if self._is_torn:
                    return None
                if how.may_be_left(error):
                    return how.unsent
                raise
            finally:
                answered.set()
                await self._end(wakers)
        return replies[-1]

    async def _end(self, wakers: list[asyncio.Task[None]]) -> None:
        """An UNBLOCK that is still on its way must not hit the next command of this connection."""
        if wakers and self._lane.is_open:
            try:
                with anyio.move_on_after(_ENDING, shield=True):
                    await asyncio.wait(wakers)
            finally:
                if not all(waker.done() for waker in wakers):
                    # It took too long, or was cancelled once more, past the shield.
                    for waker in wakers:
                        waker.cancel()
                    await self._lane.drop()

    async def aclose(self) -> None:
        """Close the connection; a command that still blocks on it fails."""
        await asyncio.gather(self._background.aclose(), self._lane.aclose())

    async def _identify(self) -> None:
        connection, _ = await self._lane.connected()
        if connection is self._identified:
            return
        commands = (_WHO, *(pack(*question) for question in self._node.questions()))
        [reply, *others] = await self._lane.converse(commands, sum(map(len, commands)), self._timeout)
        self._node.learn(others)
        self._client_id = reply if isinstance(reply, int) and self._node.can_unblock is not False else None
        self._identified = connection

    async def _wake(self, answered: asyncio.Event, how: Blocking) -> None:
        # An UNBLOCK that arrives before the command does nothing, hence again until the answer is here.
        while not answered.is_set():
            if (refusal := await self._unblock()) is not None:
                if how.harmless and not answered.is_set():
                    self._is_torn = True
                    await self._lane.drop()
                elif not how.harmless and (how.unsent is None or not isinstance(refusal, _LOST)):
                    self._lane.expect_within(how.seconds + _WATCHDOG)
                    _log.warning("cannot wake a blocked read, it will run to its end: %s", refusal)
                return
            try:
                async with asyncio.timeout(_AGAIN):
                    await answered.wait()
            except TimeoutError:
                continue

    async def _unblock(self) -> object | None:
        """Ask the server to answer the command; why it does not, if so."""
        if self._client_id is None:
            return "the server does not allow it"
        try:
            if not self._control.is_open:
                await self._control.call((_PING,), len(_PING))
            if self._control.peer != self._lane.peer:  # there, another client may have that ID
                return "the other connection to this host is one to another server"
            command = pack("CLIENT", "UNBLOCK", self._client_id)
            [reply] = await self._control.call((command,), len(command))
        except _FAILURES as error:
            return error
        return None if isinstance(reply, int) else reply
