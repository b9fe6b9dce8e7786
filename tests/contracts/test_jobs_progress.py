"""What a handler tells of its work, and what it can learn: how far it is, and whether it works for nothing."""

from __future__ import annotations

import threading
from functools import partial
from typing import Any

import pytest

from conquiet import ConfigError, Job, JobQueue, JobState, StaleLeaseError
from conquiet.kit.clock import ManualClock
from tests.contracts.jobs_flavours import CHECKED_FIRST, TTL, Recorder, Site, only, serving
from tests.rigs.clocks import WatchedClock
from tests.rigs.waiting import LONG, eventually

pytest_plugins = ("tests.contracts.jobs_fixtures",)


async def is_told(jobs: JobQueue, id: str, fraction: float | None, message: str = "") -> bool:
    job = await jobs.get(id)
    return job is not None and (job.progress.fraction, job.progress.message) == (fraction, message)


@pytest.mark.parametrize("concurrency", [1, 4])
async def test_how_far_a_handler_is_can_be_seen_while_it_runs(site: Site, jobs: JobQueue, concurrency: int) -> None:
    gate = threading.Event()

    def work(job: Job) -> None:
        job.progress(0.4, "40 of 100 é\nand more")
        gate.wait(LONG)

    id = await jobs.enqueue(1)
    assert await is_told(jobs, id, None)
    async with serving(site.worker(jobs, work, concurrency=concurrency)):
        try:
            await eventually(partial(is_told, jobs, id, 0.4, "40 of 100 é\nand more"), "it was told")
            job = await jobs.get(id)
            assert job is not None
            assert (job.state, job.attempts, job.snoozes) == (JobState.IN_FLIGHT, 1, 0)
        finally:
            gate.set()
        await jobs.wait(id, LONG)
    assert await is_told(jobs, id, 0.4, "40 of 100 é\nand more"), "it stays"


async def test_who_claims_by_hand_tells_too(jobs: JobQueue) -> None:
    await jobs.enqueue(1, job_id="a")
    job = await only(jobs)
    job.progress(1, "x" * 2000)
    await eventually(partial(is_told, jobs, "a", 1.0, "x" * 1000), "it is stored at once, and cut")


async def test_the_latest_is_stored_half_a_second_after_the_one_before(jobs: JobQueue, clock: WatchedClock) -> None:
    await jobs.enqueue(1, job_id="a")
    job = await only(jobs)
    job.progress(0.1)
    await eventually(partial(is_told, jobs, "a", 0.1), "the first")
    for fraction in (0.2, 0.3, 0.4):
        job.progress(fraction)
    await clock.waited_on()
    assert await is_told(jobs, "a", 0.1)
    clock.advance(0.51)
    await eventually(partial(is_told, jobs, "a", 0.4), "the latest")


async def test_what_was_told_goes_on_with_the_job(jobs: JobQueue) -> None:
    await jobs.enqueue(1, job_id="a")
    job = await only(jobs)
    job.progress(0.5, "half")
    await eventually(partial(is_told, jobs, "a", 0.5, "half"), "it was told")
    await jobs.release(job, delay=0)
    again = await only(jobs)
    assert (again.progress.fraction, again.progress.message, again.snoozes) == (0.5, "half", 1)
    await jobs.ack(again)
    assert await is_told(jobs, "a", 0.5, "half")
    await jobs.delete("a")
    await jobs.enqueue(1, job_id="a")
    assert await is_told(jobs, "a", None)


async def test_who_has_lost_a_job_tells_nothing_of_it(site: Site, jobs: JobQueue, clock: ManualClock) -> None:
    await jobs.enqueue(1, job_id="a")
    old = await only(jobs)
    clock.advance(TTL + 1)
    new = await only(jobs)
    if site.flavour == "core":
        with pytest.raises(StaleLeaseError, match="job 'a'"):
            await old.progress(0.9, "old")
    new.progress(0.1, "new")
    await eventually(partial(is_told, jobs, "a", 0.1, "new"), "the new one's word")
    await jobs.ack(new)
    if site.flavour == "core":
        clock.advance(1)
        with pytest.raises(StaleLeaseError):
            await new.progress(0.2, "too late")
    assert await is_told(jobs, "a", 0.1, "new")


