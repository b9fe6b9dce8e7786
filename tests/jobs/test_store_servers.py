"""Stores on servers: tasks that are cancelled at any moment, loops, forks, clocks. Nobody hangs, nothing repeats."""

from __future__ import annotations

import asyncio
import os
import secrets
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, asynccontextmanager
from typing import Any

import pytest

from conquiet import ConquietError, Job
from conquiet.jobs.job import NewJob, Settlement
from conquiet.jobs.store import Wanted
from conquiet.kit.clock import ManualClock
from tests.conftest import LADDER, Rung
from tests.contracts.jobs_fixtures import kind_name, started
from tests.contracts.jobs_flavours import Backend
from tests.rigs.waiting import LONG

WANTED = Wanted(10, "w", 30_000, 3)


@pytest.fixture(scope="module", params=[LADDER[-1], "postgres"], ids=kind_name)
def remote(request: pytest.FixtureRequest) -> Iterator[Backend]:
    """A store on a server."""
    kind: str | Rung = request.param
    with ExitStack() as servers:
        yield started(kind, servers)


@asynccontextmanager
async def opened(remote: Backend) -> AsyncIterator[Any]:
    async with remote.make("core", ManualClock()) as store:
        yield store


def queue_name() -> str:
    return f"q-{secrets.token_hex(6)}"


async def works(store: Any, queue: str) -> None:
    """Add, be told, claim, settle and wait for the end."""
    async with asyncio.timeout(LONG):
        mark = (await store.claim(queue, WANTED)).mark
        waiting = asyncio.ensure_future(store.news(queue, mark, LONG))
        ids = [secrets.token_hex(4) for _ in range(3)]
        await asyncio.gather(*(store.add(queue, [NewJob(id, b"1")]) for id in ids))
        await waiting
        ending = asyncio.ensure_future(store.finished(queue, ids[0], None))
        jobs: list[Job] = []
        while not {*ids} <= {job.id for job in jobs}:
            jobs += (await store.claim(queue, WANTED)).jobs
        assert all(await store.settle(queue, [Settlement.of(job, "ack") for job in jobs]))
        job = await ending
        assert job is not None
        assert job.is_finished


def busy(store: Any, queue: str) -> list[Awaitable[Any]]:
    """Everything that a store does, at once."""
    adds = [store.add(queue, [NewJob(secrets.token_hex(4), b"1")]) for _ in range(3)]
    return [
        *adds,
        store.claim(queue, WANTED),
        store.news(queue, "0-0", LONG),
        store.news(queue, "", LONG),
        store.finished(queue, "none", None),
        store.counts(queue),
    ]


async def turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def test_tokens_rise_though_the_clock_goes_back(remote: Backend) -> None:
    """Also above those of a job that was removed, whose ID is used again: a server took over whose clock is behind."""
    queue, ahead = queue_name(), ManualClock()
    ahead.advance(3600)
    async with remote.make("core", ahead) as fast, opened(remote) as slow:
        await fast.add(queue, [NewJob("a", b"1"), NewJob("b", b"1")])
        before = {job.id: job for job in (await fast.claim(queue, WANTED)).jobs}
        await fast.settle(queue, [Settlement.of(before["a"], "ack"), Settlement.of(before["b"], "release")])
        await fast.delete(queue, "a")
        await slow.add(queue, [NewJob("a", b"2")])
        after = {job.id: job for job in (await slow.claim(queue, WANTED)).jobs}
        assert after["a"].lease_token > before["a"].lease_token
        assert after["b"].lease_token > before["b"].lease_token


@pytest.mark.timeout(120)
async def test_when_all_tasks_were_cancelled_the_store_works_on(remote: Backend) -> None:
    """As a framework does that ends a request, or a test that cleans up."""
    async with opened(remote) as store:
        queue = queue_name()
        for count in (*range(8), 12, 20, 50):
            tasks = [asyncio.ensure_future(one) for one in busy(store, queue)]
            await turns(count)
            for task in asyncio.all_tasks() - {asyncio.current_task()}:
                task.cancel()
            await asyncio.wait(tasks, timeout=LONG)
            assert all(task.done() for task in tasks), count
            await works(store, queue)


@pytest.mark.timeout(120)
async def test_when_only_the_stores_own_tasks_were_cancelled_nobody_hangs(remote: Backend) -> None:
    """Those who wait for one of them end, or are told."""
    for count in (*range(8), 12, 20):
        async with opened(remote) as store:
            queue = queue_name()
            await store.add(queue, [NewJob("j", b"1")])
            mark = (await store.claim(queue, WANTED)).mark
            callers = [
                asyncio.ensure_future(store.news(queue, mark, LONG)),
                asyncio.ensure_future(store.finished(queue, "j", LONG)),
                *(asyncio.ensure_future(store.add(queue, [NewJob(f"{at}", b"1")])) for at in range(3)),
            ]
            await turns(count)
            for task in asyncio.all_tasks() - {asyncio.current_task(), *callers}:
                task.cancel()
            await turns(3)
            await works(store, queue)
            for caller in callers:
                caller.cancel()
            await asyncio.wait(callers, timeout=LONG)
            assert all(caller.done() for caller in callers)


@pytest.mark.timeout(120)
async def test_a_store_that_is_closed_tells_whoever_still_waits(remote: Backend) -> None:
    for count in (*range(8), 12, 20):
        async with opened(remote) as store:
            queue = queue_name()
            adds = [asyncio.ensure_future(store.add(queue, [NewJob(f"{at}", b"1")])) for at in range(3)]
            await turns(count)
        done, waiting = await asyncio.wait(adds, timeout=LONG)
        await store.aclose()  # what was begun after it was closed
        assert not waiting, count
        assert all(one.exception() is None or isinstance(one.exception(), ConquietError) for one in done)


def _in_a_loop(work: Callable[[], Awaitable[None]]) -> None:
    async def run() -> None:
        await work()

    asyncio.run(run())


def test_a_store_serves_one_loop_after_the_other(remote: Backend) -> None:
    """Also if the first was left in the middle of everything."""
    store, queue = remote.make("core", ManualClock()), queue_name()

    async def leave() -> None:
        for one in busy(store, queue):
            asyncio.ensure_future(one)  # noqa: RUF006 - cancelled with the loop
        await turns(3)

    async def use() -> None:
        await works(store, queue)
        await store.aclose()

    _in_a_loop(leave)
    _in_a_loop(use)


async def test_a_child_may_be_forked_in_the_middle_of_everything(remote: Backend) -> None:
    async with opened(remote) as store:
        queue = queue_name()
        tasks = [asyncio.ensure_future(one) for one in busy(store, queue)]
        await turns(3)
        child = os.fork()
        if child == 0:
            # On a thread: here the parent's loop would go on, with the parent's sockets.
            with ThreadPoolExecutor() as thread:
                done = thread.submit(_in_a_loop, lambda: works(store, queue_name()))
                if (error := done.exception()) is not None:
                    traceback.print_exception(error)
                os._exit(0 if error is None else 1)
        await works(store, queue_name())
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        _, status = await asyncio.to_thread(os.waitpid, child, 0)
        assert os.waitstatus_to_exitcode(status) == 0
