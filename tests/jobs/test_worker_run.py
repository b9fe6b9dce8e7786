"""A worker at work: how many at once, what becomes of results and errors, and what is counted."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import logging
import threading
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import pytest

from conquiet import (
    Backoff,
    Job,
    JobQueue,
    JobRetention,
    JobState,
    MemoryStore,
    Reject,
    Retry,
    RetryPolicy,
)
from conquiet.kit.clock import ManualClock
from tests.contracts.jobs_flavours import Recorder
from tests.jobs.working import Gate, Holding, Watched, counted, queue_in, ran, settled, working
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


# --- how many ---------------------------------------------------------------------------------------------------------


async def test_no_more_handlers_run_than_may() -> None:
    """Each job is handled, and handled once."""
    queue, gate = queue_in(), Gate()
    await queue.enqueue_many(range(20))
    async with working(queue, gate, concurrency=3) as worker:
        await gate.entered(3)
        assert worker.inflight == 3
        await settled(queue, ready=17, in_flight=3)
        gate.open()
        await settled(queue, succeeded=20)
    assert gate.most == 3
    assert sorted(job.payload for job in gate.done) == list(range(20))


async def test_nothing_is_claimed_before_there_is_a_place_for_it() -> None:
    """Claimed means started: a job does not lose its lease in a queue of the worker's own."""
    store = Watched()
    queue, gate = queue_in(store), Gate()
    await queue.enqueue_many(range(50))
    async with working(queue, gate, concurrency=4):
        await gate.entered(4)
        assert max(store.asked) <= 4
        assert store.got == 4
        gate.open()
        await settled(queue, succeeded=50)
    assert max(store.asked) <= 4


async def test_a_place_that_becomes_free_is_used_while_others_are_taken() -> None:
    queue = queue_in()
    slow, done = asyncio.Event(), asyncio.Event()

    async def handler(job: Job) -> None:
        if job.payload == "slow":
            await slow.wait()
        elif job.payload == 5:
            done.set()

    await queue.enqueue("slow")
    await queue.enqueue_many(range(6))
    async with working(queue, handler, concurrency=2):
        await asyncio.wait_for(done.wait(), LONG)
        slow.set()
        await settled(queue, succeeded=7)


async def test_many_short_jobs_do_not_starve_the_loop() -> None:
    queue = queue_in()
    turns = 0

    async def handler(job: Job) -> None:
        pass

    await queue.enqueue_many(range(3000))
    async with working(queue, handler, concurrency=1000):

        async def finished() -> bool:
            nonlocal turns
            turns += 1
            return (await queue.counts())[JobState.SUCCEEDED] == 3000

        await eventually(finished, "all done")
    assert turns > 1, "others had their turn while it worked"


async def test_two_workers_share_a_queue() -> None:
    queue = queue_in()
    one, other = Recorder(), Recorder()
    async with working(queue, one, name="one"), working(queue, other, name="other"):
        await queue.enqueue_many(range(40))
        await settled(queue, succeeded=40)
    assert sorted(one.payloads + other.payloads) == list(range(40))
    assert {job.worker for job in one.jobs} <= {"one"}


async def test_jobs_that_come_later_are_taken_at_once() -> None:
    queue, seen = queue_in(), Recorder()
    async with working(queue, seen):
        for number in range(5):
            await queue.enqueue(number)
            await seen.saw(number + 1)


# --- handlers ---------------------------------------------------------------------------------------------------------


async def test_plain_handlers_run_in_threads_side_by_side() -> None:
    queue, holding = queue_in(), Holding()
    await queue.enqueue_many(range(3))
    async with working(queue, holding, concurrency=3):
        await holding.entered(3)
        assert len(holding.threads) == 3
        assert threading.current_thread().name not in holding.threads
        holding.open()
        await settled(queue, succeeded=3)


async def test_a_plain_handler_sees_the_callers_context() -> None:
    variable = contextvars.ContextVar("variable", default="none")
    variable.set("the caller's")
    queue = queue_in()
    id = await queue.enqueue(1)
    async with working(queue, lambda job: variable.get()):
        assert (await queue.wait(id, LONG)).result == "the caller's"


async def test_async_in_disguise_is_awaited() -> None:
    async def double(by: int, job: Job) -> int:
        return int(job.payload) * by

    queue = queue_in()
    first, second = await queue.enqueue_many([1, 2])
    async with working(queue, lambda job: double(10, job)):
        assert (await queue.wait(first, LONG)).result == 10
    async with working(queue, partial(double, 100)):
        assert (await queue.wait(second, LONG)).result in (20, 200)


async def test_a_callable_object_is_a_handler() -> None:
    class Handler:
        async def __call__(self, job: Job) -> str:
            return "called"

    queue = queue_in()
    id = await queue.enqueue(1)
    async with working(queue, Handler()):
        assert (await queue.wait(id, LONG)).result == "called"


# --- outcomes ---------------------------------------------------------------------------------------------------------


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


# --- what is counted --------------------------------------------------------------------------------------------------


async def test_what_happens_is_counted() -> None:
    queue = queue_in()

    def handler(job: Job) -> None:
        if job.payload == "once" and job.attempts == 1:
            raise RuntimeError
        if job.payload == "never":
            raise Reject

    await queue.enqueue_many(["good", "good", "once", "never"])
    async with working(queue, handler):
        await settled(queue, succeeded=3, failed=1)
    names = ("enqueued", "claimed", "succeeded", "retried", "failed", "expired", "released", "cancelled")
    assert [counted(queue, f"{name}_total") for name in names] == [4, 5, 3, 1, 1, 0, 0, 0]
    assert ran(queue) == {"succeeded": 3, "retried": 1, "failed": 1}
    assert counted(queue, "wait_seconds_count") == 5
    assert [counted(queue, "stale_total", operation=one) for one in ("ack", "retry", "fail", "renew")] == [0, 0, 0, 0]


async def test_finished_jobs_are_purged_by_workers() -> None:
    clock = ManualClock()
    queue = queue_in(MemoryStore(clock=clock), keep=JobRetention(age=10, count=None))
    await queue.enqueue(1)
    async with working(queue, Recorder()):
        await settled(queue, succeeded=1)
        clock.advance(100)
        await settled(queue)


async def test_errors_of_handlers_are_logged_without_what_they_hold(caplog: pytest.LogCaptureFixture) -> None:
    queue = queue_in(retry=RetryPolicy(max_retries=0))

    def handler(job: Job) -> None:
        raise RuntimeError("s3cr3t")

    with caplog.at_level(logging.INFO, "conquiet.jobs"):
        id = await queue.enqueue({"password": "s3cr3t"})
        async with working(queue, handler):
            await queue.wait(id, LONG)
    assert f"job {id!r}, attempt 1 failed: RuntimeError" in caplog.text
    assert "s3cr3t" not in caplog.text
