"""How much one call makes a Redis do: no more, however many jobs there are, and however large they are."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Final

import pytest

from conquiet import EmbeddedRedis, JobQueue, JobSpec
from conquiet.jobs.job import Job, JobState, NewJob, Settlement
from conquiet.jobs.store import JobRetention, Lease, Wanted
from conquiet.jobs.stores.redis import RedisStore
from conquiet.kit.clock import ManualClock
from tests.conftest import Rung
from tests.rigs.asking import ask
from tests.rigs.servers import on_a_port

pytestmark = pytest.mark.any_server

QUEUE: Final = "emails"
MANY: Final = 3000
LARGE: Final = b'"' + b"x" * 1_000_000 + b'"'


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


async def work(url: str, call: Awaitable[Any]) -> tuple[int, int, int]:
    """How many scripts a call ran, how many commands the largest share of one ran, and how many bytes came back."""
    before = await ask(url, "INFO", "stats")
    await ask(url, "CONFIG", "RESETSTAT")
    await call
    stats = await ask(url, "INFO", "commandstats")
    sent = int((await ask(url, "INFO", "stats"))["total_net_output_bytes"])
    assert before
    calls = {name.removeprefix("cmdstat_"): int(one["calls"]) for name, one in stats.items()}
    scripts = calls.pop("evalsha", 0) + calls.pop("eval", 0)
    own = ("config", "info", "client", "hello", "ping", "select", "auth")
    commands = sum(count for name, count in calls.items() if not name.startswith(own))
    return scripts, -(-commands // max(1, scripts)), sent


async def fill(store: RedisStore, count: int, *, prefix: str = "", payload: bytes = b"1", priorities: int = 7) -> None:
    for start in range(0, count, 500):
        some = range(start, min(start + 500, count))
        await store.add(QUEUE, [NewJob(f"{prefix}{at}", payload, priority=at % priorities) for at in some])


async def take(store: RedisStore, count: int) -> list[Job]:
    jobs: list[Job] = []
    while len(jobs) < count:
        jobs += (await store.claim(QUEUE, Wanted(count, "w", 30_000, 3))).jobs
    return jobs


@pytest.mark.slow
async def test_no_call_does_more_because_there_are_many(
    store: RedisStore, server: EmbeddedRedis, clock: ManualClock
) -> None:
    """Jobs in every state by the thousand: the commands that a script runs are bounded by what is asked for."""
    await fill(store, MANY, prefix="gone-")
    jobs = await take(store, MANY)
    half = MANY // 2
    for start in range(0, MANY, 500):
        kinds = ["ack" if at < half else "fail" for at in range(start, start + 500)]
        told = [Settlement.of(job, kind) for job, kind in zip(jobs[start:], kinds, strict=False)]  # type: ignore[arg-type]
        await store.settle(QUEUE, told)
    await fill(store, MANY, prefix="held-")
    held = await take(store, MANY)
    await fill(store, MANY, prefix="ready-", priorities=MANY)
    await store.add(QUEUE, [NewJob(f"late-{at}", b"1", delay_ms=1000) for at in range(MANY)])
    calls: dict[str, tuple[Callable[[], Awaitable[Any]], int]] = {
        "counts": (lambda: store.counts(QUEUE), 10),
        "page": (lambda: store.page(QUEUE, JobState.READY, 100, None), 100),
        "find": (lambda: store.find(QUEUE, ["ready-1"]), 10),
        "cancel": (lambda: store.cancel(QUEUE, "ready-1"), 40),
        "replay": (lambda: store.replay(QUEUE, "ready-1"), 40),
        "delete": (lambda: store.delete(QUEUE, jobs[0].id), 20),
        "claim": (lambda: store.claim(QUEUE, Wanted(10, "w", 30_000, 3, 2, 2)), 60),
        "claim many": (lambda: store.claim(QUEUE, Wanted(100_000, "w", 30_000, 3, 20_000, 20_000)), 1500),
        "renew": (lambda: store.renew(QUEUE, [Lease.of(job) for job in held], 30_000), 20),
        "settle": (lambda: store.settle(QUEUE, [Settlement.of(held[0], "ack")]), 20),
        "purge": (lambda: store.purge(QUEUE, JobState.SUCCEEDED, JobRetention(0, 0)), 20),
        "watch": (lambda: store.finished(QUEUE, jobs[-1].id, 1), 20),
    }
    for name, (call, most) in calls.items():
        _, commands, _ = await work(server.url, call())
        assert commands <= most, name
    clock.advance(60)
    _, commands, sent = await work(server.url, store.claim(QUEUE, Wanted(10, "w", 30_000, 3)))
    assert commands <= 120, "five hundred leases that ran out, a thousand jobs that fell due"
    assert sent < 100_000


@pytest.mark.slow
async def test_no_call_reads_more_because_they_are_large(
    store: RedisStore, server: EmbeddedRedis, clock: ManualClock
) -> None:
    """Forty jobs of a megabyte, with results as large: what is more than a call may carry comes with the next."""
    queue = JobQueue(store, QUEUE, lease_ttl=30)
    large = LARGE.decode().strip('"')
    scripts, _, _ = await work(server.url, queue.enqueue_many([JobSpec(large, f"{at}") for at in range(40)]))
    assert scripts >= 5
    ids = [f"{at}" for at in range(40)]
    scripts, _, sent = await work(server.url, store.find(QUEUE, ids))
    assert scripts >= 4
    assert sent / scripts < 17_000_000
    scripts, _, sent = await work(server.url, store.page(QUEUE, JobState.READY, 1000, None))
    assert sent < 17_000_000
    jobs: list[Job] = []
    while len(jobs) < 40:
        claimed: list[Job] = []
        _, _, sent = await work(server.url, _collect(store, claimed))
        assert sent < 17_000_000
        jobs += claimed
    assert [job.id for job in jobs] == ids
    told = [Settlement.of(job, "ack", result=LARGE) for job in jobs]
    scripts, _, _ = await work(server.url, store.settle(QUEUE, told))
    assert scripts >= 5
    seen: list[str] = []
    cursor: str | None = None
    while True:
        page = await store.page(QUEUE, JobState.SUCCEEDED, 1000, cursor)
        seen += [job.id for job in page.jobs]
        cursor = page.cursor
        if cursor is None:
            break
    assert sorted(seen) == sorted(ids)
    _, _, sent = await work(server.url, store.settle(QUEUE, told[:5]))
    assert sent < 10_000
    for stale in (store.settle(QUEUE, told), store.renew(QUEUE, [Lease.of(job) for job in jobs], 30_000)):
        await work(server.url, stale)
        # A script that read what they are now would read every result.
        assert "cmdstat_hmget" not in await ask(server.url, "INFO", "commandstats")
    _, _, sent = await work(server.url, store.purge(QUEUE, JobState.SUCCEEDED, JobRetention(0, 0)))
    assert sent < 10_000


async def _collect(store: RedisStore, claimed: list[Job]) -> None:
    claimed += (await store.claim(QUEUE, Wanted(1000, "w", 30_000, 3))).jobs
