"""What the cancellation suites of jobs share: a store that is cancelled in use, and an eye on what became of it."""

from __future__ import annotations

import secrets
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Final, TypeAlias
from unittest.mock import patch

import psycopg
import pytest

from conquiet import Backoff, Job, JobQueue, JobState, JobStore, RetryPolicy
from conquiet.jobs.stores.postgres import driver
from conquiet.kit.clock import ManualClock
from tests.conftest import CONTRACT_LADDER, Rung
from tests.contracts.jobs_fixtures import kind_name
from tests.contracts.jobs_flavours import Backend
from tests.rigs.cancelling import HOWS, Call, How, Scene, followed, nothing_left
from tests.rigs.proxy import Proxy
from tests.rigs.sizing import IS_FULL
from tests.rigs.waiting import eventually

__all__ = [
    "IS_FULL",
    "TTL",
    "Ground",
    "Stage",
    "Verb",
    "everywhere",
    "ground_on",
    "hows",
    "in_memory",
    "on_postgres",
    "on_redis",
    "on_servers",
    "scene_of",
]

TTL: Final = 30.0
"""The lease of the queues, in seconds of their own time."""
_ONE_TRY: Final = RetryPolicy(max_retries=0, backoff=Backoff(base=0, cap=0, kind="fixed"))
_SUBJECT: Final = "subject"
"""By which the connections of what is cancelled are known to PostgreSQL."""
_SERVERS: Final[list[str | Rung]] = [*(CONTRACT_LADDER if IS_FULL else CONTRACT_LADDER[-1:]), "postgres"]


def _on(*kinds: str | Rung) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("backend", kinds, ids=kind_name, indirect=True, scope="session")


in_memory: Final = _on("memory")
on_servers: Final = _on(*_SERVERS)
on_redis: Final = _on(*_SERVERS[:-1])
on_postgres: Final = _on("postgres")
everywhere: Final = _on("memory", *_SERVERS)


def hows(*, is_taking: bool = False) -> tuple[How, ...]:
    """How the calls are cancelled: in all ways at full size, else by a scope, and late where something is taken."""
    if IS_FULL:
        return HOWS
    return ("late task", "scope") if is_taking else ("scope",)


@dataclass(frozen=True)
class Ground:
    """A server, or none, whose connections are counted."""

    backend: Backend
    clock: ManualClock
    subject: Callable[..., Any]
    """Makes a store that is to be cancelled."""
    eye: JobStore
    """A store that never is, over connections of its own."""
    connections: Callable[[], int]
    """How many the subjects have open."""
    proxy: Proxy | None = None
    is_blocked: Callable[[], bool] = lambda: False
    """Whether PostgreSQL has a statement of theirs wait for somebody else's lock."""

    @property
    def is_memory(self) -> bool:
        return self.backend.name == "memory"

    @property
    def is_postgres(self) -> bool:
        return self.backend.name == "postgres"


@asynccontextmanager
async def ground_on(backend: Backend) -> AsyncGenerator[Ground]:
    """A place to be cancelled at."""
    clock = ManualClock()
    ways = {"MemoryStore": _in_memory, "RedisStore": _at_redis, "PostgresStore": _at_postgres}
    async with ways[backend.store](backend, clock) as ground, ground.eye:  # type: ignore[attr-defined]
        yield ground


@asynccontextmanager
async def _in_memory(backend: Backend, clock: ManualClock) -> AsyncGenerator[Ground]:
    store = backend.make("core", clock)
    yield Ground(backend, clock, lambda: store, store, lambda: 0)


@asynccontextmanager
async def _at_redis(backend: Backend, clock: ManualClock) -> AsyncGenerator[Ground]:
    async with Proxy(backend.where[0]) as proxy:
        behind = replace(backend, where=(proxy.url,))
        eye = backend.make("core", clock)
        yield Ground(backend, clock, lambda: behind.make("core", clock), eye, lambda: proxy.open_connections, proxy)


