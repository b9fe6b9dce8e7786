"""Commands that block on the server, on a connection of their own, and the way to wake them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Final

import anyio
from redis.asyncio.connection import AbstractConnection
from redis.exceptions import RedisError

from conquiet.kit.service import Background
from conquiet.wire.interrupt import Interrupt
from conquiet.wire.lane import Lane
from conquiet.wire.parser import Reply
from conquiet.wire.streams import pack

__all__ = ["WaitingLane"]

_log = logging.getLogger("conquiet.wire")
_AGAIN: Final = 0.02
_WATCHDOG: Final = 5.0


class WaitingLane:
    """One blocking command at a time.

    A request on the interrupt makes the server answer the blocked command at once, with ``CLIENT UNBLOCK`` from
    another connection to the same node: the command is never torn off, so whatever the server handed out at
    that moment still arrives. A cancelled call is ended on the server in the same way, so that nothing more is
    handed to it. Where the server forbids ``CLIENT``, the command runs to its own end.
    """

    def __init__(self, dial: Callable[[], AbstractConnection], timeout: float | None, control: Lane) -> None:
        self._lane = Lane(dial, timeout)
        self._timeout = timeout
        self._control = control
        self._client_id: int | None = None
        self._identified: AbstractConnection | None = None
        self._background = Background()

    async def call(
        self, commands: Sequence[bytes], seconds: float, interrupt: Interrupt, unsent: Reply | None = None
    ) -> Reply | None:
        """The reply to the last of ``commands``, which blocks for up to ``seconds``; ``unsent`` if none was sent.

        A server that is silent for five seconds longer than that is given up (``TimeoutError``).
        """
        await self._identify()
        answered = asyncio.Event()
        wakers: list[asyncio.Task[None]] = []

        def wake() -> None:
            wakers.append(self._background.start(self._wake(answered), "unblock"))

        with interrupt.waking(wake):
            if interrupt.requested:
                return unsent
            try:
                # A cancelled call of several commands is torn off: which answer is due is not known then.
                hurry = wake if len(commands) == 1 and self._client_id is not None else None
                size = sum(map(len, commands))
                replies = await self._lane.converse(commands, size, seconds + _WATCHDOG, hurry)
            finally:
                answered.set()
                await self._end(wakers)
        return replies[-1]

    async def _end(self, wakers: list[asyncio.Task[None]]) -> None:
        """An UNBLOCK that is still on its way must not hit the next command of this connection."""
        if wakers and self._lane.is_open:
            try:
                with anyio.CancelScope(shield=True):
                    await asyncio.wait(wakers)
            except asyncio.CancelledError:  # once more, past the shield
                await self._lane.drop()
                raise

    async def aclose(self) -> None:
        """Close the connection; a command that still blocks on it fails."""
        await self._background.aclose()
        await self._lane.aclose()

    async def _identify(self) -> None:
        connection, _ = await self._lane.connected()
        if connection is self._identified:
            return
        command = pack("CLIENT", "ID")
        [reply] = await self._lane.converse((command,), len(command), self._timeout)
        self._client_id = reply if isinstance(reply, int) else None
        self._identified = connection

    async def _wake(self, answered: asyncio.Event) -> None:
        # An UNBLOCK that arrives before the command does nothing, hence again until the answer is here.
        while not answered.is_set():
            if not await self._unblock():
                return
            try:
                async with asyncio.timeout(_AGAIN):
                    await answered.wait()
            except TimeoutError:
                continue

    async def _unblock(self) -> bool:
        if self._client_id is None:
            reply: object = "the server does not tell the connection's ID"
        else:
            try:
                command = pack("CLIENT", "UNBLOCK", self._client_id)
                [reply] = await self._control.call((command,), len(command))
            except (RedisError, OSError) as error:
                reply = error
        if isinstance(reply, int):
            return True
        _log.warning("cannot wake a blocked read, it will run to its end: %s", reply)
        return False
