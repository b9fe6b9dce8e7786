"""Claiming: in which order, how many, what stays invisible, and who gets what when many claim."""

from __future__ import annotations

from typing import Any

import pytest

from conquiet import ConfigError, JobQueue, JobSpec, JobState, Reject
from conquiet.kit.clock import ManualClock
from tests.contracts.jobs_flavours import CHECKED_FIRST, DELAY, TTL, Site, ids_of, only, tally

pytestmark = pytest.mark.guarantee

pytest_plugins = ("tests.contracts.jobs_fixtures",)


async def retries(jobs: JobQueue, clock: ManualClock, *ids: str, priority: int = 0) -> None:
    """Jobs that were tried and failed once, and are due again."""
    await jobs.enqueue_many([JobSpec(id, id, priority=priority) for id in ids])
    claimed = await jobs.claim(len(ids))
    assert [job.id for job in claimed] == list(ids)
    await jobs.nack(*claimed, error="once")
    clock.advance(DELAY + 1)


async def fresh(jobs: JobQueue, *ids: str, priority: int = 0) -> None:
    await jobs.enqueue_many([JobSpec(id, id, priority=priority) for id in ids])


def names(letter: str, count: int) -> list[str]:
    return [f"{letter}{n}" for n in range(count)]


# --- what a claim does ------------------------------------------------------------------------------------------------


async def test_a_claim_leases(jobs: JobQueue) -> None:
    """spec 5: Claim: atomic update of the status to InFlight, assign lease token; leased to a specific worker."""
    id = await jobs.enqueue({"a": 1})
    job = await only(jobs, worker="w-1")
    assert (job.id, job.state, job.worker, job.attempts) == (id, JobState.IN_FLIGHT, "w-1", 1)
    assert job.claimed_ms is not None
    assert job.lease_token >= job.claimed_ms
    assert job.lease_ms == job.claimed_ms + TTL * 1000
    assert job.claimed_ms >= job.enqueued_ms
    assert await jobs.get(id) == job


async def test_a_claim_without_a_worker_names_the_process(jobs: JobQueue) -> None:
    await jobs.enqueue(1)
    assert (await only(jobs)).worker


async def test_a_claimed_job_is_invisible(jobs: JobQueue) -> None:
    """spec 5: Visibility: jobs are invisible to other workers while leased (in-flight)."""
    await jobs.enqueue(1)
    await jobs.claim(worker="one")
    assert await jobs.claim(5, worker="two") == []


async def test_a_succeeded_job_is_never_claimed_again(jobs: JobQueue, clock: ManualClock) -> None:
    """spec 5: Visibility: successful jobs are never re-processed. Of succeeded and ready, only the ready."""
    await fresh(jobs, "a", "b")
    await jobs.ack(await only(jobs))
    assert ids_of(await jobs.claim(5)) == ["b"]
    clock.advance(10 * TTL)
    assert ids_of(await jobs.claim(5)) == ["b"]


async def test_a_failed_job_is_never_claimed_again(jobs: JobQueue, clock: ManualClock) -> None:
    """spec 5: States: Failed: exceeded max retries and will not be processed again."""
    await jobs.enqueue(1, max_retries=0)
    await jobs.nack(await only(jobs))
    clock.advance(10 * TTL)
    assert await jobs.claim(5) == []


async def test_a_claim_takes_no_more_than_it_was_asked_for(jobs: JobQueue) -> None:
    await fresh(jobs, *names("j", 7))
    assert [len(await jobs.claim(3)) for _ in range(4)] == [3, 3, 1, 0]


async def test_a_claim_takes_what_there_is(jobs: JobQueue) -> None:
    """2 jobs and room for 10 give 2."""
    await fresh(jobs, "a", "b")
    assert len(await jobs.claim(10)) == 2


async def test_of_an_empty_queue_nothing_is_claimed(jobs: JobQueue) -> None:
    assert await jobs.claim(10) == []
    assert await tally(jobs) == (0, 0, 0, 0)


async def test_many_can_be_claimed_at_once(jobs: JobQueue) -> None:
    ids = await jobs.enqueue_many(range(1500))
    assert ids_of(await jobs.claim(1200)) == ids[:1200]
    assert await tally(jobs) == (300, 1200, 0, 0)


@pytest.mark.slow
async def test_a_claim_is_bounded_by_bytes_and_shares_come_first(jobs: JobQueue, clock: ManualClock) -> None:
    """8 MiB a call: what does not fit is claimed next."""
    large = "x" * 3_000_000
    await jobs.enqueue_many([JobSpec(large, id, priority=1) for id in ("low0", "low1")])
    clock.advance(1)
    await jobs.enqueue_many([JobSpec(large, id, priority=2) for id in names("high", 4)])
    await jobs.enqueue("x" * 9_000_000, job_id="huge", priority=-1)
    got = [ids_of(await jobs.claim(10)) for _ in range(3)]
    assert got == [["high0", "low0", "low1"], ["high1", "high2", "high3"], ["huge"]]


# --- order ------------------------------------------------------------------------------------------------------------


