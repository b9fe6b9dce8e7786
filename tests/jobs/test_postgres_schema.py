"""The schema of the PostgreSQL store, and what is refused before anything is done: spec 5, Durability."""

from __future__ import annotations

import asyncio
import pickle
import subprocess
import sys
from typing import Any

import psycopg
import pytest

from conquiet.errors import ConfigError, QueueError
from conquiet.jobs.job import JobState, NewJob, Settlement
from conquiet.jobs.store import JobRetention, Lease, Wanted
from conquiet.jobs.stores.postgres import PostgresStore
from conquiet.kit.clock import ManualClock
from tests.rigs.postgres import LocalPostgres, schema_name

pytestmark = pytest.mark.slow

pytest_plugins = ["tests.jobs.postgres_fixtures"]

JOB = NewJob("a", b"1")
WANTED = Wanted(10, "w", 5_000, 3)
LATEST = 2
"""The version of the tables that this library makes."""


async def test_migrate_gives_the_version_and_may_be_repeated(pg: LocalPostgres, schema: str) -> None:
    store = PostgresStore(pg.dsn, schema=schema)
    assert await store.migrate() == LATEST
    await store.add("q", [JOB])
    assert await store.migrate() == LATEST
    assert (await store.counts("q"))[JobState.READY] == 1
    await store.aclose()


async def test_many_may_migrate_at_once(pg: LocalPostgres, schema: str) -> None:
    stores = [PostgresStore(pg.dsn, schema=schema) for _ in range(8)]
    assert await asyncio.gather(*(store.migrate() for store in stores)) == [LATEST] * 8
    assert pg.ask(f"SELECT count(*) FROM {schema}.migrations") == [(LATEST,)]


async def test_what_migrate_does_can_be_applied_by_hand(pg: LocalPostgres, schema: str) -> None:
    store = PostgresStore(pg.dsn, schema=schema)
    with psycopg.connect(pg.dsn, autocommit=True) as connection:
        connection.execute(store.sql().encode())
    async with store:
        await store.add("q", [JOB])
        assert await store.migrate() == LATEST
    assert "CREATE TABLE" not in store.sql(since=1)


async def test_a_schema_that_somebody_made_is_used(pg: LocalPostgres, schema: str) -> None:
    """Also by a user who may not make schemas."""
    user = f"u_{schema}"
    pg.ask(f"CREATE ROLE {user} LOGIN")
    pg.ask(f"CREATE SCHEMA {schema} AUTHORIZATION {user}")
    store = PostgresStore(pg.dsn.replace("postgres@", f"{user}@"), schema=schema)
    assert await store.migrate() == LATEST
    async with store:
        await store.add("q", [JOB])
    pg.drop(schema)
    pg.ask(f"DROP ROLE {user}")


@pytest.mark.parametrize("name", ['odd "name"; DROP TABLE x', "ünï-cödé", "UPPER case", "a" * 63, "100%{schema}"])
async def test_any_name_of_a_schema_is_taken_as_it_is(pg: LocalPostgres, name: str) -> None:
    store = PostgresStore(pg.dsn, schema=name)
    await store.migrate()
    async with store:
        await store.add("q", [JOB])
        assert [job.id for job in (await store.claim("q", WANTED)).jobs] == ["a"]
        await store.news("q", "", 5)
    assert pg.ask("SELECT 1 FROM pg_namespace WHERE nspname = %s", name) == [(1,)]
    pg.drop(name)


@pytest.mark.parametrize("name", ["", "a" * 64, "ü" * 32, "nul\0", "pg_mine", 7, None, "\ud800"])
def test_what_cannot_name_a_schema_is_refused(name: Any) -> None:
    with pytest.raises(ConfigError, match="schema must"):
        PostgresStore("postgresql://localhost/x", schema=name)


@pytest.mark.parametrize("size", [0, -1, 1.5, True, None])
def test_a_pool_has_at_least_one_connection(size: Any) -> None:
    with pytest.raises(ConfigError, match="pool_size must be an integer of at least 1"):
        PostgresStore("postgresql://localhost/x", pool_size=size)


@pytest.mark.parametrize(
    "dsn", ["", "  ", "no dsn", "redis://localhost", "postgresql://u:secret@[::1/x", None, 7, b"x", "nul\0"]
)
def test_what_is_no_dsn_is_refused_and_not_quoted(dsn: Any) -> None:
    with pytest.raises(ConfigError, match="dsn must be like 'postgresql://") as refusal:
        PostgresStore(dsn)
    assert "secret" not in str(refusal.value)
    assert refusal.value.__cause__ is None
    assert refusal.value.__suppress_context__


async def test_no_server_is_a_queue_error(pg: LocalPostgres) -> None:
    store = PostgresStore("postgresql://postgres:secret@127.0.0.1:1/none")
    for call in (store.open, store.migrate, lambda: store.counts("q")):
        with pytest.raises(QueueError) as failure:
            await call()
        assert isinstance(failure.value.__cause__, psycopg.OperationalError)
        assert "secret" not in str(failure.value)
    await store.aclose()


