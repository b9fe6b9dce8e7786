"""Waiting for jobs in Redis: nothing is missed, and all who wait for a queue share one connection."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Sequence
from typing import Any, Final

import pytest
from redis.exceptions import RedisError

from conquiet.errors import QueueError
from conquiet.jobs.job import Job, JobState, NewJob, Settlement
from conquiet.jobs.store import Claimed, Lease, Wanted
from conquiet.jobs.stores.redis import RedisStore
from conquiet.kit.clock import ManualClock
from conquiet.wire.keys import JobKeys
from tests.rigs.asking import ask, blocked, nodes_of
from tests.rigs.proxy import Proxy
from tests.rigs.waiting import LONG, eventually

pytestmark = pytest.mark.cluster_too

READY, IN_FLIGHT, SUCCEEDED, FAILED = JobState.READY, JobState.IN_FLIGHT, JobState.SUCCEEDED, JobState.FAILED
QUEUE: Final = "emails"
TTL: Final = 30_000


@pytest.fixture
def namespace() -> str:
    return f"t{secrets.token_hex(6)}"


@pytest.fixture
def keys(namespace: str) -> JobKeys:
    return JobKeys(QUEUE, namespace)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
async def store(url: str, namespace: str, clock: ManualClock) -> AsyncIterator[RedisStore]:
    async with RedisStore(url, namespace=namespace, clock=clock) as store:
        yield store


def new(*ids: str, delay_ms: int = 0, priority: int = 0, payload: bytes = b"{}") -> list[NewJob]:
    return [NewJob(id, payload, priority, delay_ms) for id in ids]


async def claim(store: RedisStore, count: int = 10, **more: Any) -> Claimed:
    return await store.claim(QUEUE, Wanted(count, "w", more.pop("ttl_ms", TTL), more.pop("max_retries", 3), **more))


def acks(jobs: Sequence[Job]) -> list[Settlement]:
    return [Settlement.of(job, "ack") for job in jobs]


async def clients(url: str) -> int:
    """How many connections there are to the server, or to all nodes."""
    return sum([(await ask(node, "INFO", "clients"))["connected_clients"] for node in nodes_of(url)])


async def told(waiting: asyncio.Task[None]) -> None:
    async with asyncio.timeout(LONG):
        await waiting


async def test_what_is_added_after_a_claim_is_news_also_if_nobody_waited_yet(store: RedisStore) -> None:
    mark = (await claim(store)).mark
    await store.add(QUEUE, new("j"))
    async with asyncio.timeout(LONG):
        await store.news(QUEUE, mark, 600)


@pytest.mark.parametrize("how", ["add", "delayed", "retry", "release", "replay", "late retry"])
async def test_whatever_makes_a_job_claimable_or_due_sooner_is_news(how: str, store: RedisStore, url: str) -> None:
    await store.add(QUEUE, new("held", "failed"))
    held, failed = (await claim(store, ttl_ms=10 * TTL)).jobs
    await store.settle(QUEUE, [Settlement.of(failed, "fail", error="x")])
    mark = (await claim(store)).mark
    waiting = asyncio.create_task(store.news(QUEUE, mark, 600))
    await blocked(url)
    if how == "replay":
        await store.replay(QUEUE, "failed")
    elif how in ("add", "delayed"):
        await store.add(QUEUE, new("j", delay_ms=TTL if how == "delayed" else 0))
    else:
        kind = "release" if how == "release" else "retry"
        delay = TTL if how == "late retry" else 0
        await store.settle(QUEUE, [Settlement.of(held, kind, delay_ms=delay)])  # type: ignore[arg-type]
    await told(waiting)


async def test_what_changes_nothing_for_whoever_waits_is_no_news(store: RedisStore, url: str, keys: JobKeys) -> None:
    await store.add(QUEUE, new("a", "b"))
    jobs = (await claim(store, ttl_ms=TTL)).jobs
    mark = (await claim(store)).mark
    await store.settle(QUEUE, acks(jobs[:1]))
    await store.renew(QUEUE, [Lease.of(jobs[1])], 5 * TTL)
    await store.add(QUEUE, new("much later", delay_ms=50 * TTL))
    assert (await claim(store)).mark == mark
    assert await ask(url, "XLEN", keys.news) == 1
    await store.news(QUEUE, mark, 0.01)


async def test_a_wait_for_news_ends_by_the_stores_clock(store: RedisStore, clock: ManualClock, url: str) -> None:
    waiting = asyncio.create_task(store.news(QUEUE, (await claim(store)).mark, 1000))
    await blocked(url)
    clock.advance(1001)
    await told(waiting)


async def test_all_who_wait_for_a_queue_share_one_connection(store: RedisStore, url: str) -> None:
    ids = [f"j{at}" for at in range(300)]
    await store.add(QUEUE, new(*ids))
    jobs = (await claim(store, 300)).jobs
    mark = (await claim(store)).mark
    before = await clients(url)
    async with asyncio.TaskGroup() as group:
        ends = [group.create_task(store.finished(QUEUE, id, None)) for id in ids]
        news = [group.create_task(store.news(QUEUE, mark, 600)) for _ in range(5)]
        await blocked(url)
        assert await clients(url) == before + 1
        assert all(await store.settle(QUEUE, acks(jobs)))
        await store.add(QUEUE, new("more"))
    assert [job and (job.id, job.state) for job in (end.result() for end in ends)] == [(id, SUCCEEDED) for id in ids]
    assert all(one.done() for one in news)


@pytest.mark.parametrize("how", ["ack", "fail", "cancel", "cancel waiting", "expire"])
async def test_every_way_to_end_is_told(how: str, store: RedisStore, url: str, clock: ManualClock) -> None:
    await store.add(QUEUE, new("j"))
    claimed = [] if how == "cancel waiting" else (await claim(store)).jobs
    waiting = asyncio.create_task(store.finished(QUEUE, "j", None))
    await blocked(url)
    if how.startswith("cancel"):
        await store.cancel(QUEUE, "j")
    elif how == "expire":
        clock.advance(TTL / 1000 + 1)
        await claim(store, max_retries=0)
    else:
        await store.settle(QUEUE, [Settlement.of(job, how) for job in claimed])  # type: ignore[arg-type]
    async with asyncio.timeout(LONG):
        job = await waiting
    assert job is not None
    assert job.is_finished


async def test_nobody_writes_down_ends_that_nobody_waits_for(store: RedisStore, url: str, keys: JobKeys) -> None:
    await store.add(QUEUE, new("j", "other"))
    await store.settle(QUEUE, acks((await claim(store, 1)).jobs))
    assert await ask(url, "EXISTS", keys.ended) == 0
    assert (await store.finished(QUEUE, "j", None)) is not None
    assert await store.finished(QUEUE, "other", 0) is None
    assert await store.finished(QUEUE, "none", None) is None
    assert 0 < await ask(url, "PTTL", keys.watched) <= 60_000


async def test_a_wait_for_an_end_is_over_by_the_stores_clock(store: RedisStore, clock: ManualClock, url: str) -> None:
    await store.add(QUEUE, new("j"))
    waiting = asyncio.create_task(store.finished(QUEUE, "j", 1000))
    await blocked(url)
    clock.advance(1001)
    async with asyncio.timeout(LONG):
        assert await waiting is None


async def test_who_was_cancelled_leaves_nothing_behind(store: RedisStore, url: str) -> None:
    await store.add(QUEUE, new("j"))
    await claim(store)
    mark = (await claim(store)).mark
    waiting: list[asyncio.Task[object]] = [
        *(asyncio.create_task(store.finished(QUEUE, "j", None)) for _ in range(20)),
        *(asyncio.create_task(store.news(QUEUE, mark, 600)) for _ in range(20)),
    ]
    await blocked(url)
    [watch] = store._watches.values()
    await eventually(lambda: len(watch._ends.get("j", ())) == 20 == len(watch._listeners), "all wait")
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    assert (watch._ends, watch._listeners) == ({}, set())


@pytest.mark.any_server
async def test_the_connection_is_closed_once_nobody_has_waited_for_a_while(
    store: RedisStore, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("conquiet.jobs.stores._redis_watch._SLICE", 0.05)
    monkeypatch.setattr("conquiet.wire.read_group._LONG", 0.05)
    monkeypatch.setattr("conquiet.wire.blocking_pool._KEPT_FOR", 0.05)
    mark = (await claim(store)).mark
    before = await clients(url)
    await store.news(QUEUE, mark, 0.01)

    async def is_closed() -> bool:
        return await clients(url) == before and not store._watches

    await eventually(is_closed, "the watch has ended")
    await store.add(QUEUE, new("j"))
    async with asyncio.timeout(LONG):
        await store.news(QUEUE, mark, 600)


async def test_closing_the_store_ends_every_wait_with_an_error(url: str, namespace: str) -> None:
    store = RedisStore(url, namespace=namespace)
    await store.open()
    await store.add(QUEUE, new("j"))
    waiting = [
        asyncio.create_task(store.finished(QUEUE, "j", None)),
        asyncio.create_task(store.news(QUEUE, (await claim(store)).mark, 600)),
    ]
    await blocked(url)
    async with asyncio.timeout(LONG):
        await store.aclose()
        errors = await asyncio.gather(*waiting, return_exceptions=True)
    assert [type(error) for error in errors] == [QueueError, QueueError]
    await blocked(url, 0)


@pytest.mark.one_node
@pytest.mark.any_server
async def test_a_server_that_goes_away_ends_every_wait_with_an_error(url: str, namespace: str) -> None:
    async with Proxy(url) as proxy, RedisStore(proxy.url, namespace=namespace) as store:
        await store.add(QUEUE, new("j"))
        mark = (await claim(store)).mark
        waiting = [
            asyncio.create_task(store.finished(QUEUE, "j", None)),
            asyncio.create_task(store.finished(QUEUE, "j", None)),
            asyncio.create_task(store.news(QUEUE, mark, 600)),
        ]
        await blocked(url)
        proxy.shut()
        async with asyncio.timeout(LONG):
            errors = await asyncio.gather(*waiting, return_exceptions=True)
        assert [type(error) for error in errors] == [QueueError] * 3
        assert all(
            isinstance(error.__cause__, OSError | RedisError) for error in errors if isinstance(error, Exception)
        )
        proxy.reopen()
        await store.add(QUEUE, new("more"))
        async with asyncio.timeout(LONG):
            await store.news(QUEUE, mark, 600)


async def test_news_that_a_failover_lost_keeps_nobody_busy(store: RedisStore, url: str, keys: JobKeys) -> None:
    old = (await claim(store)).mark
    waiting = asyncio.create_task(store.news(QUEUE, old, 600))
    await blocked(url)
    await store.add(QUEUE, new("j"))
    await told(waiting)
    await ask(url, "DEL", keys.news, keys.ready)
    waiting = asyncio.create_task(store.news(QUEUE, (await claim(store)).mark, 600))
    await eventually(lambda: any(watch._listeners for watch in store._watches.values()), "it waits")
    await store.add(QUEUE, new("k"))
    await told(waiting)
