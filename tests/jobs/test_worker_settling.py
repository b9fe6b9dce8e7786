"""Outcomes that cannot be written: nothing more is run for nothing, none holds up the others, and health tells."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Final

import pytest

from conquiet import (
    ConfigError,
    ConquietError,
    EmbeddedRedis,
    Job,
    JobState,
    JobWorker,
    MemoryStore,
    QueueError,
    RedisStore,
    RetryPolicy,
)
from conquiet.jobs.job import Settlement
from conquiet.kit.clock import ManualClock
from conquiet.wire.scripts import Script
from tests.contracts.jobs_flavours import Backend, Recorder
from tests.jobs.working import Gate, Holding, counted, queue_in, ran, settled, working
from tests.rigs.asking import ask
from tests.rigs.proxy import Proxy
from tests.rigs.waiting import LONG, eventually

pytest_plugins = ("tests.contracts.jobs_fixtures",)

PLACES: Final = 5
FULL: Final = b"-OOM command not allowed when used memory > 'maxmemory'.\r\n"


class Fussy(MemoryStore):
    """A store that asks ``check`` before each settle, and notes what it was given."""

    def __init__(self, check: Callable[[Sequence[Settlement]], None], **options: Any) -> None:
        super().__init__(**options)
        self.check = check
        self.batches: list[Sequence[Settlement]] = []

    async def settle(self, queue: str, settlements: Sequence[Settlement]) -> list[bool]:
        self.batches.append(settlements)
        self.check(settlements)
        return await super().settle(queue, settlements)


def refusing(job_id: str, error: BaseException) -> Callable[[Sequence[Settlement]], None]:
    def check(settlements: Sequence[Settlement]) -> None:
        if any(one.job_id == job_id for one in settlements):
            raise error

    return check


# --- places ---------------------------------------------------------------------------------------------------------


@pytest.mark.guarantee
@pytest.mark.any_server
async def test_while_no_outcome_can_be_written_no_more_jobs_are_run(url: str) -> None:
    """Those at work, and up to three times as many whose outcomes were on their way when it began."""
    async with Proxy(url) as proxy, RedisStore(proxy.url) as store, RedisStore(url) as outside:
        queue, seen = queue_in(store), Recorder()
        eye = queue_in(outside, name=queue.name)
        ids = await eye.enqueue_many(range(100))
        refusal = proxy.refuse(Script.named("jobs_settle").sha.encode(), FULL, times=1_000_000)
        async with working(queue, seen, concurrency=PLACES) as worker:
            await eventually(lambda: worker.health().failures >= 5, "it tries again and again")
            assert not worker.health().healthy
            assert PLACES <= len(seen.jobs) <= 4 * PLACES
            refusal.times = 0
            await settled(eye, succeeded=100)
            await eventually(lambda: worker.health().healthy, "it is well again")
        assert [(await eye.wait(id)).attempts for id in ids] == [1] * 100
    assert len(seen.jobs) == 100


async def test_a_worker_at_a_full_redis_runs_no_more_than_it_can_tell_of() -> None:
    async with EmbeddedRedis() as server, RedisStore(server.url) as store, RedisStore(server.url) as outside:
        queue, gate = queue_in(store), Gate()
        eye = queue_in(outside, name=queue.name)
        await eye.enqueue_many(range(100))
        async with working(queue, gate, concurrency=PLACES) as worker:
            await gate.entered(PLACES)
            await ask(server.url, "CONFIG", "SET", "maxmemory", "1")
            gate.open()
            await eventually(lambda: worker.health().failures >= 3, "it is refused again and again")
            assert len(gate.began) <= 4 * PLACES
            await ask(server.url, "CONFIG", "SET", "maxmemory", "0")
            await settled(eye, succeeded=100)
    assert len(gate.began) == 100


# --- what goes together ---------------------------------------------------------------------------------------------


async def test_outcomes_go_together_by_their_bytes_too() -> None:
    store = Fussy(lambda settlements: None)
    queue = queue_in(store)
    ready = asyncio.Event()

    async def handler(job: Job) -> str:
        await ready.wait()
        return "x" * 300_000

    await queue.enqueue_many(range(20))
    async with working(queue, handler, concurrency=20) as worker:
        await eventually(lambda: worker.inflight == 20, "all are at work")
        ready.set()
        await settled(queue, succeeded=20)
    assert max(sum(len(one.result or b"") for one in batch) for batch in store.batches) <= 1 << 20
    assert len(store.batches) < 20, "but as many as fit"


async def test_acks_and_enqueues_by_hand_go_together_by_their_bytes_too() -> None:
    class Noting(Fussy):
        async def add(self, queue: str, jobs: Any, connection: Any = None) -> None:
            added.append(len(jobs))
            await super().add(queue, jobs, connection)

    added: list[int] = []
    store = Noting(lambda settlements: None)
    queue = queue_in(store)
    large = "x" * (1 << 20)
    ids = await queue.enqueue_many([large] * 8 + [1] * 3)
    assert added == [3, 3, 5]
    jobs: list[Job] = []
    while len(jobs) < 11:  # a claim is bounded by bytes as well
        jobs += await queue.claim(11)
    assert [job.id for job in jobs] == ids
    await queue.ack(*jobs, result=large)
    assert [len(batch) for batch in store.batches] == [3, 3, 3, 2]
    await settled(queue, succeeded=11)


# --- one that the store cannot keep ---------------------------------------------------------------------------------


@pytest.mark.guarantee
@pytest.mark.parametrize("error", [QueueError("no"), TypeError("no"), ConfigError("no")], ids=repr)
async def test_an_outcome_that_the_store_cannot_keep_holds_up_no_others(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    """Its job's lease runs out, as if its worker had died."""
    clock = ManualClock()
    store = Fussy(refusing("bad", error), clock=clock)
    queue, gate = queue_in(store, retry=RetryPolicy(max_retries=0)), Gate()
    for number in range(50):
        await queue.enqueue(number, job_id="bad" if number == 20 else f"job-{number}")
    async with working(queue, gate, concurrency=50) as worker:
        await gate.entered(50)
        gate.open()
        await settled(queue, succeeded=49, in_flight=1)
        await queue.enqueue("later")
        await settled(queue, succeeded=50, in_flight=1)
        await eventually(lambda: "job 'bad': its outcome cannot be kept" in caplog.text, "it was given up")
        await eventually(lambda: worker.health().healthy, "it is well")
        store.check = lambda settlements: None
        clock.advance(31)
        await settled(queue, succeeded=50, failed=1)
    job = await queue.get("bad")
    assert job is not None
    assert (job.state, job.last_error) == (JobState.FAILED, "lease expired")


