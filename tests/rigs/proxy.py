"""A TCP proxy in front of a server, which knows where commands and replies end and can make trouble there."""

from __future__ import annotations

import asyncio
import ssl
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import Final, Self
from urllib.parse import urlsplit

__all__ = ["Hold", "Proxy", "Refusal"]

_CHUNK: Final = 1 << 16
_BULK: Final = b"$=!"
_NESTED: Final = b"*~>%"
_TURNS: Final = 5
"""Of the loop, in which a connection that is accepted comes to its conversation."""


@dataclass
class Hold:
    """Replies that are kept back."""

    needle: bytes
    once: bool = False
    """Whether it is the first such reply only."""
    caught: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the server has answered such a command, and the answer is here."""
    released: asyncio.Event = field(default_factory=asyncio.Event)

    def release(self) -> None:
        """Let it go, and all that come after."""
        self.released.set()


@dataclass
class _Cut:
    needle: bytes
    skip: int
    done: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass
class Refusal:
    """Commands that are answered by ``line``."""

    needle: bytes
    line: bytes
    times: int
    """How many more; 0 ends it."""


@dataclass(frozen=True)
class _Expected:
    """What goes to the client next: the server's reply to ``command``, or a ``line`` of our own."""

    command: bytes
    line: bytes = b""


class Proxy:
    """Passes everything on, but for the trouble that a test asks for.

    A needle is matched against a whole command as it is on the wire, so ``b"XADD"`` finds that command, and
    a stream's name finds what is done to that stream.
    """

    def __init__(self, upstream: str = "", *, secure: ssl.SSLContext | None = None) -> None:
        self.lead_to(upstream)
        self._secure = secure
        self._port = 0
        self._server: asyncio.Server | None = None
        self._conversations: set[asyncio.Task[None]] = set()
        self._clients: set[asyncio.StreamWriter] = set()
        self._passing: set[asyncio.Event] = set()
        self._holds: list[Hold] = []
        self._cuts: list[_Cut] = []
        self._refusals: list[Refusal] = []
        self.received: list[bytes] = []
        """Every command of every client, in the order of arrival."""
        self.forwarded: list[bytes] = []
        """Those of them that the server was given."""
        self.accepted = 0
        """How many connections clients have opened so far."""
        self._shut = False

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0, ssl=self._secure)
        self._port = int(self._server.sockets[0].getsockname()[1])
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._server is not None
        # When the server closes, asyncio leaves the transport of a connection open that it has just accepted: so first
        # it accepts no more, and then those that it has accepted come to their conversations.
        for listening in self._server.sockets:
            asyncio.get_running_loop().remove_reader(listening.fileno())
        for _ in range(_TURNS):
            await asyncio.sleep(0)
        self._server.close()
        await self.disconnect()
        await self._server.wait_closed()

    def lead_to(self, upstream: str) -> None:
        """Connect new clients to the server at this URL."""
        parts = urlsplit(upstream)
        self._upstream = (parts.hostname or "", parts.port or 0)
        self._login = f"{parts.netloc.rpartition('@')[0]}@" if "@" in parts.netloc else ""

    @property
    def port(self) -> int:
        return self._port

    @property
    def url(self) -> str:
        """Where clients find it, with the user and password of the server behind it."""
        return f"{'rediss' if self._secure else 'redis'}://{self._login}127.0.0.1:{self._port}"

    @property
    def open_connections(self) -> int:
        return len(self._conversations)

    def count(self, needle: bytes) -> int:
        """How many commands with ``needle`` the server was given."""
        return sum(needle in command for command in self.forwarded)

    def cut(self, needle: bytes, *, skip: int = 0) -> asyncio.Event:
        """Once, when the server has answered a command with ``needle``: close the connection instead of passing
        the answer on. The first ``skip`` answers still pass. The event tells that it has happened.

        What the server was given together with that command it still answers before, to nobody: when the client
        sees the end, everything that was forwarded has been done.
        """
        cut = _Cut(needle, skip)
        self._cuts.append(cut)
        return cut.done

    def hold(self, needle: bytes, *, once: bool = False) -> Hold:
        """Keep back answers to commands with ``needle``, or the first one, and what would follow on that connection."""
        hold = Hold(needle, once)
        self._holds.append(hold)
        return hold

    def refuse(self, needle: bytes, line: bytes, *, times: int = 1) -> Refusal:
        """Answer the next ``times`` commands with ``needle`` by ``line``, without asking the server."""
        refusal = Refusal(needle, line, times)
        self._refusals.append(refusal)
        return refusal

    def forgive(self) -> None:
        """Refuse nothing more."""
        self._refusals.clear()

    def blurt(self, line: bytes) -> None:
        """Send ``line`` to every client, which none has asked for."""
        for client in self._clients:
            client.write(line)

    def silence(self) -> None:
        """Pass nothing more on, either way, for the connections that are open now, as if the way to them were gone."""
        for passing in self._passing:
            passing.clear()

    def shut(self) -> None:
        """Close every connection that is open now, and each that is opened from now on."""
        self._shut = True
        for conversation in self._conversations:
            conversation.cancel()

    def reopen(self) -> None:
        """Take connections again."""
        self._shut = False

    async def disconnect(self) -> None:
        """Close every connection that is open now."""
        conversations = tuple(self._conversations)
        for conversation in conversations:
            conversation.cancel()
        await asyncio.gather(*conversations, return_exceptions=True)

    # --- one connection ------------------------------------------------------------------------------

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._conversations.add(task)
        self._clients.add(writer)
        self.accepted += 1
        try:
            if not self._shut:
                await self._converse(reader, writer)
        except (OSError, asyncio.CancelledError):
            pass  # one side is gone, or the proxy closes: either way this conversation is over
        finally:
            self._clients.discard(writer)
            await _close(writer)
            self._conversations.discard(task)

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        server_reader, server_writer = await asyncio.open_connection(*self._upstream)
        expected: deque[_Expected] = deque()
        passing = asyncio.Event()
        passing.set()
        self._passing.add(passing)
        pumps = [
            asyncio.create_task(self._pump_commands(reader, server_writer, writer, expected, passing)),
            asyncio.create_task(self._pump_replies(server_reader, writer, expected, passing)),
        ]
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._passing.discard(passing)
            for pump in pumps:
                pump.cancel()
            try:
                await asyncio.gather(*pumps, return_exceptions=True)
            finally:
                server_writer.transport.abort()  # at once: a second cancellation must not leave it open
                await _close(server_writer)

    async def _pump_commands(
        self,
        reader: asyncio.StreamReader,
        server: asyncio.StreamWriter,
        client: asyncio.StreamWriter,
        expected: deque[_Expected],
        passing: asyncio.Event,
    ) -> None:
        buffer = bytearray()
        while data := await reader.read(_CHUNK):
            await passing.wait()
            buffer += data
            for command in _frames(buffer):
                self.received.append(command)
                await self._wait_to_arrive(command)
                if not self._may_arrive(command):
                    await server.drain()
                    return
                line = self._refused(command)
                expected.append(_Expected(command, line))
                if not line:
                    self.forwarded.append(command)
                    server.write(command)
            _write_own_lines(client, expected)
            await server.drain()

    async def _pump_replies(
        self,
        server: asyncio.StreamReader,
        client: asyncio.StreamWriter,
        expected: deque[_Expected],
        passing: asyncio.Event,
    ) -> None:
        buffer = bytearray()
        cut = False
        while not (cut and not expected) and (data := await server.read(_CHUNK)):
            await passing.wait()
            buffer += data
            for reply in _frames(buffer):
                command = b"" if reply.startswith(b">") else expected.popleft().command
                await self._wait_for_release(command)
                cut = cut or self._is_cut(command) or not await self._may_return(command, reply)
                if not cut:
                    client.write(reply)
                _write_own_lines(client, expected)
            await client.drain()

    # --- the trouble ---------------------------------------------------------------------------------

    async def _wait_to_arrive(self, command: bytes) -> None:
        """Return when a command, and what follows it on its connection, may go on. For subclasses."""

    def _may_arrive(self, command: bytes) -> bool:
        """Whether a command may reach the server; if not, its connection ends before it. For subclasses."""
        return True

    async def _may_return(self, command: bytes, reply: bytes) -> bool:
        """Whether the server's answer may reach the client; if not, the connection is cut. For subclasses."""
        return True

    def _refused(self, command: bytes) -> bytes:
        for refusal in self._refusals:
            if refusal.times and refusal.needle in command:
                refusal.times -= 1
                return refusal.line
        return b""

    def _is_cut(self, command: bytes) -> bool:
        for cut in self._cuts:
            if not cut.done.is_set() and cut.needle in command:
                if not cut.skip:
                    cut.done.set()
                    return True
                cut.skip -= 1
        return False

    async def _wait_for_release(self, command: bytes) -> None:
        for hold in self._holds:
            if command and hold.needle in command and not (hold.once and hold.caught.is_set()):
                hold.caught.set()
                await hold.released.wait()


