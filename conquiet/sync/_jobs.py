"""Jobs without ``await``."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, Self, TypeAlias, cast

from conquiet import jobs as core
from conquiet.errors import ConfigError
from conquiet.jobs import Job, Keep
from conquiet.jobs.queue import KEEP, KEEP_FAILED, RETRY
from conquiet.kit.clock import SYSTEM_CLOCK, Clock
from conquiet.kit.policy import RetryPolicy
from conquiet.kit.signals import stop_on_signals
from conquiet.sync._bridge import Facade, Twin, blocking, passing
from conquiet.sync._portal import call, on_caller, plain
from conquiet.wire.address import Address, AddressLike

__all__ = ["JobQueue", "JobWorker", "MemoryStore", "PostgresStore", "RedisStore"]


class MemoryStore(Facade[core.MemoryStore]):
    __doc__ = core.MemoryStore.__doc__

    def __init__(self, *, clock: Clock = SYSTEM_CLOCK) -> None:
        super().__init__(core.MemoryStore, clock=clock)

    @property
    def clock(self) -> Clock:
        return self._core().clock

    open = blocking(core.MemoryStore.open)
    close = blocking(core.MemoryStore.aclose)


class RedisStore(Facade[core.RedisStore]):
    __doc__ = core.RedisStore.__doc__

    def __init__(self, client: AddressLike, *, namespace: str = "", clock: Clock = SYSTEM_CLOCK) -> None:
        super().__init__(core.RedisStore, Address.of(client), namespace=namespace, clock=clock)

    @classmethod
    def connect(cls, url: str, *, namespace: str = "", clock: Clock = SYSTEM_CLOCK) -> Self:
        return cls(url, namespace=namespace, clock=clock)

    @property
    def clock(self) -> Clock:
        return self._core().clock

    open = blocking(core.RedisStore.open)
    close = blocking(core.RedisStore.aclose)


class PostgresStore(Facade[core.PostgresStore]):
    __doc__ = core.PostgresStore.__doc__

    def __init__(self, dsn: str, *, schema: str = "conquiet", pool_size: int = 8, clock: Clock = SYSTEM_CLOCK) -> None:
        super().__init__(core.PostgresStore, dsn, schema=schema, pool_size=pool_size, clock=clock)

    @classmethod
    def connect(cls, dsn: str, *, schema: str = "conquiet", pool_size: int = 8, clock: Clock = SYSTEM_CLOCK) -> Self:
        return cls(dsn, schema=schema, pool_size=pool_size, clock=clock)

    @property
    def clock(self) -> Clock:
        return self._core().clock

    open = blocking(core.PostgresStore.open)
    close = blocking(core.PostgresStore.aclose)
    migrate = blocking(core.PostgresStore.migrate)
    sql = passing(core.PostgresStore.sql)


Store: TypeAlias = MemoryStore | PostgresStore | RedisStore


class JobQueue(Twin[core.JobQueue]):
    __doc__ = core.JobQueue.__doc__

    def __init__(
        self,
        store: Store,
        name: str,
        *,
        lease_ttl: float = 5.0,
        retry: RetryPolicy = RETRY,
        keep: Keep = KEEP,
        keep_failed: Keep = KEEP_FAILED,
        random: Callable[[], float] = random.random,
    ) -> None:
        if not isinstance(store, Facade):
            raise ConfigError(f"store must be a store of conquiet.sync, not {store!r}")
        super().__init__(
            core.JobQueue,
            store,
            name,
            lease_ttl=lease_ttl,
            retry=retry,
            keep=keep,
            keep_failed=keep_failed,
            random=random,
        )

    @property
    def name(self) -> str:
        return self._core().name

    @property
    def store(self) -> Store:
        return cast("Store", self._recipe[1][0])

    @property
    def lease_ttl(self) -> float:
        return self._core().lease_ttl

    @property
    def retry(self) -> RetryPolicy:
        return self._core().retry

    enqueue = blocking(core.JobQueue.enqueue)
    enqueue_many = blocking(core.JobQueue.enqueue_many)
    claim = blocking(core.JobQueue.claim)
    heartbeat = blocking(core.JobQueue.heartbeat)
    ack = blocking(core.JobQueue.ack)
    nack = blocking(core.JobQueue.nack)
    release = blocking(core.JobQueue.release)
    get = blocking(core.JobQueue.get)
    counts = blocking(core.JobQueue.counts)
    list_jobs = blocking(core.JobQueue.list_jobs)
    wait = blocking(core.JobQueue.wait)
    replay = blocking(core.JobQueue.replay)
    cancel = blocking(core.JobQueue.cancel)
    delete = blocking(core.JobQueue.delete)
    purge = blocking(core.JobQueue.purge)
    collector = passing(core.JobQueue.collector)


class JobWorker(Twin[core.JobWorker]):
    __doc__ = core.JobWorker.__doc__

    def __init__(
        self,
        queue: JobQueue,
        handler: Callable[[Job], Any],
        *,
        concurrency: int = 10,
        execution_timeout: float | None = None,
        drain_timeout: float = 30.0,
        name: str | None = None,
        handle_signals: bool = True,
    ) -> None:
        if not isinstance(queue, JobQueue):
            raise ConfigError(f"queue must be a conquiet.sync.JobQueue, not {queue!r}")
        super().__init__(
            _worker,
            queue,
            handler,
            concurrency=concurrency,
            execution_timeout=execution_timeout,
            drain_timeout=drain_timeout,
            name=name,
            handle_signals=handle_signals,
        )

    @property
    def name(self) -> str:
        return self._core().name

    @property
    def inflight(self) -> int:
        return self._core().inflight

    stop = passing(core.JobWorker.stop)
    health = passing(core.JobWorker.health)

    def run(self) -> None:
        # The core cannot see to signals: it does not run on the main thread, where alone they can be handled.
        with stop_on_signals(self.stop) if self._recipe[2]["handle_signals"] else nullcontext():
            call(self._core().run)


def _worker(queue: core.JobQueue, handler: Callable[[Job], Any], *, concurrency: int, **options: Any) -> core.JobWorker:
    """A core worker for a plain handler: in a pool of threads, or on the thread that runs it if one is enough."""
    plain("handler", handler, "job")
    if concurrency == 1:
        return core.JobWorker(queue, on_caller(handler), concurrency=1, **options)
    return core.JobWorker(queue, handler, concurrency=concurrency, **options)
