"""Claims that the store has done and whose answers were lost: what they leased is found, and given back at no cost."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Final

import pytest
from msgspec.structs import replace

from conquiet import Job, JobQueue, JobStore, JobWorker, QueueError, StaleLeaseError
from conquiet.jobs.store import Claimed, Lease, Wanted
from conquiet.kit.clock import ManualClock
from tests.contracts.jobs_flavours import TTL, Backend, Site, every, only, opened, serving, tally
from tests.rigs.waiting import eventually

pytest_plugins = ["tests.contracts.jobs_fixtures"]
pytestmark = pytest.mark.guarantee

BEAT: Final = TTL / 3
TTL_MS: Final = round(TTL * 1000)


class Deaf:
    """A store some of whose answers do not arrive: the call was done, and fails."""

    def __init__(self, store: JobStore) -> None:
        self._store = store
        self.deaf_to: list[str] = []
        """The methods whose next answers are lost, in order."""
        self.late: list[Wanted] = []
        """Claims that are yet to arrive."""
        self.asked: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def clone(self) -> JobStore:
        return self._store.clone()

    def apart(self) -> JobStore:
        return self.clone()

    async def claim(self, queue: str, wanted: Wanted) -> Claimed:
        self.asked.append("claim")
        if self.deaf_to[:1] == ["late claim"]:
            self.late.append(wanted)
        elif self.deaf_to[:1] != ["claim"]:
            return await self._store.claim(queue, wanted)
        else:
            await self._store.claim(queue, wanted)
        del self.deaf_to[0]
        raise QueueError("the connection is lost")

    async def settle(self, queue: str, settlements: Any) -> list[bool]:
        self.asked.append("settle")
        self._lose("unsent settle")
        done = await self._store.settle(queue, settlements)
        self._lose("settle")
        return done

    async def leased(self, queue: str, claim_ids: Any, left_ms: int) -> list[Lease]:
        self.asked.append("leased")
        found = await self._store.leased(queue, claim_ids, left_ms)
        self._lose("leased")
        return found

    def _lose(self, what: str) -> None:
        if self.deaf_to[:1] == [what]:
            del self.deaf_to[0]
            raise QueueError("the connection is lost")


@pytest.fixture
async def core(backend: Backend, clock: ManualClock) -> AsyncIterator[Site]:
    async with opened(backend, "core", clock) as site:
        yield site


@pytest.fixture
def deaf(core: Site) -> Deaf:
    core.store = store = Deaf(core.store)
    return store


@pytest.fixture
def jobs(core: Site, deaf: Deaf) -> JobQueue:
    return core.queue()


async def untouched(jobs: JobQueue, ids: list[str]) -> None:
    found = [await jobs.get(id) for id in ids]
    assert [(job.attempts, job.failures, job.worker) for job in found if job] == [(0, (), None)] * len(ids)


# --- what a store finds ---------------------------------------------------------------------------------------------


async def test_what_a_claim_has_leased_is_found_by_its_id(jobs: JobQueue) -> None:
    await jobs.enqueue_many(range(5))
    mine = [Wanted(2, "w", TTL_MS, 3, claim_id=id) for id in ("aa", "bb")]
    first, second = [(await jobs.store.claim(jobs.name, wanted)).jobs for wanted in mine]
    other = await only(jobs)
    leases = await jobs.store.leased(jobs.name, ["aa", "bb", "cc"], 0)
    assert sorted(leases, key=str) == sorted(map(Lease.of, (*first, *second)), key=str)
    assert {lease.claim_id for lease in leases} == {"aa", "bb"}
    assert Lease.of(other) not in leases
    assert await jobs.store.leased(jobs.name, ["cc"], 0) == []


async def test_what_a_claim_has_settled_or_others_have_now_is_not_found(jobs: JobQueue, clock: ManualClock) -> None:
    await jobs.enqueue_many(range(3))
    claimed = (await jobs.store.claim(jobs.name, Wanted(3, "w", TTL_MS, 3, claim_id="aa"))).jobs
    await jobs.ack(claimed[0])
    await jobs.release(claimed[1])
    assert await jobs.store.leased(jobs.name, ["aa"], 0) == [Lease.of(claimed[2])]
    clock.advance(TTL + 1)
    assert len(await every(jobs)) == 2
    assert await jobs.store.leased(jobs.name, ["aa"], 0) == []


async def test_what_ends_too_soon_to_be_of_the_claim_need_not_be_found(jobs: JobQueue, clock: ManualClock) -> None:
    await jobs.enqueue(1)
    await jobs.store.claim(jobs.name, Wanted(1, "w", TTL_MS, 3, claim_id="aa"))
    assert len(await jobs.store.leased(jobs.name, ["aa"], TTL_MS - 5000)) == 1
    assert await jobs.store.leased(jobs.name, ["aa"], TTL_MS + 60_000) == []
    clock.advance(TTL / 2)
    assert len(await jobs.store.leased(jobs.name, ["aa"], TTL_MS // 2 - 5000)) == 1


# --- what the next claim does ---------------------------------------------------------------------------------------


async def test_the_next_claim_gives_back_what_a_lost_one_leased(jobs: JobQueue, deaf: Deaf) -> None:
    ids = await jobs.enqueue_many(range(3))
    deaf.deaf_to = ["claim"]
    with pytest.raises(QueueError):
        await jobs.claim(2)
    assert await tally(jobs) == (1, 2, 0, 0)
    claimed = await jobs.claim(3)
    assert ([job.id for job in claimed], [job.attempts for job in claimed]) == (ids, [1, 1, 1])


async def test_a_claim_without_a_failure_looks_for_nothing(jobs: JobQueue, deaf: Deaf) -> None:
    await jobs.enqueue_many(range(3))
    await jobs.claim(2)
    await jobs.claim(2)
    assert deaf.asked == ["claim", "claim"]


@pytest.mark.parametrize("what", ["leased", "settle"])
async def test_a_look_that_fails_is_repeated(jobs: JobQueue, deaf: Deaf, what: str) -> None:
    ids = await jobs.enqueue_many(range(3))
    deaf.deaf_to = ["claim", what]
    for _ in range(2):
        with pytest.raises(QueueError):
            await jobs.claim(3)
    assert [job.id for job in await jobs.claim(3)] == ids


async def test_a_claim_that_arrives_late_is_found_a_heartbeat_later(
    jobs: JobQueue, deaf: Deaf, clock: ManualClock
) -> None:
    """The connection broke while the claim was on its way: the store came to it after the first look."""
    ids = await jobs.enqueue_many(range(3))
    deaf.deaf_to = ["late claim"]
    with pytest.raises(QueueError):
        await jobs.claim(2)
    held = await only(jobs)
    await deaf.claim(jobs.name, deaf.late[0])
    assert await tally(jobs) == (0, 3, 0, 0)
    assert await jobs.claim(3) == [], "one look at once, and one after a while: not one for each claim"
    clock.advance(BEAT)
    assert {job.id for job in await jobs.claim(3)} == set(ids) - {held.id}
    clock.advance(BEAT)
    before = deaf.asked.count("leased")
    await jobs.claim(3)
    assert deaf.asked.count("leased") == before, "two looks are enough"


async def test_what_others_have_claimed_meanwhile_stays_theirs(jobs: JobQueue, deaf: Deaf, clock: ManualClock) -> None:
    await jobs.enqueue(1)
    deaf.deaf_to = ["claim"]
    with pytest.raises(QueueError):
        await jobs.claim()
    clock.advance(TTL + 1)
    other = (await deaf.claim(jobs.name, Wanted(1, "other", TTL_MS, 3))).jobs[0]
    assert await jobs.claim() == []
    await jobs.ack(other)


@pytest.mark.slow
async def test_who_waits_for_jobs_gets_those_of_a_claim_that_arrived_late(
    jobs: JobQueue, deaf: Deaf, clock: ManualClock
) -> None:
    [id] = await jobs.enqueue_many([1])
    deaf.deaf_to = ["late claim"]
    with pytest.raises(QueueError):
        await jobs.claim()
    waiting = asyncio.ensure_future(_after_late_claim(jobs, deaf))
    await eventually(lambda: "leased" in deaf.asked, "the first look")

    def is_done() -> bool:
        clock.advance(0.1)
        return waiting.done()

    began = clock.monotonic()
    await eventually(is_done, "the second look")
    assert [job.id for job in waiting.result()] == [id]
    assert clock.monotonic() - began < TTL


async def _after_late_claim(jobs: JobQueue, deaf: Deaf) -> list[Job]:
    # Between the look and the claim that finds nothing.
    claim, late = deaf.claim, deaf.late[0]

    async def arrives(queue: str, wanted: Wanted) -> Claimed:
        deaf.claim = claim  # type: ignore[method-assign]
        await claim(queue, late)
        return await claim(queue, wanted)

    deaf.claim = arrives  # type: ignore[method-assign]
    return await jobs.claim(timeout=10 * TTL)


# --- workers --------------------------------------------------------------------------------------------------------


async def test_a_worker_runs_what_its_lost_claim_leased_within_a_heartbeat(
    jobs: JobQueue, deaf: Deaf, clock: ManualClock
) -> None:
    began = clock.monotonic()
    await jobs.enqueue_many(range(3), connection=None)
    deaf.deaf_to = ["claim"]
    ran: list[Job] = []
    async with serving(JobWorker(jobs, ran.append, concurrency=2, handle_signals=False)):

        async def all_done() -> bool:
            clock.advance(0.01 if clock.monotonic() - began < BEAT - 1 else 0.0)
            return await tally(jobs) == (0, 0, 3, 0)

        await eventually(all_done, "all to be done")
    assert (sorted(job.payload for job in ran), {job.attempts for job in ran}) == ([0, 1, 2], {1})


async def test_a_worker_that_leaves_gives_back_what_its_lost_claim_leased(core: Site, deaf: Deaf) -> None:
    jobs = core.queue()
    ids = await jobs.enqueue_many(range(3))
    deaf.deaf_to = ["claim"]
    worker = JobWorker(jobs, lambda job: None, concurrency=3, handle_signals=False)

    class Stopping(Deaf):
        async def claim(self, queue: str, wanted: Wanted) -> Claimed:
            worker.stop()
            await asyncio.sleep(0)
            return await deaf.claim(queue, wanted)

    jobs._dispatch.store = Stopping(deaf)
    await worker.run()
    assert await tally(jobs) == (3, 0, 0, 0)
    await untouched(jobs, ids)


# --- what callers settle ----------------------------------------------------------------------------------------------


@asynccontextmanager
async def lost(deaf: Deaf, what: str = "settle") -> AsyncIterator[None]:
    deaf.deaf_to = [what]
    with pytest.raises(QueueError) as failure:
        yield
    assert type(failure.value) is QueueError


async def test_a_settlement_whose_answer_was_lost_can_be_repeated(jobs: JobQueue, deaf: Deaf) -> None:
    await jobs.enqueue_many(range(4))
    one, two, three, four = await jobs.claim(4)
    async with lost(deaf):
        await jobs.ack(one, two, result=7)
    await jobs.ack(one, two, result=7)
    async with lost(deaf):
        await jobs.nack(three, error="why", delay=60.0)
    await jobs.nack(three, error="why", delay=60.0)
    async with lost(deaf):
        await jobs.release(four)
    await jobs.release(four)
    assert await tally(jobs) == (2, 0, 2, 0)
    again = await jobs.get(three.id)
    assert again is not None
    assert len(again.failures) == 1
    for job in (one, four):
        with pytest.raises(StaleLeaseError):
            await jobs.ack(job)


async def test_a_settlement_that_another_prevented_is_stale_the_second_time(
    jobs: JobQueue, deaf: Deaf, clock: ManualClock
) -> None:
    await jobs.enqueue(1)
    job = await only(jobs)
    async with lost(deaf, "unsent settle"):
        await jobs.ack(job)
    clock.advance(TTL + 1)
    other = await only(jobs)
    with pytest.raises(StaleLeaseError):
        await jobs.ack(job)
    await jobs.ack(other)


async def test_a_settlement_of_another_claim_with_the_same_token_is_not_taken_for_ones_own(
    jobs: JobQueue, deaf: Deaf
) -> None:
    """As after a server that lost its last writes, and whose clock went back: the token comes twice."""
    await jobs.enqueue(1)
    job = await only(jobs)
    forgotten = replace(job, claim_id="forgotten")
    await jobs.ack(job)
    async with lost(deaf):
        await jobs.ack(forgotten)
    with pytest.raises(StaleLeaseError):
        await jobs.ack(forgotten)
