"""What workers cost that have nothing to do: commands, transactions, connections."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import Final

import psycopg
import pytest

from conquiet import JobStore, PostgresStore, RedisStore
from conquiet.jobs.store import Claimed, Wanted
from conquiet.kit.clock import ManualClock
from conquiet.wire.scripts import Script
from tests.contracts.jobs_flavours import Recorder
from tests.jobs.working import Gate, queue_in, working
from tests.rigs.postgres import LocalPostgres
from tests.rigs.proxy import Proxy
from tests.rigs.waiting import eventually

pytestmark = pytest.mark.slow

pytest_plugins = ["tests.jobs.postgres_fixtures"]

CLAIM: Final = Script.named("jobs_claim").sha.encode()
WINDOW: Final = 2.0
"""Seconds in which too much would have happened by far; what is right has no need of them."""


async def happens(condition: Callable[[], bool], seconds: float = WINDOW) -> bool:
    """Whether ``condition`` becomes true soon."""
    try:
        await eventually(condition, "", seconds)
    except AssertionError:
        return False
    return True


@pytest.mark.any_server
async def test_a_worker_that_may_not_wait_for_news_asks_from_time_to_time(url: str) -> None:
    """The server refuses the blocked read: by an access list, or because it has too many clients."""
    async with Proxy(url) as proxy, RedisStore(proxy.url) as store:
        proxy.refuse(b"XREAD", b"-NOPERM this user has no permissions to run the 'xread' command\r\n", times=1_000_000)
        async with working(queue_in(store), Recorder()):
            assert not await happens(lambda: proxy.count(CLAIM) > 20)


class Counting(PostgresStore):
    """A store that counts claims."""

    claims = 0

    async def claim(self, queue: str, wanted: Wanted) -> Claimed:
        self.claims += 1
        return await super().claim(queue, wanted)


async def test_a_job_that_somebody_else_has_locked_is_asked_for_from_time_to_time(
    pg: LocalPostgres, pg_store: PostgresStore, pg_clock: ManualClock, schema: str
) -> None:
    async with Counting(pg.dsn, schema=schema, clock=pg_clock) as store:
        queue, seen = queue_in(store), Recorder()
        id = await queue.enqueue(1, delay=60)
        with psycopg.connect(pg.dsn) as other:
            other.execute(f"SELECT FROM {schema}.jobs WHERE id = %s FOR UPDATE".encode(), [id])
            pg_clock.advance(61)
            async with working(queue, seen):
                assert not await happens(lambda: store.claims > 20)
                other.rollback()
                await seen.saw(1)


@pytest.mark.any_server
async def test_a_new_job_wakes_few_workers(url: str) -> None:
    workers = 12
    async with Proxy(url) as proxy, RedisStore(url) as outside, AsyncExitStack() as stack:
        eye, seen = queue_in(outside), Recorder()
        for _ in range(workers):
            store = await stack.enter_async_context(RedisStore(proxy.url))
            await stack.enter_async_context(working(queue_in(store, name=eye.name), seen))
        await eventually(lambda: proxy.count(b"XREAD") >= workers, "all wait for jobs")
        before = proxy.count(CLAIM)
        await eye.enqueue(1)
        await seen.saw(1)
        assert not await happens(lambda: proxy.count(CLAIM) - before > workers // 2)


async def hold_one_each(stack: AsyncExitStack, store: JobStore, clock: ManualClock) -> None:
    """Have workers at 20 queues, each with a job and with places for more, and let them renew their leases."""
    gate = Gate()
    for _ in range(20):
        queue = queue_in(store, lease_ttl=60.0)
        await queue.enqueue(1)
        await stack.enter_async_context(working(queue, gate))
    stack.callback(gate.open)
    await gate.entered(20)
    clock.advance(25)


@pytest.mark.any_server
async def test_many_queues_of_a_redis_share_its_connections(url: str) -> None:
    clock = ManualClock()
    async with Proxy(url) as proxy, RedisStore(proxy.url, clock=clock) as store, AsyncExitStack() as stack:
        await hold_one_each(stack, store, clock)
        assert not await happens(lambda: proxy.open_connections > 8)


async def test_many_queues_of_a_database_share_its_connections(
    pg: LocalPostgres, pg_store: PostgresStore, pg_clock: ManualClock
) -> None:
    def connections() -> int:
        [[count]] = pg.ask("SELECT count(*) FROM pg_stat_activity WHERE application_name = 'conquiet'")
        return int(count)

    before = connections()
    async with AsyncExitStack() as stack:
        await hold_one_each(stack, pg_store, pg_clock)
        assert not await happens(lambda: connections() - before > 12)