def _write_own_lines(client: asyncio.StreamWriter, expected: deque[_Expected]) -> None:
    while expected and expected[0].line:
        client.write(expected.popleft().line)


async def _close(writer: asyncio.StreamWriter) -> None:
    writer.transport.abort()
    with suppress(OSError, asyncio.CancelledError):
        await writer.wait_closed()


def _frames(buffer: bytearray) -> Iterator[bytes]:
    """Take the whole commands or replies off the front of ``buffer``."""
    data = bytes(buffer)
    start = 0
    while (end := _frame_end(data, start)) is not None:
        yield data[start:end]
        start = end
    del buffer[:start]


def _frame_end(data: bytes, start: int) -> int | None:
    """Where the value ends that starts at ``start``; ``None`` if that has not arrived."""
    line_end = data.find(b"\r\n", start)
    if line_end < 0:
        return None
    kind, size, after = data[start], data[start + 1 : line_end], line_end + 2
    if kind in _BULK:
        end = after + int(size) + 2 if int(size) >= 0 else after
        return end if end <= len(data) else None
    if kind in _NESTED:
        return _nested_end(data, after, int(size) * (2 if kind == ord("%") else 1))
    return after


def _nested_end(data: bytes, start: int, count: int) -> int | None:
    end: int | None = start
    for _ in range(count):
        if end is None:
            break
        end = _frame_end(data, end)
    return end
