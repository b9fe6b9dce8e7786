"""Which workers look for a new job in PostgreSQL: a notice reaches all, but few claim, and the job waits for none."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from typing import Any, Final

import pytest

from conquiet import PostgresStore
from conquiet.jobs.job import NewJob, Settlement
from conquiet.jobs.store import Claimed, Wanted
from conquiet.jobs.stores.postgres.turns import Turns
from conquiet.kit.clock import ManualClock
from tests.contracts.jobs_flavours import Recorder
from tests.jobs.test_worker_idle import happens
from tests.jobs.working import queue_in, working
from tests.rigs.postgres import LocalPostgres
from tests.rigs.waiting import LONG, eventually

pytest_plugins = ["tests.jobs.postgres_fixtures"]

WORKERS: Final = 30
JOBS: Final = 5
SHORT: Final = 0.5
"""Seconds in which too much would have happened; what is right has no need of them."""


class Counting(PostgresStore):
    """A store that counts claims."""

    claims = 0

    async def claim(self, queue: str, wanted: Wanted) -> Claimed:
        self.claims += 1
        return await super().claim(queue, wanted)


@pytest.fixture
async def stack() -> AsyncIterator[AsyncExitStack]:
    async with AsyncExitStack() as stack:
        yield stack


async def stores(stack: AsyncExitStack, pg: LocalPostgres, count: int, **options: Any) -> list[Counting]:
    """As many processes would have them."""
    made = [Counting(pg.dsn, pool_size=1, **options) for _ in range(count)]
    for store in made:
        await stack.enter_async_context(store)
    return made


async def all_wait(made: list[Counting], clock: ManualClock, workers: int = 1) -> None:
    """All have counted each other, and wait for jobs."""

    def counted() -> bool:
        clock.advance(31)  # they count each other again, and look once more
        return all(store._listener._mine.turns.listeners == len(made) for store in made)

    await eventually(counted, "all know how many listen")
    await eventually(lambda: all(waiting(store) == workers for store in made), "all wait")


def waiting(store: PostgresStore) -> int:
    events = [event for waiters in store._listener._mine.waiters.values() for event in waiters]
    return sum(not event.is_set() for event in events)


@pytest.mark.parametrize("concurrency", [1, 10])
@pytest.mark.usefixtures("pg_store")
async def test_with_thirty_idle_processes_a_job_costs_few_claims(
    pg: LocalPostgres, schema: str, pg_clock: ManualClock, stack: AsyncExitStack, concurrency: int
) -> None:
    """One looks, and as many more as have their turn before they hear of it; and it looks again when it is done."""
    outside = queue_in(await stack.enter_async_context(PostgresStore(pg.dsn, schema=schema, clock=pg_clock)))
    made, seen = await stores(stack, pg, WORKERS, schema=schema, clock=pg_clock), Recorder()
    for store in made:
        queue = queue_in(store, name=outside.name)
        await stack.enter_async_context(working(queue, seen, concurrency=concurrency))
    await all_wait(made, pg_clock)
    before = sum(store.claims for store in made)
    for number in range(JOBS):
        await outside.enqueue(number)
        await seen.saw(number + 1)
        await eventually(lambda: all(map(waiting, made)), "all wait again")
    most = before + 6 * JOBS
    assert not await happens(lambda: sum(store.claims for store in made) > most, SHORT)


@pytest.mark.usefixtures("pg_store")
async def test_of_thirty_workers_in_one_process_as_many_look_as_there_are_jobs(
    pg: LocalPostgres, schema: str, pg_clock: ManualClock, stack: AsyncExitStack
) -> None:
    [store], seen = await stores(stack, pg, 1, schema=schema, clock=pg_clock), Recorder()
    queue = queue_in(store)
    for _ in range(WORKERS):
        await stack.enter_async_context(working(queue, seen, concurrency=10))
    await all_wait([store], pg_clock, WORKERS)
    for number in range(JOBS):
        before = store.claims
        await queue.enqueue(number)
        await seen.saw(number + 1)
        assert not await happens(lambda before=before: store.claims > before + 2, SHORT)  # type: ignore[misc]
        await eventually(lambda: waiting(store) == WORKERS, "all wait again")


def new(*ids: str) -> list[NewJob]:
    return [NewJob(id, b"1") for id in ids]


async def idle(store: PostgresStore) -> asyncio.Task[None]:
    """Somebody who has claimed in vain and waits for news."""
    claimed = await store.claim("q", Wanted(10, "w", 30_000, 3))
    assert claimed.jobs == []
    before = waiting(store)
    task = asyncio.create_task(store.news("q", claimed.mark, LONG))
    await eventually(lambda: task.done() or waiting(store) > before, "it waits")
    return task


async def listening(store: PostgresStore) -> None:
    await store.news("q", "", LONG)


async def test_if_the_one_that_is_woken_does_not_claim_all_others_are_woken(pg_store: PostgresStore) -> None:
    await listening(pg_store)
    tasks = [await idle(pg_store) for _ in range(5)]
    await pg_store.add("q", new("a"))
    async with asyncio.timeout(4):
        await asyncio.gather(*tasks)


async def test_what_is_given_back_is_told_like_a_new_job(pg_store: PostgresStore) -> None:
    await listening(pg_store)
    await pg_store.add("q", new("a", "b"))
    jobs = (await pg_store.claim("q", Wanted(10, "w", 30_000, 3))).jobs
    waits = await idle(pg_store)
    await pg_store.settle("q", [Settlement.of(job, "release") for job in jobs])
    await asyncio.wait_for(waits, 4)


@pytest.mark.parametrize(
    "ids", [[f"{'x' * 100}{at}" for at in range(20)], [str(at) for at in range(300)], ['"\\\x01é€']]
)
async def test_jobs_of_any_number_and_name_are_told(pg_store: PostgresStore, ids: list[str]) -> None:
    """A notice that is too long would fail the transaction."""
    await listening(pg_store)
    waits = await idle(pg_store)
    await pg_store.add("q", new(*ids))
    await asyncio.wait_for(waits, 4)
    claimed = await pg_store.claim("q", Wanted(1000, "w", 30_000, 3))
    assert sorted(job.id for job in claimed.jobs) == sorted(ids)


# --- whose turn it is ---------------------------------------------------------------------------------------------


class Fleet:
    """The turns of several processes, and which of them have woken how many."""

    def __init__(self, size: int) -> None:
        self.woken: list[int] = []
        self.turns = [Turns(self._waker(number)) for number in range(size)]
        for number, turns in enumerate(self.turns):
            turns.stand(number, range(size))

    def _waker(self, number: int) -> Callable[[str, int | None], int]:
        def wake(queue: str, count: int | None) -> int:
            self.woken.append(number)
            return 1

        return wake


async def test_one_looks_at_once_and_the_others_one_after_the_other_unless_it_is_taken() -> None:
    fleet = Fleet(8)
    for turns in fleet.turns:
        turns.heard("q", ["a"])
    assert len(fleet.woken) == 1
    await eventually(lambda: sorted(set(fleet.woken)) == list(range(8)), "each has had its turn")


async def test_who_hears_that_a_job_is_taken_looks_no_more() -> None:
    fleet = Fleet(8)
    for turns in fleet.turns:
        turns.heard("q", ["a"])
    [first] = fleet.woken
    assert [turns.claims("q") for turns in fleet.turns] == [True] * 8, "what they take now would be told"
    for turns in fleet.turns:
        turns.taken("q", ["a"])
    others = Fleet(8)
    for turns in others.turns:
        turns.heard("q", ["a"])
    await eventually(lambda: set(others.woken) == set(range(8)), "those who hear of no other have had their turns")
    assert set(fleet.woken) == {first}
    assert [turns.claims("q") for turns in fleet.turns] == [False] * 8


async def test_what_is_taken_does_not_hide_another_job() -> None:
    fleet = Fleet(2)
    for turns in fleet.turns:
        turns.heard("q", ["a"])
        turns.heard("q", ["b"])
        turns.taken("q", ["a"])
    await eventually(lambda: sorted(set(fleet.woken)) == [0, 1], "both look for the other")
