"""What rows that nobody sees any more cost, while a transaction elsewhere keeps them from being removed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import psycopg
import pytest

from conquiet.jobs.job import JobState, NewJob, Settlement
from conquiet.jobs.store import JobRetention, Lease, Wanted
from conquiet.jobs.stores.postgres import PostgresStore, looking
from conquiet.kit.clock import ManualClock
from tests.jobs.test_postgres_plans import explained
from tests.rigs.postgres import LocalPostgres
from tests.rigs.waiting import eventually

pytestmark = pytest.mark.slow

pytest_plugins = ["tests.jobs.postgres_fixtures"]

WANTED = Wanted(100, "w", 30_000, 3)
ANALYZED: Final = ", ANALYZE, BUFFERS"


def new(count: int, prefix: str = "") -> list[NewJob]:
    return [NewJob(f"{prefix}{at}", b"1") for at in range(count)]


async def test_a_heartbeat_touches_no_index(pg: LocalPostgres, pg_store: PostgresStore, schema: str) -> None:
    """PostgreSQL counts such updates: what it calls heap-only."""
    await pg_store.add("q", new(40))
    leases = [Lease.of(job) for job in (await pg_store.claim("q", WANTED)).jobs]
    for _ in range(10):
        assert all(await pg_store.renew("q", leases, 30_000))
    await pg_store.aclose()  # a server process counts when it ends, at the latest

    def counted() -> tuple[int, int]:
        [(all_of_them, hot)] = pg.ask(
            "SELECT n_tup_upd, n_tup_hot_upd FROM pg_stat_user_tables WHERE schemaname = %s AND relname = 'jobs'",
            schema,
        )
        return all_of_them, hot

    await eventually(lambda: counted()[0] == 440, "all updates are counted")
    assert counted()[1] > 350, "of 400 heartbeats"


async def test_a_renewed_lease_ends_when_it_was_renewed_to(pg_store: PostgresStore, pg_clock: ManualClock) -> None:
    """Also to an earlier moment than before."""
    await pg_store.add("q", new(3))
    longer, shorter, left = (await pg_store.claim("q", WANTED)).jobs
    pg_clock.advance(10)
    assert await pg_store.renew("q", [Lease.of(longer)], 60_000) == [True]
    assert await pg_store.renew("q", [Lease.of(shorter)], 5_000) == [True]
    ends: list[tuple[int, set[str]]] = []
    second = 0
    for step in (4, 2, 13, 2, 38, 2):  # from the renewal on
        pg_clock.advance(step)
        second += step
        claimed = await pg_store.claim("q", Wanted(100, "w", 600_000, 3))
        ends.append((second, {job.id for job in claimed.jobs}))
    assert ends == [(4, set()), (6, {shorter.id}), (19, set()), (21, {left.id}), (59, set()), (61, {longer.id})]


async def test_what_is_to_be_kept_is_counted_once_for_all_that_is_purged(
    pg_store: PostgresStore, pg_clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not for each thousand: there may be many to keep."""
    for batch in range(4):
        await pg_store.add("q", new(1000, f"{batch}-"))
        jobs = (await pg_store.claim("q", Wanted(1000, "w", 30_000, 3))).jobs
        await pg_store.settle("q", [Settlement.of(job, "ack") for job in jobs])
        pg_clock.advance(1)
    asked: list[str] = []
    run = pg_store._pool.run

    async def noted(what: str, *calls: tuple[str, Any]) -> Any:
        asked.extend(name for name, _ in calls)
        return await run(what, *calls)

    monkeypatch.setattr(pg_store._pool, "run", noted)
    gone = 0
    while removed := await pg_store.purge("q", JobState.SUCCEEDED, JobRetention(age=None, count=500)):
        gone += removed
    assert gone == 3500
    assert (asked.count("surplus"), asked.count("purge")) == (2, 5)
    await pg_store.add("q", new(10, "more-"))
    jobs = (await pg_store.claim("q", WANTED)).jobs
    await pg_store.settle("q", [Settlement.of(job, "ack") for job in jobs])
    assert await pg_store.purge("q", JobState.SUCCEEDED, JobRetention(age=None, count=500)) == 10, "counted anew"


