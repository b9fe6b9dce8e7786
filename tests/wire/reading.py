"""What the tests of shared reads share: readers, what they are told, and a way to look on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest

from conquiet.wire.address import Address
from conquiet.wire.connections import Connections
from conquiet.wire.embedded import EmbeddedRedis
from tests.rigs.asking import ask
from tests.rigs.freezing import own_server
from tests.rigs.proxy import Proxy
from tests.rigs.waiting import LONG

__all__ = ["MANY", "START", "add", "ended", "link", "mortal", "names", "proxy", "reading", "stream", "told"]

MANY = 300
START = "0-0"


@pytest.fixture
async def proxy(url: str) -> AsyncIterator[Proxy]:
    async with Proxy(url) as proxy:
        yield proxy


@pytest.fixture
async def link(proxy: Proxy) -> AsyncIterator[Connections]:
    link = Connections(Address.of(proxy.url))
    yield link
    await link.aclose()


@pytest.fixture
async def mortal() -> AsyncIterator[EmbeddedRedis]:
    async with own_server() as server:
        yield server


def reading(
    link: Connections, stream: str, *, seconds: float = LONG, count: int = 10, after: str = START
) -> asyncio.Task[Any]:
    return asyncio.create_task(link.read({stream: after}, count, seconds))


def told(reply: Any) -> dict[str, list[str]]:
    """The IDs by stream."""
    return {stream.decode(): [id.decode() for id, _ in entries] for stream, entries in reply or ()}


async def add(url: str, *streams: str) -> list[str]:
    return [await ask(url, "XADD", stream, "*", "n", 1) for stream in streams]


async def ended(tasks: Sequence[asyncio.Task[Any]]) -> list[Any]:
    async with asyncio.timeout(LONG):
        return list(await asyncio.gather(*tasks, return_exceptions=True))


def names(stream: str, count: int) -> list[str]:
    return [f"{stream}:{number}" for number in range(count)]


@pytest.fixture
def stream(config: Any) -> str:
    return str(config.stream_key)
