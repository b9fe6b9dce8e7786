"""The end of a worker: what was not begun goes back, what runs may finish, and nothing is lost."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import anyio
import pytest

from conquiet import Job, JobQueue, JobSpec, JobState, JobWorker
from conquiet.kit import runners
from conquiet.kit.clock import ManualClock
from conquiet.kit.loopthread import Threads
from tests.contracts.jobs_flavours import Backend, serving
from tests.jobs.working import Deaf, Gate, Holding, Late, Silent, counted, outlived, queue_in, ran, settled
from tests.rigs.waiting import LONG, eventually, turns

pytest_plugins = ("tests.contracts.jobs_fixtures",)


def worker_of(queue: JobQueue, handler: Any, **options: Any) -> JobWorker:
    return JobWorker(queue, handler, **{"handle_signals": False, **options})


@asynccontextmanager
async def run(worker: JobWorker) -> AsyncIterator[asyncio.Future[None]]:
    """A worker that the block has to end."""
    task = asyncio.ensure_future(worker.run())
    try:
        yield task
    finally:
        if not task.done():
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task


async def look(queue: JobQueue, id: str) -> Job:
    job = await queue.get(id)
    assert job is not None
    return job


async def test_what_runs_may_finish() -> None:
    queue, gate = queue_in(), Gate()
    ids = await queue.enqueue_many([1, 2])
    worker = worker_of(queue, gate)
    async with run(worker) as task:
        await gate.entered(2)
        worker.stop()
        await turns()
        assert not task.done()
        await queue.enqueue(3)
        gate.open()
        await asyncio.wait_for(task, LONG)
    assert [(await look(queue, id)).result for id in ids] == ["done", "done"]
    assert await queue.counts() == {
        JobState.READY: 1,
        JobState.IN_FLIGHT: 0,
        JobState.SUCCEEDED: 2,
        JobState.FAILED: 0,
    }
    assert len(gate.began) == 2, "nothing is begun after the stop"


@pytest.mark.slow
async def test_leases_are_kept_while_handlers_finish() -> None:
    queue, gate = queue_in(lease_ttl=0.3), Gate()
    id = await queue.enqueue(1)
    worker = worker_of(queue, gate)
    async with run(worker) as task:
        await gate.entered(1)
        worker.stop()
        await outlived(queue, id)
        gate.open()
        await asyncio.wait_for(task, LONG)
    assert ((await look(queue, id)).state, (await look(queue, id)).attempts) == (JobState.SUCCEEDED, 1)


async def test_what_was_not_begun_goes_back_at_no_cost() -> None:
    """A handler that blocks has stopped the worker while more jobs were on their way to it."""
    queue = queue_in()
    began: list[str] = []

    async def handler(job: Job) -> None:
        began.append(job.id)
        worker.stop()

    ids = await queue.enqueue_many(range(4))
    worker = worker_of(queue, handler, concurrency=4)
    await asyncio.wait_for(worker.run(), LONG)
    left = [await look(queue, id) for id in ids if id not in began]
    assert {(job.state, job.attempts, job.failures) for job in left} <= {(JobState.READY, 0, ())}
    assert counted(queue, "released_total") == len(left)
    assert [(await look(queue, id)).state for id in began] == [JobState.SUCCEEDED] * len(began)


async def test_jobs_that_arrive_after_the_stop_go_back_at_no_cost() -> None:
    store = Late()
    queue, gate = queue_in(store), Gate()
    ids = await queue.enqueue_many(range(3))
    worker = worker_of(queue, gate)
    async with run(worker) as task:
        await asyncio.wait_for(store.claimed.wait(), LONG)
        worker.stop()
        await turns()
        store.answer.set()
        await turns()
        gate.open()
        await asyncio.wait_for(task, LONG)
    assert gate.began == []
    assert {(job.state, job.attempts) for job in [await look(queue, id) for id in ids]} == {(JobState.READY, 0)}


async def test_what_does_not_finish_in_time_is_given_back_as_a_failed_try() -> None:
    queue, gate = queue_in(), Gate()
    id = await queue.enqueue(1)
    worker = worker_of(queue, gate, drain_timeout=0.1)
    async with run(worker) as task:
        await gate.entered(1)
        worker.stop()
        await asyncio.wait_for(task, LONG)
    job = await look(queue, id)
    assert (job.state, job.attempts, len(gate.cancelled)) == (JobState.READY, 1, 1)
    assert "the worker was stopped" in (job.last_error or "")
    assert [again.id for again in await queue.claim()] == [id], "at once, for somebody else"
    assert ran(queue) == {"retried": 1}


async def test_the_last_try_of_a_job_that_does_not_finish_in_time_is_its_last() -> None:
    queue, gate = queue_in(), Gate()
    id = await queue.enqueue(1, max_retries=0)
    worker = worker_of(queue, gate, drain_timeout=0)
    async with run(worker) as task:
        await gate.entered(1)
        worker.stop()
        await asyncio.wait_for(task, LONG)
    assert (await look(queue, id)).state is JobState.FAILED


async def test_a_thread_that_does_not_finish_in_time_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runners, "_GRACE", 0.1)
    queue, holding = queue_in(), Holding()
    id = await queue.enqueue(1)
    worker = worker_of(queue, holding, drain_timeout=0.1)
    async with run(worker) as task:
        await holding.entered(1)
        worker.stop()
        await asyncio.wait_for(task, LONG)
    before = await look(queue, id)
    assert (before.state, before.attempts) == (JobState.READY, 1)
    holding.open()
    await eventually(lambda: len(holding.done) == 1, "the thread ends some time")
    assert await look(queue, id) == before


async def test_a_thread_that_starts_after_its_job_was_given_back_does_not_begin_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As on a machine that has much else to do."""
    late, handled = list[Callable[[], Any]](), list[str]()
    monkeypatch.setattr(runners, "_GRACE", 0.1)

    def put_off(_: Threads, work: Callable[[], Any]) -> asyncio.Future[Any]:
        late.append(work)
        return asyncio.get_running_loop().create_future()

    monkeypatch.setattr(Threads, "run", put_off)
    queue = queue_in()
    id = await queue.enqueue(1)

    def handle(job: Job) -> None:
        handled.append(job.id)

    worker = worker_of(queue, handle, drain_timeout=0.0)
    async with run(worker) as task:
        await eventually(lambda: bool(late), "a thread is asked for")
        worker.stop()
        await asyncio.wait_for(task, LONG)
    job = await look(queue, id)
    assert (job.state, job.attempts) == (JobState.READY, 0), "what was not begun has cost nothing"
    for work in late:
        work()
    assert handled == []


