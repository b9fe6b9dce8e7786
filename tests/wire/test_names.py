"""A host's name with several addresses: what is meant for one server never reaches another."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import Any

import pytest

from conquiet import Address
from conquiet.wire.connections import Connections
from conquiet.wire.interrupt import Interrupt
from conquiet.wire.streams import pack, xread
from tests.conftest import Rung
from tests.rigs.asking import ask, blocked
from tests.rigs.proxy import Proxy
from tests.rigs.servers import on_a_port

pytestmark = pytest.mark.any_server

NAME = "several.test"


@asynccontextmanager
async def relayed(host: str, port: int, upstream: str) -> AsyncIterator[int]:
    """An address that leads to the server at ``upstream``; its port."""
    to = int(upstream.rpartition(":")[2])
    passing: set[asyncio.Task[None]] = set()

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            writer.write(data)
        writer.close()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection("127.0.0.1", to)
        for way in (pump(reader, back), pump(there, writer)):
            passing.add(asyncio.create_task(way))

    server = await asyncio.start_server(accept, host, port)
    try:
        yield int(server.sockets[0].getsockname()[1])
    finally:
        server.close()
        await asyncio.wait(passing)


@pytest.fixture
def resolved(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The addresses of ``NAME``, of which the resolver gives the first, and the next at the next question."""
    addresses: list[str] = []
    genuine = asyncio.base_events.BaseEventLoop.getaddrinfo

    async def getaddrinfo(loop: Any, host: Any, port: Any, **options: Any) -> Any:
        if host != NAME:
            return await genuine(loop, host, port, **options)
        addresses.append(addresses.pop(0))
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (addresses[-1], port))]

    monkeypatch.setattr(asyncio.base_events.BaseEventLoop, "getaddrinfo", getaddrinfo)
    return addresses


async def test_no_unblock_goes_to_another_server_of_the_same_name(rung: Rung, resolved: list[str]) -> None:
    async with (
        on_a_port(rung.binary) as one,
        on_a_port(rung.binary) as two,
        Proxy(one.url) as first,
        Proxy(two.url) as second,
        relayed("127.0.0.1", 0, first.url) as port,
        relayed("127.0.0.2", port, second.url),
    ):
        resolved[:] = ["127.0.0.1", "127.0.0.2"]
        address = Address("single", ((NAME, port),), Address.of(one.url).settings)
        async with aclosing(Connections(address)) as link:
            interrupt = Interrupt()
            command = xread({"t:names": "0-0"}, block_ms=60_000)
            reading = asyncio.create_task(link.wait("t:names", command, 60, interrupt, harmless=True))
            await blocked(one.url)
            assert await link.call("any", pack("PING")) == b"PONG"
            assert second.count(b"PING") == 1, "the commands go to the other server"
            interrupt.request()
            assert await reading is None  # it was torn off
            probes = first.count(b"UNBLOCK\r\n$1\r\n0\r\n")
            assert (first.count(b"UNBLOCK"), second.count(b"UNBLOCK")) == (probes, 0)


async def test_an_unblock_goes_to_the_server_where_the_read_is(rung: Rung, url: str) -> None:
    async with Proxy(url) as proxy, aclosing(Connections(Address.of(proxy.url))) as link:
        interrupt = Interrupt()
        command = xread({"t:names": "0-0"}, block_ms=60_000)
        reading = asyncio.create_task(link.wait("t:names", command, 60, interrupt, harmless=True))
        await blocked(url)
        interrupt.request()
        assert await reading is None
        assert proxy.count(b"UNBLOCK") > 0
        assert await ask(url, "PING")
