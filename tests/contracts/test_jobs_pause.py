"""A queue that is paused for the whole fleet: nothing of it is claimed, and nothing else stands still."""

from __future__ import annotations

import asyncio

from conquiet import JobQueue, JobState
from conquiet.kit.clock import ManualClock
from tests.contracts.jobs_flavours import TTL, Backend, Flavour, Recorder, Site, every, only, opened, serving, tally
from tests.rigs.clocks import WatchedClock
from tests.rigs.waiting import LONG

pytest_plugins = ("tests.contracts.jobs_fixtures",)


async def test_nothing_of_a_paused_queue_is_claimed(site: Site, jobs: JobQueue) -> None:
    other = site.queue()
    await jobs.enqueue(1, priority=5)
    await other.enqueue(2)
    assert await jobs.is_paused() is False
    await jobs.pause()
    await jobs.pause()
    assert (await jobs.is_paused(), await other.is_paused()) == (True, False)
    assert await jobs.claim(10) == []
    await jobs.enqueue_many(range(3))
    assert await jobs.claim(10) == []
    assert (await only(other)).payload == 2
    assert (await jobs.counts()).due == 4
    await jobs.resume()
    await jobs.resume()
    assert await jobs.is_paused() is False
    assert len(await every(jobs)) == 4


async def test_every_user_of_the_queue_is_paused(
    site: Site, backend: Backend, job_flavour: Flavour, clock: ManualClock
) -> None:
    jobs = site.queue()
    await jobs.enqueue(1)
    await jobs.pause()
    assert await site.queue(jobs.name).claim() == [], "another object"
    if backend.name != "memory":
        async with opened(backend, job_flavour, clock) as elsewhere:
            theirs = elsewhere.queue(jobs.name)
            assert await theirs.is_paused() is True
            assert await theirs.claim() == []
            await theirs.resume()
            assert (await only(jobs)).payload == 1


async def test_what_is_in_flight_goes_on(jobs: JobQueue, clock: ManualClock) -> None:
    await jobs.enqueue_many(range(4))
    first, second, third, fourth = await jobs.claim(4)
    await jobs.pause()
    await jobs.heartbeat(first, second, third)
    await jobs.ack(first, result="done")
    await jobs.nack(second, delay=0)
    await jobs.release(third)
    clock.advance(TTL + 1)
    assert await jobs.claim(10) == []
    found = await jobs.get(fourth.id)
    assert found is not None
    assert (found.state, found.last_error) == (JobState.READY, "lease expired")
    assert await tally(jobs) == (3, 0, 1, 0)


async def test_who_waits_is_told_when_it_goes_on(jobs: JobQueue, clock: WatchedClock) -> None:
    await jobs.pause()
    await jobs.enqueue(1)
    waiting = asyncio.ensure_future(jobs.claim(1, timeout=3600))
    await clock.waited_on()
    assert not waiting.done()
    await jobs.resume()
    assert len(await asyncio.wait_for(waiting, LONG)) == 1


async def test_a_worker_stands_still_and_goes_on(site: Site, jobs: JobQueue, clock: WatchedClock) -> None:
    seen = Recorder()
    await jobs.pause()
    ids = await jobs.enqueue_many(range(5))
    async with serving(site.worker(jobs, seen)):
        await clock.waited_on()
        assert seen.jobs == []
        await jobs.resume()
        for id in ids:
            await jobs.wait(id, LONG)
    assert sorted(seen.payloads) == list(range(5))


async def test_a_job_that_falls_due_meanwhile_waits_too(jobs: JobQueue, clock: ManualClock) -> None:
    await jobs.enqueue(1, delay=10)
    await jobs.pause()
    clock.advance(60)
    assert await jobs.claim() == []
    assert await jobs.claim() == []
    await jobs.resume()
    assert (await only(jobs)).attempts == 1
