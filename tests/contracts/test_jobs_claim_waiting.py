"""Claims that wait for a job, and many of them at once."""

from __future__ import annotations

import asyncio

import pytest

from conquiet import Job, JobQueue, JobState
from conquiet.kit.clock import ManualClock
from tests.contracts.jobs_flavours import TTL, ids_of, only
from tests.rigs.clocks import WatchedClock
from tests.rigs.waiting import LONG

pytestmark = pytest.mark.guarantee

pytest_plugins = ("tests.contracts.jobs_fixtures",)


# --- waiting for one --------------------------------------------------------------------------------------------------


async def test_a_claim_may_wait_for_a_job(jobs: JobQueue, clock: WatchedClock) -> None:
    waiting = asyncio.ensure_future(jobs.claim(timeout=3600))
    await clock.waited_on()
    assert not waiting.done()
    id = await jobs.enqueue(1)
    assert ids_of(await asyncio.wait_for(waiting, LONG)) == [id]


async def test_a_claim_that_waits_gets_a_delayed_job_when_it_is_due(jobs: JobQueue, clock: WatchedClock) -> None:
    id = await jobs.enqueue(1, delay=100)
    waiting = asyncio.ensure_future(jobs.claim(timeout=3600))
    await clock.waited_on()
    clock.advance(101)
    assert ids_of(await asyncio.wait_for(waiting, LONG)) == [id]


async def test_a_claim_that_waits_gets_a_job_whose_lease_runs_out(jobs: JobQueue, clock: WatchedClock) -> None:
    id = await jobs.enqueue(1)
    await jobs.claim()
    waiting = asyncio.ensure_future(jobs.claim(timeout=3600))
    await clock.waited_on()
    clock.advance(TTL + 1)
    assert ids_of(await asyncio.wait_for(waiting, LONG)) == [id]


@pytest.mark.parametrize("how", ["nack", "release", "replay"])
async def test_a_claim_that_waits_gets_a_job_that_came_back(jobs: JobQueue, clock: WatchedClock, how: str) -> None:
    id = await jobs.enqueue(1)
    job = await only(jobs)
    if how == "replay":
        await jobs.cancel(id)
    waiting = asyncio.ensure_future(jobs.claim(timeout=3600))
    await clock.waited_on()
    if how == "nack":
        await jobs.nack(job, delay=0)
    elif how == "release":
        await jobs.release(job)
    else:
        await jobs.replay(id)
    assert ids_of(await asyncio.wait_for(waiting, LONG)) == [id]


@pytest.mark.parametrize("how", ["nack", "enqueue"])
async def test_a_claim_that_waits_learns_of_what_was_put_off_meanwhile(
    jobs: JobQueue, clock: WatchedClock, how: str
) -> None:
    await jobs.enqueue(1, job_id="a")
    job = await only(jobs)
    await jobs.enqueue(1, job_id="far", delay=3000)
    waiting = asyncio.ensure_future(jobs.claim(timeout=3600))
    await clock.waited_on()
    before = clock.waits
    if how == "nack":
        await jobs.nack(job, delay=10)
    else:
        await jobs.ack(job)
        await jobs.enqueue(1, job_id="b", delay=10)
    await clock.waited_again(before)
    clock.advance(11)
    assert ids_of(await asyncio.wait_for(waiting, LONG)) == ["a" if how == "nack" else "b"]


async def test_a_claim_waits_no_longer_than_it_was_told(jobs: JobQueue, clock: WatchedClock) -> None:
    waiting = asyncio.ensure_future(jobs.claim(timeout=60))
    await clock.waited_on()
    assert not waiting.done()
    clock.advance(61)
    assert await asyncio.wait_for(waiting, LONG) == []


@pytest.mark.slow
async def test_of_many_who_wait_each_job_goes_to_one(jobs: JobQueue, clock: WatchedClock) -> None:
    waiting = [asyncio.ensure_future(jobs.claim(timeout=3600)) for _ in range(4)]
    await clock.waited_on(4)
    ids = [await jobs.enqueue(n) for n in range(4)]
    claimed = await asyncio.wait_for(asyncio.gather(*waiting), LONG)
    assert sorted(job.id for [job] in claimed) == sorted(ids)


# --- many at once -----------------------------------------------------------------------------------------------------


async def test_claimers_never_get_the_same_job(jobs: JobQueue) -> None:
    """spec 5: Lease Safety: only one worker can hold a lease on a job at any time."""
    ids = await jobs.enqueue_many(range(200))

    async def take(worker: str, count: int) -> list[Job]:
        taken: list[Job] = []
        while got := await jobs.claim(count, worker=worker):
            taken += got
        return taken

    taken = await asyncio.gather(*(take(f"w{n}", n + 1) for n in range(8)))
    everything = [job for jobs_of_one in taken for job in jobs_of_one]
    assert sorted(job.id for job in everything) == sorted(ids)
    assert {job.attempts for job in everything} == {1}


@pytest.mark.slow
async def test_waiting_for_a_job_hides_it_from_nobody(jobs: JobQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who comes by while somebody begins to wait for a job's end gets the job, or is told of it at once."""
    # Notices alone must do: nobody looks for himself once in a while.
    monkeypatch.setattr("conquiet.jobs.stores.postgres.listening.PATIENCE", 3600.0)
    for turn in range(60):
        id = await jobs.enqueue(1)
        waiting = asyncio.ensure_future(jobs.wait(id, LONG))
        await asyncio.sleep(turn % 12 * 0.0004)  # waits for nothing: any moment of its beginning is meant
        claimed = await asyncio.wait_for(jobs.claim(timeout=3600), LONG)
        assert ids_of(claimed) == [id]
        await jobs.ack(*claimed)
        assert (await asyncio.wait_for(waiting, LONG)).state is JobState.SUCCEEDED


async def test_of_many_who_claim_a_lapsed_job_one_gets_it(jobs: JobQueue, clock: ManualClock) -> None:
    await jobs.enqueue(1)
    await jobs.claim()
    clock.advance(TTL + 1)
    claimed = await asyncio.gather(*(jobs.claim(worker=f"w{n}") for n in range(6)))
    assert sum(map(len, claimed)) == 1
    [job] = [job for got in claimed for job in got]
    assert job.attempts == 2
