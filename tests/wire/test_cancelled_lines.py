"""Connections under a caller who is cancelled: how long that may take, and what becomes of the connection."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

import anyio
import pytest
from redis.asyncio import Redis

from conquiet import QueueConfig, QueueConsumer, RedisStreamsQueue
from conquiet.wire.address import Address
from conquiet.wire.connections import Connections
from conquiet.wire.interrupt import Interrupt
from conquiet.wire.streams import pack
from tests.contracts.cancellation_scenes import SERVERS, hows_of_taking
from tests.rigs.asking import ask, nodes_of
from tests.rigs.cancelling import Call, How, cancelled_everywhere, nothing_left
from tests.rigs.proxy import Proxy
from tests.rigs.waiting import LONG, eventually

pytestmark = [*SERVERS]

FOREVER: Final = 60_000


@pytest.fixture
async def proxy(url: str) -> AsyncIterator[Proxy]:
    async with Proxy(url) as proxy:
        yield proxy


# --- a read that is ended -----------------------------------------------------------------------------------------


@asynccontextmanager
async def blocked_read(proxy: Proxy, config: QueueConfig) -> AsyncGenerator[tuple[QueueConsumer, asyncio.Task[object]]]:
    """A consumer whose read blocks, with connections that wait for ever for an answer."""
    async with Redis.from_url(proxy.url, socket_timeout=None) as client:
        queue = RedisStreamsQueue(client, config)
        await queue.open()
        consumer = QueueConsumer(queue, handle_signals=False)
        reading: asyncio.Task[object] = asyncio.create_task(consumer.next(FOREVER))
        await eventually(lambda: proxy.count(b"XREADGROUP") == 1, "the read blocks")
        yield consumer, reading
        await queue.aclose()


@pytest.mark.parametrize("way", ["stopped", "cancelled"])
async def test_a_read_ends_though_nobody_says_whether_it_was_woken(proxy: Proxy, config: QueueConfig, way: str) -> None:
    """The server has ended it; the connection over which that was asked for has gone silent."""
    async with nothing_left(lambda: proxy.open_connections), blocked_read(proxy, config) as (consumer, reading):
        hold = proxy.hold(b"UNBLOCK")
        if way == "stopped":
            consumer.stop()
        else:
            reading.cancel()
        await asyncio.wait_for(hold.caught.wait(), LONG)
        done, _ = await asyncio.wait([reading], timeout=LONG)
        assert done, "it waits for ever"
        hold.release()


async def test_a_cancelled_read_ends_though_the_server_is_silent(proxy: Proxy, config: QueueConfig) -> None:
    """After a second it is torn off: its connection is closed, and the next read has another."""
    async with (
        nothing_left(lambda: proxy.open_connections),
        Redis.from_url(proxy.url, socket_timeout=None) as client,
        asyncio.timeout(LONG),
    ):
        queue = RedisStreamsQueue(client, config)
        await queue.open()
        with anyio.CancelScope() as scope:
            silencing = asyncio.create_task(_silence_when_blocked(proxy, scope))
            await queue.read(FOREVER)
        assert scope.cancelled_caught
        await silencing
        await proxy.disconnect()  # what has gone silent is found by nobody without a time-out
        sent = await queue.enqueue({"n": 1})
        assert [message.id for message in await queue.read(FOREVER)] == [sent]
        await queue.aclose()


async def _silence_when_blocked(proxy: Proxy, scope: anyio.CancelScope) -> None:
    await eventually(lambda: proxy.count(b"XREADGROUP") == 1, "the read blocks")
    proxy.silence()
    scope.cancel()


# --- a Cluster ----------------------------------------------------------------------------------------------------


async def connections(url: str) -> int:
    """How many there are to all nodes, but for those by which this is asked."""
    lists = [await ask(node, "CLIENT", "LIST", "TYPE", "normal") for node in nodes_of(url)]
    return sum(len(lines.splitlines()) - 1 for lines in lists)


@pytest.mark.cluster_too
@hows_of_taking
async def test_a_link_that_looks_for_its_node_works_on_after_a_cancellation(
    url: str, config: QueueConfig, how: How
) -> None:
    """The first call also finds out where the key is; so does a wait."""
    key = config.stream_key
    await ask(url, "XADD", key, "1-1", "n", 1)
    before = await connections(url)

    @asynccontextmanager
    async def scene() -> AsyncGenerator[Call]:
        async with nothing_left():
            link = Connections(Address.of(url))

            async def call() -> None:
                assert await link.call(key, pack("XLEN", key)) == 1
                assert await link.wait(key, pack("XREAD", "BLOCK", 20_000, "STREAMS", key, "0-0"), 20, Interrupt())

            yield call
            async with asyncio.timeout(LONG):
                await call()
            await link.aclose()

        async def are_gone() -> bool:
            return await connections(url) <= before

        await eventually(are_gone, "no connection is left")

    await cancelled_everywhere(scene, how)
