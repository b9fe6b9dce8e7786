"""Claims that their callers give up: what the store has leased by then goes back at no cost. Claims of very many."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, Final, TypeAlias

import anyio
import pytest

from conquiet import JobQueue, JobState, JobWorker, QueueError, RedisStore
from conquiet.jobs.store import Claimed, Wanted
from conquiet.kit.clock import ManualClock
from tests.jobs.working import Gate, Late, Silent, Watched, counted, queue_in, settled
from tests.rigs.proxy import Proxy
from tests.rigs.waiting import LONG

TTL: Final = 30.0
End: TypeAlias = Callable[[Awaitable[Any], asyncio.Event], Awaitable[None]]


async def by_task(claim: Awaitable[Any], moment: asyncio.Event) -> None:
    task = asyncio.ensure_future(claim)
    await moment.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def by_task_twice(claim: Awaitable[Any], moment: asyncio.Event) -> None:
    """The second time it ends at once, and what is to be given back is given back behind it."""
    task = asyncio.ensure_future(claim)
    await moment.wait()
    for _ in range(2):
        task.cancel()
        await asyncio.sleep(0)
    with pytest.raises(asyncio.CancelledError):
        await task


async def by_scope(claim: Awaitable[Any], moment: asyncio.Event) -> None:
    async with anyio.create_task_group() as group:
        group.start_soon(_until, moment, group.cancel_scope)
        await claim


async def _until(moment: asyncio.Event, scope: anyio.CancelScope) -> None:
    await moment.wait()
    scope.cancel()


ENDS = pytest.mark.parametrize("end", [by_task, by_task_twice, by_scope])


async def all_free_of_cost(queue: JobQueue, ids: list[str]) -> None:
    await settled(queue, ready=len(ids))
    found = [await queue.get(id) for id in ids]
    assert [(job.attempts, job.failures) for job in found if job is not None] == [(0, ())] * len(ids)


@pytest.mark.guarantee
@ENDS
async def test_a_claim_that_is_cancelled_gives_back_what_it_got(end: End) -> None:
    store = Late()
    queue = queue_in(store)
    ids = await queue.enqueue_many([1, 2, 3])
    ending = asyncio.ensure_future(end(queue.claim(2), store.claimed))
    await store.claimed.wait()
    for _ in range(10):
        await asyncio.sleep(0)
    assert ending.done() == (end is by_task_twice), "it waits for the answer"
    store.answer.set()
    await asyncio.wait_for(ending, LONG)
    if end is not by_task_twice:
        assert (await queue.counts())[JobState.READY] == 3
    await all_free_of_cost(queue, ids)
    assert counted(queue, "released_total") == 2


@pytest.mark.slow
@ENDS
async def test_a_claim_that_the_store_never_answers_can_be_cancelled(end: End) -> None:
    store = Silent()
    await asyncio.wait_for(end(queue_in(store).claim(2), store.asked), LONG)
    for task in asyncio.all_tasks() - {asyncio.current_task()}:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


@pytest.mark.slow
@pytest.mark.any_server
async def test_a_claim_that_runs_out_of_time_gives_back_what_it_got(url: str) -> None:
    """The answer comes after its caller has gone."""
    async with Proxy(url) as proxy, RedisStore(proxy.url) as store, RedisStore(url) as outside:
        queue = queue_in(store)
        eye = queue_in(outside, name=queue.name)
        assert await eye.claim() == []  # so that the server knows the script
        ids = await eye.enqueue_many([1, 2, 3])
        hold = proxy.hold(b"w-late")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(queue.claim(10, worker="w-late"), 0.1)
        await hold.caught.wait()
        await settled(eye, in_flight=3)
        hold.release()
        await all_free_of_cost(eye, ids)


async def test_a_claim_that_waits_for_jobs_is_cancelled_at_once() -> None:
    queue = queue_in()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await queue.claim(timeout=LONG)
    await queue.enqueue(1)
    await settled(queue, ready=1)


async def test_a_claim_of_very_many_asks_for_a_thousand_at_a_time() -> None:
    """No call keeps the store from everybody else."""
    store = Watched()
    queue = queue_in(store)
    ids = await queue.enqueue_many(range(2500))
    assert [job.id for job in await queue.claim(10**9)] == ids
    assert store.asked == [1000, 1000, 1000]
    assert await queue.claim(2000) == []
    assert store.asked == [1000, 1000, 1000, 1000]


async def test_a_claim_of_very_many_ends_while_the_first_are_leased_for_long() -> None:
    class Slow(Watched):
        async def claim(self, queue: str, wanted: Wanted) -> Claimed:
            claimed = await super().claim(queue, wanted)
            clock.advance(TTL / 4)
            return claimed

    clock = ManualClock()
    store = Slow(clock=clock)
    queue = queue_in(store, lease_ttl=TTL)
    await queue.enqueue_many(range(2001))
    assert len(await queue.claim(10**9)) == 2000


async def test_a_claim_of_very_many_of_which_a_part_fails_has_the_rest() -> None:
    class Failing(Watched):
        async def claim(self, queue: str, wanted: Wanted) -> Claimed:
            if self.asked:
                raise QueueError("away")
            return await super().claim(queue, wanted)

    queue = queue_in(Failing())
    await queue.enqueue_many(range(2001))
    assert len(await queue.claim(2001)) == 1000


async def test_a_claim_of_very_many_that_is_cancelled_in_the_middle_strands_none() -> None:
    """The first thousand were leased when the worker was told to end while it waited for the others."""

    class Halting(Watched):
        async def claim(self, queue: str, wanted: Wanted) -> Claimed:
            if self.got:
                halted.set()
                await asyncio.Event().wait()
            return await super().claim(queue, wanted)

    halted = asyncio.Event()
    queue, gate = queue_in(Halting()), Gate()
    ids = await queue.enqueue_many(range(1001))
    worker = JobWorker(queue, gate, concurrency=1001, handle_signals=False)
    await asyncio.wait_for(by_task(worker.run(), halted), LONG)
    assert gate.began == []
    await all_free_of_cost(queue, ids)
