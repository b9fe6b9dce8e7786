"""What others do to the same database: transactions that hold an ID or stay open, and poolers in between."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import psycopg
import pytest

from conquiet.errors import DuplicateJobError
from conquiet.jobs.job import JobState, NewJob, Settlement
from conquiet.jobs.store import Wanted
from conquiet.jobs.stores.postgres import PostgresStore
from conquiet.kit.clock import ManualClock
from tests.rigs.postgres import LocalPostgres
from tests.rigs.waiting import LONG, eventually

pytestmark = pytest.mark.slow

pytest_plugins = ["tests.jobs.postgres_fixtures"]

WANTED = Wanted(10, "w", 5_000, 3)


def job(id: str) -> NewJob:
    return NewJob(id, b"1")


@asynccontextmanager
async def held(store: PostgresStore, pg: LocalPostgres, *ids: str) -> AsyncIterator[psycopg.AsyncConnection[Any]]:
    """A transaction of somebody else's that has added these, and not yet decided."""
    async with await psycopg.AsyncConnection.connect(pg.dsn) as connection:
        await store.add("q", [job(id) for id in ids], connection)
        yield connection
        await connection.rollback()


# --- an ID that is held ------------------------------------------------------------------------------------


@pytest.mark.parametrize("end", ["commit", "rollback"])
async def test_who_wants_an_id_that_is_held_waits_alone(pg: LocalPostgres, pg_store: PostgresStore, end: str) -> None:
    """Twenty want it, more than there are connections: others are added, claimed and counted meanwhile."""
    async with held(pg_store, pg, "order-7") as connection, asyncio.timeout(LONG):
        waiting = [asyncio.ensure_future(pg_store.add("q", [job("order-7")])) for _ in range(20)]
        await asyncio.gather(*(pg_store.add("q", [job(f"other-{at}")]) for at in range(30)))
        assert len((await pg_store.claim("q", WANTED)).jobs) == 10
        assert (await pg_store.counts("q"))[JobState.READY] == 20
        assert not any(one.done() for one in waiting)
        await getattr(connection, end)()
        found = await asyncio.gather(*waiting, return_exceptions=True)
    kinds = [type(one) for one in found]
    assert kinds.count(DuplicateJobError) == (20 if end == "commit" else 19)
    assert (await pg_store.counts("q"))[JobState.READY] == 21


async def test_many_of_which_one_is_held_are_added_as_a_whole(pg: LocalPostgres, pg_store: PostgresStore) -> None:
    async with held(pg_store, pg, "b") as connection, asyncio.timeout(LONG):
        adding = asyncio.ensure_future(pg_store.add("q", [job(id) for id in "abc"]))
        await pg_store.add("q", [job("other")])
        assert (await pg_store.counts("q"))[JobState.READY] == 1
        await connection.rollback()
        await adding
    assert (await pg_store.counts("q"))[JobState.READY] == 4


async def test_who_gives_up_on_an_id_that_is_held_leaves_nobody_waiting(
    pg: LocalPostgres, pg_store: PostgresStore
) -> None:
    """At most a try that was under way is still made, once."""
    async with held(pg_store, pg, "order-7") as connection:
        waiting = [asyncio.ensure_future(pg_store.add("q", [job("order-7")])) for _ in range(3)]
        await pg_store.add("q", [job("other")])
        for one in waiting:
            one.cancel()
        await asyncio.wait(waiting)
        await connection.rollback()
    with suppress(DuplicateJobError):
        await pg_store.add("q", [job("order-7")])
    await eventually(lambda: not pg_store._gathering._background._tasks, "nothing is under way")
    assert (await pg_store.counts("q"))[JobState.READY] == 2


async def test_the_callers_own_transaction_waits_as_it_is_set_to(pg: LocalPostgres, pg_store: PostgresStore) -> None:
    """Nothing is set in it."""
    async with await psycopg.AsyncConnection.connect(pg.dsn) as connection:
        await pg_store.add("q", [job("a")], connection)
        cursor = await connection.execute("SELECT name FROM pg_settings WHERE source = 'session'")
        assert await cursor.fetchall() == []
        await connection.rollback()


# --- a row that is held -----------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["lease", "delay"])
async def test_what_others_have_locked_is_not_asked_for_without_end(
    pg: LocalPostgres, pg_store: PostgresStore, pg_clock: ManualClock, schema: str, what: str
) -> None:
    """A lease that has run out, or a job that has fallen due: it is passed over, and looked for again in a while."""
    await pg_store.add("q", [NewJob("a", b"1", delay_ms=1_000 if what == "delay" else 0)])
    await pg_store.claim("q", WANTED)
    pg_clock.advance(10)
    async with await psycopg.AsyncConnection.connect(pg.dsn) as connection:
        await connection.execute(f'SELECT FROM "{schema}".jobs FOR UPDATE'.encode())
        claimed = await pg_store.claim("q", WANTED)
        assert (claimed.jobs, claimed.expired) == ([], [])
        assert claimed.next_ms is not None
        assert 0 < claimed.next_ms <= 1_000
        await connection.rollback()
    assert [one.id for one in (await pg_store.claim("q", WANTED)).jobs] == ["a"]


