"""Jobs in a store that lost its last writes: only the claim that it records is accepted, on Redis and on PostgreSQL.

The worker whose claim it has forgotten goes on, as one does who was told "yes": everything it tries is refused. What
that costs: a job whose outcome is lost runs again, and one whose enqueueing is lost does not run.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Final

import pytest
from msgspec.structs import replace

from conquiet import DuplicateJobError, Job, JobQueue, JobState, JobWorker, StaleLeaseError
from conquiet.jobs.store import JobStore
from conquiet.jobs.stores.postgres import PostgresStore
from conquiet.jobs.stores.redis import RedisStore
from conquiet.kit.clock import ManualClock
from tests.conftest import CONTRACT_LADDER
from tests.jobs.working import AT_ONCE, Gate, settled
from tests.rigs.postgres import LocalPostgres, schema_name
from tests.rigs.rollback import WAYS, Rollback, UnflushedCommits, rollback_by
from tests.rigs.sizing import IS_FULL
from tests.rigs.waiting import LONG, eventually

pytestmark = pytest.mark.guarantee

SERVERS: Final = [rung for rung in CONTRACT_LADDER if rung.binary][None if IS_FULL else -1 :]
STORES: Final = [*((way, rung) for way in WAYS for rung in SERVERS), ("unflushed commits", None)]
TTL: Final = 30.0


class Home:
    """A queue in a store that can be made to forget; by new connections after that."""

    def __init__(self, rollback: Rollback, clock: ManualClock, schema: str) -> None:
        self.rollback = rollback
        self.clock = clock
        self._schema = schema

    @asynccontextmanager
    async def queue(self) -> AsyncIterator[JobQueue]:
        store: JobStore
        if isinstance(self.rollback, UnflushedCommits):
            store = PostgresStore(self.rollback.url, schema=self._schema, clock=self.clock)
            await store.migrate()
        else:
            store = RedisStore(self.rollback.url, namespace=self._schema, clock=self.clock)
        async with store:
            yield JobQueue(store, "emails", lease_ttl=TTL, retry=AT_ONCE)


@pytest.fixture(scope="module")
def database() -> Iterator[LocalPostgres]:
    """Of this suite alone: it crashes."""
    with LocalPostgres(settings=UnflushedCommits.SETTINGS) as server:
        yield server


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture(params=STORES, ids=lambda case: f"{case[0].replace(' ', '_')}{f'-{case[1].name}' if case[1] else ''}")
async def home(request: pytest.FixtureRequest, clock: ManualClock) -> AsyncIterator[Home]:
    way, rung = request.param
    if rung is None:
        rollback: Rollback = UnflushedCommits(request.getfixturevalue("database"))
        schema = schema_name()
    else:
        rollback, schema = rollback_by(way, rung.binary), f"t{secrets.token_hex(6)}"
    async with rollback:
        yield Home(rollback, clock, schema)


@pytest.fixture
async def jobs(home: Home) -> AsyncIterator[JobQueue]:
    async with home.queue() as queue:
        yield queue


async def claimed(queue: JobQueue, worker: str = "one") -> Job:
    [job] = await queue.claim(worker=worker)
    return job


async def is_refused_everything(queue: JobQueue, stale: Job) -> None:
    before = await queue.get(stale.id)
    for settle in (queue.ack, queue.nack, queue.release, queue.heartbeat):
        with pytest.raises(StaleLeaseError):
            await settle(stale)
        assert await queue.get(stale.id) == before


# --- claims -----------------------------------------------------------------------------------------------------


async def test_of_two_claims_only_the_recorded_one_is_accepted(home: Home, jobs: JobQueue) -> None:
    """Also by the same worker, and also while nobody has claimed it anew."""
    await jobs.enqueue(1, job_id="a")
    await home.rollback.keep()
    stale = await claimed(jobs)
    await home.rollback.lose()
    async with home.queue() as queue:
        await is_refused_everything(queue, stale)
        held = await claimed(queue)
        assert held.lease_token > stale.lease_token
        await is_refused_everything(queue, stale)
        await queue.heartbeat(held)
        await queue.ack(held)
        await is_refused_everything(queue, stale)
        await settled(queue, succeeded=1)


async def test_a_claim_after_an_expiry_that_was_forgotten_is_stale_and_the_one_before_counts(
    home: Home, jobs: JobQueue
) -> None:
    await jobs.enqueue(1, job_id="a")
    first = await claimed(jobs, "one")
    await home.rollback.keep()
    home.clock.advance(TTL + 1)
    async with home.queue() as queue:
        second = await claimed(queue, "two")
    await home.rollback.lose()
    async with home.queue() as queue:
        await is_refused_everything(queue, second)
        home.clock.advance(TTL + 1)
        third = await claimed(queue, "three")
        assert third.lease_token > second.lease_token > first.lease_token
        await is_refused_everything(queue, first)
        await is_refused_everything(queue, second)
        await queue.ack(third)


async def test_where_a_token_comes_twice_the_claims_own_id_decides(home: Home, jobs: JobQueue) -> None:
    """Writes lost and a clock that went back: the one case in which a number can be given a second time."""
    await jobs.enqueue(1, job_id="a")
    await home.rollback.keep()
    stale = await claimed(jobs)
    await home.rollback.lose()
    async with home.queue() as queue:
        held = await claimed(queue)
        await is_refused_everything(queue, replace(stale, lease_token=held.lease_token))
        await queue.ack(held)


async def test_a_token_of_a_clock_that_was_ahead_is_refused_all_the_same(home: Home, jobs: JobQueue) -> None:
    await jobs.enqueue(1, job_id="a")
    await home.rollback.keep()
    home.clock.advance(3600)
    stale = await claimed(jobs)
    await home.rollback.lose()
    behind = Home(home.rollback, ManualClock(), home._schema)
    async with behind.queue() as queue:
        held = await claimed(queue)
        assert held.lease_token < stale.lease_token
        await is_refused_everything(queue, stale)
        await queue.ack(held)
        await is_refused_everything(queue, stale)


# --- outcomes ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("outcome", ["ack", "nack", "release"])
async def test_a_job_whose_outcome_was_forgotten_is_in_flight_and_runs_again(
    home: Home, jobs: JobQueue, outcome: str
) -> None:
    """Whoever had it may say so again, since its claim is the recorded one; else the lease runs out."""
    await jobs.enqueue(1, job_id="a")
    job = await claimed(jobs)
    await home.rollback.keep()
    async with home.queue() as queue:
        if outcome == "ack":
            await queue.ack(job)
        else:
            await (queue.nack(job) if outcome == "nack" else queue.release(job))
    await home.rollback.lose()
    async with home.queue() as queue:
        back = await queue.get("a")
        assert back is not None
        assert (back.state, back.lease_token, back.attempts) == (JobState.IN_FLIGHT, job.lease_token, 1)
        if outcome == "ack":
            await queue.ack(job, result="again")
            await settled(queue, succeeded=1)
        else:
            assert await queue.claim() == []
            home.clock.advance(TTL + 1)
            again = await claimed(queue)
            assert (again.id, again.attempts) == ("a", 2)
            await is_refused_everything(queue, job)
            await queue.ack(again)


async def test_what_was_cancelled_or_replayed_and_forgotten_is_as_before(home: Home, jobs: JobQueue) -> None:
    await jobs.enqueue(1, job_id="ready")
    await jobs.enqueue(2, job_id="failed")
    await jobs.cancel("failed")
    await home.rollback.keep()
    async with home.queue() as queue:
        await queue.cancel("ready")
        await queue.replay("failed")
        await settled(queue, ready=1, failed=1)
    await home.rollback.lose()
    async with home.queue() as queue:
        assert [job.id for job in await queue.claim(10)] == ["ready"]
        failed = await queue.get("failed")
        assert failed is not None
        assert failed.state is JobState.FAILED


# --- enqueueing -------------------------------------------------------------------------------------------------


async def test_a_job_that_was_enqueued_and_forgotten_can_be_enqueued_again(home: Home, jobs: JobQueue) -> None:
    """With an ID of one's own, whoever is not sure does so: it is there once, or not lost."""
    await jobs.enqueue("kept", job_id="a")
    await home.rollback.keep()
    async with home.queue() as queue:
        await queue.enqueue("lost", job_id="b")
    await home.rollback.lose()
    async with home.queue() as queue:
        assert await queue.get("b") is None
        with pytest.raises(DuplicateJobError):
            await queue.enqueue("kept", job_id="a")
        await queue.enqueue("again", job_id="b")
        assert [job.payload for job in await queue.claim(10)] == ["kept", "again"]


