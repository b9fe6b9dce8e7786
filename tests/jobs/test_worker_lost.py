"""Jobs that a worker has lost: their handlers are cancelled, and how they end does not count."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import pytest

from conquiet import Job, JobQueue, JobState, JobStore, MemoryStore, RedisStore
from conquiet.kit.clock import ManualClock
from conquiet.kit.retrying import Lines
from tests.contracts.jobs_flavours import Backend
from tests.jobs.working import Gate, Holding, counted, queue_in, ran, settled, working
from tests.rigs.clocks import next_beat
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


@pytest.mark.slow
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
