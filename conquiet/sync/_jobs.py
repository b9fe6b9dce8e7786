"""Jobs without ``await``."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, Self, TypeAlias, TypeVar, Unpack, cast

from conquiet import jobs as core
from conquiet.errors import ConfigError
from conquiet.jobs import Job
from conquiet.jobs import options as given
from conquiet.kit.clock import SYSTEM_CLOCK, Clock
from conquiet.kit.options import takes
from conquiet.kit.policy import RetryPolicy
from conquiet.kit.signals import stop_on_signals
from conquiet.sync._bridge import Facade, Twin, blocking, passing
from conquiet.sync._portal import call, on_caller, plain
from conquiet.wire.address import Address, AddressLike

__all__ = ["JobQueue", "JobWorker", "MemoryStore", "PostgresStore", "RedisStore"]


_S = TypeVar("_S", core.MemoryStore, core.PostgresStore, core.RedisStore)


class _Store(Facade[_S]):
    """What all stores share."""

    @property
    def clock(self) -> Clock:
        """Moves time in tests."""
        return self._core().clock


class MemoryStore(_Store[core.MemoryStore]):
    __doc__ = core.MemoryStore.__doc__

    def __init__(self, *, clock: Clock = SYSTEM_CLOCK) -> None:
        super().__init__(core.MemoryStore, clock=clock)

    open = blocking(core.MemoryStore.open)
    close = blocking(core.MemoryStore.aclose)


class RedisStore(_Store[core.RedisStore]):
    __doc__ = core.RedisStore.__doc__

    @takes(given.RedisStoreOptions)
    def __init__(self, client: AddressLike, **options: Unpack[given.RedisStoreKeywords]) -> None:
        super().__init__(core.RedisStore, Address.of(client), **options)

    @classmethod
    @takes(given.RedisStoreOptions)
    def connect(cls, url: str, **options: Unpack[given.RedisStoreKeywords]) -> Self:
        return cls(url, **options)

    open = blocking(core.RedisStore.open)
    close = blocking(core.RedisStore.aclose)


class PostgresStore(_Store[core.PostgresStore]):
    __doc__ = core.PostgresStore.__doc__

    @takes(given.PostgresStoreOptions)
    def __init__(self, dsn: str, **options: Unpack[given.PostgresStoreKeywords]) -> None:
        super().__init__(core.PostgresStore, dsn, **options)

    @classmethod
    @takes(given.PostgresStoreOptions)
    def connect(cls, dsn: str, **options: Unpack[given.PostgresStoreKeywords]) -> Self:
        return cls(dsn, **options)

    open = blocking(core.PostgresStore.open)
    close = blocking(core.PostgresStore.aclose)
    migrate = blocking(core.PostgresStore.migrate)
    sql = passing(core.PostgresStore.sql)


Store: TypeAlias = MemoryStore | PostgresStore | RedisStore


class JobQueue(Twin[core.JobQueue]):
    __doc__ = core.JobQueue.__doc__

    @takes(given.JobQueueOptions)
    def __init__(self, store: Store, name: str, **options: Unpack[given.JobQueueKeywords]) -> None:
        if not isinstance(store, Facade):
            raise ConfigError(f"store must be a store of conquiet.sync, not {store!r}")
        super().__init__(core.JobQueue, store, name, **options)

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

    @takes(given.JobWorkerOptions)
    def __init__(
        self, queue: JobQueue, handler: Callable[[Job], Any], **options: Unpack[given.JobWorkerKeywords]
    ) -> None:
        if not isinstance(queue, JobQueue):
            raise ConfigError(f"queue must be a conquiet.sync.JobQueue, not {queue!r}")
        super().__init__(_worker, queue, handler, **options)

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
        with stop_on_signals(self.stop) if self._core()._life.handles_signals else nullcontext():
            call(self._core().run)


def _worker(
    queue: core.JobQueue, handler: Callable[[Job], Any], **options: Unpack[given.JobWorkerKeywords]
) -> core.JobWorker:
    """A core worker for a plain handler: in a pool of threads, or on the thread that runs it if one is enough."""
    plain("handler", handler, "job")
    alone = given.JobWorkerOptions(**options).concurrency == 1
    return core.JobWorker(queue, on_caller(handler) if alone else handler, **options)
