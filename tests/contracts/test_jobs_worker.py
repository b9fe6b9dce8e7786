"""Workers with plain handlers, as a user sees them: on every store, in both flavours."""

from __future__ import annotations

import asyncio
import threading
from functools import partial
from typing import Any

import pytest

from conquiet import ConfigError, Job, JobQueue, JobState, Reject, Retry
from conquiet.kit.clock import ManualClock
from tests.contracts.jobs_flavours import CHECKED_FIRST, DELAY, Recorder, Site, serving, tally
from tests.jobs.working import AT_ONCE
from tests.rigs.clocks import WatchedClock
from tests.rigs.waiting import LONG, eventually

pytest_plugins = ("tests.contracts.jobs_fixtures",)

CONCURRENCY = pytest.mark.parametrize("concurrency", [1, 4])


async def finished(jobs: JobQueue, *ids: str) -> list[Job]:
    return [await jobs.wait(id, LONG) for id in ids]


@CONCURRENCY
async def test_jobs_are_handled_and_results_kept(site: Site, jobs: JobQueue, concurrency: int) -> None:
    """spec 5: At-Least-Once: every enqueued job will be processed."""
    seen = Recorder(lambda job: job.payload * 2)
    ids = await jobs.enqueue_many(range(20))
    async with serving(site.worker(jobs, seen, concurrency=concurrency, name="w-1")):
        ids += await jobs.enqueue_many(range(20, 30))
        done = await finished(jobs, *ids)
    assert [job.result for job in done] == [n * 2 for n in range(30)]
    assert {(job.state, job.attempts, job.worker) for job in done} == {(JobState.SUCCEEDED, 1, "w-1")}
    assert sorted(seen.payloads) == list(range(30))


async def test_a_single_place_keeps_the_order(site: Site, jobs: JobQueue) -> None:
    """spec 5: Ordering: jobs within a single queue are processed in FIFO order by default."""
    seen = Recorder()
    await jobs.enqueue_many(range(30))
    async with serving(site.worker(jobs, seen, concurrency=1)):
        # Not by waiting for each: a wait that begins at the moment of a claim may hold that one job back for a moment.
        await eventually(lambda: len(seen.payloads) == 30, "all to be handled")
    assert seen.payloads == list(range(30))


@CONCURRENCY
async def test_what_fails_is_tried_again_after_its_delay(
    site: Site, jobs: JobQueue, clock: WatchedClock, concurrency: int
) -> None:
    def act(job: Job) -> str:
        if job.attempts < 3:
            raise RuntimeError(f"attempt {job.attempts}")
        return "at last"

    seen = Recorder(act)
    id = await jobs.enqueue(1)
    async with serving(site.worker(jobs, seen, concurrency=concurrency)):
        for tries in (1, 2):
            await eventually(partial(_failures, jobs, id, tries), f"{tries} failures")
            await seen.saw(tries)
            await clock.waited_on()
            clock.advance(DELAY + 1)
        [job] = await finished(jobs, id)
    assert (job.result, job.attempts) == ("at last", 3)
    assert [one.error for one in job.failures] == ["RuntimeError: attempt 1", "RuntimeError: attempt 2"]
    assert "in act" in (job.last_error or "")


async def _failures(jobs: JobQueue, id: str, count: int) -> bool:
    job = await jobs.get(id)
    return job is not None and len(job.failures) == count and job.state is JobState.READY


@CONCURRENCY
@pytest.mark.parametrize(("error", "tries"), [(Reject("no"), 1), (ValueError("no"), 4), (Retry("no", delay=0), 4)])
async def test_a_job_is_given_up(site: Site, concurrency: int, error: Exception, tries: int) -> None:
    """spec 5: Retry Bound: jobs are retried at most MaxRetries times before being permanently failed."""

    def act(job: Job) -> None:
        raise error

    jobs, seen = site.queue(retry=AT_ONCE), Recorder(act)
    id = await jobs.enqueue(1)
    async with serving(site.worker(jobs, seen, concurrency=concurrency)):
        [job] = await finished(jobs, id)
    assert (job.state, job.attempts, len(seen.jobs)) == (JobState.FAILED, tries, tries)