# --- a pooler ----------------------------------------------------------------------------------------------


async def test_a_store_leaves_nothing_set_in_a_session(pg_store: PostgresStore) -> None:
    """A pooler would give it to others, who share the session transaction by transaction."""
    await pg_store.add("q", [job("a"), job("b")])
    await pg_store.claim("q", WANTED)
    [connection] = pg_store._pool._mine.idle
    cursor = await connection.execute("SELECT name FROM pg_settings WHERE source = 'session'")
    assert await cursor.fetchall() == []
    cursor = await connection.execute("SELECT setting FROM pg_settings WHERE name = 'enable_seqscan'")
    assert await cursor.fetchall() == [("off",)], "it comes with the connection"


class Bouncer:
    """Refuses connections that bring settings along, as PgBouncer does, and passes all others on."""

    def __init__(self, pg: LocalPostgres) -> None:
        self._pg = pg
        self._open: set[asyncio.StreamWriter] = set()
        self.refused = 0

    async def __aenter__(self) -> Bouncer:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for writer in self._open:
            writer.close()
        await eventually(lambda: not self._open, "all connections have ended")

    @property
    def dsn(self) -> str:
        return self.dsn_and()

    def dsn_and(self, *others: int) -> str:
        """With the ports of others, to be tried after it."""
        ports = (self._server.sockets[0].getsockname()[1], *others)
        hosts = ",".join(f"127.0.0.1:{port}" for port in ports)
        return f"postgresql://postgres@{hosts}/postgres?sslmode=disable&gssencmode=disable"

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open.add(writer)
        try:
            length = await reader.readexactly(4)
            words = await reader.readexactly(struct.unpack("!i", length)[0] - 4)
            if b"\0options\0" in words:
                self.refused += 1
                text = b"SFATAL\0VFATAL\0C08P01\0Munsupported startup parameter: options\0\0"
                writer.write(b"E" + struct.pack("!i", len(text) + 4) + text)
                await writer.drain()
                return
            there, back = await asyncio.open_connection("127.0.0.1", self._pg.port)
            back.write(length + words)
            await asyncio.gather(_pump(reader, back), _pump(there, writer))
        finally:
            writer.close()
            self._open.discard(writer)


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while data := await reader.read(65536):
            writer.write(data)
    writer.close()


async def test_where_a_pooler_refuses_settings_the_store_does_without(
    pg: LocalPostgres, pg_store: PostgresStore, schema: str
) -> None:
    async with Bouncer(pg) as bouncer, PostgresStore(bouncer.dsn, schema=schema) as store, asyncio.timeout(LONG):
        await asyncio.gather(*(store.add("q", [job(f"{at}"), job(f"{at}'")]) for at in range(6)))
        assert len((await store.claim("q", WANTED)).jobs) == 10
        assert 1 <= bouncer.refused <= 6
        seen = bouncer.refused
        await store._pool.aclose()
        await store.counts("q")
        assert bouncer.refused == seen, "it is not tried again"


async def test_that_a_pooler_refuses_settings_is_seen_though_others_fail_in_other_ways(
    pg: LocalPostgres, pg_store: PostgresStore, schema: str
) -> None:
    """A name may stand for several hosts: the driver tells of all of them, of the last one first."""
    with socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))  # and does not listen
        async with Bouncer(pg) as bouncer, asyncio.timeout(LONG):
            async with PostgresStore(bouncer.dsn_and(deaf.getsockname()[1]), schema=schema) as store:
                await store.add("q", [job("a")])
            assert bouncer.refused == 1


async def test_pages_miss_nothing_though_the_server_plans_as_it_sees_fit(
    pg: LocalPostgres, pg_store: PostgresStore, schema: str
) -> None:
    """As behind a pooler that refuses settings. The rows lie in another order than that of enqueueing."""
    ids = [f"{at}" for at in range(50)]
    await pg_store.add("q", [job(id) for id in ids])
    claimed = {one.id: one for one in (await pg_store.claim("q", Wanted(50, "w", 60_000, 3))).jobs}
    for id in reversed(ids):
        assert await pg_store.settle("q", [Settlement.of(claimed[id], "release")]) == [True]
    pg.ask(f'VACUUM FULL ANALYZE "{schema}".jobs')
    async with Bouncer(pg) as bouncer, PostgresStore(bouncer.dsn, schema=schema) as store, asyncio.timeout(LONG):
        found: list[str] = []
        cursor = None
        while cursor is not None or not found:
            page = await store.page("q", JobState.READY, 20, cursor)
            found += [one.id for one in page.jobs]
            cursor = page.cursor
    assert found == ids


async def test_what_the_environment_says_of_connections_holds_too(
    pg: LocalPostgres, pg_store: PostgresStore, schema: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store's own settings come on top of it."""
    monkeypatch.setenv("PGOPTIONS", "-c statement_timeout=12345")
    async with PostgresStore(pg.dsn, schema=schema) as store:
        await store.counts("q")
        [connection] = store._pool._mine.idle
        cursor = await connection.execute(
            "SELECT setting FROM pg_settings WHERE name IN ('statement_timeout', 'enable_seqscan') ORDER BY name"
        )
        assert await cursor.fetchall() == [("off",), ("12345",)]
