"""Who leaves while the server stands still is gone soon all the same, and another takes over when the leases have run
out: the server was not told, and need not be.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, Final

import psutil
import pytest

from conquiet import (
    JobQueue,
    JobState,
    JobWorker,
    QueueConfig,
    QueueConsumer,
    RedisStore,
    RedisStreamsQueue,
    StreamBalancer,
)
from conquiet.wire.embedded import EmbeddedRedis
from tests.jobs.working import Gate
from tests.rigs.freezing import all_of, freeze, freezer, own_server, thaw
from tests.rigs.waiting import LONG, eventually
from tests.system.pauses import Streams

pytestmark = pytest.mark.system

LEASE: Final = 0.9


@asynccontextmanager
async def standing_still(server: EmbeddedRedis) -> AsyncIterator[None]:
    """Within the block; which has to end without it."""
    await freeze(server.pid)
    try:
        yield
        assert psutil.Process(server.pid).status() == psutil.STATUS_STOPPED
    finally:
        thaw(server.pid)


async def leave_streams() -> None:
    work = Streams()
    async with own_server() as server:

        def made(name: str) -> StreamBalancer:
            return StreamBalancer.connect(
                server.url, service="ingest", consumer=name, lease_ttl=LEASE, handle_signals=False
            )

        leaver = made("leaver")
        await leaver.open()
        running = asyncio.ensure_future(leaver.run(work.of("leaver")))
        await leaver.add_stream("session:1")
        await eventually(lambda: work.owners() == {"session:1": "leaver"}, "it is at work")
        async with standing_still(server):
            await asyncio.wait_for(leaver.aclose(), LONG)
            await asyncio.wait_for(running, LONG)
            assert work.owners() == {}
        async with made("heir") as heir:
            running = asyncio.ensure_future(heir.run(work.of("heir")))
            await eventually(lambda: work.owners() == {"session:1": "heir"}, "the heir is at work")
            work.done.add("session:1")
            await eventually(lambda: not heir.owned, "it is done")
            heir.stop()
            await running
    assert work.together == []


async def leave_jobs() -> None:
    async with own_server() as server, RedisStore.connect(server.url) as store:
        queue, gate = JobQueue(store, "work", lease_ttl=LEASE), Gate()
        job_id = await queue.enqueue(1)
        async with RedisStore.connect(server.url) as apart:
            worker = JobWorker(JobQueue(apart, "work", lease_ttl=LEASE), gate, handle_signals=False, drain_timeout=0.1)
            running = asyncio.ensure_future(worker.run())
            await gate.entered(1)
            async with standing_still(server):
                worker.stop()
                await asyncio.wait_for(running, LONG)
        gate.open()
        heir = JobWorker(queue, gate, handle_signals=False)
        running = asyncio.ensure_future(heir.run())

        async def is_done() -> bool:
            job = await queue.get(job_id)
            return job is not None and job.state is JobState.SUCCEEDED

        await eventually(is_done, "the heir has done it")
        heir.stop()
        await running


async def leave_a_queue() -> None:
    """The server stays silent: a stop ends the read with nothing, and nothing is lost."""
    async with own_server() as server, freezer(server.url) as proxy:
        config = QueueConfig("orders", "group", "consumer-1")
        async with RedisStreamsQueue.connect(proxy.url, config) as queue:
            async with QueueConsumer(queue, handle_signals=False) as consumer:
                await consumer.next(block_ms=1)  # so that its connection is there
                async with standing_still(server):
                    reading = asyncio.ensure_future(consumer.next(block_ms=500))
                    await eventually(lambda: sum(b"XREADGROUP" in one for one in proxy.received) == 2, "it reads")
                    consumer.stop()
                    assert await asyncio.wait_for(reading, LONG) is None
            entry_id = await queue.enqueue({"number": 1})
            got = await queue.read(block_ms=2000)
            assert [message.id for message in got or await queue.claim_stale(min_idle_ms=0)] == [entry_id]


async def test_who_leaves_a_server_that_stands_still_is_gone_soon() -> None:
    scenes: dict[str, Callable[[], Any]] = {
        "balance": leave_streams,
        "jobs": leave_jobs,
        "queue": leave_a_queue,
    }
    await all_of(scenes)
