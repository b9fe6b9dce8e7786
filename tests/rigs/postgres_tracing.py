"""A proxy before PostgreSQL that knows the store's statements by name, keeps their trace, and strikes at one of them.

It lets a statement commit, and ends the connection in place of the answer.
"""

from __future__ import annotations

import asyncio
import struct
from collections import deque
from collections.abc import AsyncIterator, Mapping
from types import TracebackType
from typing import Final, Self

from tests.rigs.tracing import Striker

__all__ = ["PostgresTracer"]

_STARTUP: Final = 196_608
"""The code of the first message of a conversation; another one asks for encryption, or cancels somebody's statement."""
_READY: Final = b"Z"


class PostgresTracer(Striker):
    """Passes everything on, but for one statement that it was told to strike at.

    ``names`` has the names of statements by their text; one that is not there goes by its first word. Connections must
    not be encrypted.
    """

    def __init__(self, port: int, names: Mapping[bytes, str]) -> None:
        super().__init__()
        self._upstream = port
        self._names = names
        self._server: asyncio.Server | None = None
        self._conversations: set[asyncio.Task[None]] = set()
        self._is_shut = False

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._server is not None
        self._server.close()
        self.shut()
        await asyncio.gather(*self._conversations, return_exceptions=True)
        await self._server.wait_closed()

    @property
    def dsn(self) -> str:
        """Where clients find it."""
        assert self._server is not None
        port = self._server.sockets[0].getsockname()[1]
        return f"postgresql://postgres@127.0.0.1:{port}/postgres?sslmode=disable&gssencmode=disable"

    def shut(self) -> None:
        """Close every connection that is open now, and each that is opened from now on."""
        self._is_shut = True
        for conversation in self._conversations:
            conversation.cancel()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._conversations.add(task)
        try:
            if not self._is_shut:
                await self._converse(reader, writer)
        except (OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass  # one side is gone, or the proxy closes
        finally:
            writer.transport.abort()
            self._conversations.discard(task)

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection("127.0.0.1", self._upstream)
        conversation = _Conversation(self._names)
        pumps = [
            asyncio.create_task(self._pump_statements(reader, back, conversation)),
            asyncio.create_task(self._pump_answers(there, writer, conversation)),
        ]
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            back.transport.abort()  # at once: a second cancellation must not leave it open
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)

    async def _pump_statements(
        self, reader: asyncio.StreamReader, server: asyncio.StreamWriter, conversation: _Conversation
    ) -> None:
        first = await _untyped(reader)
        server.write(first)
        if struct.unpack("!I", first[4:8])[0] == _STARTUP:
            conversation.awaited.append("")  # the answer to it ends as that to a statement
        async for kind, message in _messages(reader):
            name = conversation.begun(kind, message[5:])
            if name and not self._may_be_sent([name]):
                return
            server.write(message)
            await server.drain()

    async def _pump_answers(
        self, server: asyncio.StreamReader, client: asyncio.StreamWriter, conversation: _Conversation
    ) -> None:
        answer = bytearray()
        async for kind, message in _messages(server):
            answer += message
            if kind == _READY:
                name = conversation.awaited.popleft()
                if name and not await self._may_be_answered([name]):
                    return
            if kind == _READY or len(conversation.awaited) == 0:
                client.write(bytes(answer))  # all of it, or nothing
                await client.drain()
                answer.clear()
            elif conversation.awaited[0] == "":
                client.write(bytes(answer))
                answer.clear()


class _Conversation:
    """What a client has asked for and the server has not answered yet, by name; empty for what is no statement."""

    def __init__(self, names: Mapping[bytes, str]) -> None:
        self.awaited: deque[str] = deque()
        self._names = names
        self._prepared: dict[bytes, str] = {}
        self._running = ""

    def begun(self, kind: bytes, body: bytes) -> str:
        """The name of the statement that this message of the client begins, if it does."""
        if kind == b"Q":
            name = self._name(body.rstrip(b"\0"))
            self.awaited.append(name)
            return name
        if kind == b"P":
            prepared, text, _ = body.split(b"\0", 2)
            self._prepared[prepared] = self._name(text)
        elif kind == b"B":
            self._running = self._prepared[body.split(b"\0", 2)[1]]
            return self._running
        elif kind == b"S":
            self.awaited.append(self._running)
            self._running = ""
        return ""

    def _name(self, text: bytes) -> str:
        return self._names.get(text) or text.split(None, 1)[0].decode().strip(";").upper()


async def _untyped(reader: asyncio.StreamReader) -> bytes:
    head = await reader.readexactly(4)
    return head + await reader.readexactly(struct.unpack("!I", head)[0] - 4)


async def _messages(reader: asyncio.StreamReader) -> AsyncIterator[tuple[bytes, bytes]]:
    """Each message with its kind, until the other side ends."""
    while kind := await reader.read(1):
        yield kind, kind + await _untyped(reader)
