"""A PostgreSQL that stands still: it takes connections and answers nothing. Nobody waits for it for ever."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress

import pytest

from conquiet import JobWorker, PostgresStore
from conquiet.jobs.store import Wanted
from tests.jobs.working import Gate, queue_in
from tests.rigs.postgres import LocalPostgres
from tests.rigs.relay import Relay
from tests.rigs.waiting import LONG

pytestmark = pytest.mark.slow

pytest_plugins = ["tests.jobs.postgres_fixtures"]

SOON = 10.0
"""Far more than the few seconds that are promised, and far less than the driver takes by itself."""


@pytest.fixture
async def relay(pg: LocalPostgres) -> AsyncIterator[Relay]:
    async with Relay(pg.port) as relay:
        yield relay


@pytest.fixture
async def store(pg: LocalPostgres, pg_store: PostgresStore, schema: str, relay: Relay) -> AsyncIterator[PostgresStore]:
    """A store that is reached through the relay."""
    dsn = pg.tcp_dsn.replace(str(pg.port), str(relay.port))
    async with PostgresStore(dsn, schema=schema) as store:
        yield store


async def test_a_worker_is_stopped_in_time_while_the_server_stands_still(store: PostgresStore, relay: Relay) -> None:
    queue, gate = queue_in(store, lease_ttl=0.5), Gate()
    await queue.enqueue_many([1, 2])
    worker = JobWorker(queue, gate, handle_signals=False, drain_timeout=0.1)
    running = asyncio.ensure_future(worker.run())
    await gate.entered(2)
    relay.freeze()
    gate.open()
    worker.stop()
    await asyncio.wait_for(running, SOON)


async def test_a_call_is_cancelled_in_time_while_the_server_stands_still(store: PostgresStore, relay: Relay) -> None:
    await store.counts("q")
    relay.freeze()
    call = asyncio.ensure_future(store.claim("q", Wanted(1, "w", 1000, 3)))
    with suppress(TimeoutError):
        async with asyncio.timeout(0.1):
            await asyncio.shield(call)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(asyncio.shield(call), SOON / 2)
    relay.thaw()
    assert await asyncio.wait_for(store.counts("q"), LONG)
