"""Real servers that lose the last writes that they have confirmed, and go on without them.

A server that saves now and then has after a crash what its file has. A replica that lags behind when it becomes the
primary has what it was sent so far. Either way clients that were told "done" meet a server that has not done it.
"""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from contextlib import AsyncExitStack
from types import TracebackType
from typing import ClassVar, Final, Literal, Protocol, Self
from urllib.parse import urlsplit

import psycopg

from conquiet import EmbeddedRedis
from tests.rigs.asking import ask
from tests.rigs.postgres import LocalPostgres
from tests.rigs.proxy import Proxy
from tests.rigs.relay import Relay
from tests.rigs.servers import on_a_port
from tests.rigs.waiting import eventually

__all__ = ["WAYS", "LaggingReplica", "OldFile", "Rollback", "UnflushedCommits", "Way", "rollback_by"]

Way = Literal["old file", "lagging replica"]
WAYS: Final[tuple[Way, ...]] = ("old file", "lagging replica")
_AT_ONCE: Final = {"repl-diskless-sync": "yes", "repl-diskless-sync-delay": "0"}


class Rollback(Protocol):
    """A server that can be made to forget, under one URL."""

    @property
    def url(self) -> str:
        """Where clients find the server, before and after."""
        ...

    async def keep(self) -> None:
        """What was written so far will survive; what is written from now on will not."""
        ...

    async def lose(self) -> None:
        """Kill the server, and let one go on that has only what was kept."""
        ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


def rollback_by(way: Way, binary: str) -> Rollback:
    """A server of that kind, which is not started yet."""
    return OldFile(binary) if way == "old file" else LaggingReplica(binary)


class OldFile:
    """It is killed, and started again on the same port with the file that it saved before."""

    def __init__(self, binary: str) -> None:
        self._binary = binary
        self._directory = ""
        self._server = EmbeddedRedis()

    async def __aenter__(self) -> Self:
        self._directory = tempfile.mkdtemp(prefix="conquiet-rollback-")
        await self._start(None)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._server.aclose()
        shutil.rmtree(self._directory, ignore_errors=True)

    @property
    def url(self) -> str:
        return self._server.url

    async def keep(self) -> None:
        await ask(self.url, "SAVE")

    async def lose(self) -> None:
        port = urlsplit(self.url).port
        await _kill(self._server)
        await self._start(port)

    async def _start(self, port: int | None) -> None:
        self._server = on_a_port(self._binary, directory=self._directory, port=port)
        await self._server.open()


class LaggingReplica:
    """Its replica is cut off, and becomes the primary when that is killed. Clients are led to the primary."""

    def __init__(self, binary: str) -> None:
        self._binary = binary
        self._primary = self._made()
        self._replica = self._made()
        self._proxy = Proxy()
        self._relays: list[Relay] = []
        self._stack = AsyncExitStack()

    def _made(self) -> EmbeddedRedis:
        return on_a_port(self._binary, settings=_AT_ONCE)

    async def __aenter__(self) -> Self:
        try:
            await self._stack.enter_async_context(self._proxy)
            await self._open(self._primary)
            self._proxy.lead_to(self._primary.url)
            await self._open(self._replica)
            await self._follow()
        except BaseException:
            await self._stack.aclose()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    @property
    def url(self) -> str:
        return self._proxy.url

    async def keep(self) -> None:
        # Not by offsets: they go on with each ping, and the relay passes what it was given before it stands still.
        await ask(self._primary.url, "SET", "conquiet-rollback", "kept")
        await eventually(self._has_the_mark, "the replica has what the primary has")
        self._relays[-1].freeze()

    async def lose(self) -> None:
        await _kill(self._primary)
        await ask(self._replica.url, "REPLICAOF", "NO", "ONE")
        await ask(self._replica.url, "DEL", "conquiet-rollback")
        self._primary, self._replica = self._replica, self._made()
        self._proxy.lead_to(self._primary.url)
        await self._proxy.disconnect()

    async def _open(self, server: EmbeddedRedis) -> None:
        await server.open()
        self._stack.push_async_callback(server.aclose)

    async def _follow(self) -> None:
        relay = Relay(urlsplit(self._primary.url).port or 0)
        self._relays.append(await self._stack.enter_async_context(relay))
        await ask(self._replica.url, "REPLICAOF", "127.0.0.1", relay.port)
        await eventually(self._is_following, "the replica follows the primary")

    async def _is_following(self) -> bool:
        return bool((await ask(self._replica.url, "INFO", "replication")).get("master_link_status") == "up")

    async def _has_the_mark(self) -> bool:
        return bool(await ask(self._replica.url, "EXISTS", "conquiet-rollback"))


async def _kill(server: EmbeddedRedis) -> None:
    os.kill(server.pid, signal.SIGKILL)
    await server.aclose()


class UnflushedCommits:
    """A PostgreSQL server that crashes with commits that it has answered and not written, as it may if it is told not
    to wait for the disk (``synchronous_commit = off``). It recovers by itself, under the same address.

    What would write them in the background is kept from it: the process that writes the log stands still, and pages
    are not written before a checkpoint. So all that is committed after :meth:`keep` is lost, each time.
    """

    SETTINGS: ClassVar = {
        "synchronous_commit": "off",
        "bgwriter_lru_maxpages": "0",
        "autovacuum": "off",
        "checkpoint_timeout": "1h",
    }
    """With which the server must have been started."""

    def __init__(self, server: LocalPostgres) -> None:
        self._server = server
        self._writer = 0

    @property
    def url(self) -> str:
        return self._server.dsn

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._writer:
            await self.lose()

    async def keep(self) -> None:
        self._writer = self._log_writer()
        os.kill(self._writer, signal.SIGSTOP)
        with psycopg.connect(self.url, autocommit=True) as connection:
            connection.execute("SET synchronous_commit = on")
            connection.execute("SELECT pg_logical_emit_message(true, 'conquiet', 'kept')")  # with all before it

    async def lose(self) -> None:
        writer, self._writer = self._writer, 0
        os.kill(writer, signal.SIGKILL)
        await eventually(lambda: self._has_recovered(writer), "the server has recovered")

    def _log_writer(self) -> int:
        [(pid,)] = self._server.ask("SELECT pid FROM pg_stat_activity WHERE backend_type = 'walwriter'")
        return int(pid)

    def _has_recovered(self, writer: int) -> bool:
        try:
            return self._log_writer() != writer
        except (psycopg.OperationalError, ValueError):  # it is not there, or has not begun to write
            return False
