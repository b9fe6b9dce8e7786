"""A worker that is cancelled at each suspension of its run, of its calls on the store and of its handlers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, Final

import pytest

from conquiet import Job, JobState, JobWorker, MemoryStore, QueueError
from conquiet.jobs.job import Settlement
from conquiet.kit import runners
from conquiet.kit.clock import ManualClock
from tests.contracts import jobs_leaving
from tests.contracts.jobs_cancellation import TTL, Ground, Stage, everywhere, ground_on, hows, in_memory
from tests.contracts.jobs_flavours import Backend
from tests.jobs.working import Gate, queue_in
from tests.rigs.cancelling import Call, How, Scene, cancelled_everywhere, followed, nothing_left
from tests.rigs.waiting import LONG, eventually
from tests.sync.programs import run

pytest_plugins = ("tests.contracts.jobs_fixtures",)

JOBS: Final = 4
CALLS: Final = ("claim", "settle", "news")
each_how: Final = pytest.mark.parametrize("how", hows(is_taking=True))


class Crew:
    """A worker whose handler stops it with the last job, and what was handled."""

    def __init__(self, stage: Stage, handler: Callable[[Crew, Job], Any], **options: Any) -> None:
        self.began: list[str] = []
        self.ended: list[str] = []
        self.worker = JobWorker(stage.queue, self._as_handler(handler), handle_signals=False, **options)

    def _as_handler(self, handler: Callable[[Crew, Job], Any]) -> Callable[[Job], Any]:
        if asyncio.iscoroutinefunction(handler):

            async def handle(job: Job) -> None:
                await followed(handler)(self, job)

            return handle
        return lambda job: handler(self, job)

    def begin(self, job: Job) -> None:
        self.began.append(job.id)

    def end(self, job: Job) -> None:
        self.ended.append(job.id)
        if len(self.ended) == JOBS:
            self.worker.stop()


async def waits(crew: Crew, job: Job) -> None:
    crew.begin(job)
    await asyncio.sleep(0)
    await asyncio.sleep(0.001)  # the work itself
    crew.end(job)


def blocks(crew: Crew, job: Job) -> None:
    crew.begin(job)
    crew.end(job)


def scene_of(ground: Ground, handler: Callable[[Crew, Job], Any], *, is_idle: bool = False, **options: Any) -> Scene:
    """A run on four jobs of one try each, which is cancelled; nothing of it is left, and another ends the work.

    If ``is_idle``, the jobs come when the worker waits for some.
    """

    @asynccontextmanager
    async def scene() -> AsyncGenerator[Call]:
        async with nothing_left(ground.connections):
            stage = Stage(ground, ground.subject())
            try:
                crew = Crew(stage, handler, **options)
                stage.follow(*CALLS)
                async with fed(stage, is_idle=is_idle) as ids:
                    yield crew.worker.run
                await in_order(stage, crew, ids)
            finally:
                for name in CALLS:  # the store in memory is the same for all
                    delattr(stage.store, name)
                await stage.store.aclose()

    return scene


@asynccontextmanager
async def fed(stage: Stage, *, is_idle: bool) -> AsyncGenerator[list[str]]:
    """The jobs' IDs; of a run that was cancelled before it waited, none."""
    ids: list[str] = []

    async def feed() -> None:
        if is_idle:
            await eventually(stage.is_waiting, "the worker waits")
        ids.extend(await stage.eye.enqueue_many(range(JOBS)))

    if not is_idle:
        await feed()
    feeding = asyncio.ensure_future(feed()) if is_idle else None
    yield ids
    if feeding is not None:
        feeding.cancel()
        with suppress(asyncio.CancelledError):
            await feeding


async def in_order(stage: Stage, crew: Crew, ids: list[str]) -> None:
    """The run has ended: it leases nothing any more, and what it did not handle is as if it had not been claimed."""
    assert not crew.worker.health().healthy
    for job in [await stage.job(id) for id in ids]:
        assert job.state is not JobState.IN_FLIGHT, "what was claimed is settled, or given back"
        if job.state is JobState.READY:
            assert job.id not in crew.began
            assert (job.attempts, job.failures) == (0, ()), "no handler had it"
        else:
            assert job.id in crew.began, "a handler had it"
        if job.state is JobState.SUCCEEDED:
            assert job.id in crew.ended
    await stage.eye.ack(*await stage.eye.claim(JOBS))
    assert set(await stage.states(*ids)) <= {JobState.SUCCEEDED, JobState.FAILED}


@everywhere
@pytest.mark.parametrize("handler", [waits, blocks], ids=["async", "plain"])
@each_how
async def test_a_worker_that_is_cancelled_anywhere_strands_no_job(backend: Backend, handler: Any, how: How) -> None:
    async with ground_on(backend) as ground:
        await cancelled_everywhere(scene_of(ground, handler, concurrency=2), how)


@everywhere
@each_how
async def test_an_idle_worker_that_is_cancelled_anywhere_strands_no_job(backend: Backend, how: How) -> None:
    async with ground_on(backend) as ground:
        await cancelled_everywhere(scene_of(ground, waits, is_idle=True), how)


# --- ends that are worse ----------------------------------------------------------------------------------------


class Refusing(MemoryStore):
    """Takes no outcomes."""

    async def settle(self, queue: str, settlements: Sequence[Settlement]) -> list[bool]:
        raise QueueError("not now")


@pytest.mark.guarantee
async def test_what_a_cancelled_worker_could_not_give_back_runs_out() -> None:
    """The store takes no outcomes when it leaves, and would take heartbeats: there are none."""
    clock, gate = ManualClock(), Gate()
    queue = queue_in(Refusing(clock=clock), lease_ttl=TTL)
    id = await queue.enqueue(1)
    async with nothing_left():
        working = asyncio.ensure_future(JobWorker(queue, gate, handle_signals=False).run())
        await gate.entered(1)
        working.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(working, LONG)
        for _ in range(3):
            assert await queue.claim() == []
            clock.advance(TTL / 3 + 1)
        assert [job.id for job in await queue.claim()] == [id]


@in_memory
async def test_a_handler_that_does_not_end_when_it_is_cancelled_is_left_behind(
    backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run has a bound, as it has for threads."""
    monkeypatch.setattr(runners, "_GRACE", 0.1)
    release, clock = asyncio.Event(), ManualClock()
    queue = queue_in(backend.make("core", clock), lease_ttl=TTL)

    async def stubborn(job: Job) -> None:
        while not release.is_set():
            with suppress(asyncio.CancelledError):
                await release.wait()

    id = await queue.enqueue(1)
    async with nothing_left():
        worker = JobWorker(queue, stubborn, handle_signals=False)
        working = asyncio.ensure_future(worker.run())
        await eventually(lambda: worker.inflight == 1, "it began")
        working.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(working, LONG)
        assert [job.id for job in await queue.claim()] == [id], "for somebody else"
        release.set()


@everywhere
@pytest.mark.parametrize("ending", [jobs_leaving.returned, jobs_leaving.closed], ids=["returned", "closed"])
def test_a_worker_whose_loop_has_ended_holds_nothing(backend: Backend, ending: Callable[..., None]) -> None:
    """Nobody closed the store and nobody stopped the worker."""
    words = [backend.store, *backend.where, *(word for option in backend.options for word in option)]
    assert run(ending, *words) == ["fine"]