async def test_an_outcome_that_is_refused_frees_its_place_also_if_that_is_the_only_one(
    caplog: pytest.LogCaptureFixture,
) -> None:
    store = Fussy(refusing("bad", QueueError("no")))
    queue, seen = queue_in(store, retry=RetryPolicy(max_retries=0)), Recorder()
    await queue.enqueue(1, job_id="bad")
    next_one = await queue.enqueue(2)
    async with working(queue, seen, concurrency=1):
        assert (await queue.wait(next_one, LONG)).state is JobState.SUCCEEDED
    assert len(store.batches) > 3, "it was tried again"
    assert "job 'bad': its outcome cannot be kept" in caplog.text


@pytest.mark.guarantee
@pytest.mark.parametrize("answers", [False, True])
async def test_outcomes_wait_for_a_store_that_takes_none_however_long(answers: bool) -> None:
    """It is away, or it answers questions only: that is no fault of an outcome's."""

    class Away(Fussy):
        async def find(self, queue: str, ids: Sequence[str]) -> list[Job | None]:
            if not answers:
                self.check([])
            return await super().find(queue, ids)

    def away(settlements: Sequence[Settlement]) -> None:
        raise QueueError("away")

    clock = ManualClock()
    store = Away(away, clock=clock)
    queue, seen = queue_in(store, lease_ttl=3600.0), Recorder()
    await queue.enqueue_many(range(2))
    async with working(queue, seen, concurrency=2) as worker:
        for failures in range(1, 15):
            await eventually(lambda: worker.health().failures >= failures, "it tries")  # noqa: B023
            clock.advance(100)
        store.check = lambda settlements: None
        clock.advance(10)
        await settled(queue, succeeded=2)
    assert len(seen.jobs) == 2


