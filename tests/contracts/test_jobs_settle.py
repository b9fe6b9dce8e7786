"""What became of jobs: done, failed, to be tried again, or given back."""

from __future__ import annotations

from typing import Any

import pytest

from conquiet import (
    Backoff,
    ConfigError,
    JobQueue,
    JobSpec,
    JobState,
    PayloadError,
    Reject,
    Retry,
    RetryPolicy,
    StaleLeaseError,
)
from conquiet.kit.clock import ManualClock
from tests.contracts.jobs_flavours import CHECKED_FIRST, DELAY, TTL, Site, every, only, tally

pytestmark = pytest.mark.guarantee

pytest_plugins = ("tests.contracts.jobs_fixtures",)


def failure(text: str) -> BaseException:
    """An exception that was really raised."""
    try:
        raise RuntimeError(text)
    except RuntimeError as error:
        return error


# --- done -------------------------------------------------------------------------------------------------------------


async def test_an_acknowledged_job_has_succeeded(jobs: JobQueue) -> None:
    """spec 5: Ack: update status to Succeeded; the job is complete."""
    await jobs.enqueue(1, job_id="a")
    job = await only(jobs, worker="w")
    await jobs.ack(job)
    after = await jobs.get("a")
    assert after is not None
    assert (after.state, after.is_finished, after.result, after.last_error) == (JobState.SUCCEEDED, True, None, None)
    assert (after.attempts, after.lease_token, after.worker) == (1, job.lease_token, "w")
    assert (after.lease_expires_at, after.retry_at, after.claimed_at) == (None, None, job.claimed_at)
    assert after.finished_at is not None
    assert job.claimed_at is not None
    assert after.finished_at >= job.claimed_at
    assert await tally(jobs) == (0, 0, 1, 0)


async def test_a_result_is_kept(jobs: JobQueue) -> None:
    results: list[Any] = [{"sent": [1, None, "é"]}, 0, False, "", [], 2**64 - 1, "\u0000"]
    for result in results:
        id = await jobs.enqueue(1)
        await jobs.ack(await only(jobs), result=result)
        after = await jobs.get(id)
        assert after is not None
        assert (after.result, type(after.result)) == (result, type(result))


async def test_a_result_that_json_cannot_carry_is_refused_and_the_job_still_held(jobs: JobQueue) -> None:
    await jobs.enqueue(1)
    job = await only(jobs)
    with pytest.raises(PayloadError, match="of type set"):
        await jobs.ack(job, result={1, 2})
    assert await tally(jobs) == (0, 1, 0, 0)
    await jobs.ack(job, result=[1, 2])


async def test_a_job_that_succeeds_late_keeps_what_went_wrong_before(jobs: JobQueue) -> None:
    await jobs.enqueue(1, job_id="a")
    await jobs.nack(await only(jobs), error="at first", delay=0)
    await jobs.ack(await only(jobs), result="at last")
    after = await jobs.get("a")
    assert after is not None
    assert (after.state, after.result, after.last_error) == (JobState.SUCCEEDED, "at last", "at first")
    assert [one.error for one in after.failures] == ["at first"]


# --- to be tried again ------------------------------------------------------------------------------------------------


async def test_a_failed_try_is_followed_by_another_after_its_delay(jobs: JobQueue, clock: ManualClock) -> None:
    """spec 5: Retry Visibility: back to Ready, retry_at = now + delay, not claimable until then."""
    await jobs.enqueue(1, job_id="a")
    job = await only(jobs)
    clock.advance(2)
    await jobs.nack(job, error="no")
    after = await jobs.get("a")
    assert after is not None
    assert (after.state, after.attempts, after.last_error) == (JobState.READY, 1, "no")
    assert after.lease_token == job.lease_token
    assert (after.lease_expires_at, after.finished_at) == (None, None)
    assert after.retry_at is not None
    [one] = after.failures
    assert (after.retry_at - one.ended_at).total_seconds() == DELAY
    assert await jobs.claim() == []
    clock.advance(DELAY - 3)
    assert await jobs.claim() == []
    clock.advance(4)
    again = await only(jobs)
    assert (again.id, again.attempts, again.retry_at) == ("a", 2, None)


