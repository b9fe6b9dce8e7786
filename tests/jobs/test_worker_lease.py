"""Leases under a worker: kept while handlers compute, given up with the handler when they are lost; time limits."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import threading
import time
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any, Final

import pytest

from conquiet import Job, JobQueue, JobState, JobStore, MemoryStore, QueueError, RedisStore, RetryPolicy
from conquiet.jobs.job import Settlement
from conquiet.jobs.store import Claimed, Lease, Wanted
from conquiet.kit import runners
from conquiet.kit.clock import ManualClock
from conquiet.kit.retrying import Lines
from tests.contracts.jobs_flavours import Backend
from tests.jobs.working import AT_ONCE, Gate, Holding, counted, outlived, queue_in, ran, settled, working
from tests.rigs.clocks import next_beat
from tests.rigs.proxy import Proxy
from tests.rigs.waiting import LONG, eventually

pytest_plugins = ("tests.contracts.jobs_fixtures",)

TTL: Final = 0.3
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


# --- kept -------------------------------------------------------------------------------------------------------------


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


# --- lost -------------------------------------------------------------------------------------------------------------


async def test_a_cancelled_job_cancels_its_handler(store: JobStore) -> None:
    queue, gate = queue_in(store, lease_ttl=TTL), Gate()
    id = await queue.enqueue(1)
    async with working(queue, gate) as worker:
        await gate.entered(1)
        assert await queue.cancel(id)
        await eventually(lambda: len(gate.cancelled) == 1, "the handler was cancelled")
        await eventually(lambda: worker.inflight == 0, "its place is free")
        await queue.enqueue(2)
        gate.open()
        await settled(queue, failed=1, succeeded=1)
    job = await queue.get(id)
    assert job is not None
    assert (job.last_error, job.attempts) == ("cancelled", 1)
    assert ran(queue) == {"lost": 1, "succeeded": 1}
    assert counted(queue, "stale_total", operation="renew") == 1


async def test_a_stolen_job_cancels_its_handler(backend: Backend, store: JobStore) -> None:
    """Somebody whose clock is ahead takes it over: whoever had it must stop, and can change nothing."""
    queue, gate = queue_in(store, lease_ttl=TTL), Gate()
    clock = store.clock
    assert isinstance(clock, ManualClock)
    id = await queue.enqueue(1)
    async with working(queue, gate, concurrency=1):  # or it could take the job back itself
        await gate.entered(1)
        if backend.store == "MemoryStore":
            rival = queue_in(store, name=queue.name, lease_ttl=3600)
            job = await queue.get(id)
            assert job is not None
            await queue.release(job)
            stolen = await rival.claim(worker="thief")
        else:
            ahead = ManualClock()
            ahead.advance(60)
            async with backend.make("core", ahead) as other:
                stolen = await queue_in(other, name=queue.name, lease_ttl=3600).claim(worker="thief")
        assert [(one.id, one.worker) for one in stolen] == [(id, "thief")]
        await eventually(lambda: len(gate.cancelled) == 1, "the handler was cancelled")
    await queue.ack(*stolen, result="the thief's")
    job = await queue.get(id)
    assert job is not None
    assert (job.state, job.result) == (JobState.SUCCEEDED, "the thief's")
    assert ran(queue) == {"lost": 1}


@pytest.mark.any_server
@pytest.mark.parametrize("max_retries", [0, 1])
async def test_a_handler_that_holds_the_interpreter_loses_its_job(url: str, max_retries: int) -> None:
    """A call into C that never lets another thread run: nothing in its process can renew. It costs attempts, and what
    the handler returns in the end changes nothing."""
    async with RedisStore(url) as store:
        heir = queue_in(store, lease_ttl=3600.0)
        id = await heir.enqueue(1, max_retries=max_retries)
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "tests.jobs.gil_worker", url, heir.name, "0.3"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            assert await asyncio.wait_for(process.stdout.readline(), LONG) == b"began\n"
            await eventually(lambda: _is_taken_over(heir, id, max_retries), "the lease runs out")
            before = await heir.get(id)
            process.stdin.write(b"!")
            assert await asyncio.wait_for(process.wait(), LONG) == 0
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        job = await heir.get(id)
        assert job == before
        assert job is not None
        assert (job.attempts, job.result) == (1 + max_retries, None)


async def _is_taken_over(heir: JobQueue, id: str, max_retries: int) -> bool:
    got = [(job.id, job.attempts) for job in await heir.claim(worker="heir")]
    job = await heir.get(id)
    assert job is not None
    return got == [(id, 2)] if max_retries else (job.state, job.last_error) == (JobState.FAILED, "lease expired")


async def test_how_a_handler_ends_that_lost_its_job_does_not_count() -> None:
    queue = queue_in(lease_ttl=TTL)
    ended = asyncio.Event()

    async def stubborn(job: Job) -> str:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            ended.set()
        return "too late"

    id = await queue.enqueue(1)
    async with working(queue, stubborn) as worker:
        await eventually(lambda: worker.inflight == 1, "it began")
        await queue.cancel(id)
        await asyncio.wait_for(ended.wait(), LONG)
        await eventually(lambda: worker.inflight == 0, "it is over")
    job = await queue.get(id)
    assert job is not None
    assert (job.state, job.result) == (JobState.FAILED, None)
    assert [counted(queue, f"{one}_total") for one in ("succeeded", "cancelled")] == [0, 1]
    assert counted(queue, "stale_total", operation="ack") == 0


async def test_a_plain_handler_that_lost_its_job_keeps_its_place_until_it_ends() -> None:
    queue, holding = queue_in(lease_ttl=TTL), Holding()
    first = await queue.enqueue(1)
    async with working(queue, holding, concurrency=1) as worker:
        await holding.entered(1)
        await queue.cancel(first)
        second = await queue.enqueue(2)
        await eventually(lambda: counted(queue, "stale_total", operation="renew") == 1, "the loss is known")
        assert worker.inflight == 1
        assert len(holding.began) == 1
        holding.open()
        assert (await queue.wait(second, LONG)).result == "done"
    job = await queue.get(first)
    assert job is not None
    assert (job.state, job.result) == (JobState.FAILED, None)


@pytest.mark.slow
async def test_a_job_that_was_lost_before_it_began_is_not_begun() -> None:
    """It was cancelled while the one before it blocked the loop."""
    queue = queue_in(lease_ttl=TTL)
    began: list[Any] = []

    def cancel() -> None:
        asyncio.run(queue.cancel("second"))

    async def handler(job: Job) -> None:
        began.append(job.id)
        if job.id == "first":
            with ThreadPoolExecutor(1) as thread:
                thread.submit(cancel).result(LONG)
            time.sleep(3 * TTL)  # noqa: ASYNC251 - that is what it is about

    await queue.enqueue(1, job_id="first")
    await queue.enqueue(2, job_id="second")
    async with working(queue, handler, concurrency=2):
        await settled(queue, succeeded=1, failed=1)
    assert began == ["first"]


@pytest.mark.guarantee
def test_leases_of_an_event_loop_that_was_closed_run_out(clock: ManualClock) -> None:
    """A program that ends its loop without ending its worker: nobody is left to run what it holds."""
    queue = queue_in(MemoryStore(clock=clock), lease_ttl=LONG_TTL)
    holder = queue.dispatch.holder(lambda job, reason: None, Lines(logging.getLogger("conquiet")))

    async def hold() -> None:
        await queue.enqueue(1)
        await holder.open()
        holder.add(await queue.claim(worker="w-1"), clock.monotonic())

    async def wait_for_it() -> list[int]:
        clock.advance(await next_beat(clock))
        await eventually(lambda: not len(holder), "it lets go of them")
        clock.advance(LONG_TTL)
        return [job.attempts for job in await queue.claim(worker="w-2")]

    asyncio.run(hold())
    try:
        assert asyncio.run(wait_for_it()) == [2]
    finally:
        asyncio.run(holder.aclose())


# --- time limits ------------------------------------------------------------------------------------------------------


async def test_a_handler_that_takes_too_long_is_cancelled_and_has_failed() -> None:
    """spec 5: Execution Timeout: application-layer limit on handler runtime, apart from the lease."""
    queue, gate = queue_in(lease_ttl=TTL, retry=RetryPolicy(max_retries=0)), Gate()
    id = await queue.enqueue(1)
    async with working(queue, gate, execution_timeout=0.2):
        job = await queue.wait(id, LONG)
    assert len(gate.cancelled) == 1
    assert job.state is JobState.FAILED
    assert (job.last_error or "").startswith("TimeoutError: the handler took longer than 0.2 seconds")


async def test_a_handler_longer_than_its_lease_but_within_its_limit_is_left_alone() -> None:
    """spec 5: Separation of Concerns: long-running work with short leases."""
    queue, gate = queue_in(lease_ttl=TTL), Gate()
    id = await queue.enqueue(1)
    async with working(queue, gate, execution_timeout=LONG):
        await gate.entered(1)
        await outlived(queue, id)
        gate.open()
        job = await queue.wait(id, LONG)
    assert (job.result, job.attempts) == ("done", 1)


async def test_a_timeout_is_tried_again_like_any_error() -> None:
    queue = queue_in(retry=AT_ONCE)

    async def handler(job: Job) -> str:
        if job.attempts == 1:
            await asyncio.Event().wait()
        return "second"

    id = await queue.enqueue(1)
    async with working(queue, handler, execution_timeout=0.1):
        job = await queue.wait(id, LONG)
    assert (job.result, job.attempts) == ("second", 2)
    assert ran(queue) == {"retried": 1, "succeeded": 1}


async def test_a_timeout_may_be_the_end() -> None:
    queue, gate = queue_in(retry=RetryPolicy(give_up_on=TimeoutError)), Gate()
    id = await queue.enqueue(1)
    async with working(queue, gate, execution_timeout=0.1):
        assert (await queue.wait(id, LONG)).attempts == 1


async def test_a_handler_that_returns_when_it_is_cancelled_has_failed_all_the_same() -> None:
    queue = queue_in(retry=RetryPolicy(max_retries=0))

    async def handler(job: Job) -> str:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            return "nearly"
        return "never"

    id = await queue.enqueue(1)
    async with working(queue, handler, execution_timeout=0.1):
        job = await queue.wait(id, LONG)
    assert (job.state, job.result) == (JobState.FAILED, None)
    assert "TimeoutError" in (job.last_error or "")


async def test_a_handler_that_does_not_let_itself_be_cancelled_loses_its_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """The job goes on without it; its place stays taken, because it still uses it."""
    monkeypatch.setattr(runners, "_GRACE", 0.1)
    queue = queue_in()
    release = asyncio.Event()
    calls: list[int] = []

    async def stubborn(job: Job) -> str:
        calls.append(job.attempts)
        while job.attempts == 1 and not release.is_set():
            try:
                await release.wait()
            except asyncio.CancelledError:
                continue
        return f"attempt {job.attempts}"

    id = await queue.enqueue(1)
    async with working(queue, stubborn, execution_timeout=0.2, concurrency=2) as worker:
        job = await queue.wait(id, LONG)
        assert (job.result, job.attempts, worker.inflight) == ("attempt 2", 2, 1)
        release.set()
        await eventually(lambda: worker.inflight == 0, "the stubborn one ended")
        assert await queue.get(id) == job
    assert calls == [1, 2]


async def test_a_thread_that_takes_too_long_loses_its_job_but_not_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runners, "_GRACE", 0.1)
    queue, holding = queue_in(retry=RetryPolicy(max_retries=0)), Holding()
    id = await queue.enqueue(1)
    async with working(queue, holding, execution_timeout=0.2, concurrency=1) as worker:
        job = await queue.wait(id, LONG)
        assert (job.state, worker.inflight) == (JobState.FAILED, 1)
        assert "TimeoutError" in (job.last_error or "")
        next = await queue.enqueue(2)
        assert len(holding.began) == 1
        holding.open()
        await eventually(lambda: len(holding.began) == 2, "the place was used again")
        assert (await queue.wait(next, LONG)).result == "done"
    assert await queue.get(id) == job
