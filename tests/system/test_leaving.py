"""Who leaves is gone at most one second after its drain time, whatever the server does, and so is what it closes.

The time is what is promised here, so it is measured; with slack, for a machine that has much else to do.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias
from urllib.parse import urlsplit

import psutil
import pytest

from conquiet import (
    Broker,
    Job,
    JobQueue,
    JobStore,
    JobWorker,
    Message,
    PostgresStore,
    QueueConfig,
    QueueConsumer,
    QueueError,
    RedisStore,
    RedisStreamsQueue,
    StreamBalancer,
    SubscribeOptions,
)
from conquiet.jobs.stores.postgres import driver
from conquiet.kit.lifecycle import MOMENT
from tests.jobs.working import Gate
from tests.rigs.postgres import schema_name
from tests.rigs.relay import Relay
from tests.rigs.waiting import LONG, eventually
from tests.system.jobs_crew import PostgresHome, RedisHome
from tests.system.pauses import Streams

pytestmark = pytest.mark.system

Fault: TypeAlias = Literal["frozen", "killed", "silent"]
"""SIGSTOP; an end without a word; the server is well, but nothing passes between it and its clients."""
FAULTS: Final[tuple[Fault, ...]] = ("frozen", "killed", "silent")

DRAIN: Final = 0.2
SLACK: Final = 3.0
"""Seconds that a loaded machine may take longer; what is shown here took several times as long."""


@contextmanager
def at_most(seconds: float, what: str) -> Iterator[None]:
    """The block ends within ``seconds``, about."""
    began = time.monotonic()
    yield
    took = time.monotonic() - began
    assert took <= seconds + SLACK, f"{what} took {took:.2f} s, not {seconds:g} s"


# --- servers ---------------------------------------------------------------------------------------------------------


class Place:
    """A server of the test's own, and what happens to it."""

    def __init__(self, home: RedisHome | PostgresHome, relay: Relay, fault: Fault) -> None:
        self._home = home
        self._relay = relay
        self._fault = fault

    @property
    def url(self) -> str:
        """Where it is found: behind a relay if that is what will fail."""
        if isinstance(self._home, PostgresHome):
            url, port = self._home.server.tcp_dsn, self._home.server.port
        else:
            url, port = self._home.url, urlsplit(self._home.url).port or 0
        return url.replace(str(port), str(self._relay.port)) if self._fault == "silent" else url

    async def fails(self) -> None:
        """From now on nobody gets an answer."""
        if self._fault == "silent":
            self._relay.freeze()
            return
        if isinstance(self._home, PostgresHome) and self._fault == "killed":
            await asyncio.to_thread(self._home.server.stop, "immediate")
            return
        processes = self._home.processes()
        for process in processes:
            os.kill(process.pid, signal.SIGKILL if self._fault == "killed" else signal.SIGSTOP)
        gone = (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE)
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                await eventually(lambda p=process: p.status() in gone or not p.is_running(), "it is so")  # type: ignore[misc]


@asynccontextmanager
async def failing(home: RedisHome | PostgresHome, fault: Fault) -> AsyncIterator[Place]:
    with home:
        port = home.server.port if isinstance(home, PostgresHome) else urlsplit(home.url).port or 0
        async with Relay(port) as relay:
            processes: list[psutil.Process] = []
            try:
                processes += home.processes()
                yield Place(home, relay, fault)
            finally:
                with suppress(FileNotFoundError, psutil.NoSuchProcess):
                    processes += home.processes()
                for process in processes:
                    with suppress(psutil.NoSuchProcess):
                        process.resume()


@pytest.fixture(params=FAULTS)
def fault(request: pytest.FixtureRequest) -> Fault:
    return request.param  # type: ignore[no-any-return]


@pytest.fixture
async def redis(fault: Fault, tmp_path: Path) -> AsyncIterator[Place]:
    async with failing(RedisHome(tmp_path), fault) as place:
        yield place


@pytest.fixture
async def postgres(fault: Fault) -> AsyncIterator[Place]:
    async with failing(PostgresHome(), fault) as place:
        yield place


# --- jobs ------------------------------------------------------------------------------------------------------------


async def leave_with_jobs(store: JobStore, place: Place) -> None:
    """One job is at work and does not end, one has ended but cannot be told, and the worker waits for more."""
    queue, gate, ready = JobQueue(store, "work", lease_ttl=0.9), Gate(), asyncio.Event()

    async def handle(job: Job) -> str:
        await ready.wait()
        return await gate(job) if job.payload == 1 else "done"

    await queue.enqueue_many([1, 2])
    worker = JobWorker(queue, handle, handle_signals=False, drain_timeout=DRAIN)
    running = asyncio.ensure_future(worker.run())
    await eventually(lambda: worker.inflight == 2, "both are at work")
    await place.fails()
    ready.set()
    await gate.entered(1)
    worker.stop()
    with at_most(DRAIN + MOMENT, "the worker's leaving"):
        await asyncio.wait_for(running, LONG)
    with at_most(MOMENT, "closing the store"):
        await asyncio.wait_for(store.aclose(), LONG)


async def test_a_worker_on_redis_leaves_in_time(redis: Place) -> None:
    await leave_with_jobs(RedisStore.connect(redis.url), redis)


