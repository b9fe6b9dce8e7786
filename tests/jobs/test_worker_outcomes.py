"""What becomes of what a handler returns and raises."""

from __future__ import annotations

import asyncio
import contextvars
import gc
from contextlib import suppress
from dataclasses import dataclass

import pytest

from conquiet import (
    Backoff,
    Job,
    JobQueue,
    JobState,
    MemoryStore,
    Reject,
    Retry,
    RetryPolicy,
)
from conquiet.kit.clock import ManualClock
from tests.contracts.jobs_flavours import Recorder
from tests.jobs.working import queue_in, settled, working
from tests.rigs.waiting import LONG, eventually


async def failed_once(queue: JobQueue, id: str) -> Job:
    """The job once it waits for another try."""
    found: list[Job] = []

    async def waits() -> bool:
        job = await queue.get(id)
        assert job is not None
        found[:] = [job]
        return job.state is JobState.READY and bool(job.failures)

    await eventually(waits, "a failed try")
    return found[0]


async def test_what_a_handler_returns_is_kept() -> None:
    """spec 5: Ack: source: handler returns success."""
    queue = queue_in()
    id = await queue.enqueue({"n": 20})
    async with working(queue, lambda job: {"twice": job.payload["n"] * 2}):
        job = await queue.wait(id, LONG)
    assert (job.state, job.result, job.attempts) == (JobState.SUCCEEDED, {"twice": 40}, 1)


async def test_a_result_that_json_cannot_carry_is_not_kept_but_the_work_is_done(
    caplog: pytest.LogCaptureFixture,
) -> None:
    queue, seen = queue_in(), Recorder(lambda job: object())
    id = await queue.enqueue(1)
    async with working(queue, seen):
        job = await queue.wait(id, LONG)
    assert (job.state, job.result, len(seen.jobs)) == (JobState.SUCCEEDED, None, 1)
    assert "its result is not kept" in caplog.text


async def test_an_error_is_tried_again_until_no_try_is_left() -> None:
    """spec 5: Nack: source: handler returns error. Its neighbours are not harmed."""
    queue = queue_in()

    def handler(job: Job) -> str:
        if job.payload == "bad":
            raise RuntimeError(f"attempt {job.attempts}")
        return "good"

    ids = await queue.enqueue_many(["good", "bad", "good"])
    async with working(queue, handler):
        good, bad, other = [await queue.wait(id, LONG) for id in ids]
    assert (good.result, other.result) == ("good", "good")
    assert (bad.state, bad.attempts) == (JobState.FAILED, 4)
    assert [one.error for one in bad.failures] == [f"RuntimeError: attempt {n}" for n in range(1, 5)]
    assert "in handler" in (bad.last_error or "")


async def test_retries_wait_for_their_backoff() -> None:
    clock = ManualClock()
    queue = queue_in(MemoryStore(clock=clock), retry=RetryPolicy(backoff=Backoff(base=60, cap=60, kind="fixed")))

    def act(job: Job) -> None:
        if job.attempts == 1:
            raise RuntimeError

    seen = Recorder(act)
    id = await queue.enqueue(1)
    async with working(queue, seen):
        await seen.saw(1)
        assert (await failed_once(queue, id)).retry_at is not None
        clock.advance(61)
        assert (await queue.wait(id, LONG)).attempts == 2


@pytest.mark.parametrize(
    ("error", "tries"), [(Reject("never"), 1), (KeyError("hopeless"), 1), (ValueError("again"), 4), (Retry("again"), 4)]
)
async def test_which_errors_are_tried_again(error: Exception, tries: int) -> None:
    queue = queue_in(retry=RetryPolicy(backoff=Backoff(base=0, cap=0), give_up_on=LookupError))

    def act(job: Job) -> None:
        raise error

    seen = Recorder(act)
    id = await queue.enqueue(1)
    async with working(queue, seen):
        job = await queue.wait(id, LONG)
    assert (job.state, len(seen.jobs), job.attempts) == (JobState.FAILED, tries, tries)
    assert str(error).strip("'") in (job.last_error or "")


