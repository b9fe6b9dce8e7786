"""Jobs of an earlier version, in Redis and PostgreSQL: read as they were, held by whom they were, run to their end."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import pytest
from msgspec.structs import replace

from conquiet import (
    DuplicateJobError,
    Job,
    JobQueue,
    JobState,
    JobWorker,
    Keep,
    PostgresStore,
    RedisStore,
    StaleLeaseError,
)
from tests.conftest import Rung
from tests.rigs.postgres import LocalPostgres
from tests.rigs.servers import on_a_port
from tests.rigs.waiting import eventually
from tests.upgrades.scenes.jobs import PAYLOAD, TTL, emails, plain
from tests.upgrades.stored import Recording, Resumed, load_sql

pytest_plugins = ["tests.jobs.postgres_fixtures"]
pytestmark = pytest.mark.any_server

HELD = {"in-flight", "in-flight-renewed", "in-flight-last-try", "expired-once"}
READY = ["ready-1", "ready-4", "ready-0", "ready-3", "ready-2"]
"""In the order of their priorities."""
RETRIES = {"waits-for-retry", "replayed"}
LATER = {"later-60.0", "later-3600.0"}


@dataclass(frozen=True)
class Home:
    """A queue of that version, and the time that goes on from there."""

    queue: JobQueue
    clock: Resumed
    facts: dict[str, Any]

    async def job(self, id: str) -> Job:
        found = await self.queue.get(id)
        assert found is not None
        return found

    async def claimed(self) -> list[str]:
        """All that can be claimed now, one after the other."""
        found: list[str] = []
        while jobs := await self.queue.claim(100, "new-worker"):
            found += [job.id for job in jobs]
        return found


@pytest.fixture(params=["redis", "postgres"])
async def home(request: pytest.FixtureRequest, version: str, rung: Rung) -> AsyncIterator[Home]:
    is_redis = request.param == "redis"
    recording = Recording.loaded(version, "jobs" if is_redis else "jobs-postgres")
    clock, facts = Resumed(recording.recorded_ms), dict(recording.facts)
    if is_redis:
        async with on_a_port(rung.binary) as server:
            await recording.restore(server.url)
            async with RedisStore.connect(server.url, clock=clock) as store:
                yield Home(emails(store), clock, facts)
        return
    pg: LocalPostgres = request.getfixturevalue("pg")
    name = f"u_{secrets.token_hex(6)}"
    pg.ask(f"CREATE DATABASE {name}")
    dsn = pg.dsn.replace("/postgres?", f"/{name}?")
    load_sql(dsn, version)
    async with PostgresStore.connect(dsn, clock=clock) as tables:
        await tables.migrate()
        yield Home(emails(tables), clock, facts)
    pg.ask(f"DROP DATABASE {name} WITH (FORCE)")


def as_told(told: dict[str, Any]) -> dict[str, Any]:
    """Without the token of a job that nobody has claimed: a claim gives it one, and 0.1.0 gave it one before."""
    return told if told["claimed_ms"] else told | {"lease_token": 0}


async def test_every_job_is_read_as_it_was(home: Home) -> None:
    assert {str(state): count for state, count in (await home.queue.counts()).items()} == home.facts["counts"]
    found = {id: plain(await home.job(id)) for id in home.facts["jobs"]}
    assert {id: as_told(told) for id, told in found.items()} == {
        id: as_told(told) for id, told in home.facts["jobs"].items()
    }
    for state in JobState:
        listed = {job.id for job in (await home.queue.list_jobs(state)).jobs}
        assert listed == {id for id, told in home.facts["jobs"].items() if told["state"] == state}


async def test_a_worker_of_that_version_still_holds_its_jobs(home: Home) -> None:
    """What it had in hand when it was stopped is nobody else's before the leases have run out."""
    jobs = [await home.job(id) for id in ("in-flight", "in-flight-renewed", "expired-once")]
    assert set(await home.claimed()) == set(READY)
    home.clock.advance(TTL - 5)
    await home.queue.heartbeat(*jobs)
    home.clock.advance(TTL - 5)
    await home.queue.ack(jobs[0], result="done")
    await home.queue.nack(jobs[1], error="failed in the old worker")
    await home.queue.release(jobs[2])
    assert ((await home.job("in-flight")).state, (await home.job("in-flight")).result) == (JobState.SUCCEEDED, "done")
    assert (await home.job("in-flight-renewed")).last_error == "failed in the old worker"
    assert (await home.job("expired-once")).attempts == 1


