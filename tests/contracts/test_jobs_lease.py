"""Leases: tokens that fence, and heartbeats that extend."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final

import pytest
from msgspec.structs import replace

from conquiet import Job, JobQueue, JobSpec, JobState, LeaseError, Reject, StaleLeaseError
from conquiet.kit.clock import ManualClock
from tests.contracts.jobs_flavours import TTL, only, tally

pytestmark = pytest.mark.guarantee

pytest_plugins = ("tests.contracts.jobs_fixtures",)

Call = Callable[[JobQueue, Job], Awaitable[object]]
FENCED: Final[dict[str, Call]] = {
    "ack": lambda jobs, job: jobs.ack(job, result="mine"),
    "nack": lambda jobs, job: jobs.nack(job, error="mine"),
    "reject": lambda jobs, job: jobs.nack(job, error=Reject("mine")),
    "heartbeat": lambda jobs, job: jobs.heartbeat(job),
    "release": lambda jobs, job: jobs.release(job),
}


async def refused(jobs: JobQueue, job: Job) -> None:
    """Every fenced call is stale, and leaves the record as it was, to the last field."""
    before = await jobs.get(job.id)
    for name, call in FENCED.items():
        with pytest.raises(StaleLeaseError) as caught:
            await call(jobs, job)
        assert (caught.value.job_ids, caught.value.queue) == ((job.id,), jobs.name), name
        assert isinstance(caught.value, LeaseError), name
        assert await jobs.get(job.id) == before, name


# --- fencing ----------------------------------------------------------------------------------------------------------


async def test_what_a_former_owner_says_changes_nothing(jobs: JobQueue, clock: ManualClock) -> None:
    """spec 5: Fencing: stale lease tokens are rejected; delayed acks/nacks corrupt nothing."""
    await jobs.enqueue(1)
    old = await only(jobs, worker="old")
    clock.advance(TTL + 1)
    new = await only(jobs, worker="new")
    await refused(jobs, old)
    await jobs.ack(new)


async def test_a_token_that_nobody_was_given_is_stale(jobs: JobQueue) -> None:
    await jobs.enqueue(1)
    job = await only(jobs)
    for token in (0, job.lease_token - 1, job.lease_token + 1, -1, 2**52):
        await refused(jobs, replace(job, lease_token=token))
    await jobs.heartbeat(job)


async def test_a_claim_that_the_store_has_forgotten_is_stale_by_whatever_token(jobs: JobQueue) -> None:
    """Two claims have the same token if the store lost the first, and its clock went back besides."""
    await jobs.enqueue(1)
    job = await only(jobs)
    for claim_id in ("", "0" * 16):
        await refused(jobs, replace(job, claim_id=claim_id))
    await jobs.heartbeat(job)


async def test_what_nobody_claimed_cannot_be_settled(jobs: JobQueue) -> None:
    """spec 5: Ack, Nack: precondition: job status is InFlight. A job without a lease."""
    await jobs.enqueue(1, job_id="a")
    job = await jobs.get("a")
    assert job is not None
    await refused(jobs, job)


@pytest.mark.parametrize("end", ["ack", "nack", "cancel", "release", "retry"])
async def test_what_is_not_in_flight_cannot_be_settled(jobs: JobQueue, end: str) -> None:
    """spec 5: Fencing: all state transitions from InFlight require a valid lease token, and that it is InFlight."""
    await jobs.enqueue(1, job_id="a", max_retries=1 if end == "retry" else 0)
    job = await only(jobs)
    if end == "ack":
        await jobs.ack(job)
    elif end in ("nack", "retry"):
        await jobs.nack(job)
    elif end == "release":
        await jobs.release(job)
    else:
        assert await jobs.cancel("a")
    await refused(jobs, job)


async def test_a_heartbeat_after_the_ack_does_not_bring_the_job_back(jobs: JobQueue) -> None:
    await jobs.enqueue(1, job_id="a")
    job = await only(jobs)
    await jobs.ack(job)
    with pytest.raises(StaleLeaseError):
        await jobs.heartbeat(job)
    assert await tally(jobs) == (0, 0, 1, 0)


async def test_what_is_not_there_cannot_be_settled(jobs: JobQueue) -> None:
    await jobs.enqueue(1, job_id="a")
    job = await only(jobs)
    await jobs.cancel("a")
    await jobs.delete("a")
    for call in FENCED.values():
        with pytest.raises(StaleLeaseError):
            await call(jobs, job)
        assert await jobs.get("a") is None
    assert await tally(jobs) == (0, 0, 0, 0)


async def test_the_token_of_a_former_job_of_that_id_is_stale(jobs: JobQueue) -> None:
    """Also once the new one is claimed: an ID may be used again, a token may not."""
    await jobs.enqueue(1, job_id="a")
    old = await only(jobs)
    await jobs.cancel("a")
    await jobs.delete("a")
    await jobs.enqueue(2, job_id="a")
    await refused(jobs, old)
    assert (await only(jobs)).payload == 2
    await refused(jobs, old)


async def test_every_claim_has_a_higher_token(jobs: JobQueue, clock: ManualClock) -> None:
    """spec 5: Fencing: each claim generates a new unique lease token; lease version incremented on each claim."""
    await jobs.enqueue(1, job_id="a", max_retries=99)
    tokens: list[int] = []
    for turn in range(8):
        job = await only(jobs)
        tokens.append(job.lease_token)
        if turn % 4 == 0:
            await jobs.nack(job, delay=0)
        elif turn % 4 == 1:
            await jobs.release(job)
        elif turn % 4 == 2:
            clock.advance(TTL + 1)
        else:
            await jobs.cancel("a")
            await jobs.replay("a")
    assert tokens == sorted(set(tokens))


async def test_a_token_is_at_least_the_stores_time(jobs: JobQueue, clock: ManualClock) -> None:
    """So it rises even if the store forgets the last one, with its last writes."""
    await jobs.enqueue_many([JobSpec(1, "a"), JobSpec(2, "b")])
    first = await jobs.claim(2)
    for job in first:
        assert job.claimed_ms is not None
        assert job.claimed_ms <= job.lease_token < job.claimed_ms + 10_000
    await jobs.release(*first)
    clock.advance(86_400)
    for before, after in zip(first, await jobs.claim(2), strict=True):
        assert after.lease_token >= before.lease_token + 86_400_000


async def test_claims_faster_than_the_clock_have_rising_tokens(jobs: JobQueue) -> None:
    await jobs.enqueue(1)
    tokens: list[int] = []
    for _ in range(30):
        job = await only(jobs)
        tokens.append(job.lease_token)
        await jobs.release(job)
    assert tokens == sorted(set(tokens))


async def test_a_job_of_a_former_ones_id_gets_a_higher_token(jobs: JobQueue) -> None:
    """However the former one was removed, and within the same millisecond."""
    tokens: list[int] = []
    for _ in range(10):
        await jobs.enqueue(1, job_id="a")
        job = await only(jobs)
        tokens.append(job.lease_token)
        await jobs.ack(job)
        await jobs.delete("a")
    assert tokens == sorted(set(tokens))


@pytest.mark.parametrize("what", ["ack", "nack"])
async def test_the_current_token_is_accepted(jobs: JobQueue, clock: ManualClock, what: str) -> None:
    """With the stored token, exactly one change."""
    await jobs.enqueue(1, job_id="a")
    await jobs.claim()
    clock.advance(TTL + 1)
    job = await only(jobs)
    await FENCED[what](jobs, job)
    after = await jobs.get("a")
    assert after is not None
    assert after.state is (JobState.SUCCEEDED if what == "ack" else JobState.READY)
    assert after.lease_token == job.lease_token
    assert len(after.failures) == (1 if what == "ack" else 2)


@pytest.mark.parametrize("call", FENCED.values(), ids=FENCED)
async def test_the_token_decides_and_not_the_clock(jobs: JobQueue, clock: ManualClock, call: Call) -> None:
    """A late word counts while nobody has taken over."""
    await jobs.enqueue(1, job_id="a")
    job = await only(jobs)
    clock.advance(TTL + 1)
    await call(jobs, job)
    after = await jobs.get("a")
    assert after is not None
    assert after.last_error != "lease expired"


# --- heartbeats -------------------------------------------------------------------------------------------------------


async def test_a_heartbeat_extends_the_lease_from_now(jobs: JobQueue, clock: ManualClock) -> None:
    """spec 5: Lease Extension: each heartbeat extends LeaseExpiresAt by LeaseTTL."""
    await jobs.enqueue(1, job_id="a")
    job = await only(jobs)
    clock.advance(TTL / 2)
    await jobs.heartbeat(job)
    after = await jobs.get("a")
    assert after is not None
    assert after.lease_ms is not None
    assert job.lease_ms is not None
    assert TTL / 2 * 1000 <= after.lease_ms - job.lease_ms < TTL * 1000
    assert replace(after, lease_ms=job.lease_ms) == job


async def test_while_heartbeats_come_nobody_else_gets_the_job(jobs: JobQueue, clock: ManualClock) -> None:
    """Periodic heartbeats keep it in flight; when they stop for longer than the TTL, the next claim has it."""
    await jobs.enqueue(1, job_id="a")
    job = await only(jobs)
    for _ in range(5):
        clock.advance(TTL * 0.7)
        await jobs.heartbeat(job)
        assert await jobs.claim() == []
    clock.advance(TTL + 1)
    again = await only(jobs)
    assert (again.id, again.attempts) == ("a", 2)
    assert again.lease_token > job.lease_token


async def test_many_leases_are_extended_in_one_call(jobs: JobQueue, clock: ManualClock) -> None:
    await jobs.enqueue_many(range(20))
    claimed = await jobs.claim(20)
    clock.advance(TTL * 0.7)
    await jobs.heartbeat(*claimed)
    clock.advance(TTL * 0.7)
    assert await jobs.claim(20) == []


async def test_a_heartbeat_of_many_names_those_that_are_lost(jobs: JobQueue, clock: ManualClock) -> None:
    await jobs.enqueue_many([JobSpec(n, id) for n, id in enumerate("abcd")])
    claimed = await jobs.claim(4)
    await jobs.ack(claimed[1])
    await jobs.cancel("d")
    clock.advance(TTL / 2)
    with pytest.raises(StaleLeaseError, match="of job 'b' and 1 more") as caught:
        await jobs.heartbeat(*claimed)
    assert caught.value.job_ids == ("b", "d")
    clock.advance(TTL * 0.7)
    assert await jobs.claim(4) == [], "the others were extended"


async def test_a_heartbeat_for_nothing_is_nothing(jobs: JobQueue) -> None:
    await jobs.heartbeat()
    await jobs.ack()
    await jobs.nack()
    await jobs.release()
