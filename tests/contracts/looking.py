"""Looking at a server past the library: what is in a stream, what is pending, which commands arrive."""

from __future__ import annotations

import asyncio
import re
import secrets
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import urlsplit

from redis.asyncio import Redis

from conquiet import QueueConfig
from tests.rigs.proxy import Proxy
from tests.rigs.scraping import value
from tests.rigs.waiting import eventually

__all__ = ["Commands", "Look", "Row", "proxied", "recorded", "sample"]

_WORD: Final = re.compile(rb'"((?:[^"\\]|\\.)*)"')
_OURS: Final = frozenset({"ECHO", "PING", "SELECT", "HELLO", "AUTH", "CLIENT"})


@dataclass(frozen=True)
class Row:
    """A line of the pending list."""

    id: str
    consumer: str
    idle_ms: int
    deliveries: int


class Look:
    """One stream and group as the server has them, by a client that shares nothing with the library."""

    def __init__(self, url: str, config: QueueConfig) -> None:
        self.url = url
        self.stream = config.stream_key
        self.group = config.consumer_group
        self.redis: Any = Redis.from_url(url, protocol=2)

    async def aclose(self) -> None:
        await self.redis.aclose()

    async def add(self, *fields: bytes | str) -> str:
        """Append an entry of any fields, as a foreign writer may."""
        return str((await self.redis.execute_command("XADD", self.stream, "*", *fields)).decode())

    async def entries(self) -> list[tuple[str, dict[bytes, bytes]]]:
        return [(id.decode(), fields) for id, fields in await self.redis.xrange(self.stream)]

    async def length(self) -> int:
        return int(await self.redis.xlen(self.stream))

    async def pending(self) -> list[Row]:
        """The pending list in ID order."""
        rows = await self.redis.xpending_range(self.stream, self.group, "-", "+", 10_000)
        return [
            Row(
                row["message_id"].decode(),
                row["consumer"].decode(),
                row["time_since_delivered"],
                row["times_delivered"],
            )
            for row in rows
        ]

    async def pending_ids(self) -> list[str]:
        return [row.id for row in await self.pending()]

    async def groups(self) -> list[dict[str, Any]]:
        return list(await self.redis.xinfo_groups(self.stream))

    async def age(self, ids: Sequence[str], idle_ms: int) -> None:
        """Make pending entries as old as a long wait would, leaving owner and delivery count."""
        owners = {row.id: row.consumer for row in await self.pending()}
        for id in ids:
            words = ("XCLAIM", self.stream, self.group, owners[id], 0, id, "IDLE", idle_ms, "JUSTID")
            await self.redis.execute_command(*words, parse_justid=True)

    async def drain(self) -> list[str]:
        """Take what nobody was given yet, without a trace in the pending list."""
        words = ("XREADGROUP", "GROUP", self.group, "drain", "NOACK", "COUNT", 10_000, "STREAMS", self.stream, ">")
        reply = await self.redis.execute_command(*words)
        return [id.decode() for _, entries in reply for id, _ in entries]

    async def calls(self, command: str) -> int:
        """How often the server has run ``command``."""
        stats = await self.redis.info("commandstats")
        return int(stats.get(f"cmdstat_{command.lower()}", {}).get("calls", 0))

    async def clients(self) -> set[str]:
        """The IDs of the connections that the server has."""
        return {client["id"] for client in await self.redis.client_list()}

    async def blocked(self, readers: int = 1) -> None:
        """Return once so many clients wait inside a blocking read of the server."""

        async def enough() -> bool:
            clients = await self.redis.client_list()
            waiting = [client for client in clients if "b" in client["flags"] and client["cmd"] == "xreadgroup"]
            return len(waiting) >= readers

        await eventually(enough, f"{readers} blocked reads")


class Commands:
    """What ``MONITOR`` shows."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._seen: list[list[str]] = []

    def feed(self, line: bytes) -> None:
        words = [_unescaped(word) for word in _WORD.findall(line)]
        if words:
            self._seen.append([words[0].upper(), *words[1:]])

    async def all(self) -> list[list[str]]:
        """Every command so far, connection set-up included."""
        token = secrets.token_hex(8)
        # Not by redis-py, which tells its name first, to servers from 7.2 on.
        parts = urlsplit(self._url)
        _, writer = await asyncio.open_connection(parts.hostname, parts.port)
        writer.write(f"ECHO {token}\r\n".encode())
        await eventually(lambda: ["ECHO", token] in self._seen, "the monitor has caught up")
        writer.close()
        await writer.wait_closed()
        return [words for words in self._seen if words[0] != "ECHO"]

    async def of(self, *names: str) -> list[list[str]]:
        """The commands so far of these names; without names, all but those of connecting."""
        return [words for words in await self.all() if (words[0] in names if names else words[0] not in _OURS)]


@asynccontextmanager
async def recorded(url: str) -> AsyncIterator[Commands]:
    """Record each command that the server is given within the block."""
    parts = urlsplit(url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port, limit=1 << 24)
    writer.write(b"MONITOR\r\n")
    assert await reader.readline() == b"+OK\r\n"
    commands = Commands(url)

    async def follow() -> None:
        while line := await reader.readline():
            commands.feed(line)

    following = asyncio.create_task(follow())
    try:
        yield commands
    finally:
        following.cancel()
        with suppress(asyncio.CancelledError):
            await following
        writer.close()
        await writer.wait_closed()


@asynccontextmanager
async def proxied(url: str) -> AsyncIterator[Proxy]:
    """A proxy in front of the server; the block has closed what it opened through it."""
    async with Proxy(url) as proxy:
        yield proxy
        await eventually(lambda: not proxy.open_connections, "every connection through the proxy is closed")


def _unescaped(word: bytes) -> str:
    return word.decode("unicode_escape").encode("latin-1").decode(errors="replace")


def sample(name: str, stream: str) -> float:
    """The value of a metric as a scrape would show it."""
    return value(name, stream=stream) or 0.0
