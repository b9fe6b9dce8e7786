"""A Redis with very many jobs, and with very large ones: no call holds it up for long."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import AsyncIterator
from typing import Any, Final

import pytest

from conquiet import EmbeddedRedis
from conquiet.jobs.job import Job, JobState, NewJob, Settlement
from conquiet.jobs.store import JobRetention, Lease, Wanted
from conquiet.jobs.stores.redis import RedisStore
from conquiet.kit.clock import ManualClock
from tests.conftest import Rung
from tests.rigs.asking import ask
from tests.rigs.servers import on_a_port

pytestmark = [pytest.mark.system, pytest.mark.any_server, pytest.mark.timeout(1800)]

QUEUE: Final = "emails"
TTL_MS: Final = 3_600_000
"""Longer than it takes to claim all of them."""
MOST_MS: Final = 50.0
"""What a call may take on the server; one in ten twice as long, where the machine has other things to do too."""


class Watched:
    """A store, and how long the server was busy with each kind of call."""

    def __init__(self, store: RedisStore, url: str) -> None:
        self._store = store
        self._url = url
        self._took: defaultdict[str, list[float]] = defaultdict(list)

    async def __call__(self, name: str, *args: Any) -> Any:
        before = await self._busy()
        answer = await getattr(self._store, name)(QUEUE, *args)
        calls, took = [now - then for now, then in zip(await self._busy(), before, strict=True)]
        self._took[name].append(took / 1000 / max(1, calls))
        return answer

    async def _busy(self) -> tuple[int, int]:
        stats = await ask(self._url, "INFO", "commandstats")
        found = [stats[name] for name in ("cmdstat_evalsha", "cmdstat_eval") if name in stats]
        return sum(int(one["calls"]) for one in found), sum(int(one["usec"]) for one in found)

    def check(self, scale: float) -> None:
        """At full size; tests/jobs/test_redis_bounds.py counts what a call does, whatever the machine is doing."""
        if scale < 1:
            return
        for name, took in self._took.items():
            in_order = sorted(took)
            assert in_order[len(took) // 2] < MOST_MS, (name, in_order[-5:])
            assert in_order[len(took) * 9 // 10] < 2 * MOST_MS, (name, in_order[-5:])


@pytest.fixture
async def server(rung: Rung) -> AsyncIterator[EmbeddedRedis]:
    async with on_a_port(rung.binary) as server:
        yield server


async def test_very_many_jobs_in_every_state(server: EmbeddedRedis, scale: float) -> None:
    """A million: ready, in flight, run out, failed, succeeded, purged."""
    many, clock = max(10_000, int(1_000_000 * scale**2)), ManualClock()  # most of the time is spent on filling it
    async with RedisStore(server.url, clock=clock) as store:
        do = Watched(store, server.url)
        for start in range(0, many, 1000):
            await do("add", [NewJob(f"{at}", b"1", priority=at % 10_000) for at in range(start, start + 1000)])
        await _look(do, JobState.READY)
        jobs = await _take(do, many, max_retries=1)
        await _look(do, JobState.IN_FLIGHT)
        await do("renew", [Lease.of(job) for job in jobs[:5000]], TTL_MS)
        clock.advance(2 * TTL_MS / 1000)  # all leases have run out, and do so once more
        jobs = await _take(do, many, max_retries=1)
        for start in range(0, many, 1000):
            kind = "ack" if start % 2000 else "fail"
            await do("settle", [Settlement.of(job, kind) for job in jobs[start : start + 1000]])  # type: ignore[arg-type]
        for state in (JobState.FAILED, JobState.SUCCEEDED):
            await _look(do, state)
            while await do("purge", state, JobRetention(age=0, count=0)):
                pass
        do.check(scale)
        assert sum((await store.counts(QUEUE)).values()) == 0


async def test_very_large_jobs(server: EmbeddedRedis, scale: float) -> None:
    """Three hundred of a megabyte, with results as large."""
    many, large = int(300 * scale), b'"' + b"x" * 1_000_000 + b'"'
    async with RedisStore(server.url, clock=ManualClock()) as store:
        do = Watched(store, server.url)
        for at in range(many):
            await do("add", [NewJob(f"{at}", large)])
        await do("find", [f"{at}" for at in range(many)])
        jobs = await _take(do, many, max_retries=1)
        await do("settle", [Settlement.of(job, "ack", result=large) for job in jobs])
        await do("settle", [Settlement.of(job, "ack") for job in jobs[:50]])
        await _look(do, JobState.SUCCEEDED)
        await do("purge", JobState.SUCCEEDED, JobRetention(age=0, count=0))
        do.check(scale)


async def _take(do: Watched, count: int, max_retries: int) -> list[Job]:
    jobs: list[Job] = []
    while len(jobs) < count:
        jobs += (await do("claim", Wanted(1000, "w", TTL_MS, max_retries, 200, 200))).jobs
    return jobs


async def _look(do: Watched, state: JobState) -> None:
    await do("counts")
    page = await do("page", state, 1000, None)
    assert page.jobs
    id = page.jobs[0].id
    if state in (JobState.READY, JobState.IN_FLIGHT):
        await do("cancel", id)
        await do("replay", id)
    elif state is JobState.FAILED:
        await do("replay", id)
        await do("cancel", id)
    await do("find", [job.id for job in page.jobs])
    await do("finished", id, 0)