async def test_after_the_last_retry_a_job_has_failed(jobs: JobQueue, clock: ManualClock) -> None:
    """spec 5: Retry Cap: initial attempt + 3 retries = 4 total attempts maximum; then Failed."""
    await jobs.enqueue(1, job_id="a")
    for attempt in range(1, 5):
        job = await only(jobs, worker=f"w{attempt}")
        assert job.attempts == attempt
        await jobs.nack(job, error=f"no {attempt}")
        clock.advance(DELAY + 1)
    assert await jobs.claim() == []
    after = await jobs.get("a")
    assert after is not None
    assert (after.state, after.attempts, after.last_error, after.retry_at) == (JobState.FAILED, 4, "no 4", None)
    assert after.finished_at == after.failures[-1].ended_at
    assert [(one.number, one.worker, one.error) for one in after.failures] == [
        (number, f"w{number}", f"no {number}") for number in range(1, 5)
    ]
    assert await tally(jobs) == (0, 0, 0, 1)


@pytest.mark.parametrize(("own", "policy", "tries"), [(0, 3, 1), (2, 0, 3), (None, 1, 2)])
async def test_a_jobs_own_limit_wins(site: Site, own: int | None, policy: int, tries: int) -> None:
    jobs = site.queue(retry=RetryPolicy(max_retries=policy, backoff=Backoff(base=0, cap=0)))
    await jobs.enqueue(1, job_id="a", max_retries=own)
    done = 0
    while claimed := await jobs.claim():
        done += 1
        await jobs.nack(*claimed)
    assert done == tries
    assert await tally(jobs) == (0, 0, 0, 1)


async def test_delays_grow_with_full_jitter(site: Site, clock: ManualClock) -> None:
    """spec 5: Backoff Calculation: delay = random(0, min(base * 2^attempt, max)), attempt 0 for the first retry."""
    jobs = site.queue(retry=RetryPolicy(max_retries=9, backoff=Backoff(base=4, cap=20)), random=lambda: 0.5)
    await jobs.enqueue(1, job_id="a")
    delays: list[float] = []
    for _ in range(5):
        await jobs.nack(await only(jobs))
        after = await jobs.get("a")
        assert after is not None
        assert after.retry_at is not None
        delays.append((after.retry_at - after.failures[-1].ended_at).total_seconds())
        clock.advance(21)
    assert delays == [2, 4, 8, 10, 10]


async def test_a_caller_may_choose_the_delay(jobs: JobQueue, clock: ManualClock) -> None:
    await jobs.enqueue(1)
    await jobs.nack(await only(jobs), delay=100)
    clock.advance(DELAY + 80)
    assert await jobs.claim() == []
    clock.advance(20)
    await jobs.nack(await only(jobs), delay=0)
    await jobs.nack(await only(jobs), error=Retry(delay=50))
    clock.advance(45)
    assert await jobs.claim() == []
    clock.advance(10)
    assert (await only(jobs)).attempts == 4


async def test_a_chosen_delay_gives_no_further_try(jobs: JobQueue) -> None:
    await jobs.enqueue(1, max_retries=0)
    await jobs.nack(await only(jobs), delay=0)
    assert await tally(jobs) == (0, 0, 0, 1)


async def test_a_delay_of_ages_is_kept_by_every_store(jobs: JobQueue, clock: ManualClock) -> None:
    await jobs.enqueue(1, job_id="a")
    await jobs.nack(await only(jobs), error=Retry(delay=1e15))
    after = await jobs.get("a")
    assert after is not None
    assert after.retry_at is not None
    assert after.state is JobState.READY
    clock.advance(86_400)
    assert await jobs.claim() == []