async def test_a_store_that_takes_outcomes_takes_that_of_no_job(backend: Backend) -> None:
    """By which a worker tells whose fault a refusal is; nothing is changed by it."""
    async with backend.make("core", ManualClock()) as store:
        queue = queue_in(store)
        await queue.enqueue(1)
        assert await store.settle(queue.name, [Settlement("", 0, "release")]) == [False]
        await settled(queue, ready=1)


# --- mistakes -------------------------------------------------------------------------------------------------------


async def test_a_mistake_in_the_store_ends_nothing_and_is_told() -> None:
    def fail(settlements: Sequence[Settlement]) -> None:
        raise TypeError("a mistake")

    store = Fussy(fail)
    queue, seen = queue_in(store), Recorder()
    await queue.enqueue_many(range(10))
    async with working(queue, seen, concurrency=10) as worker:
        await eventually(lambda: worker.health().failures > 0, "it is told")
        assert not worker.health().healthy
        store.check = lambda settlements: None
        await settled(queue, succeeded=10)
        await eventually(lambda: worker.health().healthy, "it is well")


async def test_a_worker_that_can_write_nothing_more_ends_with_an_error() -> None:
    store = Fussy(refusing("bad", asyncio.CancelledError()))
    queue = queue_in(store)
    await queue.enqueue(1, job_id="bad")
    with pytest.raises(ConquietError, match=r"settling of the worker of queue .* has ended by itself"):
        await asyncio.wait_for(JobWorker(queue, Recorder(), handle_signals=False, drain_timeout=0).run(), LONG)


async def test_an_outcome_that_was_on_its_way_when_all_tasks_were_cancelled_is_not_lost() -> None:
    """The store had it, and only the answer was torn off: what is written again is looked at first."""

    class Halting(MemoryStore):
        async def settle(self, queue: str, settlements: Sequence[Settlement]) -> list[bool]:
            done = await super().settle(queue, settlements)
            if not written.is_set():
                written.set()
                await asyncio.Event().wait()
            return done

    written = asyncio.Event()
    queue, seen = queue_in(Halting()), Recorder()
    await queue.enqueue(1)
    others = asyncio.all_tasks()
    running = asyncio.create_task(JobWorker(queue, seen, handle_signals=False).run())
    await asyncio.wait_for(written.wait(), LONG)
    for task in asyncio.all_tasks() - others:
        task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(running, LONG)
    await settled(queue, succeeded=1)
    assert ran(queue) == {"succeeded": 1}
    assert counted(queue, "stale_total", operation="ack") == 0


# --- places that are taken for good ---------------------------------------------------------------------------------


async def test_a_worker_whose_places_are_all_taken_by_what_does_not_end_is_not_well() -> None:
    queue, holding = queue_in(retry=RetryPolicy(max_retries=0)), Holding()
    ids = await queue.enqueue_many([1, 2])
    async with working(queue, holding, concurrency=2, execution_timeout=0.05) as worker:
        for id in ids:
            assert (await queue.wait(id, LONG)).state is JobState.FAILED
        health = worker.health()
        assert (health.healthy, health.inflight, health.stuck) == (False, 2, 2)
        holding.open()
        await eventually(lambda: worker.health().healthy, "the places are free")
        assert worker.health().stuck == 0
