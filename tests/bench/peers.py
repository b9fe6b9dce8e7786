"""``python peers.py redis|postgres <URL>``: rates of other libraries on that server, as JSON.

Runs in an environment of its own, since their demands on redis-py and on each other's versions do not go together with
this project's. Each library is used as its documentation shows, with a handler that does nothing.
"""

from __future__ import annotations

import asyncio
import json
import logging
import statistics
import sys
import time
from collections.abc import Awaitable, Callable
from datetime import timedelta
from importlib import import_module
from typing import Any

PAYLOAD = {"order": 123, "customer": "customer-7", "amount": 12.5, "note": "some text to reach 100 bytes", "ok": True}
CHUNK = 1000
CHUNKS = 5
DRAINED = 3_000
CONCURRENCY = 50
ROUNDS = 3


async def rate(count: int, work: Callable[[], Awaitable[object]]) -> float:
    """The median of some rounds."""
    rates: list[float] = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        await work()
        rates.append(count / (time.perf_counter() - start))
    return statistics.median(rates)


async def streaq(url: str) -> dict[str, float]:
    async def nothing(payload: dict[str, Any]) -> None:
        pass

    def made() -> tuple[Any, Any]:
        worker: Any = import_module("streaq").Worker(redis_url=url, concurrency=CONCURRENCY, queue_name="bench")
        return worker, worker.task(nothing)

    async def bulk(worker: Any, task: Any, chunks: int = CHUNKS) -> None:
        for _ in range(chunks):
            await worker.enqueue_many([task.enqueue(PAYLOAD) for _ in range(CHUNK)])

    worker, task = made()
    async with worker:
        enqueued = await rate(CHUNK * CHUNKS, lambda: bulk(worker, task))
        await worker.redis.flushdb()
    drained: list[float] = []
    for _ in range(ROUNDS):
        worker, task = made()  # which runs once
        async with worker:
            await bulk(worker, task, DRAINED // CHUNK)
        worker.burst = True
        start = time.perf_counter()
        await worker.run_async()
        drained.append(DRAINED / (time.perf_counter() - start))
    return {"bulk": enqueued, "drain": statistics.median(drained)}


async def saq(url: str) -> dict[str, float]:
    module: Any = import_module("saq")
    queue = module.Queue.from_url(url, name="bench")
    await queue.connect()
    handled, all_done = 0, asyncio.Event()

    async def nothing(context: Any, *, payload: dict[str, Any]) -> None:
        nonlocal handled
        handled += 1
        if handled == DRAINED:
            all_done.set()

    async def bulk(count: int = CHUNK * CHUNKS) -> None:
        for _ in range(count // CONCURRENCY):
            await asyncio.gather(*(queue.enqueue("nothing", payload=PAYLOAD) for _ in range(CONCURRENCY)))

    enqueued = await rate(CHUNK * CHUNKS, bulk)
    await queue.redis.flushdb()
    drained: list[float] = []
    for _ in range(ROUNDS):
        await bulk(DRAINED)
        handled = 0
        all_done.clear()
        worker = module.Worker(queue, functions=[("nothing", nothing)], concurrency=CONCURRENCY)
        start = time.perf_counter()
        running = asyncio.get_running_loop().create_task(worker.start())
        await all_done.wait()
        drained.append(DRAINED / (time.perf_counter() - start))
        await worker.stop()
        await running
    await queue.disconnect()
    return {"bulk": enqueued, "drain": statistics.median(drained)}


async def arq(url: str) -> dict[str, float]:
    connections, workers = import_module("arq.connections"), import_module("arq.worker")
    settings: Any = connections.RedisSettings.from_dsn(url)
    pool: Any = await connections.create_pool(settings)

    async def nothing(context: Any, payload: dict[str, Any]) -> None:
        pass

    async def bulk(count: int = CHUNK * CHUNKS) -> None:
        for _ in range(count // CONCURRENCY):
            await asyncio.gather(*(pool.enqueue_job("nothing", PAYLOAD) for _ in range(CONCURRENCY)))

    enqueued = await rate(CHUNK * CHUNKS, bulk)
    await pool.flushdb()
    drained: list[float] = []
    for _ in range(ROUNDS):
        await bulk(DRAINED)
        function = workers.func(nothing, name="nothing")
        worker = workers.Worker(
            [function], redis_settings=settings, burst=True, max_jobs=CONCURRENCY, poll_delay=0, handle_signals=False
        )
        start = time.perf_counter()
        await worker.async_run()
        drained.append(DRAINED / (time.perf_counter() - start))
        await worker.close()
    await pool.aclose()
    return {"bulk": enqueued, "drain": statistics.median(drained)}


async def pgqueuer(dsn: str) -> dict[str, float]:
    module: Any = import_module("pgqueuer")
    mode: Any = import_module("pgqueuer.types").QueueExecutionMode
    connection: Any = await import_module("asyncpg").connect(dsn)
    driver = module.AsyncpgDriver(connection)
    queries = module.Queries(driver)
    await queries.install()
    payload = json.dumps(PAYLOAD).encode()

    async def bulk(chunks: int = 4 * CHUNKS) -> None:
        for _ in range(chunks):
            await queries.enqueue(["nothing"] * CHUNK, [payload] * CHUNK, [0] * CHUNK)

    enqueued = await rate(4 * CHUNK * CHUNKS, bulk)
    await queries.clear_queue("nothing")
    drained: list[float] = []
    for _ in range(ROUNDS):
        await bulk(DRAINED // CHUNK)
        manager = module.QueueManager(queries)

        async def nothing(job: Any) -> None:
            pass

        manager.entrypoint("nothing")(nothing)
        start = time.perf_counter()
        await manager.run(batch_size=CONCURRENCY, dequeue_timeout=timedelta(seconds=1), mode=mode.drain)
        drained.append(DRAINED / (time.perf_counter() - start))
    await connection.close()
    return {"bulk": enqueued, "drain": statistics.median(drained)}


async def main(kind: str, url: str) -> None:
    logging.disable(logging.CRITICAL)
    libraries = {"redis": (streaq, saq, arq), "postgres": (pgqueuer,)}[kind]
    print(json.dumps({library.__name__: await library(url) for library in libraries}))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