# --- errors -----------------------------------------------------------------------------------------------------------


async def test_an_exception_is_kept_with_its_traceback(jobs: JobQueue) -> None:
    await jobs.enqueue(1, job_id="a")
    job = await only(jobs, worker="w")
    await jobs.nack(job, error=failure("the disk\nis full"))
    after = await jobs.get("a")
    assert after is not None
    assert after.last_error is not None
    assert after.last_error.startswith("RuntimeError: the disk\nis full")
    assert "in failure" in after.last_error
    [one] = after.failures
    assert (one.error, one.worker, one.number) == ("RuntimeError: the disk", "w", 1)
    assert one.started_at == job.claimed_at
    assert one.ended_at >= one.started_at


async def test_any_text_can_be_kept(jobs: JobQueue) -> None:
    for text in ("", "é 😀", "a\0b", "\ud800", "x" * 30_000, "line\nline"):
        id = await jobs.enqueue(1)
        await jobs.nack(await only(jobs), error=text)
        after = await jobs.get(id)
        assert after is not None
        assert after.last_error is not None
        if text.isprintable():
            assert after.last_error == text[:10_000]
        assert len(after.failures) == 1


@pytest.mark.parametrize("error", [Reject("not ours"), KeyError("hopeless")])
async def test_some_errors_are_the_end_at_once(site: Site, error: Exception) -> None:
    jobs = site.queue(retry=RetryPolicy(give_up_on=LookupError))
    await jobs.enqueue(1, job_id="a")
    await jobs.nack(await only(jobs), error=error)
    after = await jobs.get("a")
    assert after is not None
    assert (after.state, after.attempts) == (JobState.FAILED, 1)
    assert str(error) in (after.last_error or "")


async def test_a_job_remembers_its_last_twenty_failures(jobs: JobQueue) -> None:
    await jobs.enqueue(1, job_id="a", max_retries=99)
    for number in range(23):
        await jobs.nack(await only(jobs), error=str(number), delay=0)
    after = await jobs.get("a")
    assert after is not None
    assert [one.error for one in after.failures] == [str(number) for number in range(3, 23)]
    assert [one.number for one in after.failures] == list(range(4, 24))


# --- given back -------------------------------------------------------------------------------------------------------


async def test_a_released_job_is_where_it_was(jobs: JobQueue) -> None:
    """At no cost, at once, and before those that came after it."""
    await jobs.enqueue_many([JobSpec(1, "a"), JobSpec(2, "b")])
    before = await jobs.get("a")
    job = await only(jobs)
    await jobs.release(job)
    after = await jobs.get("a")
    assert after is not None
    assert before is not None
    assert (after.state, after.attempts, after.ready_ms, after.worker) == (JobState.READY, 0, before.ready_ms, None)
    assert (after.failures, after.last_error, after.claimed_at, after.lease_expires_at) == ((), None, None, None)
    assert [one.id for one in await jobs.claim(2)] == ["a", "b"]


async def test_a_job_may_be_released_any_number_of_times(jobs: JobQueue) -> None:
    await jobs.enqueue(1, max_retries=0)
    for _ in range(6):
        job = await only(jobs)
        assert job.attempts == 1
        await jobs.release(job)
    assert await tally(jobs) == (1, 0, 0, 0)


async def test_a_released_retry_is_still_a_retry(jobs: JobQueue, clock: ManualClock) -> None:
    await jobs.enqueue(1, job_id="a")
    await jobs.nack(await only(jobs), error="once")
    clock.advance(DELAY + 1)
    await jobs.release(await only(jobs))
    after = await jobs.get("a")
    assert after is not None
    assert (after.attempts, len(after.failures), after.last_error) == (1, 1, "once")
    assert (await only(jobs)).attempts == 2


# --- many in one call -------------------------------------------------------------------------------------------------


