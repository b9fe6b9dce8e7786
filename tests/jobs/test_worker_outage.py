"""A worker whose store goes away, or whose answers are lost: nothing is lost, nothing counted that was not done."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from conquiet import JobQueue, JobSpec, JobState, JobStore, JobWorker, QueueError, RedisStore
from tests.contracts.jobs_flavours import Recorder
from tests.jobs.working import Gate, counted, outlived, queue_in, ran, settled, working
from tests.rigs.proxy import Proxy
from tests.rigs.waiting import LONG, eventually

pytestmark = [pytest.mark.any_server, pytest.mark.slow]

COUNTERS = ("enqueued", "claimed", "succeeded", "retried", "failed", "expired", "released")


@pytest.fixture
async def proxy(url: str) -> AsyncIterator[Proxy]:
    async with Proxy(url) as proxy:
        yield proxy


@pytest.fixture
async def store(proxy: Proxy) -> AsyncIterator[JobStore]:
    """A store that is reached through the proxy."""
    async with RedisStore(proxy.url) as store:
        yield store


@pytest.fixture
async def outside(url: str) -> AsyncIterator[JobStore]:
    """The same store, by a way that nothing happens to."""
    async with RedisStore(url) as store:
        yield store


def seen_from(outside: JobStore, queue: JobQueue) -> JobQueue:
    return queue_in(outside, name=queue.name, lease_ttl=queue.lease_ttl)


async def test_a_worker_goes_on_when_the_store_is_back(proxy: Proxy, store: JobStore, outside: JobStore) -> None:
    """spec 5: Store Unavailability: fetchers retry with backoff; committed work is preserved."""
    queue, seen = queue_in(store), Recorder()
    eye = seen_from(outside, queue)
    async with working(queue, seen) as worker:
        await eye.wait(await eye.enqueue("before"), LONG)
        proxy.shut()
        await eventually(lambda: worker.health().failures > 1, "the worker tries again and again")
        assert not worker.health().healthy
        id = await eye.enqueue("meanwhile")
        proxy.reopen()
        job = await eye.wait(id, LONG)
        assert (job.state, job.attempts) == (JobState.SUCCEEDED, 1)
        await eventually(lambda: worker.health().healthy, "it is well again")
    assert seen.payloads == ["before", "meanwhile"]


async def test_an_outcome_waits_until_the_store_is_back(proxy: Proxy, store: JobStore, outside: JobStore) -> None:
    queue, gate = queue_in(store, lease_ttl=60), Gate()
    eye = seen_from(outside, queue)
    ids = await eye.enqueue_many(range(5))
    async with working(queue, gate):
        await gate.entered(5)
        proxy.shut()
        gate.open()
        await eventually(lambda: len(gate.done) == 5, "the handlers have ended")
        assert (await eye.counts())[JobState.IN_FLIGHT] == 5
        proxy.reopen()
        await settled(eye, succeeded=5)
    assert [(await eye.wait(id)).attempts for id in ids] == [1] * 5
    assert len(gate.began) == 5
    assert ran(queue) == {"succeeded": 5}


async def test_an_outcome_whose_answer_is_lost_is_not_taken_for_stale(
    proxy: Proxy, store: JobStore, outside: JobStore
) -> None:
    """The store has it; only the worker does not know. It asks, and neither writes twice nor counts a loss."""
    queue, gate = queue_in(store, lease_ttl=60), Gate()
    eye = seen_from(outside, queue)
    ids = await eye.enqueue_many(range(3))
    async with working(queue, gate, concurrency=3) as worker:
        await gate.entered(3)
        lost = proxy.cut(ids[0].encode())
        gate.open()
        await asyncio.wait_for(lost.wait(), LONG)
        await settled(eye, succeeded=3)
        id = await eye.enqueue("next")
        assert (await eye.wait(id, LONG)).state is JobState.SUCCEEDED
        await eventually(lambda: worker.health().healthy, "it is well")
    assert [(await eye.wait(id)).attempts for id in ids] == [1, 1, 1]
    assert counted(queue, "stale_total", operation="ack") == 0
    assert counted(queue, "stale_total", operation="renew") == 0
    assert len(gate.began) == 4
    assert ran(queue) == {"succeeded": 4}


async def test_an_outcome_that_another_worker_has_overtaken_is_no_success(
    proxy: Proxy, store: JobStore, outside: JobStore
) -> None:
    """The store was away for longer than the lease, and somebody else has the job by now."""
    queue, gate = queue_in(store, lease_ttl=0.3), Gate()
    eye = seen_from(outside, queue)
    id = await eye.enqueue(1)
    async with working(queue, gate):
        await gate.entered(1)
        proxy.shut()
        gate.open()
        await eventually(lambda: len(gate.done) == 1, "the handler has ended")
        rival = queue_in(outside, name=queue.name, lease_ttl=60)
        [job] = await rival.claim(worker="rival", timeout=LONG)
        assert (job.id, job.attempts) == (id, 2)
        proxy.reopen()
        await eventually(lambda: counted(queue, "stale_total", operation="ack") == 1, "the ack was refused")
        before = await eye.get(id)
        assert before == job
        await rival.ack(job, result="the rival's")
    job = await eye.wait(id)
    assert (job.result, job.worker) == ("the rival's", "rival")
    assert ran(queue) == {"lost": 1}
    assert counted(queue, "succeeded_total") == 1, "the rival's"


async def test_an_outcome_of_a_job_that_has_failed_meanwhile_is_no_success(
    proxy: Proxy, store: JobStore, outside: JobStore
) -> None:
    """Its last lease ran out while the store could not be reached: what the worker did was for nothing."""
    queue, gate = queue_in(store, lease_ttl=0.3), Gate()
    eye = seen_from(outside, queue)
    id = await eye.enqueue(1, max_retries=0)
    async with working(queue, gate):
        await gate.entered(1)
        proxy.shut()
        gate.open()
        await eventually(lambda: len(gate.done) == 1, "the handler has ended")

        async def has_failed() -> bool:
            assert await eye.claim(worker="rival") == []
            return (await eye.counts())[JobState.FAILED] == 1

        await eventually(has_failed, "the lease has run out")
        proxy.reopen()
        await eventually(lambda: bool(ran(queue)), "the worker knows")
    job = await eye.wait(id)
    assert (job.state, job.last_error, job.result) == (JobState.FAILED, "lease expired", None)
    assert ran(queue) == {"lost": 1}


async def test_a_claim_whose_answer_is_lost_costs_an_attempt_and_no_job(
    proxy: Proxy, store: JobStore, outside: JobStore
) -> None:
    """The jobs were leased to somebody who never heard of it: they come back when the leases have run out."""
    queue, seen = queue_in(store, lease_ttl=0.3), Recorder()
    eye = seen_from(outside, queue)
    async with working(queue, seen, name="w-deaf"):
        await eventually(lambda: proxy.count(b"w-deaf") > 0, "it looks for jobs")
        lost = proxy.cut(b"w-deaf")
        ids = await eye.enqueue_many(range(3))
        await asyncio.wait_for(lost.wait(), LONG)
        await settled(eye, succeeded=3)
    assert sorted(seen.payloads) == [0, 1, 2]
    assert {(await eye.wait(id)).state for id in ids} == {JobState.SUCCEEDED}


async def test_heartbeats_come_back_after_a_short_outage(proxy: Proxy, store: JobStore, outside: JobStore) -> None:
    queue, gate = queue_in(store, lease_ttl=1.0), Gate()
    eye = seen_from(outside, queue)
    id = await eye.enqueue(1)
    async with working(queue, gate):
        await gate.entered(1)
        await proxy.disconnect()
        await outlived(eye, id)
        gate.open()
        job = await eye.wait(id, LONG)
    assert (job.attempts, job.failures) == (1, ())


async def test_a_worker_can_be_stopped_while_the_store_is_away(
    proxy: Proxy, store: JobStore, outside: JobStore
) -> None:
    """What it could not write is not lost: the leases run out, and somebody does the work again."""
    queue, gate = queue_in(store, lease_ttl=0.5), Gate()
    eye = seen_from(outside, queue)
    id = await eye.enqueue(1)
    worker = JobWorker(queue, gate, handle_signals=False, drain_timeout=0.2)
    running = asyncio.ensure_future(worker.run())
    await gate.entered(1)
    proxy.shut()
    gate.open()
    worker.stop()
    await asyncio.wait_for(running, LONG)
    proxy.reopen()
    [job] = await eye.claim(timeout=LONG)
    assert (job.id, job.attempts, job.last_error) == (id, 2, "lease expired")


async def test_a_queue_whose_store_is_away_says_so(proxy: Proxy, store: JobStore) -> None:
    queue = queue_in(store)
    await queue.enqueue(1, job_id="a")
    [job] = await queue.claim()
    proxy.shut()
    calls = (
        queue.enqueue(1),
        queue.enqueue_many([1, 2]),
        queue.claim(),
        queue.heartbeat(job),
        queue.ack(job),
        queue.nack(job),
        queue.release(job),
        queue.get("a"),
        queue.counts(),
        queue.list_jobs(JobState.READY),
        queue.wait("a", timeout=LONG),
        queue.replay("a"),
        queue.cancel("a"),
        queue.delete("a"),
        queue.purge(),
    )
    for call in calls:
        with pytest.raises(QueueError) as caught:
            await call
        assert caught.value.__cause__ is not None
    proxy.reopen()
    await queue.ack(job)
    assert [counted(queue, f"{name}_total") for name in COUNTERS] == [1, 1, 1, 0, 0, 0, 0]


async def test_a_long_list_of_which_an_answer_is_lost_tells_what_is_known(
    proxy: Proxy, store: JobStore, outside: JobStore
) -> None:
    queue = queue_in(store)
    specs = [JobSpec(n, f"{queue.name}-{n}") for n in range(2500)]
    lost = proxy.cut(f"{queue.name}-1999".encode())
    with pytest.raises(QueueError) as caught:
        await queue.enqueue_many(specs)
    assert lost.is_set()
    ids = [spec.job_id for spec in specs]
    assert caught.value.entry_ids == (*ids[:1000], *[None] * 1500)
    assert (await queue_in(outside, name=queue.name).counts())[JobState.READY] == 2000