async def test_first_in_first_out(jobs: JobQueue) -> None:
    """spec 5: Ordering: jobs within a single queue are processed in FIFO order by default."""
    ids = [await jobs.enqueue(n, job_id=f"{(n * 7) % 10}-{n}") for n in range(10)]
    assert ids_of(await jobs.claim(4) + await jobs.claim(3) + await jobs.claim(3)) == ids


async def test_a_larger_priority_is_sooner(jobs: JobQueue) -> None:
    """spec 5: Ordering: priority settings may alter ordering within a queue."""
    for id, priority in [("low", -1), ("a", 0), ("high", 5), ("b", 0), ("higher", 1_000_000), ("lowest", -1_000_000)]:
        await jobs.enqueue(id, job_id=id, priority=priority)
    assert ids_of(await jobs.claim(6)) == ["higher", "high", "a", "b", "low", "lowest"]


async def test_the_answer_of_a_claim_is_in_order_whoever_had_a_share(jobs: JobQueue, clock: ManualClock) -> None:
    await retries(jobs, clock, "tried")
    await fresh(jobs, "low", priority=-1)
    clock.advance(1)
    await fresh(jobs, *names("high", 10), priority=1)
    assert ids_of(await jobs.claim(5)) == ["high0", "high1", "high2", "tried", "low"]


async def test_within_a_priority_who_became_claimable_first_is_first(jobs: JobQueue, clock: ManualClock) -> None:
    await jobs.enqueue(1, job_id="later", delay=60)
    await jobs.enqueue(1, job_id="sooner", delay=30)
    clock.advance(45)
    await jobs.enqueue(1, job_id="now")
    clock.advance(45)
    assert ids_of(await jobs.claim(5)) == ["sooner", "now", "later"]


async def test_a_retry_lines_up_by_when_it_is_due(jobs: JobQueue, clock: ManualClock) -> None:
    """spec 5: Real-Time Ordering: strict FIFO is not maintained across retries."""
    await fresh(jobs, "tried", "b")
    await jobs.nack((await jobs.claim(1))[0])
    clock.advance(DELAY / 2)
    await fresh(jobs, "c")
    clock.advance(DELAY)
    await fresh(jobs, "d")
    assert ids_of(await jobs.claim(10)) == ["b", "c", "tried", "d"]


# --- shares -----------------------------------------------------------------------------------------------------------


async def test_a_fifth_of_a_claim_goes_to_retries(jobs: JobQueue, clock: ManualClock) -> None:
    """Of 10 places, with 5 retries due and 20 fresh jobs before them, 2 + 8; all leased, none waiting any more."""
    await jobs.enqueue_many([JobSpec(n, f"t{n}") for n in range(5)])
    tried = await jobs.claim(5)
    await fresh(jobs, *names("f", 20))
    await jobs.nack(*tried)
    clock.advance(DELAY + 1)
    claimed = await jobs.claim(10)
    assert ids_of(claimed) == [*names("f", 8), "t0", "t1"]
    assert {(job.state, job.retry_at) for job in claimed} == {(JobState.IN_FLIGHT, None)}
    assert all(job.lease_expires_at for job in claimed)


async def test_of_four_places_one_goes_to_a_retry(jobs: JobQueue, clock: ManualClock) -> None:
    """A fifth of 4 is less than 1, but it is 1."""
    await jobs.enqueue_many([JobSpec(n, f"t{n}") for n in range(3)])
    tried = await jobs.claim(3)
    await fresh(jobs, *names("f", 9))
    await jobs.nack(*tried)
    clock.advance(DELAY + 1)
    assert ids_of(await jobs.claim(4)) == ["f0", "f1", "f2", "t0"]


async def test_retries_fill_what_nobody_else_wants(jobs: JobQueue, clock: ManualClock) -> None:
    """If only retries are due, they fill the claim."""
    await retries(jobs, clock, *names("t", 8))
    assert ids_of(await jobs.claim(6)) == names("t", 6)


async def test_only_what_is_due_is_claimed(jobs: JobQueue, clock: ManualClock) -> None:
    """5 due retries, 1 of the future, 1 given up and 2 fresh: of 6 places, 4 + 2."""
    await retries(jobs, clock, *names("t", 5))
    await fresh(jobs, "dead", priority=9)
    await jobs.nack(await only(jobs), error=Reject("not ours"))
    await jobs.enqueue(1, job_id="future", priority=9)
    await jobs.nack(await only(jobs), delay=1000)
    await fresh(jobs, "f0", "f1")
    claimed = ids_of(await jobs.claim(6))
    assert len(claimed) == 6
    assert {"dead", "future"}.isdisjoint(claimed)
    assert len(await jobs.claim(6)) == 1, "the one that had no place"
    left = await jobs.get("future")
    assert left is not None
    assert (left.state, left.attempts) == (JobState.READY, 1)