async def test_a_handler_that_does_not_let_itself_be_cancelled_does_not_hold_the_job(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(runners, "_GRACE", 0.1)
    queue = queue_in()
    release = asyncio.Event()

    async def stubborn(job: Job) -> None:
        while not release.is_set():
            with suppress(asyncio.CancelledError):
                await release.wait()

    await queue.enqueue(1, job_id="a")
    worker = worker_of(queue, stubborn, drain_timeout=0.1)
    async with run(worker) as task:
        await eventually(lambda: worker.inflight == 1, "it began")
        worker.stop()
        await settled(queue, ready=1)
        assert "the worker was stopped" in ((await look(queue, "a")).last_error or "")
        release.set()
        await asyncio.wait_for(task, LONG)


async def test_a_run_that_is_cancelled_gives_its_jobs_back_at_once() -> None:
    queue, gate = queue_in(), Gate()
    id = await queue.enqueue(1)
    worker = worker_of(queue, gate, drain_timeout=3600)
    task = asyncio.ensure_future(worker.run())
    await gate.entered(1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(task, LONG)
    job = await look(queue, id)
    assert (job.state, job.attempts, len(gate.cancelled)) == (JobState.READY, 1, 1)
    assert not worker.health().healthy
    gate.open()
    async with serving(worker):
        assert (await queue.wait(id, LONG)).attempts == 2


async def cancelled_by_task(worker: JobWorker, moment: asyncio.Event) -> None:
    task = asyncio.ensure_future(worker.run())
    await moment.wait()
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task


async def cancelled_twice(worker: JobWorker, moment: asyncio.Event) -> None:
    task = asyncio.ensure_future(worker.run())
    await moment.wait()
    task.cancel()
    await asyncio.sleep(0)
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task


async def cancelled_by_scope(worker: JobWorker, moment: asyncio.Event) -> None:
    """A cancelled scope cancels again whatever is awaited in it."""
    async with anyio.create_task_group() as group:
        group.start_soon(worker.run)
        await moment.wait()
        group.cancel_scope.cancel()


@pytest.mark.guarantee
@pytest.mark.parametrize("cancelled", [cancelled_by_task, cancelled_twice, cancelled_by_scope])
async def test_a_run_that_is_cancelled_gives_back_what_it_was_claiming(cancelled: Any) -> None:
    """The store has leased jobs to it, but the answer has not come yet."""
    store = Late()
    queue, gate = queue_in(store), Gate()
    ids = await queue.enqueue_many([1, 2, 3])
    ending = asyncio.ensure_future(cancelled(worker_of(queue, gate), store.claimed))
    await asyncio.wait_for(store.claimed.wait(), LONG)
    for _ in range(10):
        await asyncio.sleep(0)
    store.answer.set()
    await asyncio.wait_for(ending, LONG)
    assert gate.began == []
    assert {(job.state, job.attempts) for job in [await look(queue, id) for id in ids]} == {(JobState.READY, 0)}
    assert counted(queue, "released_total") == 3


@pytest.mark.parametrize("cancelled", [cancelled_by_task, cancelled_twice, cancelled_by_scope])
async def test_a_run_that_is_cancelled_while_the_store_stands_still_ends_all_the_same(cancelled: Any) -> None:
    store = Silent()
    worker = worker_of(queue_in(store), Gate(), drain_timeout=3600)
    await asyncio.wait_for(cancelled(worker, store.asked), LONG)
    assert not worker.health().healthy


@pytest.mark.guarantee
async def test_runs_that_are_cancelled_at_any_moment_strand_no_job(backend: Backend) -> None:
    """Sooner or later in the life of a worker: before, within and after its claims and acks."""
    async with backend.make("core", ManualClock()) as store:
        queue = queue_in(store)
        await queue.enqueue_many([JobSpec(number, max_retries=0) for number in range(60)])

        async def handler(job: Job) -> None: ...

        for turns in range(40):
            running = asyncio.ensure_future(worker_of(queue, handler, concurrency=2).run())
            await asyncio.sleep(0.002 * (turns % 10))  # waits for nothing: any moment of its life is meant
            for _ in range(turns):
                await asyncio.sleep(0)
            running.cancel()
            with suppress(asyncio.CancelledError):
                await running
        counts = await queue.counts()
        assert (counts[JobState.IN_FLIGHT], counts[JobState.FAILED]) == (0, 0)
        async with serving(worker_of(queue, handler)):
            await settled(queue, succeeded=60)


async def test_a_run_that_a_scope_cancels_gives_its_jobs_back() -> None:
    queue, gate = queue_in(), Gate()
    id = await queue.enqueue(1)
    with anyio.CancelScope() as scope:
        async with asyncio.TaskGroup() as group:
            group.create_task(cancel_when_begun(gate, scope))
            await worker_of(queue, gate, drain_timeout=3600).run()
    job = await look(queue, id)
    assert (job.state, job.attempts, len(gate.cancelled)) == (JobState.READY, 1, 1)


async def cancel_when_begun(gate: Gate, scope: anyio.CancelScope) -> None:
    await gate.entered(1)
    scope.cancel()


async def test_a_run_that_is_cancelled_while_idle_just_ends() -> None:
    worker = worker_of(queue_in(), Gate())
    task = asyncio.ensure_future(worker.run())
    await eventually(lambda: worker.health().healthy, "it runs")
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(task, LONG)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_stops_it_as_stop_does(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    queue, gate = queue_in(), Gate()
    id = await queue.enqueue(1)
    worker = JobWorker(queue, gate)
    async with run(worker) as task:
        await gate.entered(1)
        signal.raise_signal(number)
        await turns()
        assert not task.done()
        gate.open()
        await asyncio.wait_for(task, LONG)
    assert (await look(queue, id)).state is JobState.SUCCEEDED
    assert signal.getsignal(number) is before


async def test_a_stop_while_it_waits_for_jobs_ends_it() -> None:
    """It ends without a job coming by."""
    worker = worker_of(queue_in(), Gate())
    async with run(worker) as task:
        await eventually(lambda: worker.health().healthy, "it runs")
        await turns()
        worker.stop()
        await asyncio.wait_for(task, LONG)


async def test_outcomes_are_written_before_it_ends() -> None:
    """No outcome waits for more of its kind."""
    queue = queue_in()

    async def handler(job: Job) -> int:
        if job.payload == 9:
            worker.stop()
        return int(job.payload)

    await queue.enqueue_many(range(10))
    worker = worker_of(queue, handler, concurrency=10)
    await asyncio.wait_for(worker.run(), LONG)
    counts = await queue.counts()
    assert counts[JobState.IN_FLIGHT] == 0
    assert counts[JobState.SUCCEEDED] + counts[JobState.READY] == 10


async def test_a_claim_that_is_never_answered_does_not_hold_the_end_up() -> None:
    store = Silent()
    worker = worker_of(JobQueue(store, "q"), Gate(), drain_timeout=0.1)
    async with run(worker) as task, asyncio.timeout(LONG):
        await store.asked.wait()
        worker.stop()
        await task


@pytest.mark.slow
async def test_a_claim_that_does_not_end_though_it_is_cancelled_does_not_hold_the_end_up(
    caplog: pytest.LogCaptureFixture,
) -> None:
    store = Deaf()
    worker = worker_of(JobQueue(store, "q"), Gate(), drain_timeout=0.1)
    task = asyncio.ensure_future(worker.run())
    await asyncio.wait_for(store.asked.wait(), LONG)
    worker.stop()
    await asyncio.wait([task], timeout=LONG / 4)
    is_over = task.done()
    store.may_go.set()
    await task
    assert is_over
    assert "did not close in time" in caplog.text
    await eventually(lambda: store.gone > 0, "what was left behind ends when it can")
