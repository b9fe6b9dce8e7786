"""Whom a new job wakes in Redis: one who waits for it, and another if that one does not come for it."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, suppress
from typing import Any, Final

import pytest

from conquiet import JobQueue, JobWorker, QueueError, RedisStore
from conquiet.jobs.job import NewJob
from conquiet.jobs.store import Claimed, Wanted
from conquiet.kit.clock import ManualClock
from conquiet.wire.keys import JobKeys
from tests.contracts.jobs_flavours import Recorder, serving
from tests.jobs.test_worker_idle import CLAIM, happens
from tests.jobs.working import Gate, queue_in, working
from tests.rigs.asking import ask, nodes_of
from tests.rigs.proxy import Proxy
from tests.rigs.waiting import LONG, eventually

pytestmark = pytest.mark.any_server

QUEUE: Final = "emails"
SHORT: Final = 0.5
"""Seconds in which nothing should happen; what is right has no need of them."""


@pytest.fixture
def namespace() -> str:
    return f"t{secrets.token_hex(6)}"


@pytest.fixture
async def stack() -> AsyncIterator[AsyncExitStack]:
    async with AsyncExitStack() as stack:
        yield stack


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody is told in the place of another."""
    monkeypatch.setattr("conquiet.jobs.stores._redis_watch._SOON", LONG)


Make = Callable[..., Awaitable[RedisStore]]


@pytest.fixture
def another(url: str, namespace: str, stack: AsyncExitStack) -> Make:
    """Makes a store, as another process has it."""

    async def make(at: str = url, clock: ManualClock | None = None) -> RedisStore:
        return await stack.enter_async_context(RedisStore(at, namespace=namespace, clock=clock or ManualClock()))

    return make


def new(*ids: str, delay_ms: int = 0) -> list[NewJob]:
    return [NewJob(id, b"{}", 0, delay_ms) for id in ids]


async def claim(store: RedisStore, count: int = 10, *, waits: bool = True) -> Claimed:
    return await store.claim(QUEUE, Wanted(count, "w", 30_000, 3, waits=waits))


async def idle(store: RedisStore, count: int = 10) -> asyncio.Task[None]:
    """Somebody who has claimed in vain and waits for news."""
    claimed = await claim(store, count)
    assert claimed.jobs == []
    before = listeners(store)
    waiting = asyncio.create_task(store.news(QUEUE, claimed.mark, 600))
    await eventually(lambda: waiting.done() or listeners(store) > before, "it waits")
    return waiting


def listeners(store: RedisStore) -> int:
    return sum(len(watch._listeners) for watch in store._watches.values())


async def told(*waiting: asyncio.Task[None]) -> None:
    async with asyncio.timeout(LONG):
        await asyncio.gather(*waiting)


async def end(*waiting: asyncio.Task[None]) -> None:
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)


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


# --- nothing is lost ----------------------------------------------------------------------------------------------


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

        with pytest.raises(AssertionError):
            await eventually(are_too_many, "", SHORT)
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
