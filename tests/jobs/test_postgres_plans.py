"""How PostgreSQL goes about the store's statements: by the right index, whatever the table holds and held before."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Final

import psycopg
import pytest

from conquiet.jobs.job import NewJob
from conquiet.jobs.store import Wanted
from conquiet.jobs.stores.postgres import PostgresStore
from conquiet.kit.clock import ManualClock
from tests.rigs.postgres import LocalPostgres

pytestmark = pytest.mark.slow

pytest_plugins = ["tests.jobs.postgres_fixtures"]

EXPECTED: Final = {
    "claim": {"jobs_line", "jobs_again", "jobs_oldest", "jobs_waiting", "jobs_leased", "jobs_key"},
    "claim_on": {"jobs_line", "jobs_key"},
    "expire": {"jobs_leased", "jobs_key"},
    "promote": {"jobs_waiting", "jobs_key"},
    "leased": {"jobs_leased"},
    "renew": {"jobs_key"},
    "settle": {"jobs_key"},
    "find": {"jobs_key"},
    "taken": {"jobs_key"},
    "watch": {"jobs_key"},
    "cancel": {"jobs_key"},
    "replay": {"jobs_key"},
    "delete": {"jobs_key"},
    "counts": {"jobs_by_state"},
    "page": {"jobs_by_state"},
    "purge": {"jobs_finished", "jobs_key"},
    "surplus": {"jobs_finished"},
}
"""The indexes that each statement may read, and has to."""

_FINISHED: Final = """
INSERT INTO {schema}.jobs
    (queue, id, state, due, priority, attempts, token, enqueued_ms, ready_ms, finished_ms, payload)
SELECT 'q', 'f' || n, CASE WHEN mod(n, 10) = 0 THEN 'failed' ELSE 'succeeded' END, true, 1, 1, 1, n, n, n, '1'
FROM generate_series(1, %s) n
"""
_DELAYED: Final = """
INSERT INTO {schema}.jobs (queue, id, due, priority, enqueued_ms, ready_ms, payload)
SELECT 'q', 'd' || n, false, 1000, 0, 9000000000000 + n, '1' FROM generate_series(1, %s) n
"""


def nodes(plan: Any) -> Iterator[dict[str, Any]]:
    yield plan
    for below in plan.get("Plans", []):
        yield from nodes(below)


async def explained(store: PostgresStore, name: str, values: str = "", options: str = "") -> list[dict[str, Any]]:
    """The nodes of the plan that the store's own connections make, for any values."""
    statement = store._pool.statements[name]
    connection = await store._pool._fresh("explaining")
    try:
        await connection.execute(b"PREPARE it AS " + statement)
        places = {int(place) for place in re.findall(rb"\$(\d+)", statement)}
        given = values or ", ".join(["NULL"] * max(places))
        cursor = await connection.execute(f"EXPLAIN (FORMAT JSON{options}) EXECUTE it ({given})".encode())
        [(found,)] = await cursor.fetchall()
        return list(nodes(found[0]["Plan"]))
    finally:
        await connection.close()


@pytest.fixture(params=["new", "grown", "known"])
async def table(
    request: pytest.FixtureRequest, pg: LocalPostgres, pg_store: PostgresStore, schema: str, scale: float
) -> PostgresStore:
    """An empty table; one that has grown since anybody counted; one whose statistics are up to date."""
    if request.param != "new":
        grow(pg, schema, int(1_000_000 * scale))
    if request.param == "known":
        pg.ask(f"VACUUM ANALYZE {schema}.jobs")
    return pg_store


def grow(pg: LocalPostgres, schema: str, rows: int) -> None:
    with psycopg.connect(pg.dsn, autocommit=True) as connection:
        connection.execute(_FINISHED.format(schema=schema).encode(), [rows])
        connection.execute(_DELAYED.format(schema=schema).encode(), [rows // 10])


@pytest.mark.timeout(300)
async def test_every_statement_goes_by_its_index(table: PostgresStore) -> None:
    for name, expected in EXPECTED.items():
        plan = await explained(table, name)
        of_jobs = [node for node in plan if node.get("Index Name", "").startswith("jobs_")]
        assert {node["Index Name"] for node in of_jobs} == expected, (name, of_jobs)
        kinds = {node["Node Type"] for node in plan}
        assert not kinds & {"Seq Scan", "Hash Join", "Merge Join", "Bitmap Heap Scan"}, (name, kinds)
        for node in of_jobs:
            if node["Index Name"] == "jobs_key":  # one job at a time, never all of a queue
                assert re.search(r"\bid = ", node["Index Cond"]), (name, node)
        if name in ("claim", "claim_on", "expire", "promote", "page"):
            assert not kinds & {"Sort", "Incremental Sort"}, (name, kinds)


@pytest.mark.timeout(300)
async def test_a_claim_reads_no_more_for_what_is_finished_or_not_due(
    pg: LocalPostgres, pg_store: PostgresStore, schema: str, scale: float
) -> None:
    """Pages read, not time: with a million finished jobs and a hundred thousand delayed ones of a higher priority."""
    values = "'q', 0, 'w', 86400000, 50, 10, 10, false, 'c', 1000000, NULL"
    reads: list[int] = []
    for rows in (0, int(1_000_000 * scale)):
        if rows:
            grow(pg, schema, rows)
        await pg_store.add("q", [NewJob(f"{rows}.{at}", b"1") for at in range(50)])
        pg.ask(f"VACUUM {schema}.jobs")
        plan = await explained(pg_store, "claim", values, ", ANALYZE, BUFFERS")
        assert plan[0]["Actual Rows"] == 50
        reads.append(plan[0]["Shared Hit Blocks"] + plan[0]["Shared Read Blocks"])
    assert reads[1] < 2 * reads[0] + 200, reads


async def test_statements_are_prepared_once(pg_store: PostgresStore, pg_clock: ManualClock) -> None:
    """Whatever the magnitude of their values: else each call is planned anew."""
    for delay in (0, 1, 100_000, 10_000_000_000):
        await pg_store.add("q", [NewJob(f"{delay}", b"1", delay_ms=delay)])
        await pg_store.claim("q", Wanted(1, "w", 1 + delay, 3))
        pg_clock.advance(1 + delay / 1000)
    [connection] = pg_store._pool._mine.idle
    cursor = await connection.execute(b"SELECT count(*), count(DISTINCT statement) FROM pg_prepared_statements")
    [(prepared, different)] = await cursor.fetchall()
    assert prepared == different > 0
