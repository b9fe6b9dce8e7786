"""The PostgreSQL store when the server, the connection or the caller gives up: spec 5, Store Unavailability."""

from __future__ import annotations

import asyncio
import multiprocessing
from collections.abc import AsyncIterator, Iterator
from typing import Any

import psycopg
import pytest

from conquiet.errors import DuplicateJobError, QueueError
from conquiet.jobs.job import JobState, NewJob, Settlement
from conquiet.jobs.store import JobRetention, Lease, Wanted
from conquiet.jobs.stores.postgres import PostgresStore
from conquiet.jobs.stores.postgres.pool import Call, Pool, Rows
from tests.rigs.postgres import LocalPostgres, schema_name
from tests.rigs.waiting import eventually

pytestmark = pytest.mark.slow

pytest_plugins = ["tests.jobs.postgres_fixtures"]

WANTED = Wanted(10, "w", 60_000, 3)


@pytest.fixture(scope="module")
def mortal() -> Iterator[LocalPostgres]:
    """A server that tests may stop."""
    with LocalPostgres() as server:
        yield server


@pytest.fixture
async def store(mortal: LocalPostgres) -> AsyncIterator[PostgresStore]:
    store = PostgresStore(mortal.dsn, schema=schema_name())
    await store.migrate()
    async with store:
        yield store


def backends(pg: LocalPostgres) -> list[int]:
    rows = pg.ask("SELECT pid FROM pg_stat_activity WHERE application_name = 'conquiet'")
    return [row[0] for row in rows]


async def busy(store: PostgresStore, count: int = 4) -> None:
    """Have it open several connections."""
    await asyncio.gather(*(store.counts("q") for _ in range(count)))


@pytest.mark.parametrize("mode", ["fast", "immediate"])
async def test_a_restart_loses_nothing_and_the_next_call_works(
    mortal: LocalPostgres, store: PostgresStore, mode: Any
) -> None:
    await store.add("q", [NewJob(str(at), b"1") for at in range(100)])
    [job, *_] = (await store.claim("q", Wanted(1, "w", 60_000, 3))).jobs
    await busy(store)
    mortal.restart(mode)
    assert await store.settle("q", [Settlement.of(job, "ack")]) == [True]
    counts = await store.counts("q")
    assert (counts[JobState.READY], counts[JobState.SUCCEEDED]) == (99, 1)


async def test_while_the_server_is_away_calls_fail_and_then_work(mortal: LocalPostgres, store: PostgresStore) -> None:
    await busy(store)
    await store.news("q", "", 5)
    mortal.stop()
    try:
        for _ in range(3):
            with pytest.raises(QueueError) as failure:
                await store.add("q", [NewJob("a", b"1")])
            assert isinstance(failure.value.__cause__, psycopg.OperationalError)
        await asyncio.wait_for(store.news("q", "", 0.01), 5)
    finally:
        mortal.start()
    await store.add("q", [NewJob("a", b"1")])
    assert [job.id for job in (await store.claim("q", WANTED)).jobs] == ["a"]


async def test_a_call_whose_connection_breaks_fails_once(pg: LocalPostgres, pg_store: PostgresStore) -> None:
    """Not sent again: whether it was done is not known."""
    await busy(pg_store, 4)
    await pg_store.add("q", [NewJob("a", b"1")])
    with psycopg.connect(pg.dsn) as blocker:
        blocker.execute(f"LOCK TABLE {pg_store._pool.schema}.jobs")
        blocked = asyncio.ensure_future(pg_store.claim("q", WANTED))
        await eventually(lambda: bool(waiting_backends(pg)), "the call waits in the server")
        for pid in waiting_backends(pg):
            pg.ask("SELECT pg_terminate_backend(%s)", pid)
        with pytest.raises(QueueError) as failure:
            await blocked
    assert isinstance(failure.value.__cause__, psycopg.OperationalError)
    [job] = (await pg_store.claim("q", WANTED)).jobs
    assert job.attempts == 1


def waiting_backends(pg: LocalPostgres) -> list[int]:
    rows = pg.ask(
        "SELECT pid FROM pg_stat_activity WHERE application_name = 'conquiet' AND wait_event_type = 'Lock'"
        " AND state = 'active'"
    )
    return [row[0] for row in rows]


async def test_a_server_that_only_reads_is_left(pg: LocalPostgres, pg_store: PostgresStore) -> None:
    """A primary that was demoted keeps its connections: they must not be used for ever."""
    await busy(pg_store, 3)
    for connection in pg_store._pool._mine.idle:
        await connection.execute("SET default_transaction_read_only = on")
    with pytest.raises(QueueError) as failure:
        await pg_store.add("q", [NewJob("a", b"1")])
    assert isinstance(failure.value.__cause__, psycopg.errors.ReadOnlySqlTransaction)
    for _ in range(3):
        await pg_store.add("q", [NewJob(f"b{_}", b"1")])


