"""Proxies in front of all nodes of a Cluster, which trace and strike as one."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from types import TracebackType
from typing import Self
from urllib.parse import urlsplit

from redis.asyncio import Redis

from conquiet.wire.address import Address, AddressLike, Endpoint
from tests.rigs.asking import nodes_of
from tests.rigs.proxy import Proxy
from tests.rigs.tracing import SCRIPTS, Tracer

__all__ = ["ClusterTracer", "through", "tracing"]


def through(proxies: str, url: str) -> AddressLike:
    """The server or Cluster at ``url``, reached by way of the proxy or proxies before it."""
    address = Address.of(url)
    if address.kind != "cluster":
        return proxies
    doors = dict(zip(map(_endpoint, nodes_of(url)), map(_endpoint, nodes_of(proxies)), strict=True))
    return replace(address, remap=lambda endpoint: doors.get(endpoint, endpoint))


@asynccontextmanager
async def tracing(url: str) -> AsyncIterator[Tracer]:
    """A tracer before the server or Cluster at ``url``; that knows all scripts, so that no call is sent twice."""
    nodes = nodes_of(url)
    for node in nodes:
        async with Redis.from_url(node) as client, client.pipeline(transaction=False) as pipeline:
            for script in SCRIPTS.values():
                pipeline.script_load(script.text)
            await pipeline.execute()
    async with Tracer(url) if nodes == [url] else ClusterTracer(url) as proxy:
        yield proxy


class ClusterTracer(Tracer):
    """As a tracer before one server: what any node is sent, or answers, counts in the same row.

    Who owns which slot clients ask the nodes themselves.
    """

    def __init__(self, url: str) -> None:
        super().__init__()
        self._branches = [_Branch(node, self) for node in nodes_of(url)]
        self._listening = AsyncExitStack()

    async def __aenter__(self) -> Self:
        for branch in self._branches:
            await self._listening.enter_async_context(branch)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._listening.aclose()

    @property
    def url(self) -> str:
        """The proxies, in the order of the nodes; for :func:`through`."""
        return f"redis+cluster://{','.join(f'127.0.0.1:{branch.port}' for branch in self._branches)}"

    def shut(self) -> None:
        """Close every connection to any node, and each that is opened from now on."""
        for branch in self._branches:
            branch.shut()

    def reopen(self) -> None:
        """Take connections again."""
        for branch in self._branches:
            branch.reopen()

    async def disconnect(self) -> None:
        """Close every connection that is open now."""
        for branch in self._branches:
            await branch.disconnect()

    def may_arrive(self, command: bytes) -> bool:
        """For the branches."""
        return self._may_arrive(command)

    async def may_return(self, command: bytes, reply: bytes) -> bool:
        """For the branches."""
        return await self._may_return(command, reply)


class _Branch(Proxy):
    """The proxy before one node."""

    def __init__(self, upstream: str, head: ClusterTracer) -> None:
        super().__init__(upstream)
        self._head = head

    def _may_arrive(self, command: bytes) -> bool:
        return self._head.may_arrive(command)

    async def _may_return(self, command: bytes, reply: bytes) -> bool:
        return await self._head.may_return(command, reply)


def _endpoint(url: str) -> Endpoint:
    parts = urlsplit(url)
    return parts.hostname or "", parts.port or 0
