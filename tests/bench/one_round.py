"""One round of the public API's common works, as a program: prints the client's CPU a message of each, as JSON.

It asks for nothing but public names, so that it runs on whichever revision of the library is first on the path.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from conquiet import (
    Broker,
    EmbeddedRedis,
    Job,
    JobQueue,
    JobStore,
    JobWorker,
    Message,
    Outgoing,
    PostgresStore,
    QueueConfig,
    RedisStore,
    RedisStreamsQueue,
    StreamBalancer,
    SubscribeOptions,
)
from tests.rigs.postgres import LocalPostgres

PAYLOAD = {"order": 123, "customer": "customer-7", "amount": 12.5, "note": "some text to reach 100 bytes", "ok": True}
TASKS = 50
CHUNK = 500
SINGLE = 2000
STREAMS = 300
OWNED = 4


async def cpu_of(count: int, work: Awaitable[object]) -> float:
    """Microseconds of this process' CPU a message."""
    before = time.process_time()
    await work
    return (time.process_time() - before) / count * 1e6


async def from_tasks(count: int, send: Callable[[], Awaitable[object]]) -> None:
    async def some() -> None:
        for _ in range(count // TASKS):
            await send()

    await asyncio.gather(*(some() for _ in range(TASKS)))


async def in_chunks(count: int, send: Callable[[int], Awaitable[object]]) -> None:
    for _ in range(count // CHUNK):
        await send(CHUNK)


# --- topics ------------------------------------------------------------------------------------------------


async def consume(broker: Broker, topic: str, group: str, count: int, pause: float = 0.0) -> None:
    """Handle ``count`` messages with a new group, until the last is acknowledged."""
    handled, done = 0, asyncio.Event()

    async def handle(message: Message) -> None:
        nonlocal handled
        if pause:
            await asyncio.sleep(pause)
        handled += 1
        if handled == count:
            done.set()

    options = SubscribeOptions(max_inflight=200, handle_signals=False)
    async with broker.subscribe(topic, group=group, handler=handle, options=options) as subscription:
        await done.wait()
        while subscription.inflight:
            await asyncio.sleep(0.001)


async def topics(url: str) -> dict[str, float]:
    async with Broker.connect(url) as broker:
        await broker.create_topic("one", partitions=1)
        await broker.create_topic("wide", partitions=8)
        batch = [Outgoing(PAYLOAD, key=f"key-{n % 1000}") for n in range(CHUNK)]
        one, many, bulk, slow = 3_000, 10_000, 40_000, 5_000

        async def one_by_one() -> None:
            for _ in range(one):
                await broker.send("one", PAYLOAD, key="k")

        return {
            "topics: send": await cpu_of(one, one_by_one()),
            "topics: send, 50 tasks": await cpu_of(
                many, from_tasks(many, lambda: broker.send("one", PAYLOAD, key="k"))
            ),
            "topics: send_batch": await cpu_of(bulk, in_chunks(bulk, lambda _: broker.send_batch("wide", batch))),
            "topics: subscribe": await cpu_of(bulk, consume(broker, "wide", "fast", bulk)),
            "topics: subscribe, 5 ms handler": await cpu_of(slow, consume(broker, "wide", "slow", slow, 0.005)),
        }


# --- jobs --------------------------------------------------------------------------------------------------


async def work_off(queue: JobQueue, count: int) -> None:
    handled = 0

    async def handle(job: Job) -> None:
        nonlocal handled
        handled += 1
        if handled == count:
            worker.stop()

    worker = JobWorker(queue, handle, concurrency=50, handle_signals=False)
    await worker.run()


async def jobs(name: str, store: JobStore, size: int) -> dict[str, float]:
    queue, other = JobQueue(store, "bulk"), JobQueue(store, "tasks")
    return {
        f"{name}: enqueue, 50 tasks": await cpu_of(size // 2, from_tasks(size // 2, lambda: other.enqueue(PAYLOAD))),
        f"{name}: enqueue_many": await cpu_of(size, in_chunks(size, lambda n: queue.enqueue_many([PAYLOAD] * n))),
        f"{name}: JobWorker": await cpu_of(size, work_off(queue, size)),
    }


# --- queue and balance -------------------------------------------------------------------------------------


async def read_all(queue: RedisStreamsQueue, count: int) -> None:
    """Read and acknowledge one message at a time, and then the rest a hundred at a time."""
    left = count
    while left:
        messages = await queue.read(block_ms=1000, count=1 if left > count - SINGLE else 100)
        await queue.ack(*messages)
        left -= len(messages)


async def queues(url: str) -> dict[str, float]:
    many = 10_000
    config = QueueConfig("q", "group", "consumer", max_read_count=100)
    async with RedisStreamsQueue.connect(url, config) as queue:
        return {
            "queue: enqueue, 50 tasks": await cpu_of(many, from_tasks(many, lambda: queue.enqueue(PAYLOAD))),
            "queue: read and ack": await cpu_of(many, read_all(queue, many)),
        }


async def renewals(url: str) -> dict[str, float]:
    """What it costs to own many streams of which each is renewed three times a second."""
    async with StreamBalancer.connect(
        url, service="s", lease_ttl=1.0, max_streams=STREAMS, handle_signals=False
    ) as balancer:
        for number in range(STREAMS):
            await balancer.add_stream(f"stream-{number}")
        while len(balancer.owned) < STREAMS:
            await asyncio.sleep(0.01)
        return {"balance: renew": await cpu_of(STREAMS * 3 * OWNED, asyncio.sleep(OWNED))}


async def main() -> None:
    cores = sorted(os.sched_getaffinity(0))
    async with EmbeddedRedis(unix_socket=False) as server:
        os.sched_setaffinity(0, {cores[0]})
        os.sched_setaffinity(server.pid, {cores[-1]})
        found = await topics(server.url)
        async with RedisStore.connect(server.url) as store:
            found |= await jobs("jobs on Redis", store, 20_000)
        found |= await queues(server.url)
        found |= await renewals(server.url)
    with LocalPostgres(settings={"shared_buffers": "256MB"}) as postgres:
        # Its processes, which are made for connections, are where it is: not on the core of this one.
        pid = int(Path(postgres.directory, "data", "postmaster.pid").read_text().split()[0])
        os.sched_setaffinity(pid, {cores[-1]})
        table = PostgresStore.connect(postgres.dsn)
        await table.migrate()
        async with table:
            found |= await jobs("jobs on PostgreSQL", table, 10_000)
    print(json.dumps(found))


if __name__ == "__main__":
    asyncio.run(main())
