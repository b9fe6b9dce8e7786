"""How many connections there are, and how long one that is dead is waited for."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from conquiet import QueueConfig, RedisStreamsQueue, StreamAdded, StreamBalancer
from tests.rigs.asking import ask
from tests.rigs.proxy import Proxy
from tests.rigs.scraping import value
from tests.rigs.waiting import LONG, eventually

pytestmark = pytest.mark.any_server

READERS = 20
FEW = 10


@pytest.fixture
async def proxy(url: str) -> AsyncIterator[Proxy]:
    async with Proxy(url) as proxy:
        yield proxy


@pytest.mark.xfail(strict=True, reason="each read that ever blocked beside others leaves its connection open for ever")
async def test_reads_that_have_ended_leave_few_connections_open(proxy: Proxy, config: QueueConfig) -> None:
    async with RedisStreamsQueue.connect(proxy.url, config) as queue, asyncio.timeout(LONG):
        readings = [asyncio.create_task(queue.read(block_ms=20_000)) for _ in range(READERS)]
        await eventually(lambda: proxy.count(b"XREADGROUP") > 0, "they read")
        await queue.enqueue_many([{"n": number} for number in range(READERS)])
        await asyncio.gather(*readings)
        await eventually(lambda: proxy.open_connections <= FEW, "few connections are open", seconds=2)


@pytest.mark.xfail(strict=True, reason="each stream that is read and has nothing new takes a connection of its own")
async def test_streams_that_are_read_side_by_side_share_connections(
    url: str, proxy: Proxy, config: QueueConfig
) -> None:
    names = [f"{config.stream_key}:{number}" for number in range(READERS)]
    service = config.stream_key.replace(":", "-")
    async with (
        StreamBalancer.connect(proxy.url, service=service, handle_signals=False) as balancer,
        asyncio.timeout(LONG),
    ):
        for name in names:
            await balancer.add_stream(name)
        await eventually(lambda: len(balancer.owned) == READERS, "all are owned")
        readings = [asyncio.create_task(lease.read(block_ms=20_000)) for lease in balancer.owned.values()]
        await eventually(lambda: all(lease.waiting for lease in balancer.owned.values()), "all are being read")
        for name in names:
            await ask(url, "XADD", name, "*", "n", 1)
        assert [len(found) for found in await asyncio.gather(*readings)] == [1] * READERS
        assert proxy.accepted <= FEW


@pytest.mark.xfail(strict=True, reason="a renewal waits five seconds for its answer, however short the lease is")
async def test_a_short_lease_outlives_a_connection_that_has_gone_silent(proxy: Proxy, config: QueueConfig) -> None:
    service = config.stream_key.replace(":", "-")

    def renewals() -> float:
        return value("conquiet_balance_renewed_total", service=service, consumer="c") or 0.0

    async with (
        StreamBalancer.connect(
            proxy.url, service=service, consumer="c", lease_ttl=2.0, handle_signals=False
        ) as balancer,
        asyncio.timeout(LONG),
    ):
        await balancer.add_stream("stream")
        assert isinstance(await anext(balancer.events()), StreamAdded)
        lease = balancer.owned["stream"]
        await eventually(lambda: renewals() > 0, "it is renewed")
        before = renewals()
        proxy.silence()
        await eventually(lambda: renewals() >= before + 2 or not lease.owned, "it is renewed again, or lost")
        is_owned = lease.owned
        await proxy.disconnect()  # so that the end need not wait for the dead ones
        assert is_owned
