"""What the tests of the PostgreSQL store run on, as a plugin that they name."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest

from conquiet.jobs.stores.postgres import PostgresStore
from conquiet.kit.clock import ManualClock
from tests.rigs.postgres import LocalPostgres, schema_name


@pytest.fixture(scope="session")
def pg() -> Iterator[LocalPostgres]:
    """A server for all tests that leave it running."""
    with LocalPostgres() as server:
        yield server


@pytest.fixture
def schema(pg: LocalPostgres) -> Iterator[str]:
    """A schema that only this test has, not yet made."""
    name = schema_name()
    yield name
    pg.drop(name)


@pytest.fixture
def pg_clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
async def pg_store(pg: LocalPostgres, schema: str, pg_clock: ManualClock) -> AsyncIterator[PostgresStore]:
    """A store whose tables are there."""
    store = PostgresStore(pg.dsn, schema=schema, clock=pg_clock)
    await store.migrate()
    async with store:
        yield store