async def test_a_batch_is_settled_as_a_whole(jobs: JobQueue) -> None:
    """All are written, however few."""
    await jobs.enqueue_many(range(9))
    claimed = await jobs.claim(9)
    await jobs.ack(*claimed[:4], result={"n": 1})
    await jobs.nack(*claimed[4:7], error="no")
    await jobs.release(*claimed[7:])
    assert await tally(jobs) == (5, 0, 4, 0)
    page = await jobs.list_jobs(JobState.SUCCEEDED)
    assert [job.result for job in page.jobs] == [{"n": 1}] * 4


@pytest.mark.parametrize("what", ["ack", "nack", "release"])
async def test_of_a_batch_with_stale_jobs_the_others_are_settled(jobs: JobQueue, clock: ManualClock, what: str) -> None:
    """The middle one is refused, its neighbours are applied."""
    await jobs.enqueue_many([JobSpec(n, id) for n, id in enumerate("abcde")])
    claimed = await jobs.claim(5)
    clock.advance(TTL / 2)
    await jobs.heartbeat(*(job for job in claimed if job.id not in "bd"))
    clock.advance(TTL / 2 + 1)
    stolen = await jobs.claim(5, worker="thief")
    assert [job.id for job in stolen] == ["b", "d"]
    with pytest.raises(StaleLeaseError, match="the lease of job 'b' and 1 more of queue") as caught:
        await getattr(jobs, what)(*claimed)
    assert caught.value.job_ids == ("b", "d")
    expected = {"ack": (0, 2, 3, 0), "nack": (3, 2, 0, 0), "release": (3, 2, 0, 0)}
    assert await tally(jobs) == expected[what]
    await jobs.ack(*stolen)


async def test_a_job_twice_in_one_call_is_settled_once(jobs: JobQueue) -> None:
    await jobs.enqueue(1, job_id="a")
    job = await only(jobs)
    with pytest.raises(StaleLeaseError):
        await jobs.nack(job, job, error="x")
    after = await jobs.get("a")
    assert after is not None
    assert len(after.failures) == 1
    assert await tally(jobs) == (1, 0, 0, 0)


async def test_more_than_a_thousand_are_settled(jobs: JobQueue) -> None:
    await jobs.enqueue_many(range(2100))
    claimed = await every(jobs)
    await jobs.cancel(claimed[1500].id)
    with pytest.raises(StaleLeaseError) as caught:
        await jobs.ack(*claimed)
    assert caught.value.job_ids == (claimed[1500].id,)
    assert await tally(jobs) == (0, 0, 2099, 1)


# --- what is refused --------------------------------------------------------------------------------------------------


@CHECKED_FIRST
@pytest.mark.parametrize("what", ["ack", "nack", "release", "heartbeat"])
@pytest.mark.parametrize("thing", ["a", None, 7, {"id": "a"}], ids=repr)
async def test_only_claimed_jobs_can_be_settled(jobs: JobQueue, what: str, thing: Any) -> None:
    await jobs.enqueue(1, job_id="a")
    job = await only(jobs)
    with pytest.raises(ConfigError, match="a claimed Job is needed, not "):
        await getattr(jobs, what)(job, thing)
    assert await tally(jobs) == (0, 1, 0, 0), "nothing is half done"


@CHECKED_FIRST
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"delay": -1}, "delay must be a finite number of at least 0, not -1"),
        ({"delay": float("nan")}, "delay must be a finite number of at least 0, not nan"),
        ({"delay": "1"}, "delay must be a finite number of at least 0, not '1'"),
        ({"error": 7}, "error must be .*, not 7"),
        ({"error": None}, "error must be .*, not None"),
    ],
    ids=repr,
)
async def test_what_cannot_be_a_failure_is_refused(jobs: JobQueue, options: dict[str, Any], message: str) -> None:
    await jobs.enqueue(1)
    job = await only(jobs)
    with pytest.raises(ConfigError, match=message):
        await jobs.nack(job, **options)
    assert await tally(jobs) == (0, 1, 0, 0)
