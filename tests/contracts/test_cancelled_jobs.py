"""Every call on a queue of jobs, cancelled at each of its suspensions: nothing is lost, held or left behind."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, Final

import pytest

from conquiet import Job, JobState
from tests.contracts.jobs_cancellation import Stage, Verb, ground_on, hows, in_memory, on_servers, scene_of
from tests.contracts.jobs_flavours import Backend
from tests.rigs.cancelling import How, cancelled_everywhere
from tests.rigs.waiting import LONG, eventually

pytest_plugins = ("tests.contracts.jobs_fixtures",)

Made = Callable[[], Awaitable[Any]]


# --- producing --------------------------------------------------------------------------------------------------


@asynccontextmanager
async def enqueue(stage: Stage) -> AsyncGenerator[Made]:
    yield lambda: stage.queue.enqueue("mine", job_id="mine")
    [one] = await stage.ground.eye.find(stage.name, ["mine"])
    assert one is not None or not stage.is_done, "what was confirmed is there"
    assert one is None or one.payload == "mine"


@asynccontextmanager
async def enqueue_with_others(stage: Stage) -> AsyncGenerator[Made]:
    """Others enqueue in the same turn of the loop: the first, which is cancelled, takes nobody along."""
    stage.follow()
    others: list[asyncio.Future[str]] = []

    async def call() -> str:
        others.extend(asyncio.ensure_future(stage.queue.enqueue(id, job_id=id)) for id in ("a", "b"))
        return await stage.queue.enqueue("mine", job_id="mine")

    yield call
    assert await asyncio.gather(*others) == ["a", "b"]
    assert await stage.states("a", "b") == [JobState.READY] * 2
    [one] = await stage.ground.eye.find(stage.name, ["mine"])
    assert one is not None or not stage.is_done


@asynccontextmanager
async def enqueue_after_others(stage: Stage) -> AsyncGenerator[Made]:
    """The one that is cancelled has joined those of another."""
    stage.follow()
    others: list[asyncio.Future[str]] = []

    async def call() -> str:
        others.append(asyncio.ensure_future(stage.queue.enqueue("a", job_id="a")))
        await asyncio.sleep(0)  # so that it is the first
        return await stage.queue.enqueue("mine", job_id="mine")

    yield call
    assert await asyncio.gather(*others) == ["a"] * len(others)
    [one] = await stage.ground.eye.find(stage.name, ["mine"])
    assert one is not None or not stage.is_done


@asynccontextmanager
async def enqueue_many(stage: Stage) -> AsyncGenerator[Made]:
    """In two parts, each of which is there as a whole or not at all."""
    yield lambda: stage.queue.enqueue_many(range(1001))
    count = (await stage.eye.counts())[JobState.READY]
    assert count == 1001 if stage.is_done else count in (0, 1000, 1001)


# --- working ----------------------------------------------------------------------------------------------------


@asynccontextmanager
async def claim(stage: Stage) -> AsyncGenerator[Made]:
    stage.follow("claim")
    ids = await stage.eye.enqueue_many([1, 2, 3])
    yield lambda: stage.queue.claim(2)
    if stage.is_done:
        assert [job.id for job in stage.result] == ids[:2]
        await stage.eye.release(*stage.result)
    await stage.are_free(ids)


@asynccontextmanager
async def claim_after_waiting(stage: Stage) -> AsyncGenerator[Made]:
    """The job comes when the claim has begun to wait for one."""
    stage.follow("claim")
    waits, news = asyncio.Event(), stage.store.news

    async def told(*args: Any) -> None:
        waits.set()
        await news(*args)

    stage.store.news = told
    try:
        feeding = asyncio.ensure_future(_fed(stage, waits))
        yield lambda: stage.queue.claim(2, timeout=LONG)
        waits.set()
        id = await feeding
    finally:
        del stage.store.news
    if stage.is_done:
        assert [job.id for job in stage.result] == [id]
        await stage.eye.release(*stage.result)
    await stage.are_free([id])


async def _fed(stage: Stage, waits: asyncio.Event) -> str:
    await waits.wait()
    return await stage.eye.enqueue("fed")


async def _claimed(stage: Stage, id: str = "mine") -> Job:
    await stage.eye.enqueue(id, job_id=id)
    [job] = await stage.eye.claim()
    return job


@asynccontextmanager
async def heartbeat(stage: Stage) -> AsyncGenerator[Made]:
    job = await _claimed(stage)
    yield lambda: stage.queue.heartbeat(job)
    await stage.runs_out(job.id)


@asynccontextmanager
async def ack(stage: Stage) -> AsyncGenerator[Made]:
    job = await _claimed(stage)
    yield lambda: stage.queue.ack(job, result="done")
    after = await stage.job(job.id)
    assert after.state is JobState.SUCCEEDED or (not stage.is_done and after.state is JobState.IN_FLIGHT)
    if after.state is JobState.SUCCEEDED:
        assert after.result == "done"
    else:
        await stage.runs_out(job.id)


@asynccontextmanager
async def nack(stage: Stage) -> AsyncGenerator[Made]:
    job = await _claimed(stage)
    yield lambda: stage.queue.nack(job, error="no")
    after = await stage.job(job.id)
    assert after.state is JobState.FAILED or (not stage.is_done and after.state is JobState.IN_FLIGHT)
    if after.state is JobState.FAILED:
        assert after.last_error == "no"
    else:
        await stage.runs_out(job.id)


@asynccontextmanager
async def release(stage: Stage) -> AsyncGenerator[Made]:
    job = await _claimed(stage)
    yield lambda: stage.queue.release(job)
    after = await stage.job(job.id)
    if after.state is JobState.READY or stage.is_done:
        await stage.are_free([job.id])
    else:
        assert after.state is JobState.IN_FLIGHT
        await stage.runs_out(job.id)


# --- looking after ------------------------------------------------------------------------------------------------


@asynccontextmanager
async def get(stage: Stage) -> AsyncGenerator[Made]:
    await stage.eye.enqueue("mine", job_id="mine")
    yield lambda: stage.queue.get("mine")
    assert not stage.is_done or stage.result.payload == "mine"


@asynccontextmanager
async def counts(stage: Stage) -> AsyncGenerator[Made]:
    await stage.eye.enqueue_many([1, 2])
    yield stage.queue.counts
    assert not stage.is_done or stage.result[JobState.READY] == 2


@asynccontextmanager
async def list_jobs(stage: Stage) -> AsyncGenerator[Made]:
    ids = await stage.eye.enqueue_many([1, 2])
    yield lambda: stage.queue.list_jobs(JobState.READY)
    assert not stage.is_done or [job.id for job in stage.result.jobs] == ids


@asynccontextmanager
async def wait(stage: Stage) -> AsyncGenerator[Made]:
    """The job is done when the call has looked at it, and waits."""
    job = await _claimed(stage)
    finishing: list[asyncio.Future[None]] = []

    async def call() -> Any:
        finishing.append(asyncio.ensure_future(_finished(stage, job)))
        return await stage.queue.wait(job.id, LONG)

    yield call
    for task in finishing:
        task.cancel()
    await asyncio.gather(*finishing, return_exceptions=True)
    assert not stage.is_done or stage.result.result == "done"


async def _finished(stage: Stage, job: Job) -> None:
    await eventually(stage.is_waiting, "the call waits")
    await stage.eye.ack(job, result="done")


async def _failed(stage: Stage) -> str:
    job = await _claimed(stage)
    await stage.eye.nack(job, error="no")
    return str(job.id)


@asynccontextmanager
async def replay(stage: Stage) -> AsyncGenerator[Made]:
    id = await _failed(stage)
    yield lambda: stage.queue.replay(id)
    [state] = await stage.states(id)
    assert state is JobState.READY or (not stage.is_done and state is JobState.FAILED)


@asynccontextmanager
async def cancel(stage: Stage) -> AsyncGenerator[Made]:
    await stage.eye.enqueue("mine", job_id="mine")
    yield lambda: stage.queue.cancel("mine")
    [state] = await stage.states("mine")
    assert state is JobState.FAILED or (not stage.is_done and state is JobState.READY)


@asynccontextmanager
async def delete(stage: Stage) -> AsyncGenerator[Made]:
    id = await _failed(stage)
    yield lambda: stage.queue.delete(id)
    assert await stage.eye.get(id) is None or not stage.is_done


@asynccontextmanager
async def purge(stage: Stage) -> AsyncGenerator[Made]:
    id = await _failed(stage)
    kept = await stage.eye.enqueue("kept")
    stage.ground.clock.advance(31 * 86_400.0)
    yield stage.queue.purge
    assert await stage.eye.get(id) is None or not stage.is_done
    assert await stage.states(kept) == [JobState.READY]


TAKING: Final[tuple[Verb, ...]] = (claim, claim_after_waiting)
OTHERS: Final[tuple[Verb, ...]] = (
    enqueue,
    enqueue_with_others,
    enqueue_after_others,
    enqueue_many,
    heartbeat,
    ack,
    nack,
    release,
    get,
    counts,
    list_jobs,
    wait,
    replay,
    cancel,
    delete,
    purge,
)


def cases(*verbs: Verb) -> pytest.MarkDecorator:
    chosen = [(verb, how) for verb in verbs for how in hows(is_taking=verb in TAKING)]
    ids = [f"{verb.__name__}-{how.replace(' ', '_')}" for verb, how in chosen]
    return pytest.mark.parametrize(("verb", "how"), chosen, ids=ids)


@on_servers
@cases(*TAKING, *OTHERS)
async def test_a_call_that_is_cancelled_leaves_everything_in_order(backend: Backend, verb: Verb, how: How) -> None:
    async with ground_on(backend) as ground:
        await cancelled_everywhere(scene_of(ground, verb), how)


@in_memory
@cases(claim, claim_after_waiting, wait)
async def test_a_wait_in_memory_that_is_cancelled_leaves_everything_in_order(
    backend: Backend, verb: Verb, how: How
) -> None:
    """Nothing else waits there."""
    async with ground_on(backend) as ground:
        await cancelled_everywhere(scene_of(ground, verb), how, at_least=1)


@in_memory
async def test_who_has_waited_in_memory_and_gone_is_forgotten(backend: Backend) -> None:
    async with ground_on(backend) as ground:
        stage = Stage(ground, ground.subject())
        id = await stage.queue.enqueue("late", delay=60)
        for call in (stage.queue.claim(timeout=LONG), stage.queue.wait(id, LONG)):
            waiting = asyncio.ensure_future(call)
            await eventually(stage.is_waiting, "the call waits")
            waiting.cancel()
            await asyncio.wait([waiting])
            assert not stage.is_waiting()