async def test_a_fifth_of_a_claim_goes_to_who_has_waited_longest(jobs: JobQueue, clock: ManualClock) -> None:
    """Whatever its priority: so that no stream of others keeps it waiting for ever, neither below nor above it."""
    for letter, priority in (("mid", 0), ("low", -5), ("high", 5), ("mid-late", 0)):
        await fresh(jobs, *names(letter, 12), priority=priority)
        clock.advance(1)
    got = [ids_of(await jobs.claim(count)) for count in (10, 10, 20, 3)]
    assert got[0] == [*names("high", 8), "mid0", "mid1"]
    assert got[1] == [*names("high", 12)[8:], *names("mid", 8)[2:]], "those in front are the longest waiting too"
    assert got[2] == [*names("mid", 12)[8:], *names("mid-late", 12), *names("low", 4)]
    assert got[3] == ["low4", "low5", "low6"]


async def test_of_those_who_have_waited_equally_long_the_most_urgent_comes(jobs: JobQueue, clock: ManualClock) -> None:
    await jobs.enqueue_many([JobSpec(1, f"{priority}", priority=priority) for priority in (3, -7, 5, 4)])
    clock.advance(1)
    await fresh(jobs, *names("high", 20), priority=9)
    assert [ids_of(await jobs.claim(5))[-1] for _ in range(4)] == ["5", "4", "3", "-7"]


@pytest.mark.parametrize("priorities", [3, 40])
async def test_no_priority_starves_under_a_stream_of_others(
    jobs: JobQueue, clock: ManualClock, priorities: int
) -> None:
    """New ones of the highest and of the lowest priority come as fast as jobs are claimed."""
    between = [f"between-{n}" for n in range(priorities)]
    await jobs.enqueue_many([JobSpec(1, id, priority=at + 1) for at, id in enumerate(between)])
    got: list[str] = []
    for turn in range(priorities + 2):
        clock.advance(1)
        await fresh(jobs, *(f"high-{turn}-{n}" for n in range(4)), priority=100)
        await fresh(jobs, f"low-{turn}", priority=-100)
        got += ids_of(await jobs.claim(5))
    assert set(between) <= set(got)


async def test_who_lines_up_again_waits_since_its_first_time(jobs: JobQueue, clock: ManualClock) -> None:
    """Released, cancelled or claimed: what has left the line is not looked for, what came back is found."""
    await fresh(jobs, "a", "b", "c", priority=1)
    clock.advance(1)
    await fresh(jobs, *names("high", 30), priority=9)
    clock.advance(1)
    await fresh(jobs, *names("low", 5), priority=-9)
    first = await jobs.claim(5)
    assert ids_of(first) == [*names("high", 4), "a"]
    await jobs.cancel("b")
    await jobs.release(first[-1])
    assert ids_of(await jobs.claim(5)) == [*names("high", 8)[4:], "a"]
    assert ids_of(await jobs.claim(5)) == [*names("high", 12)[8:], "c"]
    assert ids_of(await jobs.claim(25))[-3:] == ["low2", "low3", "low4"]


@pytest.mark.parametrize("count", [1, 2, 5])
async def test_nobody_starves_however_small_the_claims(jobs: JobQueue, clock: ManualClock, count: int) -> None:
    """A retry and a low priority, with always something more urgent and fresh: both are claimed before long."""
    await retries(jobs, clock, "tried")
    await fresh(jobs, "low", priority=-1)
    got: set[str] = set()
    for round in range(30):
        await fresh(jobs, *(f"urgent-{round}-{n}" for n in range(count)), priority=7)
        claimed = await jobs.claim(count)
        assert len(claimed) == count
        got.update(ids_of(claimed))
    assert {"tried", "low"} <= got
    assert len(got) == 30 * count


async def test_shares_do_not_hold_places_that_nobody_needs(jobs: JobQueue) -> None:
    await fresh(jobs, *names("j", 10))
    assert ids_of(await jobs.claim(10)) == names("j", 10)


# --- what is refused --------------------------------------------------------------------------------------------------


@CHECKED_FIRST
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"count": 0}, "count must be an integer of at least 1, not 0"),
        ({"count": 1.5}, "count must be an integer of at least 1, not 1.5"),
        ({"count": True}, "count must be an integer of at least 1, not True"),
        ({"worker": ""}, "worker must be a non-empty string, not ''"),
        ({"worker": 7}, "worker must be a non-empty string, not 7"),
        ({"timeout": -1}, "timeout must be a finite number of at least 0, not -1"),
        ({"timeout": float("nan")}, "timeout must be a finite number of at least 0, not nan"),
    ],
    ids=repr,
)
async def test_what_cannot_be_claimed_is_refused(jobs: JobQueue, options: dict[str, Any], message: str) -> None:
    await jobs.enqueue(1)
    with pytest.raises(ConfigError, match=message):
        await jobs.claim(**options)
    assert await tally(jobs) == (1, 0, 0, 0)


async def test_two_objects_of_one_queue_share_its_jobs(site: Site, jobs: JobQueue) -> None:
    other = site.queue(jobs.name)
    await fresh(jobs, "a", "b")
    assert (await only(jobs)).id == "a"
    job = await only(other)
    assert job.id == "b"
    await jobs.ack(job)
    assert await tally(other) == (0, 1, 1, 0)
