"""A way to a server that passes bytes on slowly, or at some point not at all."""

from __future__ import annotations

import asyncio
import socket
from contextlib import suppress
from types import TracebackType
from typing import Final, Self
from urllib.parse import urlsplit

__all__ = ["SlowWay"]

_STEP: Final = 0.01
"""Seconds between two portions."""
_BUFFER: Final = 1 << 14
"""What the kernel keeps for the reader: with its usual megabytes, the writer would not notice that the way is slow."""


class SlowWay:
    """Passes ``rate`` bytes a second on, each way and on each connection; see :meth:`stall`."""

    def __init__(self, upstream: str, rate: int) -> None:
        parts = urlsplit(upstream)
        self._upstream = (parts.hostname or "", parts.port or 0)
        self._portion = max(1, round(rate * _STEP))
        self._server: asyncio.Server | None = None
        self._conversations: set[asyncio.Task[None]] = set()
        self._port = 0
        self._left: dict[str, int] = {}
        self.accepted = 0
        """How many connections clients have opened so far."""

    async def __aenter__(self) -> Self:
        listening = socket.socket()
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER)
        listening.bind(("127.0.0.1", 0))
        self._server = await asyncio.start_server(self._accept, sock=listening, limit=_BUFFER)
        self._port = int(listening.getsockname()[1])
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._server is not None
        self._server.close()
        for conversation in tuple(self._conversations):
            conversation.cancel()
        await asyncio.gather(*self._conversations, return_exceptions=True)
        await self._server.wait_closed()

    @property
    def url(self) -> str:
        """Where clients find it."""
        return f"redis://127.0.0.1:{self._port}"

    def stall(self, direction: str, after: int) -> None:
        """Pass on only ``after`` more bytes ``"up"`` to the server or ``"down"`` to clients, and then none."""
        self._left[direction] = after

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._conversations.add(task)
        self.accepted += 1
        server_reader, server_writer = await asyncio.open_connection(*self._upstream, limit=_BUFFER)
        try:
            async with asyncio.TaskGroup() as pumps:
                pumps.create_task(self._pump("up", reader, server_writer))
                pumps.create_task(self._pump("down", server_reader, writer))
        except* (OSError, asyncio.CancelledError):
            pass  # one side is gone, or the way closes
        finally:
            for end in (writer, server_writer):
                end.transport.abort()
                with suppress(OSError, asyncio.CancelledError):
                    await end.wait_closed()
            self._conversations.discard(task)

    async def _pump(self, direction: str, source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        while data := await source.read(self._portion):
            if direction in self._left:
                data, self._left[direction] = data[: self._left[direction]], max(0, self._left[direction] - len(data))
            target.write(data)
            await target.drain()
            await asyncio.sleep(_STEP)  # which is what makes it slow
        raise ConnectionError("the other end has closed")
