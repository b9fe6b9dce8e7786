"""A worker at work: how many at once, how handlers are called, and what is counted."""

from __future__ import annotations

import asyncio
import contextvars
import logging
import threading
from functools import partial

import pytest

from conquiet import (
    Job,
    JobRetention,
    JobState,
    MemoryStore,
    Reject,
    RetryPolicy,
)
from conquiet.kit.clock import ManualClock
from tests.contracts.jobs_flavours import Recorder
from tests.jobs.working import Gate, Holding, Watched, counted, queue_in, ran, settled, working
from tests.rigs.waiting import LONG, eventually

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
