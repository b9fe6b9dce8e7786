"""A TCP relay that knows no protocol, and can stand still: connections stay open, and nothing passes."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from types import TracebackType
from typing import Final, Self

__all__ = ["Relay"]

_CHUNK: Final = 1 << 16


class Relay:
    """Passes everything on, both ways, until it is frozen; new connections are taken even then."""

    def __init__(self, port: int) -> None:
        self._upstream = port
        self._server: asyncio.Server | None = None
        self._conversations: set[asyncio.Task[None]] = set()
        self._passing = asyncio.Event()
        self._passing.set()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._server is not None
        self._server.close()
        for conversation in self._conversations:
            conversation.cancel()
        await asyncio.gather(*self._conversations, return_exceptions=True)
        await self._server.wait_closed()

    @property
    def port(self) -> int:
        """Where clients find it."""
        assert self._server is not None
        return int(self._server.sockets[0].getsockname()[1])

    def freeze(self) -> None:
        """Let nothing pass from now on."""
        self._passing.clear()

    def thaw(self) -> None:
        """Let everything pass again, what came meanwhile first."""
        self._passing.set()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._conversations.add(task)
        try:
            await self._passing.wait()
            there, back = await asyncio.open_connection("127.0.0.1", self._upstream)
            try:
                await asyncio.gather(self._pump(reader, back), self._pump(there, writer))
            finally:
                back.transport.abort()
        except (OSError, asyncio.CancelledError):
            pass  # one side is gone, or the relay closes
        finally:
            writer.transport.abort()
            self._conversations.discard(task)

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(_CHUNK):
            await self._passing.wait()
            writer.write(data)
            await writer.drain()
        with suppress(OSError):
            writer.write_eof()
