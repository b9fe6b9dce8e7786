"""Time limits of handlers under a worker, apart from the lease."""

from __future__ import annotations

import asyncio
from typing import Final

import pytest

from conquiet import Job, JobState, RetryPolicy
from conquiet.kit import runners
from tests.jobs.working import AT_ONCE, Gate, Holding, outlived, queue_in, ran, working
from tests.rigs.waiting import LONG, eventually

pytest_plugins = ("tests.contracts.jobs_fixtures",)

TTL: Final = 0.3


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