async def test_what_it_held_is_claimed_when_its_time_is_over_and_its_word_counts_no_more(home: Home) -> None:
    old = {id: await home.job(id) for id in HELD}
    home.clock.advance(TTL + 1)
    jobs = {job.id: job for job in await home.queue.claim(100, "new-worker")}
    assert jobs.keys() & HELD == HELD - {"in-flight-last-try"}
    for id in jobs.keys() & HELD:
        assert jobs[id].lease_token > old[id].lease_token
        assert jobs[id].attempts == old[id].attempts + 1
        for settle in (home.queue.ack, home.queue.nack, home.queue.release, home.queue.heartbeat):
            with pytest.raises(StaleLeaseError, match=id):
                await settle(old[id])
        assert plain(await home.job(id)) == plain(jobs[id])
    last = await home.job("in-flight-last-try")
    assert (last.state, last.last_error) == (JobState.FAILED, "lease expired")
    assert [attempt.error for attempt in jobs["expired-once"].failures] == ["lease expired"] * 2


async def test_jobs_are_claimed_by_priority_and_not_before_their_time(home: Home) -> None:
    assert [job.id for job in await home.queue.claim(100, "new-worker")] == READY
    home.clock.advance(10.0)
    assert set(await home.claimed()) & (RETRIES | LATER) == set()
    home.clock.advance(51.0)
    assert set(await home.claimed()) & (RETRIES | LATER) == RETRIES | {"later-60.0"}
    assert (await home.job("waits-for-retry")).attempts == 2
    home.clock.advance(3540.0)
    assert "later-3600.0" in await home.claimed()


async def test_a_worker_runs_each_unfinished_job_once(home: Home) -> None:
    seen: list[Job] = []

    async def handle(job: Job) -> str:
        seen.append(job)
        return f"done: {job.id}"

    worker = JobWorker(home.queue, handle, concurrency=10, handle_signals=False)
    running = asyncio.ensure_future(worker.run())
    home.clock.advance(TTL + 1)
    home.clock.advance(4000.0)
    expected = sorted({*READY, *RETRIES, *LATER, *HELD} - {"in-flight-last-try"})
    try:
        await eventually(lambda: len(seen) >= len(expected), "all jobs")
        await asyncio.gather(*(home.queue.wait(id, 20) for id in expected))
    finally:
        worker.stop()
        await running
    assert sorted(job.id for job in seen) == expected
    for job in seen:
        assert job.payload == ({"n": int(job.id[-1])} if job.id in READY else PAYLOAD)
        assert (await home.job(job.id)).result == f"done: {job.id}"


async def test_what_had_ended_can_be_replayed_deleted_and_purged(home: Home) -> None:
    assert set(await home.claimed()) == set(READY)
    for id in ("failed", "cancelled", "cancelled-in-flight"):
        old = await home.job(id)
        assert (await home.queue.replay(id)).attempts == 0
        [job] = await home.queue.claim(1, "new-worker")
        assert (job.id, job.payload, job.attempts) == (id, PAYLOAD, 1)
        assert job.lease_token > old.lease_token
        await home.queue.ack(job)
    with pytest.raises(DuplicateJobError):
        await home.queue.enqueue(PAYLOAD, job_id="succeeded")
    await home.queue.delete("succeeded")
    assert await emails(home.queue.store, keep=Keep(count=0), keep_failed=Keep(count=0)).purge() == 5
    assert (await home.queue.counts())[JobState.SUCCEEDED] == 0


@pytest.mark.parametrize("id", ["removed", "purged-0"])
async def test_an_id_that_is_used_again_does_not_bring_an_old_lease_back(home: Home, id: str) -> None:
    assert set(await home.claimed()) == set(READY)
    assert await home.queue.get(id) is None
    await home.queue.enqueue(PAYLOAD, job_id=id)
    [job] = await home.queue.claim(1, "new-worker")
    for token in range(1, home.facts["removed_token"] + 1):
        with pytest.raises(StaleLeaseError):
            await home.queue.ack(replace(job, lease_token=token))
    await home.queue.ack(job)
