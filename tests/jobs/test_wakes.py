"""Whom a new job wakes in Redis: one who waits for it, and another if that one does not come for it."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import pytest

from conquiet import RedisStore
from conquiet.kit.clock import ManualClock
from conquiet.wire.keys import JobKeys
from tests.contracts.jobs_flavours import Recorder
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
from tests.jobs.working import Gate, queue_in, working
from tests.rigs.asking import ask, nodes_of
from tests.rigs.proxy import Proxy
from tests.rigs.waiting import eventually

__all__ = ["another", "namespace", "patient", "stack"]

pytestmark = pytest.mark.any_server

# --- one job, one worker ------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("delay", [0.0, 3600.0])
async def test_a_job_costs_two_claims_with_thirty_idle_workers(url: str, delay: float, stack: AsyncExitStack) -> None:
    workers, jobs, seen = 30, 5, Recorder()
    proxy = await stack.enter_async_context(Proxy(url))
    outside = queue_in(await stack.enter_async_context(RedisStore(url)))
    clock = ManualClock()  # nobody looks without being told
    for _ in range(workers):
        store = await stack.enter_async_context(RedisStore(proxy.url, clock=clock))
        await stack.enter_async_context(working(queue_in(store, name=outside.name), seen, concurrency=1))
    key = JobKeys(outside.name).idle
    for number in range(jobs):
        await eventually(lambda: _count_is(url, key, workers), "all wait")
        most = proxy.count(CLAIM) + 2
        await outside.enqueue(number, delay=delay)
        if not delay:
            await seen.saw(number + 1)
        assert not await happens(lambda most=most: proxy.count(CLAIM) > most, SHORT)  # type: ignore[misc]


async def _count_is(url: str, key: str, count: int) -> bool:
    return bool(await ask(url, "ZCARD", key) == count)


@pytest.mark.cluster_too
@pytest.mark.usefixtures("patient")
async def test_one_of_many_is_told_of_a_job_and_as_many_as_there_are_jobs(another: Make) -> None:
    waiting = [await idle(await another()) for _ in range(5)]
    outside = await another()
    await outside.add(QUEUE, new("a"))
    await told(waiting[-1])
    assert not await happens(lambda: any(one.done() for one in waiting[:-1]), SHORT)
    await outside.add(QUEUE, new("b", "c", "d"))
    await told(*waiting[1:])
    assert not waiting[0].done()
    await end(waiting[0])


@pytest.mark.cluster_too
@pytest.mark.usefixtures("patient")
async def test_of_those_who_wait_at_one_store_as_many_are_told_as_there_are_jobs(another: Make) -> None:
    store, outside = await another(), await another()
    waiting = [await idle(store) for _ in range(4)]
    await outside.add(QUEUE, new("a"))
    await eventually(lambda: any(one.done() for one in waiting), "one is told")
    await claim(store, waits=False)
    assert sum(one.done() for one in waiting) == 1
    waiting = [one for one in waiting if not one.done()]
    again = await idle(store)
    await outside.add(QUEUE, new("b", "c"))
    await eventually(lambda: sum(one.done() for one in (again, *waiting)) >= 2, "two are told")
    await claim(store, waits=False)
    assert sum(one.done() for one in (again, *waiting)) == 2
    await end(again, *waiting)


# --- what falls due -----------------------------------------------------------------------------------------------


async def test_one_of_those_who_wait_looks_when_something_falls_due(another: Make) -> None:
    first, second, outside = await another(), await another(), await another()
    await outside.add(QUEUE, new("later", delay_ms=60_000))
    claimed = await claim(first)
    assert claimed.next_ms is not None
    waiting = asyncio.create_task(first.news(QUEUE, claimed.mark, 600))
    await eventually(lambda: listeners(first) == 1, "it waits")
    other = await claim(second)
    assert other.next_ms is None, "somebody else looks then"
    watching = asyncio.create_task(second.news(QUEUE, other.mark, 600))
    await eventually(lambda: listeners(second) == 1, "it waits")
    await end(waiting)
    await told(watching)
    assert (await claim(second)).next_ms is not None, "now it has to"


async def test_all_who_wait_look_when_a_lease_runs_out(another: Make) -> None:
    """The owner waits as well, for more, and is the last one to be relied on: it may be dead by then."""
    owner, other, outside = await another(), await another(), await another()
    await outside.add(QUEUE, new("a"))
    mine = await claim(owner)
    assert [job.id for job in mine.jobs] == ["a"]
    found = await claim(other)
    assert found.jobs == []
    assert found.next_ms is not None, "it would hear of the lease's end at its next look only"


async def test_something_that_falls_due_earlier_is_looked_at_earlier(another: Make) -> None:
    first, second, outside = await another(), await another(), await another()
    await outside.add(QUEUE, new("later", delay_ms=60_000))
    early, late = await idle(first), await idle(second)
    await outside.add(QUEUE, new("sooner", delay_ms=30_000))
    await told(late)
    found = (await claim(second)).next_ms
    assert found is not None
    assert found <= 30_000
    await end(early)


async def test_a_worker_that_is_full_hands_on_when_to_look(another: Make) -> None:
    first, second, outside = await another(), await another(), await another()
    await outside.add(QUEUE, new("later", delay_ms=60_000))
    other = await idle(second)
    mine = await idle(first)
    claimed = await claim(second)  # it looks, the other does not
    assert claimed.next_ms is not None
    await end(other)
    await outside.add(QUEUE, new("now"))
    assert len((await claim(second, 1)).jobs) == 1
    await told(mine)
    assert (await claim(first)).next_ms is not None


# --- many queues --------------------------------------------------------------------------------------------------


@pytest.mark.cluster_too
async def test_twenty_queues_wait_on_one_connection_or_on_eight_of_a_cluster_node(url: str) -> None:
    async with RedisStore(url) as store, RedisStore(url) as outside, AsyncExitStack() as stack:
        seen, queues = Recorder(), [queue_in(store) for _ in range(20)]
        for queue in queues:
            await stack.enter_async_context(working(queue, seen))
        await eventually(lambda: listeners(store) == 20, "all wait")
        most = 8 if len(nodes_of(url)) > 1 else 1

        async def are_too_many() -> bool:
            counts = [(await ask(node, "INFO", "clients"))["blocked_clients"] for node in nodes_of(url)]
            return bool(max(counts) > most)

        for _ in range(30):  # each look is some round trips: none may be cut off by a time-out
            assert not await are_too_many()
        for queue in queues:
            await queue_in(outside, name=queue.name).enqueue(1)
        await seen.saw(20)


async def test_workers_share_one_clone_for_their_heartbeats_and_the_last_closes_it(url: str) -> None:
    async with RedisStore(url) as store, AsyncExitStack() as stack:
        gate = Gate()
        for _ in range(3):
            await stack.enter_async_context(working(queue_in(store), gate))
        await eventually(lambda: store.heartbeats._users == 3, "all have it")
        clone = store.heartbeats._store
        assert isinstance(clone, RedisStore)
        await stack.aclose()
        assert (store.heartbeats._users, store.heartbeats._store) == (0, None)
        assert clone._link._closed


def test_a_forked_child_has_a_name_and_a_clone_of_its_own(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    store = RedisStore(url)
    name, (clone, _) = store._name(), store.heartbeats.borrow()
    assert store._name() == name
    assert store.heartbeats.borrow()[0] is clone
    monkeypatch.setattr("conquiet.jobs.stores.redis.forks", lambda: 99)
    monkeypatch.setattr("conquiet.jobs.heartbeat_store.forks", lambda: 99)
    assert store._name() != name
    assert store.heartbeats.borrow()[0] is not clone
    assert store.heartbeats._users == 1
