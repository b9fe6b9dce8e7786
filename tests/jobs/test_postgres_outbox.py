"""Jobs that are added in a transaction of the caller's: there when it commits, and not otherwise."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator
from typing import Any

import psycopg
import pytest
from psycopg.rows import dict_row

from conquiet.errors import ConfigError, DuplicateJobError, QueueError
from conquiet.jobs.job import JobState, NewJob, Settlement
from conquiet.jobs.store import Wanted
from conquiet.jobs.stores.postgres import PostgresStore
from tests.rigs.postgres import LocalPostgres

pytestmark = pytest.mark.slow

pytest_plugins = ["tests.jobs.postgres_fixtures"]

JOBS = [NewJob("a", b"1"), NewJob("b", b"2", priority=5)]
WANTED = Wanted(10, "w", 5_000, 3)


@pytest.fixture(params=["async", "plain"])
async def caller(request: pytest.FixtureRequest, pg: LocalPostgres) -> AsyncIterator[Any]:
    """A connection of the caller's, of either kind, with rows that are no tuples; ``execute`` is awaited."""
    if request.param == "async":
        async with await psycopg.AsyncConnection.connect(pg.dsn, row_factory=dict_row) as connection:
            yield _Either(connection)
    else:
        with psycopg.connect(pg.dsn, row_factory=dict_row) as plain:
            yield _Either(plain)


class _Either:
    def __init__(self, connection: Any) -> None:
        self.connection = connection

    async def __call__(self, name: str, *args: Any) -> Any:
        done = getattr(self.connection, name)(*args)
        return await done if asyncio.iscoroutine(done) else done


async def ready(store: PostgresStore) -> int:
    return (await store.counts("q"))[JobState.READY]


async def test_jobs_are_there_when_the_caller_commits(pg_store: PostgresStore, caller: _Either) -> None:
    await pg_store.add("q", JOBS, caller.connection)
    assert await ready(pg_store) == 0
    assert (await pg_store.claim("q", WANTED)).jobs == []
    await caller("commit")
    assert [job.id for job in (await pg_store.claim("q", WANTED)).jobs] == ["b", "a"]


async def test_jobs_go_with_what_the_caller_rolls_back(pg_store: PostgresStore, caller: _Either, schema: str) -> None:
    await caller("execute", f"CREATE TABLE {schema}.orders (id text)")
    await pg_store.add("q", JOBS, caller.connection)
    await caller("rollback")
    assert await ready(pg_store) == 0
    await pg_store.add("q", JOBS)


async def test_a_duplicate_leaves_the_transaction_as_it_was(
    pg: LocalPostgres, pg_store: PostgresStore, caller: _Either, schema: str
) -> None:
    await pg_store.add("q", [NewJob("b", b"0")])
    await caller("execute", f"CREATE TABLE {schema}.orders (id text)")
    await caller("execute", f"INSERT INTO {schema}.orders VALUES ('first')")
    with pytest.raises(DuplicateJobError) as refusal:
        await pg_store.add("q", JOBS, caller.connection)
    assert refusal.value.job_ids == ("b",)
    await pg_store.add("q", [NewJob("c", b"3")], caller.connection)
    await caller("commit")
    assert pg.ask(f"SELECT id FROM {schema}.orders") == [("first",)]
    assert [job and job.id for job in await pg_store.find("q", ["a", "b", "c"])] == [None, "b", "c"]


async def test_ids_given_twice_are_refused_at_once(pg_store: PostgresStore, caller: _Either) -> None:
    with pytest.raises(DuplicateJobError) as refusal:
        await pg_store.add("q", [*JOBS, NewJob("a", b"1")], caller.connection)
    assert refusal.value.job_ids == ("a",)
    assert caller.connection.info.transaction_status == psycopg.pq.TransactionStatus.IDLE


async def test_a_connection_that_commits_by_itself_does(
    pg: LocalPostgres, pg_store: PostgresStore, caller: _Either
) -> None:
    await caller("set_autocommit", True)
    await pg_store.add("q", JOBS, caller.connection)
    assert await ready(pg_store) == 2
    with pytest.raises(DuplicateJobError):
        await pg_store.add("q", [NewJob("c", b"3"), *JOBS], caller.connection)
    assert await ready(pg_store) == 2


async def test_an_open_block_on_a_connection_that_commits_by_itself(pg: LocalPostgres, pg_store: PostgresStore) -> None:
    async with await psycopg.AsyncConnection.connect(pg.dsn, autocommit=True) as connection:
        async with connection.transaction(force_rollback=True):
            await pg_store.add("q", JOBS, connection)
        assert await ready(pg_store) == 0
        async with connection.transaction():
            await pg_store.add("q", JOBS, connection)
        assert await ready(pg_store) == 2


async def test_workers_are_told_at_the_commit(pg_store: PostgresStore, caller: _Either) -> None:
    await pg_store.news("q", "", 5)
    mark = (await pg_store.claim("q", WANTED)).mark
    waiting = asyncio.ensure_future(pg_store.news("q", mark, 3_600))
    await pg_store.add("q", JOBS, caller.connection)
    done, _ = await asyncio.wait([waiting], timeout=0.2)
    assert not done
    await caller("commit")
    await asyncio.wait_for(waiting, 4)  # sooner than it would look by itself


async def test_a_transaction_that_has_failed_stays_the_callers(pg_store: PostgresStore, caller: _Either) -> None:
    with pytest.raises(psycopg.Error):
        await caller("execute", "SELECT 1 / 0")
    with pytest.raises(QueueError) as failure:
        await pg_store.add("q", JOBS, caller.connection)
    assert isinstance(failure.value.__cause__, psycopg.errors.InFailedSqlTransaction)
    await caller("rollback")
    await pg_store.add("q", JOBS, caller.connection)
    await caller("commit")
    assert await ready(pg_store) == 2


async def test_a_closed_connection_is_a_queue_error(pg_store: PostgresStore, caller: _Either) -> None:
    await caller("close")
    with pytest.raises(QueueError):
        await pg_store.add("q", JOBS, caller.connection)


@pytest.mark.parametrize("connection", [object(), "postgresql://x", 7, sqlite3.connect])
async def test_other_connections_are_refused(pg_store: PostgresStore, connection: Any) -> None:
    with pytest.raises(ConfigError, match=r"connection must be a psycopg\.AsyncConnection or a psycopg\.Connection"):
        await pg_store.add("q", JOBS, connection)
    assert await ready(pg_store) == 0


async def test_in_a_transaction_that_sees_one_moment_a_former_jobs_lease_stays_stale(
    pg_store: PostgresStore, pg: LocalPostgres
) -> None:
    """The caller's transaction does not see that the former job was removed, and yet takes its ID."""
    await pg_store.add("q", [NewJob("a", b"1")])
    [former] = (await pg_store.claim("q", WANTED)).jobs
    await pg_store.settle("q", [Settlement.of(former, "fail")])
    async with await psycopg.AsyncConnection.connect(pg.dsn) as connection:
        await connection.set_isolation_level(psycopg.IsolationLevel.REPEATABLE_READ)
        await connection.execute("SELECT 1")
        await pg_store.delete("q", "a")
        await pg_store.add("q", [NewJob("a", b"2")], connection)
        await connection.commit()
    [job] = (await pg_store.claim("q", WANTED)).jobs
    assert job.payload == 2
    assert job.lease_token > former.lease_token
    assert await pg_store.settle("q", [Settlement.of(former, "ack")]) == [False]
