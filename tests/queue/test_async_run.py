"""``run`` with asynchronous handlers and factories, and cancelled runs: what only the core has."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from conquiet import QueueConsumer, QueueMessage, RedisStreamsQueue
from tests.contracts.looking import Look
from tests.rigs.asking import pending
from tests.rigs.waiting import eventually, turns


class Journal:
    """Notes its steps; the kinds of its methods are the test's choice."""

    def __init__(self) -> None:
        self.steps: list[str] = []
        self.threads: set[int] = set()

    def note(self, step: str) -> None:
        self.steps.append(step)
        self.threads.add(threading.get_ident())


class SyncTx:
    def __init__(self, journal: Journal) -> None:
        self.journal = journal

    def commit(self) -> None:
        self.journal.note("commit")

    def rollback(self) -> None:
        self.journal.note("rollback")


class AsyncTx:
    def __init__(self, journal: Journal) -> None:
        self.journal = journal

    async def commit(self) -> None:
        await asyncio.sleep(0)
        self.journal.note("commit")

    async def rollback(self) -> None:
        await asyncio.sleep(0)
        self.journal.note("rollback")


class SyncFactory:
    def __init__(self, journal: Journal, tx: Callable[[Journal], Any] = SyncTx) -> None:
        self.journal = journal
        self.tx = tx

    def begin(self) -> Any:
        self.journal.note("begin")
        return self.tx(self.journal)


class AsyncFactory(SyncFactory):
    async def begin(self) -> Any:
        await asyncio.sleep(0)
        return super().begin()


@pytest.fixture
def consumer(queue: RedisStreamsQueue) -> QueueConsumer:
    return QueueConsumer(queue)


@pytest.fixture
def journal() -> Journal:
    return Journal()


FACTORIES: dict[str, Callable[[Journal], Any]] = {
    "sync factory": SyncFactory,
    "sync factory, async transaction": partial(SyncFactory, tx=AsyncTx),
    "async factory": partial(AsyncFactory, tx=AsyncTx),
    "async factory, sync transaction": AsyncFactory,
}


@pytest.mark.any_server
@pytest.mark.parametrize("kind", ["plain", "async", "lambda", "async callable"])
@pytest.mark.parametrize("factory", FACTORIES.values(), ids=FACTORIES)
async def test_any_mixture_of_plain_and_async_runs_in_order(
    kind: str, factory: Callable[[Journal], Any], consumer: QueueConsumer, queue: RedisStreamsQueue, journal: Journal
) -> None:
    """spec 2 §11: run(handler, db_factory), whatever the driver is like."""
    await queue.enqueue({"n": 1})

    def plain(message: QueueMessage, tx: Any) -> None:
        journal.note("handler")
        consumer.stop()

    async def asynchronous(message: QueueMessage, tx: Any) -> None:
        await asyncio.sleep(0)
        plain(message, tx)

    class Callable_:
        async def __call__(self, message: QueueMessage, tx: Any) -> None:
            await asynchronous(message, tx)

    handlers: dict[str, Callable[[QueueMessage, Any], Awaitable[None] | None]] = {
        "plain": plain,
        "async": asynchronous,
        "lambda": lambda message, tx: asynchronous(message, tx),
        "async callable": Callable_(),
    }
    await asyncio.wait_for(consumer.run(handler=handlers[kind], db_factory=factory(journal)), 20)
    assert journal.steps == ["begin", "handler", "commit"]
    assert (await queue.backlog_stats()).pending == 0


@pytest.mark.any_server
async def test_an_async_handler_keeps_a_sync_transaction_on_its_own_thread(
    consumer: QueueConsumer, queue: RedisStreamsQueue, journal: Journal
) -> None:
    """spec 2 §11: a connection that belongs to a thread is used on that thread from begin to commit."""
    await queue.enqueue({"n": 1})

    async def handler(message: QueueMessage, tx: SyncTx) -> None:
        journal.note("handler")
        consumer.stop()

    await consumer.run(handler=handler, db_factory=SyncFactory(journal))
    assert journal.threads == {threading.get_ident()}


@pytest.mark.any_server
async def test_plain_functions_leave_the_loop_free(
    consumer: QueueConsumer, queue: RedisStreamsQueue, journal: Journal
) -> None:
    """spec 2 §11: a plain handler that blocks does not block the event loop."""
    await queue.enqueue({"n": 1})
    released = threading.Event()
    entered = threading.Event()

    def handler(message: QueueMessage, tx: SyncTx) -> None:
        entered.set()
        assert released.wait(20)
        consumer.stop()

    running = asyncio.create_task(consumer.run(handler=handler, db_factory=SyncFactory(journal)))
    await eventually(entered.is_set, "the handler runs")
    released.set()
    await asyncio.wait_for(running, 20)
    assert threading.get_ident() not in journal.threads