async def test_a_cancelled_call_leaves_no_connection_behind(pg: LocalPostgres, pg_store: PostgresStore) -> None:
    await pg_store.add("q", [NewJob("a", b"1")])
    with psycopg.connect(pg.dsn) as blocker:
        blocker.execute(f"LOCK TABLE {pg_store._pool.schema}.jobs")
        for _ in range(20):  # more than there are places
            blocked = asyncio.ensure_future(pg_store.claim("q", WANTED))
            await eventually(lambda: bool(waiting_backends(pg)), "the call waits in the server")
            blocked.cancel()
            with pytest.raises(asyncio.CancelledError):
                await blocked
            await eventually(lambda: not waiting_backends(pg), "the server has given up as well")
        assert pg_store._pool._mine.idle == []
    [job] = (await pg_store.claim("q", WANTED)).jobs
    assert job.attempts == 1


async def test_cancelled_at_any_moment_the_store_stays_whole(pg_store: PostgresStore) -> None:
    await pg_store.add("q", [NewJob(str(at), b"1") for at in range(300)])
    for at in range(60):
        call = asyncio.ensure_future(pg_store.claim("q", Wanted(1, "w", 60_000, 3)))
        for _ in range(at % 12):
            await asyncio.sleep(0)
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        assert await pg_store.find("q", ["0"]) != [None]
    counts = await pg_store.counts("q")
    assert counts[JobState.READY] + counts[JobState.IN_FLIGHT] == 300


async def test_calls_share_a_bounded_number_of_connections(pg: LocalPostgres, schema: str) -> None:
    store = PostgresStore(pg.dsn, schema=schema, pool_size=3)
    await store.migrate()
    before = set(backends(pg))
    adds = [store.add("q", [NewJob(f"{at}-{n}", b"1") for n in range(2)]) for at in range(25)]
    await asyncio.gather(*adds, *(store.counts("q") for _ in range(25)))
    assert len(set(backends(pg)) - before) == 3
    await store.aclose()
    await eventually(lambda: not set(backends(pg)) - before, "all are closed")
    assert (await store.counts("q"))[JobState.READY] == 50
    await store.aclose()


async def test_a_refused_statement_costs_no_connection(pg_store: PostgresStore) -> None:
    await pg_store.add("q", [NewJob("a", b"1")])
    [connection] = pg_store._pool._mine.idle
    with pytest.raises(DuplicateJobError):
        await pg_store.add("q", [NewJob("a", b"1")])
    assert pg_store._pool._mine.idle == [connection]


# --- at the same time ------------------------------------------------------------------------------------------------


async def test_renewing_and_settling_never_wait_in_a_circle(pg_store: PostgresStore) -> None:
    ids = [f"{at:03}" for at in range(200)]
    await pg_store.add("q", [NewJob(id, b"1") for id in ids])
    jobs = list((await pg_store.claim("q", Wanted(200, "w", 60_000, 3))).jobs)
    leases = [Lease.of(job) for job in jobs]
    for _ in range(5):
        renewals = [pg_store.renew("q", turned, 60_000) for turned in (leases, leases[::-1]) * 4]
        assert all(all(held) for held in await asyncio.gather(*renewals))
    settlements = [Settlement.of(job, "ack") for job in jobs]
    done = await asyncio.gather(
        *(pg_store.settle("q", turned) for turned in (settlements, settlements[::-1]) * 3),
        *(pg_store.renew("q", leases[::-1], 60_000) for _ in range(3)),
    )
    assert sum(map(sum, done[:6])) == 200


async def test_of_many_who_add_the_same_ids_one_does(pg_store: PostgresStore) -> None:
    """In whatever order each has them."""
    jobs = [NewJob(f"{at:03}", b"1") for at in range(100)]
    for turn in range(5):
        adds = [pg_store.add(f"q{turn}", given) for given in (jobs, jobs[::-1]) * 3]
        outcomes = await asyncio.gather(*adds, return_exceptions=True)
        assert outcomes.count(None) == 1
        assert all(isinstance(outcome, DuplicateJobError) for outcome in outcomes if outcome)
        assert (await pg_store.counts(f"q{turn}"))[JobState.READY] == 100


async def test_an_id_in_use_again_never_brings_old_leases_back(pg_store: PostgresStore) -> None:
    """Also where it is removed and added at the same moment."""
    tokens: list[int] = []

    async def add() -> None:
        while True:
            try:
                return await pg_store.add("q", [NewJob(f"x{len(tokens)}", b"1"), NewJob("a", b"1")])
            except DuplicateJobError:
                await asyncio.sleep(0)

    await add()
    for turn in range(40):
        jobs = (await pg_store.claim("q", WANTED)).jobs
        [job] = [job for job in jobs if job.id == "a"]
        tokens.append(job.lease_token)
        await pg_store.settle("q", [Settlement.of(job, "ack") for job in jobs])
        remove = (
            pg_store.delete("q", "a")
            if turn % 2
            else pg_store.purge("q", JobState.SUCCEEDED, JobRetention(age=None, count=0))
        )
        await asyncio.gather(add(), remove)
    assert tokens == sorted(set(tokens))


