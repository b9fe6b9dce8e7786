"""Adding jobs: what is kept of them, which IDs are refused, and when they can be claimed."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from conquiet import ConfigError, DuplicateJobError, JobQueue, JobSpec, JobState, PayloadError
from conquiet.kit.clock import ManualClock
from tests.contracts.jobs_flavours import CHECKED_FIRST, TTL, Site, every, only, tally

pytest_plugins = ("tests.contracts.jobs_fixtures",)

PAYLOADS: list[Any] = [
    {"to": "a@b.c", "n": [1, 2.5, None, True], "ü\u2028": {"": "😀"}},
    "text",
    "",
    0,
    -(2**63),
    2**64 - 1,
    1e308,
    None,
    False,
    [],
    {},
    "\u0000 and \u001f",
]


async def test_a_new_job_is_ready_and_claimable(jobs: JobQueue) -> None:
    """spec 5: Enqueue: insert job with Ready status; it is claimable."""
    id = await jobs.enqueue({"a": 1})
    job = await jobs.get(id)
    assert job is not None
    assert (job.id, job.queue, job.payload, job.state) == (id, jobs.name, {"a": 1}, JobState.READY)
    assert (job.attempts, job.lease_token, job.priority, job.max_retries) == (0, 0, 0, None)
    assert (job.worker, job.last_error, job.result, job.failures) == (None, None, None, ())
    assert (job.retry_at, job.claimed_at, job.lease_expires_at, job.finished_at) == (None, None, None, None)
    assert (await only(jobs)).id == id


async def test_what_was_enqueued_comes_back_equal(jobs: JobQueue) -> None:
    for payload in PAYLOADS:
        await jobs.enqueue(payload)
        found = (await only(jobs)).payload
        assert (found, type(found)) == (payload, type(payload))


async def test_ids_are_made_if_none_is_given(jobs: JobQueue) -> None:
    ids = [await jobs.enqueue(1), await jobs.enqueue(1), *await jobs.enqueue_many([1, 1])]
    assert len(set(ids)) == 4


async def test_an_id_may_hold_anything_that_utf8_carries(jobs: JobQueue) -> None:
    for id in ("a", "é 😀 {x}:*", "x" * 200, "../..", "1", "a\nb", "%s' OR 1=1; --"):
        assert await jobs.enqueue(1, job_id=id) == id
        job = await only(jobs)
        assert job.id == id
        await jobs.ack(job)
        found = await jobs.get(id)
        assert found is not None
        assert found.state is JobState.SUCCEEDED
        await jobs.delete(id)
        assert await jobs.get(id) is None


async def test_an_id_can_be_used_once(jobs: JobQueue) -> None:
    """spec 5: Enqueue: precondition: job with unique ID does not exist."""
    await jobs.enqueue("first", job_id="a")
    with pytest.raises(DuplicateJobError, match=f"queue '{jobs.name}' has a job with the ID 'a' already") as caught:
        await jobs.enqueue("second", job_id="a", priority=5)
    assert (caught.value.job_ids, caught.value.queue, caught.value.enqueued) == (("a",), jobs.name, ())
    job = await only(jobs, count=5)
    assert (job.payload, job.priority) == ("first", 0)


@pytest.mark.parametrize("state", [JobState.IN_FLIGHT, JobState.SUCCEEDED, JobState.FAILED])
async def test_an_id_stays_taken_while_there_is_a_record_of_it(jobs: JobQueue, state: JobState) -> None:
    await jobs.enqueue("first", job_id="a", max_retries=0)
    job = await only(jobs)
    if state is JobState.SUCCEEDED:
        await jobs.ack(job)
    elif state is JobState.FAILED:
        await jobs.nack(job)
    with pytest.raises(DuplicateJobError):
        await jobs.enqueue("second", job_id="a")
    found = await jobs.get("a")
    assert found is not None
    assert (found.state, found.payload) == (state, "first")


async def test_a_deleted_jobs_id_is_free_and_its_successor_starts_anew(jobs: JobQueue) -> None:
    await jobs.enqueue("first", job_id="a", priority=3)
    old = await only(jobs)
    await jobs.ack(old, result=1)
    await jobs.delete("a")
    await jobs.enqueue("second", job_id="a")
    job = await jobs.get("a")
    assert job is not None
    assert (job.payload, job.attempts, job.result, job.priority) == ("second", 0, None, 0)
    assert (await only(jobs)).payload == "second"


async def test_many_come_in_their_order(jobs: JobQueue) -> None:
    specs = [JobSpec(n, f"j{n}") for n in range(25)]
    assert await jobs.enqueue_many(specs) == [f"j{n}" for n in range(25)]
    assert [job.payload for job in await jobs.claim(30)] == list(range(25))


async def test_of_many_each_has_its_own_settings(jobs: JobQueue) -> None:
    ids = await jobs.enqueue_many([JobSpec({"x": 1}, "a", priority=2, delay=50, max_retries=1), "plain"])
    one, other = [await jobs.get(id) for id in ids]
    assert one is not None
    assert other is not None
    assert (one.id, one.payload, one.priority, one.max_retries) == ("a", {"x": 1}, 2, 1)
    assert one.ready_ms - one.enqueued_ms == 50_000
    assert (other.payload, other.priority, other.max_retries) == ("plain", 0, None)
    assert other.ready_ms == other.enqueued_ms == one.enqueued_ms


async def test_none_are_many_too(jobs: JobQueue) -> None:
    assert await jobs.enqueue_many([]) == []
    assert await tally(jobs) == (0, 0, 0, 0)


async def test_of_many_none_is_added_if_one_is_there(jobs: JobQueue) -> None:
    await jobs.enqueue(1, job_id="b")
    with pytest.raises(DuplicateJobError, match="'b'") as caught:
        await jobs.enqueue_many([JobSpec(1, "a"), JobSpec(1, "b"), JobSpec(1, "c")])
    assert (caught.value.job_ids, caught.value.enqueued) == (("b",), ())
    assert await tally(jobs) == (1, 0, 0, 0)
    assert await jobs.get("a") is None


async def test_of_many_none_is_added_if_two_are_the_same(jobs: JobQueue) -> None:
    await jobs.enqueue(1, job_id="c")
    with pytest.raises(DuplicateJobError) as caught:
        await jobs.enqueue_many([JobSpec(n, id) for n, id in enumerate(["a", "b", "a", "c"])])
    assert sorted(caught.value.job_ids) == ["a", "c"]
    assert await tally(jobs) == (1, 0, 0, 0)


async def test_a_long_list_says_what_was_added_before_it_was_refused(jobs: JobQueue) -> None:
    await jobs.enqueue(0, job_id="j1500")
    with pytest.raises(DuplicateJobError) as caught:
        await jobs.enqueue_many([JobSpec(n, f"j{n}") for n in range(2500)])
    assert caught.value.job_ids == ("j1500",)
    assert caught.value.enqueued == tuple(f"j{n}" for n in range(1000))
    assert await tally(jobs) == (1001, 0, 0, 0)


async def test_a_long_list_is_all_added(jobs: JobQueue) -> None:
    ids = await jobs.enqueue_many(range(2300))
    assert len(set(ids)) == 2300
    assert [job.id for job in await every(jobs)] == ids


async def test_of_many_callers_with_one_id_one_wins(jobs: JobQueue) -> None:
    async def attempt(n: int) -> bool:
        try:
            await jobs.enqueue(n, job_id="same")
        except DuplicateJobError:
            return False
        return True

    won = await asyncio.gather(*(attempt(n) for n in range(8)))
    assert sum(won) == 1
    assert (await only(jobs, count=9)).payload == won.index(True)


async def test_a_taken_id_fails_no_other_caller_at_the_same_time(jobs: JobQueue) -> None:
    await jobs.enqueue("first", job_id="taken")
    ids = [*map(str, range(10)), "taken", *map(str, range(10, 20))]
    found = await asyncio.gather(*(jobs.enqueue(id, job_id=id) for id in ids), return_exceptions=True)
    refused = found.pop(10)
    assert isinstance(refused, DuplicateJobError)
    assert (refused.job_ids, refused.enqueued) == (("taken",), ())
    assert found == [id for id in ids if id != "taken"]
    assert {job.id: job.payload for job in await jobs.claim(100, "w")} == {"taken": "first"} | {id: id for id in found}


async def test_a_delayed_job_is_not_claimable_before_its_time(jobs: JobQueue, clock: ManualClock) -> None:
    """spec 5: Claim: precondition: retry_at <= now (if set)."""
    await jobs.enqueue(1, delay=60)
    job = (await jobs.list_jobs(JobState.READY)).jobs[0]
    assert job.retry_at is not None
    assert (job.retry_at - job.enqueued_at).total_seconds() == 60
    assert await jobs.claim() == []
    clock.advance(55)
    assert await jobs.claim() == []
    clock.advance(10)
    assert (await only(jobs)).attempts == 1


async def test_queues_of_one_store_know_nothing_of_each_other(site: Site, clock: ManualClock) -> None:
    """spec 5: Ordering: no cross-queue guarantees; each queue has its own jobs, IDs, leases and counts."""
    one, other = site.queue(), site.queue()
    await one.enqueue("one", job_id="a")
    await other.enqueue("other", job_id="a")
    assert await tally(other) == (1, 0, 0, 0)
    mine = await only(one, count=5)
    theirs = await only(other, count=5)
    assert (mine.payload, theirs.payload) == ("one", "other")
    await one.ack(mine)
    assert (await tally(one), await tally(other)) == ((0, 0, 1, 0), (0, 1, 0, 0))
    clock.advance(TTL + 1)
    assert await one.claim(5) == []
    assert await tally(other) == (0, 1, 0, 0), "nobody has claimed there"
    await other.ack(theirs)
    await one.delete("a")
    assert await other.get("a") is not None


async def test_a_job_of_another_queue_is_refused(site: Site) -> None:
    one, other = site.queue(), site.queue()
    await one.enqueue(1, job_id="a")
    job = await only(one)
    for call in (other.ack, other.nack, other.heartbeat, other.release):
        with pytest.raises(ConfigError, match=f"job 'a' is of queue '{one.name}', not of '{other.name}'"):
            await call(job)
    assert await tally(one) == (0, 1, 0, 0)


# --- what is refused --------------------------------------------------------------------------------------------------


@CHECKED_FIRST
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"job_id": ""}, "job_id must be a non-empty string, not ''"),
        ({"job_id": 7}, "job_id must be a non-empty string, not 7"),
        ({"job_id": "x" * 201}, "job_id must be at most 200 characters without NUL"),
        ({"job_id": "a\0b"}, "job_id must be at most 200 characters without NUL"),
        ({"job_id": "\ud800"}, "job_id must be valid Unicode"),
        ({"priority": 1.5}, "priority must be an integer of 32 bits, not 1.5"),
        ({"priority": True}, "priority must be an integer of 32 bits, not True"),
        ({"priority": 2**31}, "priority must be an integer of 32 bits, not 2147483648"),
        ({"priority": "high"}, "priority must be an integer of 32 bits, not 'high'"),
        ({"delay": -1}, "delay must be a finite number of at least 0, not -1"),
        ({"delay": float("nan")}, "delay must be a finite number of at least 0, not nan"),
        ({"delay": float("inf")}, "delay must be a finite number of at least 0, not inf"),
        ({"delay": "1"}, "delay must be a finite number of at least 0, not '1'"),
        ({"delay": 1e12}, "delay must be at most ten years, not 1000000000000.0 seconds"),
        ({"max_retries": -1}, "max_retries must be an integer of at least 0, not -1"),
        ({"max_retries": 1.0}, "max_retries must be an integer of at least 0, not 1.0"),
    ],
    ids=repr,
)
async def test_what_a_job_cannot_be_is_refused(jobs: JobQueue, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        await jobs.enqueue(1, **options)
    with pytest.raises(ConfigError, match=message):
        await jobs.enqueue_many(["good", JobSpec(1, **options)])
    assert await tally(jobs) == (0, 0, 0, 0)


@CHECKED_FIRST
@pytest.mark.parametrize(
    ("payload", "place"),
    [(float("nan"), r"\$ is nan"), ({"a": [b""]}, r"\$\.a\[0\] is of type bytes"), ({1: 2}, "the key 1"), ({1}, "set")],
    ids=repr,
)
async def test_a_payload_that_json_would_change_is_refused(jobs: JobQueue, payload: Any, place: str) -> None:
    with pytest.raises(PayloadError, match=place):
        await jobs.enqueue(payload)
    with pytest.raises(PayloadError, match=place):
        await jobs.enqueue_many([1, payload])
    assert await tally(jobs) == (0, 0, 0, 0)


@pytest.mark.parametrize("priority", [-(2**31), 2**31 - 1])
async def test_the_ends_of_the_priorities_are_priorities(jobs: JobQueue, priority: int) -> None:
    await jobs.enqueue(1, priority=priority)
    assert (await only(jobs)).priority == priority
