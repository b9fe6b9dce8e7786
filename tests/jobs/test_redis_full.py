"""A Redis whose memory is full: what is under way can be ended and removed, and nothing more is begun."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Final, TypeAlias

import pytest
from redis.asyncio import Redis

from conquiet import EmbeddedRedis
from conquiet.errors import QueueError
from conquiet.jobs.job import Job, JobState, NewJob, Settlement
from conquiet.jobs.store import JobRetention, Lease, Wanted
from conquiet.jobs.stores.redis import RedisStore
from conquiet.kit.clock import ManualClock
from tests.conftest import Rung
from tests.rigs.asking import ask
from tests.rigs.servers import on_a_port

pytestmark = pytest.mark.guarantee

READY, IN_FLIGHT, SUCCEEDED, FAILED = JobState.READY, JobState.IN_FLIGHT, JobState.SUCCEEDED, JobState.FAILED
QUEUE: Final = "emails"
TTL: Final = 30_000

Call: TypeAlias = Callable[[RedisStore], Awaitable[Any]]


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
async def server(rung: Rung) -> AsyncIterator[EmbeddedRedis]:
    async with on_a_port(rung.binary) as server:
        yield server


@pytest.fixture
async def store(server: EmbeddedRedis, clock: ManualClock) -> AsyncIterator[RedisStore]:
    async with RedisStore(server.url, clock=clock) as store:
        yield store


async def fill(server: EmbeddedRedis) -> None:
    await ask(server.url, "CONFIG", "SET", "maxmemory", "1")


async def claim(store: RedisStore, count: int = 10) -> list[Job]:
    return list((await store.claim(QUEUE, Wanted(count, "w", TTL, 3))).jobs)


async def add(store: RedisStore, *ids: str, delay_ms: int = 0) -> None:
    await store.add(QUEUE, [NewJob(id, b"{}", delay_ms=delay_ms) for id in ids])


async def everything(url: str) -> dict[bytes | str, Any]:
    """What every key holds."""
    async with Redis.from_url(url) as client:
        return {name: await client.dump(name) for name in await client.keys()}


@pytest.mark.parametrize("kind", ["ack", "retry", "fail", "release"])
async def test_what_became_of_a_job_is_kept(store: RedisStore, server: EmbeddedRedis, kind: Any) -> None:
    await add(store, "a", "b")
    jobs = await claim(store)
    await fill(server)
    delay = 1000 if kind == "retry" else 0
    told = [Settlement.of(job, kind, delay_ms=delay, error="e" * 1000, brief="e") for job in jobs]
    assert await store.settle(QUEUE, told) == [True, True]
    state = {"ack": SUCCEEDED, "fail": FAILED}.get(kind, READY)
    assert (await store.counts(QUEUE))[state] == 2


async def test_leases_are_renewed(store: RedisStore, server: EmbeddedRedis, clock: ManualClock) -> None:
    await add(store, "a")
    [job] = await claim(store)
    await fill(server)
    clock.advance(20)
    assert await store.renew(QUEUE, [Lease.of(job)], TTL) == [True]
    clock.advance(20)
    await ask(server.url, "CONFIG", "SET", "maxmemory", "0")
    assert await claim(store) == []


@pytest.mark.parametrize("is_held", [False, True])
async def test_a_job_can_be_cancelled_and_deleted(store: RedisStore, server: EmbeddedRedis, is_held: bool) -> None:
    await add(store, "a")
    if is_held:
        await claim(store)
    await fill(server)
    job = await store.cancel(QUEUE, "a")
    assert job is not None
    assert job.state is FAILED
    await store.delete(QUEUE, "a")
    assert await store.find(QUEUE, ["a"]) == [None]


async def test_finished_jobs_are_purged(store: RedisStore, server: EmbeddedRedis) -> None:
    await add(store, *map(str, range(20)))
    await store.settle(QUEUE, [Settlement.of(job, "ack") for job in await claim(store, 20)])
    await fill(server)
    assert await store.purge(QUEUE, SUCCEEDED, JobRetention(count=5)) == 15


async def test_an_end_can_be_waited_for(store: RedisStore, server: EmbeddedRedis) -> None:
    await add(store, "a")
    await store.cancel(QUEUE, "a")
    await fill(server)
    job = await store.finished(QUEUE, "a", 5)
    assert job is not None


async def _add(store: RedisStore) -> None:
    await add(store, "new")


async def _replay(store: RedisStore) -> None:
    await store.replay(QUEUE, "failed")


@pytest.mark.parametrize("call", [_add, _replay, claim])
async def test_nothing_more_is_begun_and_nothing_half_done(
    store: RedisStore, server: EmbeddedRedis, clock: ManualClock, call: Call
) -> None:
    """Not even if leases have run out and jobs have fallen due, for which a claim writes before it leases."""
    await add(store, "failed", "lapsed")
    await claim(store)
    await store.cancel(QUEUE, "failed")
    await add(store, "late", delay_ms=1000)
    await add(store, "ready")
    clock.advance(60)
    before = await everything(server.url)
    await fill(server)
    with pytest.raises(QueueError, match="memory is full"):
        await call(store)
    assert await everything(server.url) == before
    await ask(server.url, "CONFIG", "SET", "maxmemory", "0")
    assert {job.id for job in await claim(store)} == {"lapsed", "late", "ready"}


async def test_what_has_fallen_due_does_not_get_in_line(
    store: RedisStore, server: EmbeddedRedis, clock: ManualClock
) -> None:
    """With nobody else in line and no lease that ran out, a claim would begin by taking it from where it waits."""
    await add(store, "late", delay_ms=1000)
    clock.advance(60)
    before = await everything(server.url)
    await fill(server)
    with pytest.raises(QueueError, match="memory is full"):
        await claim(store)
    assert await everything(server.url) == before


async def test_where_nothing_is_to_be_done_a_claim_is_not_refused(store: RedisStore, server: EmbeddedRedis) -> None:
    await fill(server)
    assert await claim(store) == []