async def test_without_tables_each_call_says_what_to_do(pg: LocalPostgres, schema: str) -> None:
    store = PostgresStore(pg.dsn, schema=schema)
    calls = [
        store.open(),
        store.add("q", [JOB]),
        store.claim("q", WANTED),
        store.renew("q", [Lease("a", 1)], 5_000),
        store.settle("q", [Settlement("a", 1, "ack")]),
        store.find("q", ["a"]),
        store.counts("q"),
        store.page("q", JobState.READY, 10, None),
        store.replay("q", "a"),
        store.cancel("q", "a"),
        store.delete("q", "a"),
        store.purge("q", JobState.FAILED, JobRetention()),
        store.finished("q", "a", 1.0),
    ]
    for call in calls:
        with pytest.raises(ConfigError, match=r"await store\.migrate\(\)"):
            await call
    await store.migrate()
    assert await store.find("q", ["a"]) == [None]
    await store.aclose()


async def test_an_empty_schema_has_no_tables_either(pg: LocalPostgres, schema: str) -> None:
    pg.ask(f"CREATE SCHEMA {schema}")
    with pytest.raises(ConfigError, match=r"no tables .*await store\.migrate\(\)"):
        await PostgresStore(pg.dsn, schema=schema).open()


async def test_a_schema_of_a_newer_library_is_refused(pg: LocalPostgres, pg_store: PostgresStore, schema: str) -> None:
    pg.ask(f"INSERT INTO {schema}.migrations (version, name) VALUES (99, 'later')")
    for call in (pg_store.open, pg_store.migrate):
        with pytest.raises(
            ConfigError, match=f"has version 99, made by a newer conquiet: this one knows {LATEST} at most"
        ):
            await call()


async def test_what_postgres_cannot_keep_is_refused(pg_store: PostgresStore) -> None:
    for new in (NewJob("nul\0", b"1"), NewJob("\ud800", b"1"), NewJob("a", b"1", priority=2**63)):
        with pytest.raises(ConfigError, match="PostgreSQL"):
            await pg_store.add("q", [NewJob("fine", b"1"), new])
    assert sum((await pg_store.counts("q")).values()) == 0


async def test_any_bytes_come_back_as_they_were(pg_store: PostgresStore) -> None:
    """JSON that jsonb would change, or not take at all."""
    payloads = [
        rb'"\u0000"',
        b'{"b": 1, "a": 2,  "a":3}',
        b"1.0",
        b"12345678901234567890123",
        b'"' + b"x" * 100_000 + b'"',
    ]
    await pg_store.add("q", [NewJob(f"j{at}", payload) for at, payload in enumerate(payloads)])
    jobs = (await pg_store.claim("q", WANTED)).jobs
    assert [job.raw for job in jobs] == payloads
    await pg_store.settle("q", [Settlement.of(job, "ack", result=job.raw) for job in jobs])
    found = await pg_store.find("q", [job.id for job in jobs])
    assert [job.raw_result for job in found if job] == payloads


async def test_a_pickled_store_is_its_recipe(pg: LocalPostgres, schema: str) -> None:
    store = PostgresStore(pg.dsn, schema=schema, pool_size=2)
    await store.migrate()
    await store.add("q", [JOB])
    copy = pickle.loads(pickle.dumps(store))
    assert (await copy.counts("q"))[JobState.READY] == 1
    await store.aclose()
    await copy.aclose()


async def test_a_clone_has_the_same_jobs_and_clock(pg_store: PostgresStore, pg_clock: ManualClock) -> None:
    other = pg_store.clone()
    await pg_store.add("q", [JOB])
    await pg_store.aclose()
    assert other.clock is pg_clock
    assert (await other.counts("q"))[JobState.READY] == 1
    await other.aclose()


def test_another_loop_takes_over_from_a_closed_one(pg: LocalPostgres) -> None:
    schema = schema_name()
    store = PostgresStore(pg.dsn, schema=schema)
    assert asyncio.run(store.migrate()) == LATEST
    asyncio.run(store.add("q", [JOB]))
    asyncio.run(store.news("q", "", 5))
    assert asyncio.run(store.counts("q"))[JobState.READY] == 1
    asyncio.run(store.aclose())
    pg.drop(schema)


async def test_two_loops_at_a_time_are_refused(pg_store: PostgresStore) -> None:
    await pg_store.counts("q")
    with pytest.raises(ConfigError, match=r"another event loop: use store\.clone\(\)"):
        await asyncio.to_thread(lambda: asyncio.run(pg_store.counts("q")))
    await pg_store.counts("q")


_WITHOUT = """
import sys
sys.modules["psycopg"] = None
import conquiet
from conquiet.jobs.stores.postgres import PostgresStore
try:
    PostgresStore("postgresql://localhost/x")
except conquiet.ConfigError as error:
    print(error)
"""


def test_without_the_driver_it_says_what_to_install() -> None:
    done = subprocess.run([sys.executable, "-c", _WITHOUT], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "PostgresStore needs psycopg: pip install 'conquiet[postgres]'"


def test_the_library_does_without_the_driver() -> None:
    code = "import sys, conquiet, conquiet.jobs.stores.postgres; print('psycopg' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "False"