@asynccontextmanager
async def _at_postgres(backend: Backend, clock: ManualClock) -> AsyncGenerator[Ground]:
    named = replace(backend, where=(f"{backend.where[0]}&application_name={_SUBJECT}",))

    def subject(**options: Any) -> Any:
        return replace(named, options=tuple({**dict(named.options), **options}.items())).make("core", clock)

    connecting = patch.object(driver.Connection, "connect", followed(driver.Connection.connect))
    with connecting, psycopg.connect(backend.where[0], autocommit=True) as looking:

        def count() -> int:
            query = "SELECT FROM pg_stat_activity WHERE application_name = %s"
            return looking.execute(query, [_SUBJECT]).rowcount

        def blocked() -> bool:
            query = "SELECT FROM pg_stat_activity WHERE application_name = %s AND wait_event_type = 'Lock'"
            return looking.execute(query, [_SUBJECT]).rowcount > 0

        yield Ground(backend, clock, subject, backend.make("core", clock), count, is_blocked=blocked)


@dataclass
class Stage:
    """One call on a queue in a new store, and what is known of it."""

    ground: Ground
    store: Any
    name: str = field(default_factory=lambda: f"c-{secrets.token_hex(6)}")
    is_done: bool = False
    """Whether the call has returned."""
    result: Any = None
    error: BaseException | None = None
    """Why it has not. Kept, as somebody may keep it: what it refers to is not closed by the garbage collector."""

    def __post_init__(self) -> None:
        self.queue = self.seen_by(self.store)
        """The one that is cancelled."""
        self.eye = self.seen_by(self.ground.eye)

    def follow(self, *methods: str) -> None:
        """Let the suspensions of the store be points too, where a call leaves them to a task of its own."""
        for name in methods:
            setattr(self.store, name, followed(getattr(self.store, name)))
        if hasattr(self.store, "_gathering"):
            self.store._gathering._add = followed(self.store._gathering._add)

    def seen_by(self, store: JobStore) -> JobQueue:
        """The queue, in a store. Its jobs have one try: a lease that runs out fails them."""
        return JobQueue(store, self.name, lease_ttl=TTL, retry=_ONE_TRY)

    def is_waiting(self) -> bool:
        """Whether somebody waits at the store for what others do."""
        if self.ground.proxy is not None:
            return any(b"XREAD" in one and self.name.encode() in one for one in list(self.ground.proxy.forwarded))
        if self.ground.is_memory:
            return bool(self.store._of(self.name).waiting)
        return bool(self.store._listener._mine.is_listening)

    async def job(self, id: str) -> Job:
        job = await self.eye.get(id)
        assert job is not None
        return job

    async def states(self, *ids: str) -> list[JobState]:
        return [(await self.job(id)).state for id in ids]

    async def are_free(self, ids: list[str]) -> None:
        """The jobs can be claimed, and nothing was lost by whatever was done to them."""

        async def is_so() -> bool:
            jobs = [await self.job(id) for id in ids]
            return all((job.state, job.attempts, job.failures) == (JobState.READY, 0, ()) for job in jobs)

        await eventually(is_so, "all are given back at no cost")

    async def runs_out(self, id: str) -> None:
        """The lease of a job ends with its time: nobody renews it."""
        self.ground.clock.advance(TTL + 1)
        assert await self.eye.claim(worker="heir") == []
        job = await self.job(id)
        assert (job.state, job.last_error) == (JobState.FAILED, "lease expired")

    async def works_on(self) -> None:
        """The next calls succeed, and each gets the reply that is its own."""
        word = secrets.token_hex(6)
        id = await self.queue.enqueue(word)
        found = await self.queue.get(id)
        assert found is not None
        assert found.payload == word
        assert await self.queue.counts() == await self.eye.counts()


Verb: TypeAlias = Callable[[Stage], AbstractAsyncContextManager[Callable[[], Awaitable[Any]]]]
"""Sets a stage, gives the call that is cancelled, and checks afterwards what became of it."""


def scene_of(ground: Ground, verb: Verb, *, is_closing: bool = False, **options: Any) -> Scene:
    """A scene in which the call is made on a new store, which works on afterwards, is closed and leaves nothing.

    If ``is_closing``, the call itself closes the store, and nobody else does.
    """

    @asynccontextmanager
    async def scene() -> AsyncGenerator[Call]:
        async with nothing_left(ground.connections):
            stage = Stage(ground, ground.subject(**options))
            try:
                async with verb(stage) as call:

                    async def noted() -> Any:
                        try:
                            stage.result = await call()
                        except BaseException as error:
                            stage.error = error
                            raise
                        stage.is_done = True
                        return stage.result

                    yield noted
                if not is_closing:
                    await stage.works_on()
            finally:
                if not is_closing:
                    await stage.store.aclose()

    return scene
