"""A Redis Cluster of three private servers, and slots that move while a test looks on."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import Final, Self
from urllib.parse import urlsplit

from redis.crc import key_slot

from conquiet.wire.embedded import EmbeddedRedis
from tests.rigs.asking import ask
from tests.rigs.waiting import eventually

__all__ = ["LocalCluster", "Migration", "Node"]

_SLOTS: Final = 16384
_NODES: Final = 3


@dataclass(frozen=True)
class Node:
    """A master of the Cluster."""

    id: str
    url: str
    """Of this one node, as if it stood alone."""

    @property
    def endpoint(self) -> tuple[str, int]:
        """Host and port, where it really listens."""
        parts = urlsplit(self.url)
        return parts.hostname or "", parts.port or 0

    @property
    def place(self) -> str:
        """``host:port``."""
        return "{}:{}".format(*self.endpoint)


class LocalCluster:
    """Three masters, a third of the slots each, no replicas. Holds processes only: it may outlive a loop.

    ``announced`` are ports that the nodes tell clients instead of their own, for proxies that listen there.
    """

    def __init__(
        self, binary: str, *, announced: Sequence[int] = (), settings: Mapping[str, str] | None = None
    ) -> None:
        common = {"cluster-enabled": "yes", "cluster-node-timeout": "5000", **(settings or {})}
        ports = [{"cluster-announce-port": str(port)} for port in announced] or [{}] * _NODES
        self._servers = [EmbeddedRedis(binary=binary, settings={**common, **port}) for port in ports]
        self._processes = AsyncExitStack()
        self.nodes: tuple[Node, ...] = ()

    async def __aenter__(self) -> Self:
        try:
            for server in self._servers:
                self._processes.push_async_exit(server)
            await asyncio.gather(*(server.open() for server in self._servers))
            urls = [server.url for server in self._servers]
            self.nodes = tuple([Node(await ask(url, "CLUSTER", "MYID"), url) for url in urls])
            await self._join()
        except BaseException:
            await self._processes.aclose()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._processes.aclose()

    @property
    def url(self) -> str:
        """All nodes as seeds."""
        return f"redis+cluster://{','.join(node.place for node in self.nodes)}"

    async def owner_of(self, key: str) -> Node:
        """The node that serves ``key``, by the view of the first node."""
        mine = await self._owners(self.nodes[0])
        return next(node for node in self.nodes if node.id == mine[key_slot(key.encode())])

    async def migration_of(self, key: str) -> Migration:
        """A move of the slot of ``key`` to another node, not yet begun."""
        source = await self.owner_of(key)
        target = next(node for node in self.nodes if node != source)
        return Migration(self, key_slot(key.encode()), source, target)

    async def agree(self) -> None:
        """Return once all nodes are well and have the same owner for each slot."""
        await eventually(self._agreed, "the Cluster is well and its nodes agree")

    async def _join(self) -> None:
        first, *others = self.nodes
        share = -(-_SLOTS // _NODES)
        for number, node in enumerate(self.nodes):
            slots = range(number * share, min((number + 1) * share, _SLOTS))
            # Distinct epochs from the start: two nodes of one epoch could not agree on who has a slot.
            await ask(node.url, "CLUSTER", "SET-CONFIG-EPOCH", number + 1)
            await ask(node.url, "CLUSTER", "ADDSLOTS", *slots)
        for node in others:
            await ask(first.url, "CLUSTER", "MEET", *node.endpoint, node.endpoint[1] + 10_000)
        await self.agree()

    async def _agreed(self) -> bool:
        for node in self.nodes:
            if "cluster_state:ok" not in await ask(node.url, "CLUSTER", "INFO"):
                return False
        views = [await self._owners(node) for node in self.nodes]
        return len(views[0]) == _SLOTS and all(view == views[0] for view in views)

    async def _owners(self, node: Node) -> dict[int, str]:
        """The owner's ID for each slot, in the view of ``node``."""
        owners: dict[int, str] = {}
        for line in (await ask(node.url, "CLUSTER", "NODES")).splitlines():
            id, *_ = line.split()
            for first, last in _ranges(line):
                owners |= dict.fromkeys(range(first, last + 1), id)
        return owners


def _ranges(line: str) -> Iterator[tuple[int, int]]:
    """The slots at the end of a line of ``CLUSTER NODES``, without those on their way, which are in brackets."""
    for word in line.split()[8:]:
        if not word.startswith("["):
            first, _, last = word.partition("-")
            yield int(first), int(last or first)


@dataclass(frozen=True)
class Migration:
    """One slot on its way from ``source`` to ``target``, in steps that a test can stand between."""

    cluster: LocalCluster
    slot: int
    source: Node
    target: Node

    async def begin(self) -> None:
        """Move the keys. From now on ``source`` answers ``ASK`` for them, and ``target`` wants ``ASKING``."""
        await ask(self.target.url, "CLUSTER", "SETSLOT", self.slot, "IMPORTING", self.source.id)
        await ask(self.source.url, "CLUSTER", "SETSLOT", self.slot, "MIGRATING", self.target.id)
        for key in await ask(self.source.url, "CLUSTER", "GETKEYSINSLOT", self.slot, 1000):
            await ask(self.source.url, "MIGRATE", *self.target.endpoint, key, 0, 5000)

    async def finish(self) -> None:
        """Move the slot: from now on ``source`` answers ``MOVED``."""
        others = [node for node in self.cluster.nodes if node not in (self.source, self.target)]
        for node in (self.target, self.source, *others):
            await ask(node.url, "CLUSTER", "SETSLOT", self.slot, "NODE", self.target.id)
        await self.cluster.agree()
