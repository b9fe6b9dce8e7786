"""How many connections there are, and how long one that is dead is waited for."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import AsyncIterator

import pytest

from conquiet import QueueConfig, RedisStreamsQueue, StreamAdded, StreamBalancer, StreamLease
from conquiet.message import QueueMessage
from conquiet.wire import blocking_pool
from tests.rigs.asking import ask
from tests.rigs.freezing import elapse
from tests.rigs.proxy import Proxy
from tests.rigs.scraping import value
from tests.rigs.waiting import LONG, eventually

pytestmark = [pytest.mark.any_server, pytest.mark.slow]

READERS = 20
MANY = 300
FEW = 10


@pytest.fixture
async def proxy(url: str) -> AsyncIterator[Proxy]:
    async with Proxy(url) as proxy:
        yield proxy


async def test_reads_that_have_ended_leave_few_connections_open(proxy: Proxy, config: QueueConfig) -> None:
    async with RedisStreamsQueue.connect(proxy.url, config) as queue, asyncio.timeout(LONG):
        readings = [asyncio.create_task(queue.read(block_ms=20_000)) for _ in range(READERS)]
        await eventually(lambda: proxy.count(b"XREADGROUP") > 0, "they read")
        await queue.enqueue_many([{"n": number} for number in range(READERS)])
        await asyncio.gather(*readings)
        await eventually(lambda: proxy.open_connections <= FEW, "few connections are open", seconds=2)


async def test_an_idle_connection_is_closed_after_a_while(
    proxy: Proxy, config: QueueConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocking_pool, "_KEPT_FOR", 0.2)
    async with RedisStreamsQueue.connect(proxy.url, config) as queue, asyncio.timeout(LONG):
        for _ in range(3):
            opened = proxy.accepted
            await asyncio.gather(*(queue.read(block_ms=1) for _ in range(3)))
            assert proxy.accepted > opened
            await eventually(lambda: proxy.open_connections == 1, "only that for commands is open")
        idle = proxy.accepted
        for _ in range(10):  # one that is used is not closed
            await queue.read(block_ms=50)
        assert proxy.accepted == idle + 1


async def test_closing_leaves_neither_a_connection_nor_a_timer(proxy: Proxy, config: QueueConfig) -> None:
    async with RedisStreamsQueue.connect(proxy.url, config) as queue:
        await asyncio.gather(*(queue.read(block_ms=1) for _ in range(READERS)))
        [pool] = map(weakref.ref, queue._link._waiting.values())
    await eventually(lambda: proxy.open_connections == 0, "none is left")
    del queue
    gc.collect()
    assert pool() is None


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


async def test_many_idle_streams_cost_few_connections_and_commands(url: str, proxy: Proxy, config: QueueConfig) -> None:
    names = [f"{config.stream_key}:{number}" for number in range(MANY)]
    service = config.stream_key.replace(":", "-")

    async def first_of(lease: StreamLease) -> QueueMessage:
        return await anext(lease.messages())

    async with (
        StreamBalancer.connect(proxy.url, service=service, max_streams=MANY, handle_signals=False) as balancer,
        asyncio.timeout(3 * LONG),
    ):
        for name in names:
            await balancer.add_stream(name)
        await eventually(lambda: len(balancer.owned) == MANY, "all are owned")
        readings = {name: asyncio.create_task(first_of(lease)) for name, lease in balancer.owned.items()}
        await eventually(lambda: all(name.encode() in proxy.forwarded[-1] for name in names), "all are waited for")
        loop = asyncio.get_running_loop()
        before, began = len(proxy.forwarded), loop.time()
        await elapse(6.0)  # each of them begins to wait once more
        assert len(proxy.forwarded) - before <= 20 * (loop.time() - began)
        for name in names:
            await ask(url, "XADD", name, "*", "n", 1)
        assert {name: (await reading).stream for name, reading in readings.items()} == {name: name for name in names}
        assert proxy.accepted <= 4


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
