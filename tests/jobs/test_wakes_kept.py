"""Wakes in Redis are not lost with those who were to hear them: another is told."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, suppress
from typing import Any

import pytest

from conquiet import JobQueue, JobWorker, QueueError, RedisStore
from conquiet.kit.clock import ManualClock
from conquiet.wire.keys import JobKeys
from tests.contracts.jobs_flavours import Recorder, serving
from tests.jobs.test_worker_idle import CLAIM, happens
from tests.jobs.waking import (
    QUEUE,
    SHORT,
    Make,
    another,
    claim,
    end,
    idle,
    listeners,
    namespace,
    new,
    patient,
    stack,
    told,
)
from tests.jobs.working import queue_in, working
from tests.rigs.asking import ask
from tests.rigs.proxy import Proxy
from tests.rigs.waiting import eventually

__all__ = ["another", "namespace", "patient", "stack"]

pytestmark = pytest.mark.any_server


async def _count_is(url: str, key: str, count: int) -> bool:
    return bool(await ask(url, "ZCARD", key) == count)


async def ignores(store: RedisStore, waiting: asyncio.Task[None], add: Callable[[], Awaitable[None]]) -> None:
    """It is told, and does nothing about it."""
    await add()
    await told(waiting)


async def is_cancelled(store: RedisStore, waiting: asyncio.Task[None], add: Callable[[], Awaitable[None]]) -> None:
    await end(waiting)
    await add()


async def is_cancelled_when_told(
    store: RedisStore, waiting: asyncio.Task[None], add: Callable[[], Awaitable[None]]
) -> None:
    [watch] = store._watches.values()
    [waiter] = watch._listeners
    await add()
    await waiter.event.wait()
    await end(waiting)


async def is_closed(store: RedisStore, waiting: asyncio.Task[None], add: Callable[[], Awaitable[None]]) -> None:
    await store.aclose()
    with suppress(QueueError):
        await waiting
    await add()


async def is_closed_when_told(
    store: RedisStore, waiting: asyncio.Task[None], add: Callable[[], Awaitable[None]]
) -> None:
    await add()
    await told(waiting)
    await store.aclose()


@pytest.mark.cluster_too
@pytest.mark.parametrize("what", [ignores, is_cancelled, is_cancelled_when_told, is_closed, is_closed_when_told])
async def test_if_the_one_that_would_be_told_does_not_come_another_is_told(what: Any, another: Make) -> None:
    first, second, outside = await another(), await another(), await another()
    waiting, gone = await idle(first), await idle(second)

    async def add() -> None:
        await outside.add(QUEUE, new("a"))

    await what(second, gone, add)
    await told(waiting)
    assert [job.id for job in (await claim(first)).jobs] == ["a"]


async def test_whoever_is_known_as_waiting_and_never_waits_is_forgotten(another: Make) -> None:
    """A claim is cancelled after the store has noted that its caller will wait."""
    first, second, outside = await another(), await another(), await another()
    waiting = await idle(first)
    await claim(second)
    await outside.add(QUEUE, new("a"))
    await told(waiting)


async def test_a_cancelled_claim_that_would_have_waited_is_not_told(another: Make, url: str, namespace: str) -> None:
    async with Proxy(url) as proxy:
        first, second, outside = await another(), await another(proxy.url), await another()
        waiting = await idle(first)
        hold = proxy.hold(CLAIM, once=True)
        asking = asyncio.create_task(JobQueue(second, QUEUE).claim(timeout=600))
        await hold.caught.wait()
        asking.cancel()
        hold.release()
        await asyncio.gather(asking, return_exceptions=True)
        await outside.add(QUEUE, new("a"))
        await told(waiting)
        await second.aclose()


@pytest.mark.cluster_too
async def test_whoever_takes_all_it_can_tells_another_of_the_rest(another: Make) -> None:
    """Of the second job somebody was told who has died since."""
    first, dead, last, outside = [await another() for _ in range(4)]
    waiting = await idle(first)
    died = await idle(dead)
    taking = await idle(last)
    for watch in dead._watches.values():
        watch._closed = True  # it neither hears anything nor says anything any more
    await outside.add(QUEUE, new("a", "b"))
    await told(taking)
    assert len((await claim(last, 1)).jobs) == 1
    await told(waiting)
    assert len((await claim(first, 1)).jobs) == 1
    await end(died)


@pytest.mark.usefixtures("patient")
async def test_a_full_claim_hides_nobody_who_is_about_to_wait_at_the_same_store(another: Make) -> None:
    """Two workers of one store: one has claimed in vain, and before it waits, the other takes all it can."""
    first, second, third, outside = [await another() for _ in range(4)]
    claimed = await claim(first)
    elsewhere = await idle(third)
    latest = await idle(second)
    await outside.add(QUEUE, new("a"))
    await told(latest)
    assert len((await claim(first, 1, waits=False)).jobs) == 1
    waiting = asyncio.create_task(first.news(QUEUE, claimed.mark, 600))
    await eventually(lambda: listeners(first) == 1, "it waits")
    await outside.add(QUEUE, new("b", "c"))
    await told(elsewhere, waiting)


async def test_what_fell_due_and_is_left_is_told_to_as_many(another: Make) -> None:
    clock = ManualClock()
    stores = [await another(clock=clock), await another(), await another()]
    await stores[0].add(QUEUE, new("a", "b", "c", delay_ms=4_000))
    waiting = [await idle(store) for store in stores[1:]]
    clock.advance(4.5)  # the others have not looked yet
    assert len((await claim(stores[0], 1, waits=False)).jobs) == 1
    await told(*waiting)


async def test_a_worker_that_died_when_it_was_told_keeps_no_job_waiting(url: str, stack: AsyncExitStack) -> None:
    """Others look for themselves, after five seconds."""
    clock, seen = ManualClock(), Recorder()
    proxy = await stack.enter_async_context(Proxy(url))
    alive, dead = [await stack.enter_async_context(RedisStore(at, clock=clock)) for at in (url, proxy.url)]
    queue = queue_in(alive)
    await stack.enter_async_context(working(queue, seen))
    key = JobKeys(queue.name).idle
    await eventually(lambda: _count_is(url, key, 1), "one waits")
    gone = JobWorker(queue_in(dead, name=queue.name), Recorder(), handle_signals=False)
    running = asyncio.create_task(gone.run())
    await eventually(lambda: _count_is(url, key, 2), "both wait")
    proxy.shut()
    await queue.enqueue(1)
    assert not await happens(lambda: bool(seen.jobs), SHORT), "nobody was told who is alive"
    clock.advance(5.1)
    await seen.saw(1)
    proxy.reopen()
    gone.stop()
    await running


async def test_workers_that_the_server_has_forgotten_are_told(another: Make, url: str, namespace: str) -> None:
    """It was restarted without its last writes, or a replica that was behind has taken over."""
    first, second = await another(), await another()
    waiting = [await idle(first), await idle(second)]
    await ask(url, "DEL", JobKeys(QUEUE, namespace).idle)
    await second.add(QUEUE, new("a"))
    await told(*waiting)


async def test_a_job_that_an_older_version_adds_is_told_to_all(another: Make, url: str, namespace: str) -> None:
    waiting = [await idle(await another()) for _ in range(3)]
    await ask(url, "XADD", JobKeys(QUEUE, namespace).news, "MAXLEN", 1, "*", "n", "")
    await told(*waiting)


async def test_who_polls_is_told_of_nothing_and_takes_nobodys_place(another: Make) -> None:
    first, second = await another(), await another()
    waiting = await idle(first)
    await claim(second, waits=False)
    await second.add(QUEUE, new("a"))
    await told(waiting)


async def test_a_worker_that_cannot_wait_is_not_told_in_the_place_of_one_that_can(url: str) -> None:
    seen, deaf = Recorder(), Recorder()
    async with Proxy(url) as proxy, RedisStore(proxy.url) as one, RedisStore(url) as other:
        proxy.refuse(b"XREAD", b"-NOPERM this user has no permissions to run this command\r\n", times=1_000_000)
        queue = queue_in(other)
        stuck = JobWorker(queue_in(one, name=queue.name), deaf, handle_signals=False)
        async with serving(stuck):
            await eventually(lambda: stuck.health().failures > 1, "it cannot wait")
            async with working(queue, seen):
                key = JobKeys(queue.name).idle
                await eventually(lambda: _count_is(url, key, 1), "the other waits, and it alone")
