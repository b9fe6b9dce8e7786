"""Leases that run out: what becomes of a job whose worker is not heard of."""

from __future__ import annotations

import pytest

from conquiet import ConfigError, JobQueue, JobSpec, JobState, RetryPolicy
from conquiet.kit.clock import ManualClock
from tests.contracts.jobs_flavours import CHECKED_FIRST, DELAY, TTL, Site, only, tally

pytestmark = pytest.mark.guarantee

pytest_plugins = ("tests.contracts.jobs_fixtures",)


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