async def test_a_lost_job_is_taken_over(site: Site, jobs: JobQueue, clock: ManualClock) -> None:
    """spec 5: Worker Crash: leased jobs become reclaimable after lease expiry; no in-flight work is lost."""
    id = await jobs.enqueue(1)
    [lost] = await jobs.claim(worker="crashed")
    async with serving(site.worker(jobs, Recorder(lambda job: "done"), name="heir")):
        clock.advance(31)
        [job] = await finished(jobs, id)
    assert (job.result, job.worker, job.attempts) == ("done", "heir", 2)
    assert [one.worker for one in job.failures] == ["crashed"]
    assert lost.lease_token < job.lease_token


@CONCURRENCY
async def test_stop_lets_handlers_finish(site: Site, jobs: JobQueue, concurrency: int) -> None:
    began, go = threading.Event(), threading.Event()

    def act(job: Job) -> str:
        began.set()
        assert go.wait(LONG)
        return "done"

    id = await jobs.enqueue(1)
    worker = site.worker(jobs, act, concurrency=concurrency)
    running = asyncio.ensure_future(worker.run())
    await eventually(began.is_set, "it began")
    await jobs.enqueue(2)
    worker.stop()
    go.set()
    await asyncio.wait_for(running, LONG)
    job = await jobs.get(id)
    assert job is not None
    assert job.result == "done"
    counts = await tally(jobs)
    assert (counts[1], counts[3]) == (0, 0)


async def test_a_worker_that_was_stopped_before_it_runs_does_nothing(site: Site, jobs: JobQueue) -> None:
    seen = Recorder()
    await jobs.enqueue(1)
    worker = site.worker(jobs, seen)
    worker.stop()
    await asyncio.wait_for(worker.run(), LONG)
    assert seen.jobs == []
    assert await tally(jobs) == (1, 0, 0, 0)


@CONCURRENCY
async def test_a_handler_may_use_the_queue(site: Site, jobs: JobQueue, concurrency: int) -> None:
    loop = asyncio.get_running_loop()

    def add(payload: int) -> None:
        if site.flavour == "sync":
            jobs.facade.enqueue(payload)  # type: ignore[attr-defined]
        else:
            asyncio.run_coroutine_threadsafe(jobs.enqueue(payload), loop).result(LONG)

    def act(job: Job) -> None:
        if job.payload > 0:
            add(job.payload - 1)

    seen = Recorder(act)
    await jobs.enqueue(3)
    async with serving(site.worker(jobs, seen, concurrency=concurrency)):
        await seen.saw(4)
        await eventually(lambda: _done(jobs, 4), "all done")
    assert seen.payloads == [3, 2, 1, 0]


async def _done(jobs: JobQueue, count: int) -> bool:
    return await tally(jobs) == (0, 0, count, 0)


async def test_an_execution_timeout_fails_the_try(site: Site, jobs: JobQueue) -> None:
    """spec 5: Execution Timeout: hard limit on handler runtime."""
    go = threading.Event()
    id = await jobs.enqueue(1, max_retries=0)
    async with serving(site.worker(jobs, lambda job: go.wait(LONG), concurrency=2, execution_timeout=0.1)):
        [job] = await finished(jobs, id)
        go.set()
    assert job.state is JobState.FAILED
    assert "took longer than 0.1 seconds" in (job.last_error or "")


@CHECKED_FIRST
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"concurrency": 0}, "concurrency must be an integer of at least 1, not 0"),
        ({"execution_timeout": -1}, "execution_timeout must be a positive number of seconds, not -1"),
        ({"drain_timeout": float("nan")}, "drain_timeout must be a finite number of at least 0, not nan"),
        ({"handler": 7}, "handler must be .*, not 7"),
    ],
    ids=repr,
)
def test_what_no_worker_can_be_is_refused(site: Site, jobs: JobQueue, options: dict[str, Any], message: str) -> None:
    handler = options.get("handler", Recorder())
    rest = {name: value for name, value in options.items() if name != "handler"}
    with pytest.raises(ConfigError, match=message):
        site.worker(jobs, handler, **rest)
