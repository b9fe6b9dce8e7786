"""How a worker begins and ends, how it is known and what it can be."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from functools import partial
from typing import Any

import pytest

from conquiet import ConfigError, Job, JobState, JobWorker, PostgresStore, QueueError, RedisStore, RetryPolicy, sync
from conquiet.kit.clock import ManualClock
from tests.contracts.jobs_flavours import Backend, Recorder, serving
from tests.jobs.working import Gate, Watched, queue_in, working
from tests.rigs.postgres import LocalPostgres
from tests.rigs.waiting import LONG, eventually, turns

pytest_plugins = ("tests.contracts.jobs_fixtures", "tests.jobs.postgres_fixtures")


async def test_a_worker_that_was_stopped_before_it_runs_does_nothing() -> None:
    """Harmless, and it can run afterwards."""
    queue, seen = queue_in(), Recorder()
    await queue.enqueue(1)
    worker = JobWorker(queue, seen, handle_signals=False)
    worker.stop()
    await asyncio.wait_for(worker.run(), LONG)
    assert seen.jobs == []
    assert await queue.counts() == {**dict.fromkeys(JobState, 0), JobState.READY: 1}
    async with serving(worker):
        await seen.saw(1)


async def test_a_worker_may_be_stopped_again_and_again() -> None:
    """A second stop is nothing."""
    worker = JobWorker(queue_in(), Recorder(), handle_signals=False)
    async with serving(worker):
        worker.stop()
        worker.stop()
    assert not worker.health().healthy


async def test_a_worker_may_be_stopped_by_another_thread() -> None:
    worker = JobWorker(queue_in(), Recorder(), handle_signals=False)
    running = asyncio.ensure_future(worker.run())
    await eventually(lambda: worker.health().healthy, "it runs")
    await asyncio.to_thread(worker.stop)
    await asyncio.wait_for(running, LONG)


async def test_a_worker_runs_once_at_a_time() -> None:
    worker = JobWorker(queue_in(), Recorder(), handle_signals=False)
    async with serving(worker):
        await eventually(lambda: worker.health().healthy, "it runs")
        with pytest.raises(ConfigError, match=r"the worker of queue .* runs already"):
            await worker.run()
        assert worker.health().healthy


@pytest.mark.slow
def test_a_worker_may_run_on_one_loop_after_the_other() -> None:
    store = Watched()
    queue, seen = queue_in(store), Recorder()
    worker = JobWorker(queue, seen, handle_signals=False)

    async def work(payload: int) -> None:
        async with serving(worker):
            await queue.wait(await queue.enqueue(payload), LONG)
            await eventually(lambda: worker.inflight == 0, "idle")
            await turns()

    for number in range(3):
        asyncio.run(work(number))
    assert seen.payloads == [0, 1, 2]
    assert len(store.asked) < 30, "between jobs it waits, on each loop"


async def test_health_tells_how_it_is() -> None:
    queue, gate = queue_in(), Gate()
    worker = JobWorker(queue, gate, handle_signals=False)
    assert (worker.health().healthy, worker.inflight) == (False, 0)
    async with serving(worker):
        await queue.enqueue(1)
        await gate.entered(1)
        health = worker.health()
        assert (health.healthy, health.inflight, health.failures) == (True, 1, 0)
        gate.open()
    assert not worker.health().healthy


async def test_a_worker_has_a_name() -> None:
    queue, seen = queue_in(), Recorder()
    assert JobWorker(queue, seen).name
    await queue.enqueue(1)
    async with working(queue, seen, name="w-7") as worker:
        await seen.saw(1)
        assert worker.name == seen.jobs[0].worker == "w-7"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"queue": "q"}, "queue must be a JobQueue, not 'q'"),
        ({"handler": "h"}, "handler must be callable, not 'h'"),
        ({"concurrency": 0}, "concurrency must be an integer of at least 1, not 0"),
        ({"concurrency": 1.5}, "concurrency must be an integer of at least 1, not 1.5"),
        ({"execution_timeout": 0}, "execution_timeout must be a positive number of seconds, not 0"),
        ({"execution_timeout": "1"}, "execution_timeout must be a positive number of seconds, not '1'"),
        ({"drain_timeout": -1}, "drain_timeout must be a finite number of at least 0, not -1"),
        ({"name": ""}, "name must be a non-empty string, not ''"),
        ({"handle_signals": 1}, "handle_signals must be True or False, not 1"),
    ],
    ids=repr,
)
def test_what_no_worker_can_be_is_refused(options: dict[str, Any], message: str) -> None:
    """Construction fails naming the field."""
    with pytest.raises(ConfigError, match=message):
        JobWorker(**{"queue": queue_in(), "handler": Recorder(), **options})


# --- stores that nobody entered ---------------------------------------------------------------------------------


async def test_a_store_that_was_not_opened_is_opened_by_the_first_who_needs_it(backend: Backend) -> None:
    store = backend.make("core", ManualClock())
    queue, seen = queue_in(store), Recorder()
    try:
        async with asyncio.timeout(LONG), working(queue, seen):
            assert (await queue.wait(await queue.enqueue(1), LONG)).state is JobState.SUCCEEDED
            assert await queue.claim(timeout=0.01) == []
    finally:
        await store.aclose()


@pytest.mark.any_server
async def test_a_store_that_was_closed_says_so(url: str) -> None:
    async with RedisStore(url) as store:
        queue = queue_in(store)
        id = await queue.enqueue(1)
    async with asyncio.timeout(LONG):
        for call in (queue.enqueue(1), queue.claim(timeout=LONG), queue.wait(id), queue.counts()):
            with pytest.raises(QueueError, match="closed"):
                await call
        async with working(queue, Recorder()) as worker:
            await eventually(lambda: worker.health().failures > 1, "it says that it cannot")
            assert not worker.health().healthy


async def test_a_worker_whose_tables_are_missing_ends_with_what_to_do(pg: LocalPostgres, schema: str) -> None:
    async with PostgresStore(pg.dsn, schema=schema) as store:
        with pytest.raises(ConfigError, match="migrate"):
            await asyncio.wait_for(JobWorker(queue_in(store), Recorder(), handle_signals=False).run(), LONG)


# --- handlers -------------------------------------------------------------------------------------------------------


async def of_two(job: Job, more: int) -> None: ...


async def of_none() -> None: ...


async def async_steps(job: Job) -> AsyncIterator[int]:
    yield 1


def steps(job: Job, more: int = 0) -> Iterator[int]:
    yield more


class Steps:
    def __call__(self, job: Job) -> Iterator[int]:
        yield 1


ARGUMENTS = r"handler is called with \(job\), but it is .*: "
IDLE = "handler must not be a generator function, as .* is: a call of it would end well and its body would never run"


@pytest.mark.parametrize(
    ("handler", "message"),
    [
        pytest.param(of_two, f"{ARGUMENTS}missing a required argument: 'more'", id="two"),
        pytest.param(of_none, f"{ARGUMENTS}too many positional arguments", id="none"),
        pytest.param(async_steps, IDLE, id="async generator"),
    ],
)
def test_a_handler_that_cannot_handle_is_refused(handler: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        JobWorker(queue_in(), handler)


@pytest.mark.parametrize("concurrency", [1, 4])
@pytest.mark.parametrize(
    ("handler", "message"),
    [
        pytest.param(lambda job, more: None, f"{ARGUMENTS}missing a required argument: 'more'", id="two"),
        pytest.param(lambda: None, f"{ARGUMENTS}too many positional arguments", id="none"),
        pytest.param(steps, IDLE, id="generator"),
        pytest.param(partial(steps, more=1), IDLE, id="partial"),
        pytest.param(Steps(), IDLE, id="object"),
        pytest.param(async_steps, IDLE, id="async generator"),
    ],
)
def test_a_plain_handler_that_cannot_handle_is_refused(handler: Any, message: str, concurrency: int) -> None:
    with pytest.raises(ConfigError, match=message):
        JobWorker(queue_in(), handler, concurrency=concurrency)
    queue = sync.JobQueue(sync.MemoryStore(), "q")
    with pytest.raises(ConfigError, match=message):
        sync.JobWorker(queue, handler, concurrency=concurrency)


@pytest.mark.parametrize("handler", [print, partial(of_two, more=1), lambda *jobs: None], ids=["C", "partial", "any"])
def test_whatever_takes_a_job_is_a_handler(handler: Any) -> None:
    JobWorker(queue_in(), handler)


async def test_a_handler_that_gives_a_generator_has_not_done_its_work() -> None:
    """What it returns looks like a result, but nothing of it has run."""
    queue = queue_in(retry=RetryPolicy(max_retries=0))
    id = await queue.enqueue(1)
    async with working(queue, lambda job: steps(job)):
        job = await queue.wait(id, LONG)
    assert job.state is JobState.FAILED
    assert "gave a generator" in (job.last_error or "")
