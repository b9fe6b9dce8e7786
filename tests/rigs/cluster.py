"""A Redis Cluster of three private servers, with slots that move and nodes that go while a test looks on."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Final, Self
from urllib.parse import urlsplit

from redis.crc import key_slot

from conquiet.wire.embedded import EmbeddedRedis
from tests.rigs.asking import ask
from tests.rigs.servers import on_a_port
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
    """Three masters, a third of the slots each, and replicas on request. Holds processes only: it may outlive a loop.

    ``announced`` are ports that the nodes tell clients instead of their own, for proxies that listen there. With a
    ``directory`` the nodes persist what they are told, and can be restarted.
    """

    def __init__(
        self,
        binary: str,
        *,
        announced: Sequence[int] = (),
        settings: Mapping[str, str] | None = None,
        directory: Path | None = None,
    ) -> None:
        self._binary = binary
        self._common = {"cluster-enabled": "yes", "cluster-node-timeout": "5000", **(settings or {})}
        self._directory = directory
        ports = [{"cluster-announce-port": str(port)} for port in announced] or [{}] * _NODES
        self._servers = [self._server(number, **port) for number, port in enumerate(ports)]
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

    # --- trouble --------------------------------------------------------------------------------------------

    async def shut_down(self, node: Node, *, kill: bool = False) -> None:
        """End a node, in good order or not."""
        server = self._servers[self.nodes.index(node)]
        if kill:
            os.kill(server.pid, signal.SIGKILL)
        await server.aclose()

    async def start_again(self, node: Node) -> None:
        """Start a node at its old place, with its data; returns when it listens, before the others accept it."""
        number = self.nodes.index(node)
        self._servers[number] = server = self._server(number, node.endpoint[1])
        self._processes.push_async_exit(server)
        await server.open()

    async def replicate(self, node: Node) -> Node:
        """A new replica of a master, in step with it."""
        server = on_a_port(self._binary, settings=self._common)
        self._processes.push_async_exit(server)
        await server.open()
        replica = Node(await ask(server.url, "CLUSTER", "MYID"), server.url)
        await ask(node.url, "CONFIG", "SET", "repl-diskless-sync-delay", 0)
        await ask(replica.url, "CLUSTER", "MEET", *node.endpoint, node.endpoint[1] + 10_000)
        await eventually(lambda: self._are_known(replica), "the new node knows the others")
        await ask(replica.url, "CLUSTER", "REPLICATE", node.id)

        async def is_in_step() -> bool:
            return bool((await ask(replica.url, "INFO", "replication")).get("master_link_status") == "up")

        await eventually(is_in_step, "the replica is in step")
        await eventually(lambda: self._is_known(replica, f"slave {node.id}"), "all know whose replica it is")
        return replica

    async def fail_over(self, master: Node, replica: Node) -> None:
        """Let a replica take the place of its master, in good order; returns when all nodes know."""
        await ask(replica.url, "CLUSTER", "FAILOVER")

        async def has_taken_over() -> bool:
            return replica.id in (await self._owners(replica)).values()

        await eventually(has_taken_over, "the replica is the master")
        self.nodes = tuple(replica if node == master else node for node in self.nodes)
        await self.agree()

    async def _is_known(self, node: Node, role: str) -> bool:
        views = [await ask(other.url, "CLUSTER", "NODES") for other in self.nodes]
        return all(any(node.id in line and role in line for line in view.splitlines()) for view in views)

    async def _are_known(self, node: Node) -> bool:
        known = await ask(node.url, "CLUSTER", "NODES")
        return "handshake" not in known and all(other.id in known for other in self.nodes)

    def _server(self, number: int, port: int | None = None, /, **settings: str) -> EmbeddedRedis:
        place = None if self._directory is None else self._directory / f"node-{number}"
        return on_a_port(
            self._binary,
            appendonly=place is not None,
            directory=place,
            port=port,
            settings={**self._common, **settings},
        )

    # --- agreement ------------------------------------------------------------------------------------------

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

    async def announce(self) -> None:
        """Say that the slot moves, and move no key yet: what ``source`` lacks it looks for at ``target``."""
        await ask(self.target.url, "CLUSTER", "SETSLOT", self.slot, "IMPORTING", self.source.id)
        await ask(self.source.url, "CLUSTER", "SETSLOT", self.slot, "MIGRATING", self.target.id)

    async def move(self, *keys: str) -> None:
        """Move these keys, or all that are left."""
        for key in keys or await ask(self.source.url, "CLUSTER", "GETKEYSINSLOT", self.slot, 1000):
            await ask(self.source.url, "MIGRATE", *self.target.endpoint, key, 0, 5000)

    async def begin(self) -> None:
        """Move the keys. From now on ``source`` answers ``ASK`` for them, and ``target`` wants ``ASKING``."""
        await self.announce()
        await self.move()

    async def finish(self) -> None:
        """Move the slot: from now on ``source`` answers ``MOVED``."""
        others = [node for node in self.cluster.nodes if node not in (self.source, self.target)]
        for node in (self.target, self.source, *others):
            await ask(node.url, "CLUSTER", "SETSLOT", self.slot, "NODE", self.target.id)
        await self.cluster.agree()
