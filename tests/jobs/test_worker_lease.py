"""Leases under a worker: kept while handlers compute, block the loop or hold a thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any, Final

import pytest

from conquiet import Job, JobQueue, JobState, JobStore, MemoryStore, QueueError, RedisStore
from conquiet.jobs.job import Settlement
from conquiet.jobs.store import Claimed, Lease, Wanted
from conquiet.kit.clock import ManualClock
from tests.contracts.jobs_flavours import Backend
from tests.jobs.working import Gate, queue_in, settled, working
from tests.rigs.clocks import next_beat
from tests.rigs.proxy import Proxy
from tests.rigs.waiting import LONG, eventually

pytest_plugins = ("tests.contracts.jobs_fixtures",)

LONG_TTL: Final = 60.0
"""A lease that only ends because the clock is moved."""


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
async def store(backend: Backend, clock: ManualClock) -> AsyncIterator[JobStore]:
    async with backend.make("core", clock) as store:
        yield store


@contextmanager
def pressed(backend: Backend, clock: ManualClock, queue: JobQueue, ids: list[str], began: threading.Event) -> Any:
    """Somebody on another thread, who has time pass as soon as ``began`` is set, for more than two leases: from
    heartbeat to heartbeat, each of which has to renew all of ``ids``, and tries to claim after each. The block gets an
    event that is set when he has had enough; it ends with what went wrong."""
    enough = threading.Event()

    async def press() -> None:
        shared = backend.store == "MemoryStore"
        store = queue.store if shared else backend.make("core", clock)
        rival = queue_in(store, name=queue.name, lease_ttl=LONG_TTL)
        await eventually(began.is_set, "it began")
        try:
            for _ in range(7):
                due = await next_beat(clock)
                assert due <= LONG_TTL / 3, "a lease is renewed after a third of its time"
                before = await store.find(queue.name, ids)
                clock.advance(due)
                await eventually(partial(_renewed, store, queue, before), "all leases are renewed")
                assert await rival.claim(10, worker="thief") == []
        finally:
            if not shared:
                await store.aclose()

    with ThreadPoolExecutor(1) as thread:
        pressing = thread.submit(lambda: asyncio.run(press()))
        pressing.add_done_callback(lambda _: enough.set())
        yield enough
        pressing.result(LONG)


async def _renewed(store: JobStore, queue: JobQueue, before: list[Job | None]) -> bool:
    jobs = await store.find(queue.name, [job.id for job in before if job is not None])
    ends = [job.lease_ms or 0 for job in jobs if job is not None]
    return all(end > (job.lease_ms or 0) for end, job in zip(ends, before, strict=True) if job is not None)


@pytest.mark.guarantee
async def test_a_handler_that_blocks_the_loop_keeps_its_lease(
    backend: Backend, store: JobStore, clock: ManualClock
) -> None:
    """spec 5: Lease Extension: heartbeats every LeaseTTL / 3, also while CPU work blocks the loop for two leases."""
    queue = queue_in(store, lease_ttl=LONG_TTL)
    calls: list[int] = []
    began = threading.Event()
    id = await queue.enqueue(1)
    with pressed(backend, clock, queue, [id], began) as enough:

        async def compute(job: Job) -> str:
            calls.append(job.attempts)
            began.set()
            while not enough.is_set():
                sum(range(1000))
            return "computed"

        async with working(queue, compute):
            job = await asyncio.wait_for(queue.wait(id), 3 * LONG)
    assert calls == [1]
    assert (job.state, job.result, job.attempts, job.failures) == (JobState.SUCCEEDED, "computed", 1, ())


@pytest.mark.guarantee
async def test_a_job_that_waits_behind_one_that_blocks_keeps_its_lease_too(
    backend: Backend, store: JobStore, clock: ManualClock
) -> None:
    queue = queue_in(store, lease_ttl=LONG_TTL)
    calls: list[tuple[Any, int]] = []
    began = threading.Event()
    ids = await queue.enqueue_many([0, 1, 2])
    with pressed(backend, clock, queue, ids, began) as enough:

        async def compute(job: Job) -> None:
            calls.append((job.payload, job.attempts))
            began.set()
            enough.wait(3 * LONG)

        async with working(queue, compute, concurrency=3):
            await settled(queue, succeeded=3)
    assert sorted(calls) == [(0, 1), (1, 1), (2, 1)]


@pytest.mark.guarantee
async def test_a_plain_handler_that_takes_long_keeps_its_lease(
    backend: Backend, store: JobStore, clock: ManualClock
) -> None:
    queue = queue_in(store, lease_ttl=LONG_TTL)
    calls: list[int] = []
    began = threading.Event()
    id = await queue.enqueue(1)
    with pressed(backend, clock, queue, [id], began) as enough:

        def hold(job: Job) -> str:
            calls.append(job.attempts)
            began.set()
            enough.wait(3 * LONG)
            return "done"

        async with working(queue, hold):
            job = await asyncio.wait_for(queue.wait(id), 3 * LONG)
    assert (calls, job.result, job.attempts) == ([1], "done", 1)


@pytest.fixture
async def proxy(url: str) -> AsyncIterator[Proxy]:
    async with Proxy(url) as proxy:
        yield proxy


@pytest.mark.guarantee
@pytest.mark.any_server
async def test_one_renewal_that_fails_is_no_loss(proxy: Proxy, url: str, clock: ManualClock) -> None:
    """The next one comes soon: long before the lease ends."""
    async with RedisStore(proxy.url, clock=clock) as store, RedisStore(url, clock=clock) as outside:
        queue, gate = queue_in(store, lease_ttl=LONG_TTL), Gate()
        eye = queue_in(outside, name=queue.name)
        id = await eye.enqueue(1)
        async with working(queue, gate):
            await gate.entered(1)
            [before] = await outside.find(queue.name, [id])
            refusal = proxy.refuse(id.encode(), b"-ERR not now\r\n")
            passed = await next_beat(clock)
            clock.advance(passed)
            await eventually(lambda: refusal.times == 0, "the first renewal fails")
            again = await next_beat(clock)
            assert passed + again < LONG_TTL / 2
            clock.advance(again)
            await eventually(lambda: _renewed(outside, queue, [before]), "the second does not")
            gate.open()
            await settled(eye, succeeded=1)
    assert len(gate.began) == 1


@pytest.mark.guarantee
@pytest.mark.any_server
async def test_a_worker_that_stood_still_renews_before_it_claims(proxy: Proxy, url: str, clock: ManualClock) -> None:
    """Its next claim would else be the one that finds its own leases run out, and runs its own jobs a second time."""
    async with RedisStore(proxy.url, clock=clock) as store, RedisStore(url, clock=clock) as outside:
        queue, gate = queue_in(store, lease_ttl=LONG_TTL), Gate()
        eye = queue_in(outside, name=queue.name)
        id = await eye.enqueue(1)
        async with working(queue, gate, concurrency=2) as worker:
            await gate.entered(1)
            await next_beat(clock)
            refusal = proxy.refuse(id.encode(), b"-ERR not now\r\n", times=1_000_000)  # so that it cannot renew
            clock.advance(2 * LONG_TTL)
            await eventually(lambda: worker.health().failures >= 2, "it does not claim")
            refusal.times = 0
            await eventually(lambda: worker.health().healthy, "it has renewed, and claims")
            gate.open()
            await settled(eye, succeeded=1)
        job = await eye.get(id)
    assert job is not None
    assert (len(gate.began), job.attempts, job.failures) == (1, 1, ())


async def test_jobs_that_came_too_late_to_be_begun_without_a_renewal_are_given_back(clock: ManualClock) -> None:
    """Held on to, they would be kept from everybody by a worker that never begins them."""

    class Slow(MemoryStore):
        is_away = True

        async def claim(self, queue: str, wanted: Wanted) -> Claimed:
            claimed = await super().claim(queue, wanted)
            if claimed.jobs and self.is_away:
                clock.advance(LONG_TTL * 0.7)
            return claimed

        async def renew(self, queue: str, leases: Sequence[Lease], ttl_ms: int) -> list[bool]:
            if self.is_away:
                raise QueueError("away")
            return await super().renew(queue, leases, ttl_ms)

        async def settle(self, queue: str, settlements: Sequence[Settlement]) -> list[bool]:
            self.is_away = False
            return await super().settle(queue, settlements)

    queue, gate = queue_in(Slow(clock=clock), lease_ttl=LONG_TTL), Gate()
    gate.open()
    await queue.enqueue_many([1, 2])
    async with working(queue, gate, concurrency=2):
        await settled(queue, succeeded=2)
    assert [job.attempts for job in gate.began] == [1, 1]
