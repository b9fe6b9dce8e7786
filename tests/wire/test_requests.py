"""No request has more arguments than managed services take, however large the batches are."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import pytest

from conquiet import (
    Broker,
    JobQueue,
    JobSpec,
    Message,
    Outgoing,
    QueueConfig,
    RedisStore,
    RedisStreamsQueue,
    StreamBalancer,
    SubscribeOptions,
)
from conquiet.wire.address import Address
from conquiet.wire.connections import Connections
from conquiet.wire.interrupt import Interrupt
from tests.rigs.proxy import Proxy
from tests.rigs.waiting import LONG, eventually

pytestmark = [pytest.mark.any_server, pytest.mark.slow]

MOST = 3999
"""What ElastiCache Serverless takes."""


@pytest.fixture
async def proxy(url: str) -> AsyncIterator[Proxy]:
    async with Proxy(url) as proxy:
        yield proxy


def largest(proxy: Proxy) -> int:
    """Of how many words the longest request was."""
    return max(int(command[1 : command.index(b"\r\n")]) for command in proxy.received)


async def test_the_queue(proxy: Proxy, config: QueueConfig) -> None:
    async with RedisStreamsQueue.connect(proxy.url, config) as queue:
        await queue.enqueue_many({"n": number} for number in range(5000))
        messages = await queue.read(1000, count=5000)
        assert len(await queue.claim_stale(min_idle_ms=0, count=5000)) == len(messages) == 5000
        await queue.ack(*messages)
        assert (await queue.backlog_stats()).pending == 0
    assert 1000 < largest(proxy) <= MOST


async def test_topics(proxy: Proxy) -> None:
    handled: list[str] = []

    async def handle(message: Message) -> None:
        handled.append(message.id)

    name, many = f"t{secrets.token_hex(6)}", 6000
    options = SubscribeOptions(batch_size=many, max_inflight=2 * many)
    async with Broker.connect(proxy.url) as broker:
        await broker.create_topic(name, partitions=1)
        await broker.send_batch(name, [Outgoing({"n": number}, key=str(number)) for number in range(many)])
        async with broker.subscribe(name, group="g", handler=handle, options=options):
            await eventually(lambda: len(handled) == many, "all to be handled", 3 * LONG)
        info = await broker.admin.describe_group(name, "g")
        assert (info.pending, info.lag) == (0, 0)
        await broker.admin.delete_topic(name, force=True)
    assert 1000 < largest(proxy) <= MOST


async def test_jobs_that_are_all_different(proxy: Proxy) -> None:
    async with RedisStore.connect(proxy.url) as store:
        queue = JobQueue(store, f"q{secrets.token_hex(6)}")
        specs = [JobSpec({"n": number}, priority=number % 7, max_retries=number % 3) for number in range(1500)]
        ids = await queue.enqueue_many(specs)
        jobs = await queue.claim(1500)
        assert {job.id for job in jobs} == set(ids)
        await queue.nack(*jobs, error="no")
    assert 1000 < largest(proxy) <= MOST


async def test_balanced_streams(proxy: Proxy) -> None:
    service = f"s{secrets.token_hex(6)}"
    async with StreamBalancer.connect(proxy.url, service=service, event_buffer=5000, max_streams=5000) as balancer:
        for number in range(700):
            await balancer.add_stream(f"{service}-{number}")
        await eventually(lambda: len(balancer.owned) == 700, "all to be owned", 3 * LONG)
    assert 300 < largest(proxy) <= MOST


async def test_a_read_of_very_many_streams(proxy: Proxy) -> None:
    streams, interrupt = [f"t:{secrets.token_hex(6)}:{number}" for number in range(2300)], Interrupt()
    async with aclosing(Connections(Address.of(proxy.url))) as link:
        reads: list[asyncio.Task[Any]] = [
            asyncio.create_task(link.read({stream: "0-0"}, 1, 10 * LONG, interrupt)) for stream in streams
        ]
        await eventually(lambda: sum(b"XREAD" in one and b"BLOCK" in one for one in proxy.received) >= 2, "two reads")
        interrupt.request()
        assert await asyncio.gather(*reads) == [None] * len(streams)
    assert 1000 < largest(proxy) <= MOST
