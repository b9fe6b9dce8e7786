"""What the suites of jobs run on, as a plugin that they name: every store, each in both flavours."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack

import pytest

from conquiet import JobQueue
from conquiet.kit.clock import ManualClock
from tests.conftest import CLUSTERS, CONTRACT_LADDER, Rung
from tests.contracts.jobs_flavours import FLAVOURS, Backend, Flavour, Site, opened
from tests.rigs.clocks import WatchedClock
from tests.rigs.cluster import LocalCluster
from tests.rigs.lanes import chosen
from tests.rigs.postgres import LocalPostgres, schema_name
from tests.rigs.servers import IS_CHOSEN, on_a_port_in_sync
from tests.rigs.waiting import held

_SERVERS: list[str | Rung] = [*CONTRACT_LADDER, *CLUSTERS]
KINDS = _SERVERS if IS_CHOSEN else ["memory", *_SERVERS, "postgres"]


def kind_name(kind: str | Rung) -> str:
    return kind if isinstance(kind, str) else f"redis-{kind.name}"


@pytest.fixture(scope="session", params=chosen(KINDS), ids=kind_name)
def backend(request: pytest.FixtureRequest) -> Iterator[Backend]:
    """A store of each kind."""
    with ExitStack() as servers:
        yield started(request.param, servers)


def started(kind: str | Rung, servers: ExitStack) -> Backend:
    """A backend of that kind, whose server ends with ``servers``."""
    if isinstance(kind, Rung):
        namespace = f"t{secrets.token_hex(6)}"
        return Backend(kind_name(kind), "RedisStore", (_redis(kind, servers),), (("namespace", namespace),))
    if kind == "memory":
        return Backend("memory", "MemoryStore")
    server = servers.enter_context(LocalPostgres())
    backend = Backend("postgres", "PostgresStore", (server.dsn,), (("schema", schema_name()),))
    asyncio.run(_migrate(backend))
    return backend


def _redis(rung: Rung, servers: ExitStack) -> str:
    if rung.image:
        from testcontainers.redis import RedisContainer

        container = servers.enter_context(RedisContainer(rung.image))
        return f"redis://{container.get_container_host_ip()}:{container.get_exposed_port(6379)}"
    if rung.is_cluster:
        return servers.enter_context(held(LocalCluster(rung.binary))).url
    return servers.enter_context(on_a_port_in_sync(rung.binary)).url


async def _migrate(backend: Backend) -> None:
    store = backend.make("core", ManualClock())
    try:
        await store.migrate()
    finally:
        await store.aclose()


@pytest.fixture(params=chosen(FLAVOURS))
def job_flavour(request: pytest.FixtureRequest) -> Flavour:
    return request.param  # type: ignore[no-any-return]


@pytest.fixture
def clock() -> WatchedClock:
    return WatchedClock()


@pytest.fixture
async def site(backend: Backend, job_flavour: Flavour, clock: ManualClock) -> AsyncIterator[Site]:
    async with opened(backend, job_flavour, clock) as site:
        yield site


@pytest.fixture
def jobs(site: Site) -> JobQueue:
    """A queue that only this test has."""
    return site.queue()