STOP_ITERATION = """
import asyncio, sys
import conquiet
from conquiet import QueueConfig, sync

class Tx:
    def begin(self): print("begin"); return self
    def commit(self): print("commit")
    def rollback(self): print("rollback")

def handler(message, tx):
    next(iter(()))

async def core(url, config):
    async with conquiet.RedisStreamsQueue.connect(url, config) as queue:
        await conquiet.QueueConsumer(queue).run(handler=handler, db_factory=Tx())

def facade(url, config):
    with sync.RedisStreamsQueue.connect(url, config) as queue:
        sync.QueueConsumer(queue).run(handler=handler, db_factory=Tx())

flavour, url, stream = sys.argv[1:]
config = QueueConfig(stream, "group", "consumer-1")
try:
    asyncio.run(core(url, config)) if flavour == "core" else facade(url, config)
except (RuntimeError, StopIteration) as error:
    print("raised")
"""


@pytest.mark.slow
@pytest.mark.any_server
@pytest.mark.parametrize("flavour", ["core", "sync"])
async def test_a_stop_iteration_of_a_handler_ends_the_run(
    flavour: str, queue: RedisStreamsQueue, url: str, tmp_path: Path
) -> None:
    """spec 2 §1.1, §11: user exceptions are not swallowed, that of a ``next()`` on an empty iterator included.

    Python lets no StopIteration out of a coroutine: it may arrive as a RuntimeError. In a process of its own, since
    a run that swallows it never ends, and cannot be cancelled.
    """
    sent = await queue.enqueue({"n": 1})
    command = [sys.executable, "-c", STOP_ITERATION, flavour, url, queue.config.stream_key]
    with (tmp_path / "out").open("w+") as out, subprocess.Popen(command, stdout=out, stderr=out) as process:
        try:
            await eventually(lambda: process.poll() is not None, "the run has ended")
        finally:
            process.kill()
        out.seek(0)
        assert (process.poll(), out.read().split()) == (0, ["begin", "rollback", "raised"])
    assert await pending(url, queue.config.stream_key, queue.config.consumer_group) == [sent]


# --- cancellation ------------------------------------------------------------------------------------


async def test_a_cancelled_async_handler_is_rolled_back(
    consumer: QueueConsumer, queue: RedisStreamsQueue, journal: Journal, url: str
) -> None:
    """spec 2 §1.1: guarantees rollback where possible: also when the run is cancelled; the message stays pending."""
    sent = await queue.enqueue({"n": 1})
    entered = asyncio.Event()

    async def handler(message: QueueMessage, tx: AsyncTx) -> None:
        entered.set()
        await asyncio.Event().wait()

    running = asyncio.create_task(consumer.run(handler=handler, db_factory=AsyncFactory(journal, AsyncTx)))
    await asyncio.wait_for(entered.wait(), 20)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert journal.steps == ["begin", "rollback"]
    assert await pending(url, queue.config.stream_key, queue.config.consumer_group) == [sent]


async def test_a_cancelled_run_waits_for_a_plain_handler_before_it_rolls_back(
    consumer: QueueConsumer, queue: RedisStreamsQueue, journal: Journal, url: str
) -> None:
    """spec 2 §1.1: a thread cannot be cancelled: the rollback comes after the handler, on the same thread."""
    sent = await queue.enqueue({"n": 1})
    released = threading.Event()
    entered = threading.Event()

    def handler(message: QueueMessage, tx: SyncTx) -> None:
        entered.set()
        assert released.wait(20)
        journal.note("handler")

    running = asyncio.create_task(consumer.run(handler=handler, db_factory=SyncFactory(journal)))
    await eventually(entered.is_set, "the handler runs")
    running.cancel()
    await turns()
    assert journal.steps == ["begin"]
    released.set()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(running, 20)
    assert journal.steps == ["begin", "handler", "rollback"]
    assert len(journal.threads) == 1
    assert await pending(url, queue.config.stream_key, queue.config.consumer_group) == [sent]


async def test_a_cancelled_read_leaves_the_queue_usable(
    queue: RedisStreamsQueue, consumer: QueueConsumer, look: Look
) -> None:
    """spec 1 §5.4: a read that was torn off takes no other call's answer with it."""
    for _ in range(5):
        reading = asyncio.create_task(consumer.next(block_ms=60_000))
        await look.blocked()
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
    sent = await queue.enqueue({"n": 1})
    # What the server gave to a torn read stays pending; whoever it went to, it is not lost.
    message = await consumer.next(block_ms=500)
    ids = [message.id] if message else [stale.id for stale in await queue.claim_stale(min_idle_ms=0)]
    assert ids == [sent]


@pytest.mark.any_server
async def test_a_cancelled_iteration_raises_the_cancellation(
    queue: RedisStreamsQueue, consumer: QueueConsumer, look: Look
) -> None:
    """spec 2 §7: propagates all exceptions, a cancellation included, and reads no more."""

    async def consume() -> None:
        async for message in consumer.iter_messages():
            pytest.fail(f"{message} came from nowhere")

    consuming = asyncio.create_task(consume())
    await look.blocked()
    consuming.cancel()
    with pytest.raises(asyncio.CancelledError):
        await consuming
