"""Removing jobs: one by one, and those that are finished when they are old or too many."""

from __future__ import annotations

from typing import Any

import pytest

from conquiet import (
    ConfigError,
    JobQueue,
    JobRetention,
    JobState,
    JobStateError,
    UnknownJobError,
)
from conquiet.kit.clock import ManualClock
from tests.contracts.jobs_flavours import CHECKED_FIRST, Site, every, only, tally
from tests.contracts.jobs_states import STATES, in_state

pytest_plugins = ("tests.contracts.jobs_fixtures",)

FOREVER = JobRetention(age=None, count=None)

# --- removing ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", [JobState.SUCCEEDED, JobState.FAILED])
async def test_a_finished_job_can_be_deleted(jobs: JobQueue, state: JobState) -> None:
    await in_state(jobs, state)
    await jobs.delete("a")
    assert await jobs.get("a") is None
    assert await tally(jobs) == (0, 0, 0, 0)
    assert list((await jobs.list_jobs(state)).jobs) == []


@pytest.mark.parametrize("state", [JobState.READY, JobState.IN_FLIGHT])
async def test_an_unfinished_job_cannot_be_deleted(jobs: JobQueue, state: JobState) -> None:
    """spec 5: At-Least-Once: no silent loss of jobs once successfully enqueued."""
    before = await in_state(jobs, state)
    with pytest.raises(JobStateError, match=f"job 'a' of queue '{jobs.name}' is {state}: delete is not possible"):
        await jobs.delete("a")
    assert await jobs.get("a") == before


@pytest.mark.parametrize("what", ["replay", "cancel", "delete"])
async def test_what_is_not_there_is_an_error(jobs: JobQueue, what: str) -> None:
    with pytest.raises(UnknownJobError, match=f"queue '{jobs.name}' has no job with the ID 'nobody'"):
        await getattr(jobs, what)("nobody")


@CHECKED_FIRST
@pytest.mark.parametrize("what", ["get", "wait", "replay", "cancel", "delete"])
@pytest.mark.parametrize("id", ["", None, 7, "x" * 201], ids=lambda id: repr(id)[:9])
async def test_what_is_no_id_is_refused(jobs: JobQueue, what: str, id: Any) -> None:
    with pytest.raises(ConfigError, match="job_id must be ") as caught:
        await getattr(jobs, what)(id)
    assert not isinstance(caught.value, UnknownJobError)


# --- purging ----------------------------------------------------------------------------------------------------------


async def test_finished_jobs_are_purged_when_they_are_old(site: Site, clock: ManualClock) -> None:
    jobs = site.queue(keep=JobRetention(age=100, count=None), keep_failed=JobRetention(age=1000, count=None))
    for state in STATES[:3]:
        await in_state(jobs, state, f"{state}")
    clock.advance(20)
    await in_state(jobs, JobState.SUCCEEDED, "young")
    await in_state(jobs, JobState.READY, "ready")
    assert await jobs.purge() == 0
    clock.advance(90)
    assert await jobs.purge() == 1
    assert await tally(jobs) == (1, 1, 1, 1)
    assert await jobs.get("young") is not None
    clock.advance(1000)
    assert await jobs.purge() == 2
    assert await tally(jobs) == (1, 1, 0, 0), "what is not finished is never purged"


async def test_the_oldest_are_purged_when_there_are_too_many(site: Site, clock: ManualClock) -> None:
    jobs = site.queue(keep=JobRetention(age=None, count=2), keep_failed=JobRetention(age=None, count=1))
    for n in range(5):
        await in_state(jobs, JobState.SUCCEEDED, f"s{n}")
        await in_state(jobs, JobState.FAILED, f"f{n}")
        clock.advance(1)
    assert await jobs.purge() == 7
    left = [job.id for state in JobState for job in (await jobs.list_jobs(state)).jobs]
    assert sorted(left) == ["f4", "s3", "s4"]
    assert await jobs.purge() == 0


async def test_age_counts_from_the_end_of_a_job(site: Site, clock: ManualClock) -> None:
    jobs = site.queue(keep=JobRetention(age=100, count=None))
    await jobs.enqueue(1, job_id="a")
    clock.advance(500)
    await jobs.ack(await only(jobs))
    clock.advance(50)
    assert await jobs.purge() == 0
    clock.advance(60)
    assert await jobs.purge() == 1


async def test_everything_may_be_kept(site: Site, clock: ManualClock) -> None:
    jobs = site.queue(keep=FOREVER, keep_failed=FOREVER)
    await in_state(jobs, JobState.SUCCEEDED, "s")
    await in_state(jobs, JobState.FAILED, "f")
    clock.advance(86_400 * 4000)
    assert await jobs.purge() == 0


async def test_more_than_a_thousand_are_purged(site: Site, clock: ManualClock) -> None:
    jobs = site.queue(keep=JobRetention(age=None, count=3))
    await jobs.enqueue_many(range(1510))
    await jobs.ack(*await every(jobs))
    assert await jobs.purge() == 1507
    assert await tally(jobs) == (0, 0, 3, 0)


async def test_a_purged_id_is_free_again(site: Site) -> None:
    jobs = site.queue(keep=JobRetention(count=0))
    await in_state(jobs, JobState.SUCCEEDED)
    assert await jobs.purge() == 1
    assert await jobs.enqueue(2, job_id="a") == "a"
    assert (await only(jobs)).payload == 2


async def test_a_replayed_job_is_not_purged(site: Site) -> None:
    jobs = site.queue(keep_failed=JobRetention(count=0))
    await in_state(jobs, JobState.FAILED)
    await jobs.replay("a")
    assert await jobs.purge() == 0
    await jobs.nack(await only(jobs))
    assert await jobs.purge() == 1


@pytest.mark.parametrize(
    ("options", "message"), [({"age": -1}, "age must be .* not -1"), ({"count": 1.5}, "count .*1.5")]
)
def test_what_cannot_be_kept_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        JobRetention(**options)
