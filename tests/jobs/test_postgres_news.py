"""Waiting on PostgreSQL: one connection listens for all, and nobody relies on it alone."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from conquiet.jobs.job import JobState, NewJob, Settlement
from conquiet.jobs.store import Wanted
from conquiet.jobs.stores.postgres import PostgresStore
from conquiet.kit.clock import ManualClock
from tests.rigs.postgres import LocalPostgres
from tests.rigs.waiting import LONG, eventually

pytestmark = pytest.mark.slow

pytest_plugins = ["tests.jobs.postgres_fixtures"]

AGES = 100_000.0
"""Seconds that no test lives through."""
PATIENCE = 5.0
WANTED = Wanted(10, "w", 5_000, 3)


def waiters(store: PostgresStore) -> dict[Any, Any]:
    return store._listener._mine.waiters


async def listening(store: PostgresStore) -> str:
    """Have the store listen; a mark from then on."""
    await store.news("q", "", LONG)
    mark = (await store.claim("q", WANTED)).mark
    assert mark
    return mark


async def begun(store: PostgresStore, work: Any, count: int = 1) -> asyncio.Task[Any]:
    task: asyncio.Task[Any] = asyncio.ensure_future(work)
    await eventually(lambda: sum(map(len, waiters(store).values())) >= count, "it waits")
    return task


def listeners(pg: LocalPostgres, schema: str) -> list[int]:
    rows = pg.ask("SELECT pid FROM pg_stat_activity WHERE query = %s", f'LISTEN "{schema}"')
    return [row[0] for row in rows]


async def test_an_added_job_is_news_to_other_stores(pg_store: PostgresStore) -> None:
    other = pg_store.clone()
    mark = await listening(pg_store)
    waiting = await begun(pg_store, pg_store.news("q", mark, 4.5))
    await other.add("elsewhere", [NewJob("a", b"1")])
    await other.add("q", [NewJob("a", b"1")])
    await asyncio.wait_for(waiting, 4)
    assert (await pg_store.claim("q", WANTED)).jobs
    await other.aclose()


async def test_what_came_before_the_wait_is_news_at_once(pg_store: PostgresStore) -> None:
    mark = await listening(pg_store)
    await pg_store.add("q", [NewJob("a", b"1")])
    await eventually(lambda: pg_store._listener.mark("q") != mark, "the notice has come")
    await asyncio.wait_for(pg_store.news("q", mark, AGES), 4)


@pytest.mark.parametrize("how", ["release", "retry", "replay", "expire"])
async def test_what_becomes_claimable_is_news(pg_store: PostgresStore, pg_clock: ManualClock, how: Any) -> None:
    await pg_store.add("q", [NewJob("a", b"1")])
    await listening(pg_store)
    [job] = [found for found in await pg_store.find("q", ["a"]) if found]
    if how == "replay":
        await pg_store.cancel("q", "a")
    mark = (await pg_store.claim("q", Wanted(0, "w", 5_000, 3))).mark
    waiting = await begun(pg_store, pg_store.news("q", mark, AGES))
    if how == "replay":
        await pg_store.replay("q", "a")
    elif how == "expire":
        waiting.cancel()
        pg_clock.advance(6)
        mark = pg_store._listener.mark("q")
        waiting = await begun(pg_store, pg_store.news("q", mark, AGES), 1)
        other = pg_store.clone()
        assert [gone.job_id for gone in (await other.claim("q", Wanted(0, "w", 5_000, 3))).expired] == ["a"]
        await other.aclose()
    else:
        await pg_store.settle("q", [Settlement.of(job, how)])
    await asyncio.wait_for(waiting, 4)


async def test_success_is_no_news(pg: LocalPostgres, pg_store: PostgresStore) -> None:
    """Draining a queue notifies nobody: a commit that does waits for all others that do."""
    await pg_store.add("q", [NewJob("a", b"1")])
    [job] = (await pg_store.claim("q", WANTED)).jobs
    mark = await listening(pg_store)
    await pg_store.settle("q", [Settlement.of(job, "ack")])
    await pg_store.add("other", [NewJob("b", b"1")])
    await eventually(lambda: pg_store._listener._mine.news["other"] == 1, "a later notice has come")
    assert pg_store._listener.mark("q") == mark


async def test_a_silent_channel_is_not_relied_on(pg_store: PostgresStore, pg_clock: ManualClock) -> None:
    mark = await listening(pg_store)
    waiting = await begun(pg_store, pg_store.news("q", mark, AGES))
    pg_clock.advance(PATIENCE + 1)
    await asyncio.wait_for(waiting, LONG)


async def test_one_connection_listens_for_all(pg: LocalPostgres, pg_store: PostgresStore, schema: str) -> None:
    mark = await listening(pg_store)
    tasks = [asyncio.ensure_future(pg_store.news("q", mark, AGES)) for _ in range(50)]
    tasks += [asyncio.ensure_future(pg_store.news(f"q{at}", mark, AGES)) for at in range(50)]
    await eventually(lambda: len(waiters(pg_store)) == 51, "all wait")
    assert len(listeners(pg, schema)) == 1
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert waiters(pg_store) == {}
    await pg_store.aclose()
    await eventually(lambda: not listeners(pg, schema), "it has hung up")


async def test_a_lost_connection_is_news_and_replaced(
    pg: LocalPostgres, pg_store: PostgresStore, pg_clock: ManualClock, schema: str
) -> None:
    mark = await listening(pg_store)
    waiting = await begun(pg_store, pg_store.news("q", mark, AGES))
    [pid] = listeners(pg, schema)
    pg.ask("SELECT pg_terminate_backend(%s)", pid)
    await asyncio.wait_for(waiting, 4)

    async def again() -> bool:
        pg_clock.advance(1)
        await asyncio.sleep(0)
        return bool(listeners(pg, schema)) and listeners(pg, schema) != [pid]

    await eventually(again, "it listens again")
    fresh = await listening(pg_store)
    assert fresh != mark
    waiting = await begun(pg_store, pg_store.news("q", fresh, AGES))
    await pg_store.add("q", [NewJob("a", b"1")])
    await asyncio.wait_for(waiting, 4)


async def test_notices_of_others_do_no_harm(pg: LocalPostgres, pg_store: PostgresStore, schema: str) -> None:
    mark = await listening(pg_store)
    for payload in ("", "text", "7", "{}", '[["q"]]', "[1, [2], {}]", "[]", "null"):
        pg.ask("SELECT pg_notify(%s, %s)", schema, payload)
    waiting = await begun(pg_store, pg_store.news("q", mark, AGES))
    await pg_store.add("q", [NewJob("a", b"1")])
    await asyncio.wait_for(waiting, 4)


# --- the end of a job ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("end", ["ack", "fail", "cancel", "exhaust"])
async def test_the_end_of_a_job_is_told(pg_store: PostgresStore, pg_clock: ManualClock, end: Any) -> None:
    other = pg_store.clone()
    await pg_store.add("q", [NewJob("a", b"1", max_retries=0), NewJob("b", b"2")])
    [job, _] = (await pg_store.claim("q", WANTED)).jobs
    if end == "exhaust":
        pg_clock.advance(6)
    waiting = await begun(pg_store, pg_store.finished("q", "a", AGES))
    await eventually(lambda: pg_store._listener._mine.is_listening, "it listens")
    if end == "cancel":
        await other.cancel("q", "a")
    elif end == "exhaust":
        await other.claim("q", Wanted(0, "w", 5_000, 0))
    else:
        await other.settle("q", [Settlement.of(job, end, error="no", result=b"7")])
    found = await asyncio.wait_for(waiting, 4)
    assert found is not None
    assert found.state is (JobState.SUCCEEDED if end == "ack" else JobState.FAILED)
    assert waiters(pg_store) == {}
    await other.aclose()


async def test_to_wait_for_a_job_is_news_as_long_as_it_is_ready(pg_store: PostgresStore) -> None:
    """A claim at that very moment may have passed over it."""
    await pg_store.add("q", [NewJob("a", b"1")])
    await pg_store.news("q", "", LONG)
    mark = (await pg_store.claim("q", Wanted(0, "w", 5_000, 3))).mark
    waiting = await begun(pg_store, pg_store.news("q", mark, AGES))
    assert await pg_store.finished("q", "a", 0) is None
    await asyncio.wait_for(waiting, 4)


async def test_only_whoever_waits_for_a_job_is_told(pg_store: PostgresStore) -> None:
    await pg_store.add("q", [NewJob("a", b"1"), NewJob("b", b"2")])
    jobs = (await pg_store.claim("q", WANTED)).jobs
    tasks = [asyncio.ensure_future(pg_store.finished("q", id, AGES)) for id in "ab"]
    await eventually(lambda: len(waiters(pg_store)) == 2, "both wait")
    await pg_store.settle("q", [Settlement.of(jobs[0], "ack")])
    assert await asyncio.wait_for(tasks[0], 4)
    assert not tasks[1].done()
    tasks[1].cancel()
    await asyncio.gather(tasks[1], return_exceptions=True)
    assert waiters(pg_store) == {}


async def test_waiting_for_an_end_ends(pg_store: PostgresStore, pg_clock: ManualClock) -> None:
    assert await pg_store.finished("q", "none", AGES) is None
    await pg_store.add("q", [NewJob("a", b"1")])
    assert await pg_store.finished("q", "a", 0) is None
    waiting = await begun(pg_store, pg_store.finished("q", "a", 30.0))

    async def over() -> bool:
        pg_clock.advance(1)
        await asyncio.sleep(0)
        return waiting.done()

    await eventually(over, "its time is up")
    assert waiting.result() is None
