"""The queue in both its forms, seen through one awaitable shape, so that a suite is written once.

The core has that shape by itself. The sync facade gets it here: each of its calls runs on a thread.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import TracebackType
from typing import Any, Protocol, Self, TypeVar

import conquiet
from conquiet import BacklogStats, DbFactory, DbTx, QueueConfig, QueueMessage, sync
from conquiet.wire.address import AddressLike

__all__ = ["FLAVOURS", "Consumer", "Core", "Flavour", "Queue", "Sync"]

T = TypeVar("T")
Tx = TypeVar("Tx", bound=DbTx)


class Queue(Protocol):
    """What ``RedisStreamsQueue`` promises."""

    @property
    def config(self) -> QueueConfig: ...
    async def open(self) -> None: ...
    async def aclose(self) -> None: ...
    async def __aenter__(self) -> Self: ...
    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...
    async def enqueue(self, payload: Mapping[str, Any]) -> str: ...
    async def enqueue_many(self, payloads: Iterable[Mapping[str, Any]]) -> list[str]: ...
    async def read(self, block_ms: int | None = None, count: int | None = None) -> list[QueueMessage]: ...
    async def ack(self, *messages: QueueMessage) -> None: ...
    async def claim_stale(self, min_idle_ms: int | None = None, count: int = 10) -> list[QueueMessage]: ...
    async def backlog_stats(self) -> BacklogStats: ...


class Consumer(Protocol):
    """What ``QueueConsumer`` promises."""

    @property
    def config(self) -> QueueConfig: ...
    @property
    def stopping(self) -> bool: ...
    def stop(self) -> None: ...
    async def __aenter__(self) -> Self: ...
    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...
    async def next(self, block_ms: int | None = None) -> QueueMessage | None: ...
    def iter_messages(self) -> AsyncIterator[QueueMessage]: ...
    async def ack(self, message: QueueMessage) -> None: ...
    async def run(self, *, handler: Callable[[QueueMessage, Tx], None], db_factory: DbFactory[Tx]) -> None: ...


class Flavour(ABC):
    """Makes queues and consumers; at the end of a test, stops and closes all that it made."""

    name: str

    def __init__(self) -> None:
        self._queues: list[Queue] = []
        self._consumers: list[Consumer] = []

    def queue(self, client: AddressLike, config: QueueConfig) -> Queue:
        queue = self._make_queue(client, config)
        self._queues.append(queue)
        return queue

    async def open(self, client: AddressLike, config: QueueConfig) -> Queue:
        queue = self.queue(client, config)
        await queue.open()
        return queue

    def consumer(self, queue: Queue, *, handle_signals: bool = True) -> Consumer:
        consumer = self._make_consumer(queue, handle_signals)
        self._consumers.append(consumer)
        return consumer

    async def aclose(self) -> None:
        for consumer in self._consumers:
            consumer.stop()
        for queue in self._queues:
            await queue.aclose()

    @abstractmethod
    def _make_queue(self, client: AddressLike, config: QueueConfig) -> Queue: ...

    @abstractmethod
    def _make_consumer(self, queue: Queue, handle_signals: bool) -> Consumer: ...


class Core(Flavour):
    name = "core"

    def _make_queue(self, client: AddressLike, config: QueueConfig) -> Queue:
        return conquiet.RedisStreamsQueue(client, config)

    def _make_consumer(self, queue: Queue, handle_signals: bool) -> Consumer:
        assert isinstance(queue, conquiet.RedisStreamsQueue)
        return conquiet.QueueConsumer(queue, handle_signals=handle_signals)


class Sync(Flavour):
    name = "sync"

    def _make_queue(self, client: AddressLike, config: QueueConfig) -> Queue:
        return _SyncQueue(sync.RedisStreamsQueue(client, config))

    def _make_consumer(self, queue: Queue, handle_signals: bool) -> Consumer:
        assert isinstance(queue, _SyncQueue)
        return _SyncConsumer(sync.QueueConsumer(queue.facade, handle_signals=handle_signals))


FLAVOURS: Mapping[str, type[Flavour]] = {flavour.name: flavour for flavour in (Core, Sync)}


class _SyncQueue:
    def __init__(self, facade: sync.RedisStreamsQueue) -> None:
        self.facade = facade

    @property
    def config(self) -> QueueConfig:
        return self.facade.config

    async def open(self) -> None:
        await asyncio.to_thread(self.facade.open)

    async def aclose(self) -> None:
        await asyncio.to_thread(self.facade.close)

    async def __aenter__(self) -> Self:
        await asyncio.to_thread(self.facade.__enter__)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.to_thread(self.facade.__exit__, kind, error, trace)

    async def enqueue(self, payload: Mapping[str, Any]) -> str:
        return await asyncio.to_thread(self.facade.enqueue, payload)

    async def enqueue_many(self, payloads: Iterable[Mapping[str, Any]]) -> list[str]:
        return await asyncio.to_thread(self.facade.enqueue_many, payloads)

    async def read(self, block_ms: int | None = None, count: int | None = None) -> list[QueueMessage]:
        return await asyncio.to_thread(self.facade.read, block_ms, count)

    async def ack(self, *messages: QueueMessage) -> None:
        await asyncio.to_thread(self.facade.ack, *messages)

    async def claim_stale(self, min_idle_ms: int | None = None, count: int = 10) -> list[QueueMessage]:
        return await asyncio.to_thread(self.facade.claim_stale, min_idle_ms, count)

    async def backlog_stats(self) -> BacklogStats:
        return await asyncio.to_thread(self.facade.backlog_stats)


class _SyncConsumer:
    def __init__(self, facade: sync.QueueConsumer) -> None:
        self.facade = facade

    @property
    def config(self) -> QueueConfig:
        return self.facade.config

    @property
    def stopping(self) -> bool:
        return self.facade.stopping

    def stop(self) -> None:
        self.facade.stop()

    async def __aenter__(self) -> Self:
        await asyncio.to_thread(self.facade.__enter__)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.to_thread(self.facade.__exit__, kind, error, trace)

    async def next(self, block_ms: int | None = None) -> QueueMessage | None:
        return await asyncio.to_thread(self.facade.next, block_ms)

    async def iter_messages(self) -> AsyncGenerator[QueueMessage, None]:
        messages = self.facade.iter_messages()
        with ThreadPoolExecutor(1) as thread:  # an iterator belongs to one thread
            try:
                while (message := await _on(thread, partial(next, messages, None))) is not None:
                    yield message
            finally:
                await _on(thread, getattr(messages, "close", lambda: None))

    async def ack(self, message: QueueMessage) -> None:
        await asyncio.to_thread(self.facade.ack, message)

    async def run(self, *, handler: Callable[[QueueMessage, Tx], None], db_factory: DbFactory[Tx]) -> None:
        await asyncio.to_thread(self.facade.run, handler=handler, db_factory=db_factory)


async def _on(thread: ThreadPoolExecutor, work: Callable[[], T]) -> T:
    return await asyncio.get_running_loop().run_in_executor(thread, work)
