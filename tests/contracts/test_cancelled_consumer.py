"""A consumer of a queue, cancelled at each suspension: a transaction ends once, and nothing unhandled is settled."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest

from conquiet import QueueConsumer, QueueMessage, RedisStreamsQueue
from tests.contracts.cancellation_scenes import SERVERS, Place, SceneAt, cancelled_at_each_point, hows_of_taking
from tests.rigs.cancelling import Call, How, nothing_left
from tests.rigs.proxy import Proxy
from tests.rigs.waiting import LONG, eventually

pytestmark = [*SERVERS]


@pytest.fixture
async def place(url: str) -> AsyncIterator[Place]:
    async with Proxy(url) as proxy:
        yield Place(url, proxy)


class Book:
    """A database with plain functions: which transactions there were, and how each ended."""

    def __init__(self) -> None:
        self.begun: list[Page] = []
        self.consumer: QueueConsumer | None = None

    def begin(self) -> Page:
        self.begun.append(Page())
        return self.begun[-1]

    def handle(self, message: QueueMessage, page: Page) -> None:
        page.message = message
        if message.payload["n"] == 2 and self.consumer is not None:
            self.consumer.stop()

    @property
    def committed(self) -> list[str]:
        return [page.message.id for page in self.begun if page.ends == ["commit"] and page.message is not None]

    async def is_settled(self) -> None:
        """Every transaction has ended, once, and in one way."""
        await eventually(lambda: all(page.ends for page in self.begun), "each transaction has ended")
        assert all(len(page.ends) == 1 for page in self.begun), [page.ends for page in self.begun]


class Page:
    """A transaction of the plain kind."""

    def __init__(self) -> None:
        self.message: QueueMessage | None = None
        self.ends: list[str] = []

    def commit(self) -> Any:
        self.ends.append("commit")

    def rollback(self) -> Any:
        self.ends.append("rollback")


class AsyncBook(Book):
    """The same with a driver that is awaited; cancelled before its answer, it has done nothing."""

    async def begin(self) -> Page:  # type: ignore[override]
        await asyncio.sleep(0)
        self.begun.append(AsyncPage())
        return self.begun[-1]

    async def handle(self, message: QueueMessage, page: Page) -> None:  # type: ignore[override]
        await asyncio.sleep(0)
        super().handle(message, page)


class AsyncPage(Page):
    """A transaction of the awaited kind."""

    async def commit(self) -> None:
        await asyncio.sleep(0)
        super().commit()

    async def rollback(self) -> None:
        await asyncio.sleep(0)
        super().rollback()


@asynccontextmanager
async def consuming(place: Place) -> AsyncGenerator[tuple[QueueConsumer, list[str]]]:
    """A consumer of two messages; whatever becomes of it, its queue works on and both are delivered in the end."""
    ids = await place.send(1, 2)
    async with place.queue(is_open=False) as queue:
        yield QueueConsumer(queue), ids
        assert await all_unsettled(queue, place) == await place.pending()


async def all_unsettled(queue: RedisStreamsQueue, place: Place) -> list[str]:
    """What is delivered to whoever looks for it: what nobody was given yet, and what is pending."""
    async with asyncio.timeout(LONG):
        while await queue.read(1):
            pass
        return [message.id for message in await queue.claim_stale(0)]


def signals() -> list[object]:
    return [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]


async def test_a_run_whose_thread_does_not_end_is_not_held_up_for_ever(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The scope is cancelled while the handler runs. The thread rolls back when it comes to it, and nothing is lost."""
    monkeypatch.setattr("conquiet.queue.transaction._PATIENCE", 0.05)
    monkeypatch.setattr("conquiet.queue.transaction._ROLLBACK", 0.05)
    entered, released = threading.Event(), threading.Event()

    class Slow(Book):
        def handle(self, message: QueueMessage, page: Page) -> None:
            entered.set()
            assert released.wait(LONG)

    book = Slow()
    async with nothing_left(lambda: place.proxy.open_connections), consuming(place) as (consumer, ids):
        with anyio.fail_after(LONG), anyio.CancelScope() as scope:
            cancelling = asyncio.create_task(_cancel_when(entered, scope))
            await consumer.run(handler=book.handle, db_factory=book)
        await cancelling
        assert scope.cancelled_caught
        assert [page.ends for page in book.begun] == [[]]
        released.set()
        await book.is_settled()
        assert (book.committed, await place.pending()) == ([], ids[:1])


async def _cancel_when(event: threading.Event, scope: anyio.CancelScope) -> None:
    await eventually(event.is_set, "the handler runs")
    scope.cancel()


# --- scenes -------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def asking_for_the_next(place: Place) -> AsyncGenerator[Call]:
    async with consuming(place) as (consumer, ids):
        yield consumer.next
        assert await place.pending() in ([], ids[:1]), "it holds one message at most"


@asynccontextmanager
async def iterating(place: Place) -> AsyncGenerator[Call]:
    """Within the block of the consumer: entered, iterated, acknowledged, left."""
    before, acked = signals(), list[str]()
    async with consuming(place) as (consumer, ids):

        async def call() -> None:
            async with consumer:
                async for message in consumer.iter_messages():
                    await consumer.ack(message)
                    acked.append(message.id)
                    if len(acked) == 2:
                        consumer.stop()

        yield call
        assert signals() == before, "the signals are as they were"
        assert acked == ids[: len(acked)]
        assert not {*await place.pending()} & {*acked}
        assert len(await place.pending()) <= 1


@asynccontextmanager
async def running(place: Place, book: Book) -> AsyncGenerator[Call]:
    before = signals()
    async with consuming(place) as (consumer, ids):
        book.consumer = consumer
        yield lambda: consumer.run(handler=book.handle, db_factory=book)
        assert signals() == before, "the signals are as they were"
        await book.is_settled()
        assert book.committed == ids[: len(book.committed)]
        settled = [id for id in ids[: len(book.begun)] if id not in await place.pending()]
        assert settled == book.committed[: len(settled)], "what is settled was committed before"


def running_on_a_thread(place: Place) -> Any:
    return running(place, Book())


def running_on_the_loop(place: Place) -> Any:
    return running(place, AsyncBook())


@pytest.mark.parametrize(
    "scene",
    [asking_for_the_next, iterating, running_on_a_thread, running_on_the_loop],
    ids=lambda scene: scene.__name__,
)
@hows_of_taking
async def test_what_a_cancelled_consumer_did_not_finish_stays_pending(place: Place, scene: SceneAt, how: How) -> None:
    await cancelled_at_each_point(place, scene, how)