async def test_a_worker_on_postgresql_leaves_in_time(postgres: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """However long calls that were cancelled take to end."""
    monkeypatch.setattr(driver, "GOODBYE", LONG)
    store = PostgresStore.connect(postgres.url, schema=schema_name())
    await store.migrate()
    await leave_with_jobs(store, postgres)


async def test_a_postgresql_store_is_closed_in_time_under_calls(
    postgres: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While somebody adds, claims and waits for news."""
    monkeypatch.setattr(driver, "GOODBYE", LONG)
    store = PostgresStore.connect(postgres.url, schema=schema_name())
    await store.migrate()
    queue = JobQueue(store, "work")
    await asyncio.gather(*(queue.counts() for _ in range(4)))  # so that connections are there
    waiting: asyncio.Future[Any] = asyncio.ensure_future(queue.claim(1, worker="w", timeout=LONG))
    await eventually(lambda: store._listener._mine.is_listening, "it listens")
    await postgres.fails()
    works: list[Coroutine[Any, Any, Any]] = [queue.enqueue(1), queue.enqueue(2), queue.counts()]
    calls = [waiting, *map(asyncio.ensure_future, works)]
    await asyncio.wait(calls, timeout=0.2)
    with at_most(MOMENT, "closing the store"):
        await asyncio.wait_for(store.aclose(), LONG)
    monkeypatch.undo()
    for call in calls:
        call.cancel()
    await asyncio.gather(*calls, return_exceptions=True)


# --- topics ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["one consumer", "all of a broker"])
async def test_consumers_of_topics_leave_in_time(redis: Place, way: str) -> None:
    """With a handler that does not end, one that has ended but cannot be told, and nothing to do."""
    ready, stuck = asyncio.Event(), asyncio.Event()

    async def handle(message: Message) -> None:
        await (stuck if message.payload == 1 else ready).wait()

    options = SubscribeOptions(lease_ttl=0.9, drain_timeout=DRAIN, handle_signals=False)
    broker = Broker.connect(redis.url)
    await broker.create_topic("orders", partitions=2)
    consumers = [broker.subscribe("orders", group=f"g{n}", handler=handle, options=options) for n in range(4)]
    for consumer in consumers:
        await consumer.__aenter__()
    for payload in (1, 2):
        await broker.send("orders", payload)
    await eventually(lambda: all(consumer.inflight == 2 for consumer in consumers), "both are at work")
    await redis.fails()
    ready.set()
    if way == "one consumer":
        with at_most(DRAIN + MOMENT, "the consumer's leaving"):
            await asyncio.wait_for(consumers[0].aclose(), LONG)
    with at_most(DRAIN + MOMENT, "the broker's leaving"):
        await asyncio.wait_for(broker.aclose(), LONG)


# --- balance ---------------------------------------------------------------------------------------------------------


async def test_a_balancer_leaves_in_time(redis: Place) -> None:
    work = Streams()
    balancer = StreamBalancer.connect(
        redis.url, service="ingest", lease_ttl=0.9, handle_signals=False, drain_timeout=DRAIN
    )
    await balancer.open()
    running = asyncio.ensure_future(balancer.run(work.of("leaver")))
    await balancer.add_stream("session:1")
    await eventually(lambda: bool(work.owners()), "it is at work")
    await redis.fails()
    with at_most(DRAIN + MOMENT, "the balancer's leaving"):
        balancer.stop()
        await asyncio.wait_for(running, LONG)
        await asyncio.wait_for(balancer.aclose(), LONG)
    assert work.owners() == {}


# --- queue -----------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def consuming(place: Place) -> AsyncIterator[QueueConsumer]:
    config = QueueConfig("orders", "group", "consumer-1", block_ms=60_000)
    queue = RedisStreamsQueue.connect(place.url, config)
    async with QueueConsumer(queue, handle_signals=False) as consumer:
        yield consumer
    with at_most(MOMENT, "closing the queue"):
        await asyncio.wait_for(queue.aclose(), LONG)


async def next_message(consumer: QueueConsumer) -> None:
    assert await consumer.next() is None


async def every_message(consumer: QueueConsumer) -> None:
    assert [message async for message in consumer.iter_messages()] == []


@pytest.mark.parametrize("reading", [next_message, every_message])
@pytest.mark.parametrize("when", ["it blocks", "it connects"])
async def test_a_stop_ends_a_read_in_time(
    redis: Place, reading: Callable[[QueueConsumer], Coroutine[Any, Any, None]], when: str, fault: Fault
) -> None:
    """It returns nothing, as any stop; a server that was killed may be an error instead."""
    async with consuming(redis) as consumer:
        if when == "it connects":
            await redis.fails()
        task = asyncio.ensure_future(reading(consumer))
        if when == "it blocks":
            pool = consumer._queue._link._waiting
            await eventually(lambda: any(lane._identified for one in pool.values() for lane in one._in_use), "it reads")
            await redis.fails()
        await asyncio.wait([task], timeout=0.1)
        with at_most(MOMENT, "the read's end"), suppress(*((QueueError,) if fault == "killed" else ())):
            consumer.stop()
            await asyncio.wait_for(task, LONG)


async def test_a_stop_ends_a_run_that_acknowledges_in_time(redis: Place, fault: Fault) -> None:
    """The message was committed and not acknowledged: it is an error, and the message is delivered again."""

    class Tx:
        def commit(self) -> None: ...
        def rollback(self) -> None: ...
        def begin(self) -> Tx:
            return self

    handled = asyncio.Event()

    async def handle(message: object, tx: Tx) -> None:
        await redis.fails()
        handled.set()

    async with consuming(redis) as consumer:
        await consumer._queue.enqueue({"n": 1})
        running = asyncio.ensure_future(consumer.run(handler=handle, db_factory=Tx()))
        await handled.wait()
        consumer.stop()
        with at_most(MOMENT, "the run's end"), pytest.raises(QueueError):
            await asyncio.wait_for(running, LONG)
