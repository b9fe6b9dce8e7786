"""A master, its replica and the Sentinels that watch them."""

from __future__ import annotations

import asyncio
import os
import tempfile
from contextlib import AsyncExitStack
from pathlib import Path
from types import TracebackType
from typing import Final, Self
from urllib.parse import urlsplit

from redis.asyncio import Redis
from redis.exceptions import ResponseError

from conquiet.wire.embedded import EmbeddedRedis
from tests.rigs.asking import ask
from tests.rigs.servers import on_a_port
from tests.rigs.waiting import eventually

__all__ = ["SERVICE", "LocalSentinels"]

SERVICE: Final = "mymaster"
_AT_ONCE: Final = {"repl-diskless-sync": "yes", "repl-diskless-sync-delay": "0"}


class LocalSentinels:
    """Two data servers and one or three Sentinels. Holds processes only: it may outlive a loop."""

    def __init__(self, binary: str, *, sentinels: int = 1, password: str = "", sentinel_password: str = "") -> None:
        self._binary = binary
        self._count = sentinels
        self._password = password
        login = {"requirepass": password, "masterauth": password} if password else {}
        self._data = [on_a_port(binary, settings=_AT_ONCE | login) for _ in range(2)]
        self._sentinel_login = {"requirepass": sentinel_password} if sentinel_password else {}
        self._sentinels: list[EmbeddedRedis] = []
        self._processes = AsyncExitStack()

    async def __aenter__(self) -> Self:
        try:
            await self._start()
        except BaseException:
            await self._processes.aclose()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._processes.aclose()

    @property
    def seeds(self) -> list[tuple[str, int]]:
        """Host and port of each Sentinel."""
        return [_endpoint(sentinel.url) for sentinel in self._sentinels]

    @property
    def data_urls(self) -> list[str]:
        """Both data servers, whatever their role is at the moment."""
        return [server.url for server in self._data]

    async def master_url(self) -> str:
        """The master that the first Sentinel names."""
        _, port = await ask(self._sentinels[0].url, "SENTINEL", "GET-MASTER-ADDR-BY-NAME", SERVICE)
        return next(url for url in self.data_urls if _endpoint(url)[1] == int(port))

    async def in_step(self) -> None:
        """Return once the replica has all that the master has now: a failover loses what has not arrived there."""
        master = await self.master_url()
        [replica] = [url for url in self.data_urls if url != master]
        written = (await ask(master, "INFO", "replication"))["master_repl_offset"]

        async def caught_up() -> bool:
            return bool((await ask(replica, "INFO", "replication"))["slave_repl_offset"] >= written)

        await eventually(caught_up, "the replica has what the master has")

    async def fail_over(self) -> None:
        """Make the replica the master; returns when it is one, and the old master its replica."""
        before = await self.master_url()
        after = next(url for url in self.data_urls if url != before)
        await eventually(self._failover_accepted, "a Sentinel starts a failover")
        await eventually(lambda: self._named_by_all(after), "the Sentinels name the new master")
        # What a Sentinel does to the old master too, but only after ten seconds.
        await ask(before, "REPLICAOF", *_endpoint(after))
        await ask(before, "CLIENT", "KILL", "TYPE", "normal")
        await eventually(self._replicates, "the old master follows the new one")

    async def _start(self) -> None:
        place = self._processes.enter_context(tempfile.TemporaryDirectory(prefix="conquiet-sentinel-"))
        # A server that is called by this name is a Sentinel.
        name = Path(place) / "redis-sentinel"
        os.symlink(self._binary, name)
        self._sentinels = [on_a_port(name, settings=self._sentinel_login) for _ in range(self._count)]
        servers = [*self._data, *self._sentinels]
        for server in servers:
            self._processes.push_async_exit(server)
        await asyncio.gather(*(server.open() for server in servers))
        master, replica = self.data_urls
        await ask(replica, "REPLICAOF", *_endpoint(master))
        await eventually(self._replicates, "the replica is in step")
        for sentinel in self._sentinels:
            await self._watch(sentinel.url, master)
        await eventually(self._know_each_other, "the Sentinels know each other and the replica")

    async def _watch(self, sentinel: str, master: str) -> None:
        options = {"down-after-milliseconds": "60000", "failover-timeout": "10000", "auth-pass": self._password}
        # In one write: Redis 6.2 would not notice a password that comes after it has begun to watch.
        async with Redis.from_url(sentinel) as client, client.pipeline(transaction=False) as pipeline:
            pipeline.execute_command("SENTINEL MONITOR", SERVICE, *_endpoint(master), self._count // 2 + 1)
            for option, value in options.items():
                if value:
                    pipeline.execute_command("SENTINEL SET", SERVICE, option, value)
            await pipeline.execute()

    async def _know_each_other(self) -> bool:
        views = [(await ask(sentinel.url, "SENTINEL MASTERS"))[SERVICE] for sentinel in self._sentinels]
        known = {(view["num-slaves"], view["num-other-sentinels"]) for view in views}
        return known == {(1, self._count - 1)}

    async def _named_by_all(self, master: str) -> bool:
        named = [await ask(sentinel.url, "SENTINEL MASTERS") for sentinel in self._sentinels]
        return {int(masters[SERVICE]["port"]) for masters in named} == {_endpoint(master)[1]}

    async def _replicates(self) -> bool:
        states = [await ask(url, "INFO", "replication") for url in self.data_urls]
        return any(state.get("master_link_status") == "up" for state in states)

    async def _failover_accepted(self) -> bool:
        try:
            return bool(await ask(self._sentinels[0].url, "SENTINEL", "FAILOVER", SERVICE))
        except ResponseError as error:
            if "NOGOODSLAVE" in str(error) or "INPROG" in str(error):
                return False
            raise


def _endpoint(url: str) -> tuple[str, int]:
    parts = urlsplit(url)
    return parts.hostname or "", parts.port or 0