@CHECKED_FIRST
@pytest.mark.parametrize(
    ("fraction", "message", "said"),
    [(1.5, "", "fraction must be at most 1"), (-1, "", "fraction must be"), ("1", "", "fraction"), (1, 5, "message")],
)
async def test_what_is_no_progress_is_refused(jobs: JobQueue, fraction: Any, message: Any, said: str) -> None:
    await jobs.enqueue(1)
    job = await only(jobs)
    with pytest.raises(ConfigError, match=said):
        job.progress(fraction, message)


async def test_a_job_that_nobody_here_has_claimed_takes_no_reports(jobs: JobQueue) -> None:
    await jobs.enqueue(1, job_id="a")
    job = await jobs.get("a")
    assert job is not None
    with pytest.raises(StaleLeaseError):
        job.progress(0.5)


# --- whether it works for nothing -------------------------------------------------------------------------------------


class Looking:
    """A plain handler that nobody can stop: it works until it sees that its work is for nothing."""

    def __init__(self) -> None:
        self.begun = threading.Event()
        self.saw: list[bool] = []

    def __call__(self, job: Job) -> str:
        self.saw.append(job.is_cancelled)
        self.begun.set()
        for _ in range(int(LONG * 1000)):
            if job.is_cancelled:
                self.saw.append(True)
                break
            threading.Event().wait(0.001)
        return "not kept"


@pytest.mark.parametrize("concurrency", [1, 4])
async def test_a_plain_handler_learns_that_its_job_was_cancelled(
    site: Site, jobs: JobQueue, clock: WatchedClock, concurrency: int
) -> None:
    looking = Looking()
    id = await jobs.enqueue(1)
    async with serving(site.worker(jobs, looking, concurrency=concurrency)) as worker:
        await eventually(looking.begun.is_set, "it is at work")
        assert await jobs.cancel(id) is True
        await eventually(partial(_after_a_while, clock, looking), "it has learned of it")
        await eventually(lambda: worker.inflight == 0, "its place is free")
    job = await jobs.get(id)
    assert job is not None
    assert (job.state, job.last_error, job.result, job.is_cancelled) == (JobState.FAILED, "cancelled", None, True)
    assert looking.saw == [False, True]


async def _after_a_while(clock: WatchedClock, looking: Looking) -> bool:
    clock.advance(1)  # a renewal is what tells
    return len(looking.saw) == 2


async def test_a_plain_handler_learns_that_its_worker_waits_no_longer(site: Site, jobs: JobQueue) -> None:
    looking = Looking()
    id = await jobs.enqueue(1)
    async with serving(site.worker(jobs, looking, concurrency=2, drain_timeout=0)):
        await eventually(looking.begun.is_set, "it is at work")
    await eventually(lambda: len(looking.saw) == 2, "it has learned of it")
    job = await jobs.get(id)
    assert job is not None
    assert (job.state, job.is_cancelled, job.interruptions) == (JobState.READY, False, 1)


async def test_a_plain_handler_learns_that_it_took_too_long(site: Site, jobs: JobQueue) -> None:
    looking = Looking()
    id = await jobs.enqueue(1, max_retries=0)
    async with serving(site.worker(jobs, looking, concurrency=2, execution_timeout=0.05)):
        job = await jobs.wait(id, LONG)
        await eventually(lambda: len(looking.saw) == 2, "it has learned of it")
    assert (job.state, job.is_cancelled) == (JobState.FAILED, False)


async def test_a_handler_whose_job_is_its_own_is_not_cancelled(site: Site, jobs: JobQueue) -> None:
    seen = Recorder(lambda job: job.is_cancelled)
    ids = await jobs.enqueue_many(range(5))
    async with serving(site.worker(jobs, seen)):
        assert [(await jobs.wait(id, LONG)).result for id in ids] == [False] * 5