async def test_a_handler_may_say_when_to_try_again() -> None:
    clock = ManualClock()
    queue = queue_in(MemoryStore(clock=clock))

    async def handler(job: Job) -> None:
        if job.attempts == 1:
            raise Retry("not yet", delay=1000)

    id = await queue.enqueue(1)
    async with working(queue, handler):
        job = await failed_once(queue, id)
        assert job.retry_at is not None
        assert (job.retry_at - job.failures[0].ended_at).total_seconds() == 1000
        clock.advance(1001)
        assert (await queue.wait(id, LONG)).state is JobState.SUCCEEDED


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, GeneratorExit])
async def test_what_would_end_a_thread_fails_only_the_job(error: type[BaseException]) -> None:
    queue = queue_in()

    def handler(job: Job) -> None:
        if job.payload == "bad":
            raise error

    bad, good = await queue.enqueue_many(["bad", "good"])
    async with working(queue, handler):
        assert error.__name__ in ((await queue.wait(bad, LONG)).last_error or "")
        assert (await queue.wait(good, LONG)).state is JobState.SUCCEEDED


async def test_a_handler_that_cancels_itself_has_failed() -> None:
    queue = queue_in()

    async def handler(job: Job) -> None:
        raise asyncio.CancelledError

    id = await queue.enqueue(1, max_retries=0)
    async with working(queue, handler) as worker:
        job = await queue.wait(id, LONG)
        assert "CancelledError" in (job.last_error or "")
        assert worker.health().healthy


class Panic(BaseException):
    """What a native module raises that has given up; no ``Exception``."""


@dataclass(eq=False)
class Prickly:
    """A result that cannot be compared."""

    number: int = 1

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("do not touch")

    __hash__ = object.__hash__


async def ended(queue: JobQueue, id: str) -> Job | None:
    """The job, if it ends soon."""
    with suppress(TimeoutError):
        return await queue.wait(id, 2.0)
    gc.collect()  # asyncio has a word to say of a task that nobody asked: here, and not while a report is written
    return None


async def test_whatever_an_async_handler_raises_fails_only_the_job() -> None:
    queue = queue_in(retry=RetryPolicy(max_retries=0))

    async def handler(job: Job) -> None:
        raise Panic("gone")

    id = await queue.enqueue(1)
    async with working(queue, handler, drain_timeout=0):
        job = await ended(queue, id)
    assert job is not None
    assert job.state is JobState.FAILED
    assert "Panic: gone" in (job.last_error or "")


async def test_whatever_a_handler_returns_the_work_is_done() -> None:
    queue = queue_in()

    async def handler(job: Job) -> Prickly:
        return Prickly()

    id = await queue.enqueue(1)
    async with working(queue, handler, drain_timeout=0):
        job = await ended(queue, id)
    assert job is not None
    assert job.state is JobState.SUCCEEDED


async def test_what_a_job_sets_in_its_context_is_seen_by_no_other() -> None:
    tenant: contextvars.ContextVar[int | None] = contextvars.ContextVar("tenant", default=None)
    queue = queue_in()
    seen: list[int | None] = []

    async def handler(job: Job) -> None:
        seen.append(tenant.get())
        tenant.set(job.payload)

    await queue.enqueue_many(range(10))
    async with working(queue, handler, concurrency=10):
        await settled(queue, succeeded=10)
    assert seen == [None] * 10


async def test_a_policy_that_cannot_judge_does_not_hold_the_job_for_ever() -> None:
    def broken() -> float:
        raise ZeroDivisionError

    queue = queue_in(retry=RetryPolicy(max_retries=1, backoff=Backoff(base=1, cap=1)), random=broken)

    def handler(job: Job) -> None:
        raise RuntimeError("x")

    id = await queue.enqueue(1)
    async with working(queue, handler, drain_timeout=0.1):
        assert (await queue.wait(id, 5)).is_finished