async def test_claimers_never_get_the_same_job(pg: LocalPostgres, pg_store: PostgresStore, schema: str) -> None:
    await pg_store.add("q", [NewJob(str(at), b"1", priority=at % 3) for at in range(600)])
    stores = [pg_store.clone() for _ in range(4)]

    async def drain(store: PostgresStore) -> list[str]:
        got: list[str] = []
        while jobs := (await store.claim("q", Wanted(7, "w", 60_000, 3, 1, 1))).jobs:
            got += [job.id for job in jobs]
        return got

    taken = [id for ids in await asyncio.gather(*map(drain, stores)) for id in ids]
    assert sorted(taken, key=int) == [str(at) for at in range(600)]
    for store in stores:
        await store.aclose()


# --- fork ------------------------------------------------------------------------------------------------------------


def _in_child(store: PostgresStore, pipe: Any) -> None:
    async def work() -> int:
        await store.add("q", [NewJob("child", b"1")])
        await store.news("q", "", 5)
        count = (await store.counts("q"))[JobState.READY]
        await store.aclose()
        return count

    pipe.send(asyncio.run(work()))


def test_a_forked_child_has_connections_of_its_own(pg: LocalPostgres) -> None:
    schema = schema_name()
    store = PostgresStore(pg.dsn, schema=schema)

    async def before() -> None:
        await store.migrate()
        await store.add("q", [NewJob("parent", b"1")])
        await store.news("q", "", 5)
        here, there = multiprocessing.Pipe()
        child = multiprocessing.get_context("fork").Process(target=_in_thread, args=(store, there))
        child.start()
        await eventually(lambda: here.poll(), "the child has answered")
        assert here.recv() == 2
        await asyncio.to_thread(child.join, 10)
        assert (await store.counts("q"))[JobState.READY] == 2
        [connection] = store._pool._mine.idle
        assert not connection.closed
        await store.aclose()

    asyncio.run(before())
    pg.drop(schema)


def _in_thread(store: PostgresStore, pipe: Any) -> None:
    # The child's main thread is in the middle of the parent's loop.
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(1) as thread:
        thread.submit(_in_child, store, pipe).result()


async def test_who_stands_still_between_two_statements_holds_up_nobody(
    pg_store: PostgresStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stopped process that is about to take over a lease must not keep its owner from renewing the others."""
    await pg_store.add("q", [NewJob("late", b"1"), NewJob("other", b"1")])
    jobs = (await pg_store.claim("q", Wanted(2, "owner", 1, 3))).jobs
    here, go_on = asyncio.Event(), asyncio.Event()
    rows = Pool._rows

    async def halting(self: Pool, connection: Any, call: Call) -> Rows:
        if call[0] == "promote":
            here.set()
            await go_on.wait()
        return await rows(self, connection, call)

    async def take_over() -> None:
        while not here.is_set():
            await pg_store.claim("q", Wanted(0, "heir", 60_000, 3))

    monkeypatch.setattr(Pool, "_rows", halting)
    heir = asyncio.create_task(take_over())
    await asyncio.wait_for(here.wait(), 10)
    leases = [Lease.of(job) for job in jobs]
    assert await asyncio.wait_for(pg_store.renew("q", leases, 60_000), 10) == [False, False]
    go_on.set()
    await heir


async def test_a_claim_that_the_server_has_lost_is_stale(pg: LocalPostgres, pg_store: PostgresStore) -> None:
    """A standby took over without the last commits: the job is as it was before the first claim."""
    await pg_store.add("q", [NewJob("a", b"1")])
    [before] = pg.ask(f"SELECT state, attempts, token FROM {pg_store._pool.schema}.jobs")
    [lost] = (await pg_store.claim("q", WANTED)).jobs
    pg.ask(
        f"UPDATE {pg_store._pool.schema}.jobs SET state = %s, attempts = %s, token = %s, lease_ms = NULL,"
        " worker = NULL, claimed_ms = NULL, claim_id = NULL",
        *before,
    )
    [job] = (await pg_store.claim("q", WANTED)).jobs
    assert job.lease_token >= lost.lease_token
    assert await pg_store.settle("q", [Settlement.of(lost, "ack")]) == [False]
    assert await pg_store.renew("q", [Lease.of(lost)], 5_000) == [False]
    assert await pg_store.settle("q", [Settlement.of(job, "ack")]) == [True]
