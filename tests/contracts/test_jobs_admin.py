"""Looking after jobs: what there is, what has become of one, and bringing back or calling off jobs."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from conquiet import (
    ConfigError,
    Job,
    JobQueue,
    JobSpec,
    JobState,
    JobStateError,
    StaleLeaseError,
    UnknownJobError,
)
from conquiet.kit.clock import ManualClock
from tests.contracts.jobs_flavours import CHECKED_FIRST, TTL, only, tally
from tests.contracts.jobs_states import STATES, in_state
from tests.rigs.clocks import WatchedClock
from tests.rigs.waiting import LONG

pytest_plugins = ("tests.contracts.jobs_fixtures",)

# --- looking ----------------------------------------------------------------------------------------------------------


async def test_an_unknown_job_is_none(jobs: JobQueue) -> None:
    assert await jobs.get("nobody") is None


async def test_counts_tell_of_every_state(jobs: JobQueue) -> None:
    """spec 5: State Consistency: every job is counted exactly once."""
    assert await jobs.counts() == dict.fromkeys(JobState, 0)
    for number, state in enumerate(STATES):
        for copy in range(number + 1):
            await in_state(jobs, state, f"{state}-{copy}")
    assert await jobs.counts() == {state: number + 1 for number, state in enumerate(STATES)}


@pytest.mark.parametrize("state", JobState)
async def test_pages_show_every_job_of_a_state_once(jobs: JobQueue, state: JobState) -> None:
    for one in STATES:
        for n in range(7 if one is state else 1):
            await in_state(jobs, one, f"{one}-{n}")
    for size in (1, 3, 7, 100):
        seen = await paged(jobs, state, size)
        assert sorted(job.id for job in seen) == [f"{state}-{n}" for n in range(7)]
        assert seen == [await jobs.get(job.id) for job in seen]


async def paged(jobs: JobQueue, state: JobState, size: int) -> list[Job]:
    seen: list[Job] = []
    cursor, pages = None, 0
    while pages == 0 or cursor is not None:
        page = await jobs.list_jobs(state, size, cursor)
        assert len(page.jobs) <= size
        seen += page.jobs
        cursor, pages = page.cursor, pages + 1
        assert pages < 20
    return seen


async def test_what_stays_is_met_once_though_others_come_and_go(jobs: JobQueue) -> None:
    await jobs.enqueue_many([JobSpec(n, f"j{n:02}") for n in range(20)])
    first = await jobs.list_jobs(JobState.READY, 5)
    seen = [job.id for job in first.jobs]
    gone = seen[:2]
    for id in gone:
        await jobs.cancel(id)
    await jobs.enqueue_many([JobSpec(n, f"new{n}") for n in range(3)])
    cursor = first.cursor
    while cursor is not None:
        page = await jobs.list_jobs(JobState.READY, 5, cursor)
        seen += [job.id for job in page.jobs]
        cursor = page.cursor
    old = [id for id in seen if id.startswith("j")]
    assert sorted(old) == [f"j{n:02}" for n in range(20)]


async def test_a_page_of_nothing_is_the_last(jobs: JobQueue) -> None:
    page = await jobs.list_jobs(JobState.FAILED)
    assert (list(page.jobs), page.cursor) == ([], None)


@CHECKED_FIRST
@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("lost",), "state must be one of 'ready', 'in_flight', 'succeeded', 'failed', not 'lost'"),
        ((None,), "state must be one of .* not None"),
        (("ready", 0), "count must be an integer of at least 1, not 0"),
    ],
    ids=repr,
)
async def test_what_cannot_be_listed_is_refused(jobs: JobQueue, args: tuple[Any, ...], message: str) -> None:
    await jobs.enqueue(1)
    with pytest.raises(ConfigError, match=message):
        await jobs.list_jobs(*args)


async def test_what_is_no_cursor_is_refused(jobs: JobQueue) -> None:
    """Each store has cursors of its own."""
    await jobs.enqueue(1)
    with pytest.raises(ConfigError, match="cursor must be one that a page gave, not 'not a cursor'"):
        await jobs.list_jobs(JobState.READY, 5, "not a cursor")
    with pytest.raises(ConfigError, match=r"cursor must be one that a page gave, not \[\]"):
        await jobs.list_jobs(JobState.READY, 5, cast("str", []))


# --- waiting ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", [JobState.SUCCEEDED, JobState.FAILED])
async def test_waiting_for_what_is_finished_does_not_wait(jobs: JobQueue, state: JobState) -> None:
    job = await in_state(jobs, state)
    assert await jobs.wait("a") == job
    assert await jobs.wait("a", timeout=0) == job


@pytest.mark.parametrize("end", ["ack", "nack", "cancel"])
async def test_waiting_ends_with_the_job(jobs: JobQueue, clock: WatchedClock, end: str) -> None:
    await jobs.enqueue(1, job_id="a", max_retries=0)
    job = await only(jobs)
    waiting = asyncio.ensure_future(jobs.wait("a"))
    await clock.waited_on()
    assert not waiting.done()
    if end == "ack":
        await jobs.ack(job, result=42)
    elif end == "nack":
        await jobs.nack(job, error="no")
    else:
        await jobs.cancel("a")
    found = await asyncio.wait_for(waiting, LONG)
    assert found == await jobs.get("a")
    assert found.state is (JobState.SUCCEEDED if end == "ack" else JobState.FAILED)


async def test_waiting_sees_a_job_whose_last_lease_runs_out(jobs: JobQueue, clock: WatchedClock) -> None:
    await jobs.enqueue(1, job_id="a", max_retries=0)
    await jobs.claim()
    waiting = asyncio.ensure_future(jobs.wait("a"))
    await clock.waited_on()
    clock.advance(TTL + 1)
    await jobs.claim()
    assert (await asyncio.wait_for(waiting, LONG)).last_error == "lease expired"


async def test_waiting_has_an_end(jobs: JobQueue, clock: WatchedClock) -> None:
    await jobs.enqueue(1, job_id="a")
    with pytest.raises(TimeoutError, match=r"job 'a' of queue .* has not finished in 0 seconds"):
        await jobs.wait("a", timeout=0)
    waiting = asyncio.ensure_future(jobs.wait("a", timeout=60))
    await clock.waited_on()
    assert not waiting.done()
    clock.advance(61)
    with pytest.raises(TimeoutError, match="has not finished in 60 seconds"):
        await asyncio.wait_for(waiting, LONG)


async def test_many_may_wait_for_one_job(jobs: JobQueue, clock: WatchedClock) -> None:
    await jobs.enqueue(1, job_id="a")
    waiting = [asyncio.ensure_future(jobs.wait("a")) for _ in range(4)]
    await clock.waited_on(4)
    await jobs.ack(await only(jobs), result="x")
    assert [job.result for job in await asyncio.wait_for(asyncio.gather(*waiting), LONG)] == ["x"] * 4


async def test_waiting_for_what_is_not_there_is_refused(jobs: JobQueue) -> None:
    with pytest.raises(UnknownJobError, match=f"queue '{jobs.name}' has no job with the ID 'nobody'"):
        await jobs.wait("nobody", timeout=60)


# --- bringing back ----------------------------------------------------------------------------------------------------


async def test_a_failed_job_can_be_replayed(jobs: JobQueue) -> None:
    """spec 5: Retry Cap: failed jobs require manual intervention."""
    failed = await in_state(jobs, JobState.FAILED)
    job = await jobs.replay("a")
    assert job == await jobs.get("a")
    assert (job.state, job.attempts, job.payload, job.priority) == (JobState.READY, 0, 1, 100)
    assert (job.last_error, job.failures) == ("broken", failed.failures)
    assert (job.finished_at, job.worker, job.claimed_at) == (None, None, None)
    again = await only(jobs)
    assert again.attempts == 1
    assert again.lease_token > failed.lease_token
    await jobs.nack(again)
    assert await tally(jobs) == (0, 0, 0, 1)


async def test_a_replayed_job_has_all_its_retries(jobs: JobQueue) -> None:
    await jobs.enqueue(1, job_id="a", max_retries=1)
    for _ in range(2):
        for _ in range(2):
            await jobs.nack(await only(jobs), delay=0)
        assert await tally(jobs) == (0, 0, 0, 1)
        await jobs.replay("a")
    assert await tally(jobs) == (1, 0, 0, 0)


async def test_a_replayed_job_is_behind_those_that_wait(jobs: JobQueue, clock: ManualClock) -> None:
    await jobs.enqueue(1, job_id="a")
    await jobs.cancel("a")
    await jobs.enqueue(1, job_id="b")
    clock.advance(1)
    await jobs.replay("a")
    assert [job.id for job in await jobs.claim(2)] == ["b", "a"]


@pytest.mark.parametrize("state", [JobState.READY, JobState.IN_FLIGHT, JobState.SUCCEEDED])
async def test_only_failed_jobs_can_be_replayed(jobs: JobQueue, state: JobState) -> None:
    """spec 5: Visibility: successful jobs are never re-processed."""
    before = await in_state(jobs, state)
    with pytest.raises(JobStateError, match=f"job 'a' of queue '{jobs.name}' is {state}: replay is not possible"):
        await jobs.replay("a")
    assert await jobs.get("a") == before


# --- calling off ------------------------------------------------------------------------------------------------------


async def test_a_waiting_job_can_be_cancelled(jobs: JobQueue, clock: ManualClock) -> None:
    await in_state(jobs, JobState.READY)
    assert await jobs.cancel("a") is True
    job = await jobs.get("a")
    assert job is not None
    assert (job.state, job.last_error, job.failures, job.attempts) == (JobState.FAILED, "cancelled", (), 0)
    assert job.finished_at is not None
    clock.advance(TTL)
    assert await jobs.claim() == []


async def test_a_delayed_job_can_be_cancelled(jobs: JobQueue, clock: ManualClock) -> None:
    await jobs.enqueue(1, job_id="a", delay=50)
    assert await jobs.cancel("a") is True
    clock.advance(60)
    assert await jobs.claim() == []
    assert await tally(jobs) == (0, 0, 0, 1)


async def test_a_job_in_flight_can_be_cancelled_and_its_worker_has_lost_it(jobs: JobQueue, clock: ManualClock) -> None:
    job = await in_state(jobs, JobState.IN_FLIGHT)
    assert await jobs.cancel("a") is True
    after = await jobs.get("a")
    assert after is not None
    assert (after.state, after.last_error, after.lease_expires_at) == (JobState.FAILED, "cancelled", None)
    assert after.lease_token > job.lease_token
    assert [(one.number, one.error) for one in after.failures] == [(1, "cancelled")]
    for call in (jobs.ack, jobs.nack, jobs.heartbeat, jobs.release):
        with pytest.raises(StaleLeaseError):
            await call(job)
    clock.advance(TTL + 1)
    assert await jobs.claim() == []
    assert await jobs.get("a") == after


@pytest.mark.parametrize("state", [JobState.SUCCEEDED, JobState.FAILED])
async def test_what_is_finished_stays_as_it_is(jobs: JobQueue, state: JobState) -> None:
    before = await in_state(jobs, state)
    assert await jobs.cancel("a") is False
    assert await jobs.get("a") == before


async def test_a_cancelled_job_is_not_cancelled_again(jobs: JobQueue) -> None:
    await in_state(jobs, JobState.READY)
    assert [await jobs.cancel("a"), await jobs.cancel("a")] == [True, False]
