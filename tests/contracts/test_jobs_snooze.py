"""What is put off or interrupted: given back after it was begun, at no cost, and counted."""

from __future__ import annotations

import pickle
import threading
from functools import partial
from typing import Any

import pytest

from conquiet import ConfigError, Job, JobQueue, JobState, Snooze, StaleLeaseError
from conquiet.kit.clock import ManualClock
from tests.contracts.jobs_flavours import CHECKED_FIRST, TTL, Recorder, Site, only, serving, tally
from tests.rigs.clocks import WatchedClock
from tests.rigs.waiting import LONG, eventually

pytest_plugins = ("tests.contracts.jobs_fixtures",)


@pytest.mark.parametrize("concurrency", [1, 4])
async def test_a_handler_puts_its_job_off_and_that_costs_no_attempt(
    site: Site, jobs: JobQueue, clock: WatchedClock, concurrency: int
) -> None:
    def act(job: Job) -> str:
        if job.snoozes < 2:
            raise Snooze(20, "not yet")
        return "at last"

    seen = Recorder(act)
    id = await jobs.enqueue(1, max_retries=0)
    async with serving(site.worker(jobs, seen, concurrency=concurrency)):
        for times in (1, 2):
            await eventually(partial(_was_put_off, jobs, id, times), f"put off {times} times")
            await seen.saw(times)
            await clock.waited_on()
            clock.advance(21)
        job = await jobs.wait(id, LONG)
    assert (job.result, job.attempts, job.snoozes, job.interruptions) == ("at last", 1, 2, 0)
    assert (job.failures, job.last_error) == ((), None)
    assert [(one.attempts, one.snoozes) for one in seen.jobs] == [(1, 0), (1, 1), (1, 2)]


async def _was_put_off(jobs: JobQueue, id: str, times: int) -> bool:
    job = await jobs.get(id)
    return job is not None and job.snoozes == times and job.state is JobState.READY


async def test_what_was_put_off_waits_for_its_delay_and_no_longer(jobs: JobQueue, clock: ManualClock) -> None:
    await jobs.enqueue(1, job_id="a", priority=3)
    held = await only(jobs)
    await jobs.release(held, delay=60)
    job = await jobs.get("a")
    assert job is not None
    assert (job.state, job.attempts, job.snoozes, job.claimed_at, job.worker) == (JobState.READY, 0, 1, None, None)
    assert job.ready_ms - (held.claimed_ms or 0) >= 60_000
    assert await jobs.claim() == []
    clock.advance(50)
    assert await jobs.claim() == []
    clock.advance(11)
    again = await only(jobs)
    assert (again.attempts, again.snoozes, again.priority) == (1, 1, 3)
    assert again.lease_token > held.lease_token
    with pytest.raises(StaleLeaseError):
        await jobs.release(held, delay=1)
    assert await jobs.get("a") == again


async def test_a_failure_after_a_snooze_is_the_first(jobs: JobQueue, clock: ManualClock) -> None:
    await jobs.enqueue(1, job_id="a", max_retries=1)
    await jobs.nack(await only(jobs), error=Snooze(0))
    await jobs.nack(await only(jobs), error="first", delay=0)
    await jobs.nack(await only(jobs), error=Snooze(5), delay=0)
    job = await jobs.get("a")
    assert job is not None
    assert (job.state, job.attempts, job.snoozes) == (JobState.READY, 1, 2)
    assert [(one.number, one.error) for one in job.failures] == [(1, "first")]
    await jobs.nack(await only(jobs), error="second")
    assert await tally(jobs) == (0, 0, 0, 1)
    replayed = await jobs.replay("a")
    assert (replayed.snoozes, replayed.attempts) == (2, 0), "what happened before is not forgotten"


async def test_a_lease_that_runs_out_is_no_snooze(jobs: JobQueue, clock: ManualClock) -> None:
    await jobs.enqueue(1)
    await only(jobs)
    clock.advance(TTL + 1)
    job = await only(jobs)
    assert (job.attempts, job.snoozes, job.interruptions) == (2, 0, 0)


async def test_the_count_goes_with_the_job(jobs: JobQueue) -> None:
    await jobs.enqueue(1, job_id="a")
    await jobs.release(await only(jobs), delay=0)
    await jobs.ack(await only(jobs))
    await jobs.delete("a")
    await jobs.enqueue(1, job_id="a")
    assert (await only(jobs)).snoozes == 0


async def test_work_that_a_stopping_worker_interrupts_costs_no_attempt(site: Site, jobs: JobQueue) -> None:
    """However often: a deploy says nothing of a job, not even of one that may be tried once."""

    def never_ends(job: Job) -> None:
        begun.append(job)
        gate.wait(LONG)

    gate, begun = threading.Event(), list[Job]()
    id = await jobs.enqueue(1, max_retries=0)
    try:
        for times in (1, 2):
            async with serving(site.worker(jobs, never_ends, concurrency=2, drain_timeout=0)):
                await eventually(partial(_has, begun, times), "it is at work")
            job = await jobs.get(id)
            assert job is not None
            assert (job.state, job.attempts, job.interruptions) == (JobState.READY, 0, times)
            assert (job.failures, job.last_error) == ((), None)
    finally:
        gate.set()
    assert [one.interruptions for one in begun] == [0, 1]


def _has(some: list[Job], count: int) -> bool:
    return len(some) == count


@CHECKED_FIRST
@pytest.mark.parametrize("delay", [-1, float("nan"), float("inf"), "1", None, True], ids=repr)
async def test_what_is_no_delay_is_refused(jobs: JobQueue, delay: Any) -> None:
    with pytest.raises(ConfigError, match="delay must be a finite number"):
        Snooze(delay)
    if delay is not None:
        with pytest.raises(ConfigError, match="delay must be a finite number"):
            await jobs.release(delay=delay)


def test_a_snooze_says_why_and_may_be_pickled() -> None:
    snooze = pickle.loads(pickle.dumps(Snooze(5, "the tenant has enough")))
    assert (snooze.delay, str(snooze)) == (5.0, "the tenant has enough")