# --- claims ------------------------------------------------------------------------------------------------


@pytest.fixture
def long_transaction(pg: LocalPostgres) -> Iterator[None]:
    """Somebody who began long ago and may still look at everything that was there then."""
    with psycopg.connect(pg.dsn) as connection:
        connection.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        connection.execute("SELECT count(*) FROM pg_class")
        yield
        connection.rollback()


async def work(store: PostgresStore, count: int, prefix: str) -> None:
    """Add, claim and finish so many jobs, a hundred at a time."""
    for batch in range(count // 100):
        await store.add("q", new(100, f"{prefix}{batch}-"))
        jobs = (await store.claim("q", WANTED)).jobs
        assert len(jobs) == 100
        assert all(await store.settle("q", [Settlement.of(job, "ack") for job in jobs]))


def pages(plan: list[dict[str, Any]]) -> int:
    return int(plan[0]["Shared Hit Blocks"] + plan[0]["Shared Read Blocks"])


@pytest.mark.usefixtures("long_transaction")
async def test_a_claim_that_goes_on_reads_nothing_of_what_is_done(pg_store: PostgresStore) -> None:
    """Pages read for one more job: from the beginning they grow with what was done."""
    whole: list[int] = []
    further: list[int] = []
    for round in range(2):
        await work(pg_store, 1000, f"{round}-")
        [looks] = pg_store._claiming._looks.values()
        assert looks._last is not None
        place = ", ".join(map(str, looks._last))
        await pg_store.add("q", new(1, f"{round}"))
        for name, values, found in (
            ("claim_on", f"'q', 0, 'w', 30000, 1, 'c', 1000000, {place}", further),
            ("claim", "'q', 0, 'w', 30000, 1, 0, 1, false, 'c', 1000000, NULL", whole),
        ):
            found.append(pages(await explained(pg_store, name, values, ANALYZED)))
            await pg_store.cancel("q", f"{round}0")
            await pg_store.replay("q", f"{round}0")
        await pg_store.cancel("q", f"{round}0")
    assert whole[1] > whole[0] + 50, "what this is about"
    assert further[1] < further[0] + 20, (whole, further)


@pytest.mark.usefixtures("long_transaction")
async def test_while_looks_are_dear_claims_go_on_where_the_last_one_stopped(
    pg_store: PostgresStore, pg_clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Everything is claimed once; who is more urgent or came back waits for the next look from the beginning."""
    monkeypatch.setattr(looking, "_DEAR", -1000.0)
    monkeypatch.setattr(looking, "_REST", 1_000_000)
    asked: list[str] = []
    run = pg_store._pool.run

    async def noted(what: str, *calls: tuple[str, Any]) -> Any:
        asked.extend(name for name, _ in calls)
        return await run(what, *calls)

    monkeypatch.setattr(pg_store._pool, "run", noted)
    await work(pg_store, 800, "a-")
    assert (asked.count("claim"), asked.count("claim_on")) == (2, 6)
    await pg_store.add("q", [NewJob("urgent", b"1", priority=5), NewJob("usual", b"1")])
    claimed = await pg_store.claim("q", WANTED)
    assert [job.id for job in claimed.jobs] == ["usual"]
    assert all(job.lease_token >= (job.claimed_ms or 0) > 0 for job in claimed.jobs), "also if the last one is lost"
    assert claimed.next_ms, "and then somebody looks from the beginning"
    assert await pg_store.settle("q", [Settlement.of(job, "release") for job in claimed.jobs]) == [True]
    pg_clock.advance(claimed.next_ms / 1000)
    assert [job.id for job in (await pg_store.claim("q", WANTED)).jobs] == ["urgent", "usual"]
