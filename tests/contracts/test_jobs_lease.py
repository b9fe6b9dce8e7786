"""Leases: tokens that fence, heartbeats that extend, and what becomes of a job whose worker is not heard of."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final

import pytest
from msgspec.structs import replace

from conquiet import ConfigError, Job, JobQueue, JobSpec, JobState, LeaseError, Reject, RetryPolicy, StaleLeaseError
from conquiet.kit.clock import ManualClock
from tests.contracts.jobs_flavours import CHECKED_FIRST, DELAY, TTL, Site, only, tally

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


# --- expiry -----------------------------------------------------------------------------------------------------------


async def test_a_lease_that_ran_out_makes_the_job_claimable_again(jobs: JobQueue, clock: ManualClock) -> None:
    """spec 5: TTL Enforcement: leases expire and jobs become reclaimable after LeaseTTL, with a new token."""
    await jobs.enqueue({"a": 1}, job_id="a", priority=3)
    first = await only(jobs, worker="one")
    clock.advance(TTL - 5)
    assert await jobs.claim(worker="two") == []
    clock.advance(6)
    again = await only(jobs, worker="two")
    assert (again.id, again.payload, again.priority, again.worker) == ("a", {"a": 1}, 3, "two")
    assert again.attempts == 2
    assert again.lease_token > first.lease_token


async def test_a_lapsed_job_stays_in_flight_until_somebody_claims(jobs: JobQueue, clock: ManualClock) -> None:
    """spec 5: Lease Expiry: the job remains InFlight in the store, which makes it available to new claims."""
    await jobs.enqueue(1, job_id="a")
    await jobs.claim()
    clock.advance(TTL + 1)
    assert await tally(jobs) == (0, 1, 0, 0)
    assert len(await jobs.claim()) == 1


async def test_a_lapsed_lease_is_remembered_as_a_failure(jobs: JobQueue, clock: ManualClock) -> None:
    await jobs.enqueue(1, job_id="a")
    first = await only(jobs, worker="one")
    clock.advance(TTL + 100)
    again = await only(jobs, worker="two")
    assert again.last_error == "lease expired"
    [failure] = again.failures
    assert (failure.number, failure.worker, failure.error) == (1, "one", "lease expired")
    assert (failure.started_at, failure.ended_at) == (first.claimed_at, first.lease_expires_at)


async def test_a_lapsed_job_comes_back_at_once_without_backoff(jobs: JobQueue, clock: ManualClock) -> None:
    """spec 5: Worker Crash: leased jobs become reclaimable after lease expiry; no in-flight work is lost."""
    await jobs.enqueue_many([JobSpec(1, "lapsed"), JobSpec(2, "active")])
    claimed = await jobs.claim(2)
    clock.advance(TTL / 2)
    await jobs.heartbeat(claimed[1])
    clock.advance(TTL / 2 + 1)
    await jobs.enqueue(3, job_id="fresh")
    again = await jobs.claim(5)
    assert [(job.id, job.attempts) for job in again] == [("lapsed", 2), ("fresh", 1)]
    active = await jobs.get("active")
    assert active is not None
    assert (active.state, active.lease_token) == (JobState.IN_FLIGHT, claimed[1].lease_token)


async def test_a_job_whose_leases_always_run_out_fails_in_the_end(jobs: JobQueue, clock: ManualClock) -> None:
    """spec 5: Retry Bound: at most MaxRetries retries, also for a worker that dies each time."""
    await jobs.enqueue(1, job_id="a")
    for attempt in range(1, 5):
        assert (await only(jobs)).attempts == attempt
        clock.advance(TTL + 1)
    assert await jobs.claim() == []
    job = await jobs.get("a")
    assert job is not None
    assert (job.state, job.attempts, job.last_error) == (JobState.FAILED, 4, "lease expired")
    assert job.lease_expires_at is None
    assert job.finished_at is not None
    assert [failure.number for failure in job.failures] == [1, 2, 3, 4]
    assert await tally(jobs) == (0, 0, 0, 1)


@pytest.mark.parametrize(("own", "policy"), [(0, 3), (None, 0)])
async def test_without_retries_one_lost_lease_is_the_end(
    site: Site, clock: ManualClock, own: int | None, policy: int
) -> None:
    jobs = site.queue(retry=RetryPolicy(max_retries=policy))
    await jobs.enqueue(1, job_id="a", max_retries=own)
    await jobs.claim()
    clock.advance(TTL + 1)
    assert await jobs.claim() == []
    assert await tally(jobs) == (0, 0, 0, 1)


async def test_many_lapsed_leases_all_come_back(jobs: JobQueue, clock: ManualClock) -> None:
    """However many a store gives up in one call."""
    ids = await jobs.enqueue_many(range(1200))
    assert len(await jobs.claim(1000)) + len(await jobs.claim(200)) == 1200
    clock.advance(TTL + 1)
    again: set[str] = set()
    for _ in range(10):
        again.update(job.id for job in await jobs.claim(1200))
    assert again == set(ids)


async def test_a_lapsed_lease_counts_as_a_retry_for_the_shares(jobs: JobQueue, clock: ManualClock) -> None:
    await jobs.enqueue(1, job_id="lapsed", priority=-1)
    await jobs.claim()
    clock.advance(TTL + 1)
    await jobs.enqueue_many([JobSpec(n, f"f{n}") for n in range(5)])
    assert "lapsed" in [job.id for job in await jobs.claim(3)]


async def test_leases_are_as_long_as_the_queue_says(site: Site, clock: ManualClock) -> None:
    """spec 5: Lease Duration: LeaseTTL: duration from claim until lease expires (default: 5s)."""
    short, long = site.queue(lease_ttl=2), site.queue(lease_ttl=500)
    for queue in (short, long):
        await queue.enqueue(1)
        await queue.claim()
    clock.advance(3)
    assert (len(await short.claim()), len(await long.claim())) == (1, 0)


async def test_the_defaults_of_a_queue(site: Site) -> None:
    """spec 5: Lease Duration: default 5s; Retry Policy: default 3, base 500ms, maximum 30s."""
    queue = site.plain_queue("defaults")
    assert queue.lease_ttl == 5.0
    assert (queue.retry.max_retries, queue.retry.backoff.base, queue.retry.backoff.cap) == (3, 0.5, 30.0)
    assert queue.retry.backoff.kind == "full_jitter"


@CHECKED_FIRST
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lease_ttl": 0}, "lease_ttl must be a positive number of seconds, not 0"),
        ({"lease_ttl": -1}, "lease_ttl must be a positive number of seconds, not -1"),
        ({"lease_ttl": float("inf")}, "lease_ttl must be a positive number of seconds, not inf"),
        ({"lease_ttl": "5"}, "lease_ttl must be a positive number of seconds, not '5'"),
        ({"name": ""}, "name must be 1 to 200 letters"),
        ({"name": "a b"}, "name must be 1 to 200 letters, digits, '.', '_' or '-', not 'a b'"),
        ({"name": "{a}"}, "name must be 1 to 200 letters"),
        ({"retry": 3}, "retry must be a RetryPolicy, not 3"),
        ({"retry": RetryPolicy(mode="requeue")}, "mode is for topics: .* 'requeue'"),
        ({"keep": 3}, "keep must be a JobRetention, not 3"),
        ({"keep_failed": None}, "keep_failed must be a JobRetention, not None"),
    ],
    ids=repr,
)
def test_what_no_queue_can_be_is_refused(site: Site, options: dict[str, object], message: str) -> None:
    """Construction fails naming the field."""
    with pytest.raises(ConfigError, match=message):
        site.plain_queue(**{"name": "q", **options})


async def test_the_lease_survives_while_a_retry_of_another_waits(jobs: JobQueue, clock: ManualClock) -> None:
    """Leases and waiting times do not get in each other's way."""
    await jobs.enqueue_many([JobSpec(1, "held"), JobSpec(2, "tried")])
    held, tried = await jobs.claim(2)
    await jobs.nack(tried)
    clock.advance(DELAY + 1)
    assert [job.id for job in await jobs.claim(5)] == ["tried"]
    await jobs.ack(held)
    assert await tally(jobs) == (0, 1, 1, 0)