async def test_a_claim_of_an_id_that_was_used_again_and_forgotten_does_not_count_for_the_job_before(
    home: Home, jobs: JobQueue
) -> None:
    """Nor the other way round: a claim is told from all others, whatever job has the ID."""
    await jobs.enqueue("first", job_id="a")
    first = await claimed(jobs)
    await home.rollback.keep()
    async with home.queue() as queue:
        await queue.ack(first)
        await queue.delete("a")
        await queue.enqueue("second", job_id="a")
        second = await claimed(queue)
        assert second.lease_token > first.lease_token
        await is_refused_everything(queue, first)
    await home.rollback.lose()
    async with home.queue() as queue:
        await is_refused_everything(queue, second)
        await queue.ack(first)
        job = await queue.get("a")
        assert job is not None
        assert (job.payload, job.state) == ("first", JobState.SUCCEEDED)
        await queue.delete("a")
        await queue.enqueue("third", job_id="a")
        third = await claimed(queue)
        assert third.lease_token > second.lease_token
        await is_refused_everything(queue, second)


# --- a worker that lives through it ------------------------------------------------------------------------------


@asynccontextmanager
async def working(queue: JobQueue, handler: Gate) -> AsyncIterator[JobWorker]:
    worker = JobWorker(queue, handler, concurrency=1, handle_signals=False)
    running = asyncio.create_task(worker.run())
    try:
        yield worker
    finally:
        handler.open()
        worker.stop()
        await asyncio.wait_for(running, LONG)


async def test_a_worker_whose_claim_was_forgotten_is_told_by_its_next_heartbeat(home: Home, jobs: JobQueue) -> None:
    """Its handler is cancelled, its outcome counts for nothing, and the job runs to its end under another claim."""
    gate = Gate()
    await jobs.enqueue(1, job_id="a")
    await home.rollback.keep()
    async with home.queue() as queue, working(queue, gate):
        await gate.entered(1)
        await home.rollback.lose()
        home.clock.advance(TTL / 3)
        await eventually(lambda: len(gate.began) == 2, "it is claimed anew")
        assert len(gate.cancelled) == 1
        gate.open()
        await settled(queue, succeeded=1)
    assert gate.most == 1
    assert gate.began[1].lease_token > gate.began[0].lease_token


async def test_a_worker_runs_a_job_again_whose_outcome_was_forgotten(home: Home, jobs: JobQueue) -> None:
    gate = Gate()
    await jobs.enqueue(1, job_id="a")
    async with home.queue() as queue, working(queue, gate):
        await gate.entered(1)
        await home.rollback.keep()
        gate.open()
        await settled(queue, succeeded=1)
        await home.rollback.lose()
        home.clock.advance(TTL + 1)
        await eventually(lambda: len(gate.done) == 2, "it runs again")
        await settled(queue, succeeded=1)
