"""Looking after many jobs: how many wait and how long, which queues there are, and changing those of a kind."""

from __future__ import annotations

import datetime as dt
import secrets
from typing import Any

import pytest

from conquiet import ConfigError, JobQueue, JobSpec, JobState, JobStateError, Reject
from conquiet.kit.clock import ManualClock
from tests.contracts.jobs_flavours import CHECKED_FIRST, Site, every, only, tally

pytest_plugins = ("tests.contracts.jobs_fixtures",)


# --- counts -----------------------------------------------------------------------------------------------------------


async def test_counts_tell_what_is_due_and_what_is_scheduled(jobs: JobQueue, clock: ManualClock) -> None:
    counts = await jobs.counts()
    assert (counts.due, counts.scheduled, counts.oldest_age) == (0, 0, None)
    await jobs.enqueue_many([JobSpec(n, delay=delay) for n, delay in enumerate((0, 0, 20, 300))])
    counts = await jobs.counts()
    assert (counts.due, counts.scheduled, counts[JobState.READY]) == (2, 2, 4)
    assert counts.oldest_age is not None
    assert counts.oldest_age < 15
    clock.advance(100)
    counts = await jobs.counts()
    assert (counts.due, counts.scheduled) == (3, 1), "also before any claim has looked"
    assert 100 <= (counts.oldest_age or 0) < 115
    await jobs.ack(*await every(jobs))
    counts = await jobs.counts()
    assert (counts.due, counts.scheduled, counts.oldest_age) == (0, 1, None)


async def test_the_oldest_of_all_priorities_counts(jobs: JobQueue, clock: ManualClock) -> None:
    for priority in (0, 5, -5, 3):
        await jobs.enqueue(priority, priority=priority)
        clock.advance(10)
    for expected in (40, 30, 20, 10):
        counts = await jobs.counts()
        assert expected <= (counts.oldest_age or 0) < expected + 9.9
        job = next(job for job in await jobs.claim(9) if job.payload == {40: 0, 30: 5, 20: -5, 10: 3}[expected])
        await jobs.ack(job)
        for other in (await jobs.list_jobs(JobState.IN_FLIGHT)).jobs:
            await jobs.release(other)


async def test_what_is_due_only_by_time_has_its_age_too(jobs: JobQueue, clock: ManualClock) -> None:
    await jobs.enqueue(1, delay=10)
    clock.advance(30)
    assert 20 <= ((await jobs.counts()).oldest_age or 0) < 30


async def test_the_queues_of_a_store_can_be_listed(site: Site) -> None:
    prefix = f"l.{secrets.token_hex(4)}"
    for name in ("b", "a.x", "c-1"):
        await site.queue(f"{prefix}.{name}").enqueue(1)
    await site.queue(f"{prefix}.nothing").claim()
    found = [name for name in await site.store.list_queues() if name.startswith(prefix)]
    assert found == [f"{prefix}.a.x", f"{prefix}.b", f"{prefix}.c-1"]


# --- changing many ----------------------------------------------------------------------------------------------------


async def failed(jobs: JobQueue) -> dict[str, str]:
    """Some that have failed, of all kinds: what each is, by its ID."""
    kinds: list[tuple[str, dict[str, Any], BaseException | str]] = [
        ("value", {"task": "send", "key": "ann"}, ValueError("no: really")),
        ("key", {"task": "send", "key": "bob"}, KeyError("x")),
        ("plain", {"task": "load"}, "broken"),
        ("rejected", {"key": "ann"}, Reject("refused")),
    ]
    ids: dict[str, str] = {}
    for name, fields, error in kinds * 3:
        id = await jobs.enqueue(name, max_retries=0, **fields)
        await jobs.nack(await only(jobs), error=error)
        ids[id] = name
    return ids


async def told(jobs: JobQueue, what: str, **which: Any) -> list[str]:
    """The IDs of all that were changed, through all pages."""
    found: list[str] = []
    cursor = None
    while True:
        batch = await getattr(jobs, what)(count=5, cursor=cursor, **which)
        found += batch.job_ids
        cursor = batch.cursor
        if cursor is None:
            return found


COMMON: list[tuple[dict[str, Any], tuple[str, ...]]] = [
    ({}, ("value", "key", "plain", "rejected")),
    ({"error": "ValueError"}, ("value",)),
    ({"error": "refused"}, ("rejected",)),
    ({"error": "broken", "task": "load"}, ("plain",)),
    ({"error": "broken", "task": "send"}, ()),
    ({"task": "send"}, ("value", "key")),
    ({"key": "ann"}, ("value", "rejected")),
    ({"task": "send", "key": "bob"}, ("key",)),
]


async def test_failed_jobs_are_replayed_by_what_they_have_in_common(jobs: JobQueue) -> None:
    ids = await failed(jobs)
    for which, names in COMMON:
        replayed = await told(jobs, "replay_many", **which)
        assert sorted(replayed) == sorted(id for id, name in ids.items() if name in names), which
        assert await tally(jobs) == (len(replayed), 0, 0, 12 - len(replayed))
        for job in await every(jobs):
            before: dict[str, BaseException | str] = {
                "value": ValueError("no: really"),
                "key": KeyError("x"),
                "plain": "broken",
            }
            await jobs.nack(job, error=before.get(ids[job.id], Reject("refused")))


async def test_a_call_looks_at_so_many_and_says_where_to_go_on(jobs: JobQueue) -> None:
    ids = await failed(jobs)
    batch = await jobs.replay_many(count=5)
    assert len(batch.job_ids) == 5
    assert batch.cursor is not None
    rest = await jobs.replay_many(cursor=batch.cursor)
    assert (len(rest.job_ids), rest.cursor) == (7, None)
    assert {*batch.job_ids, *rest.job_ids} == set(ids)


async def test_by_time_of_the_end_or_of_the_enqueueing(jobs: JobQueue, clock: ManualClock) -> None:
    for name in ("old", "new"):
        await jobs.enqueue(name, job_id=name)
        await jobs.enqueue(name, job_id=f"waits-{name}", delay=3600)
        await jobs.nack(await only(jobs), error=Reject(name))
        clock.advance(60)
    new = await jobs.get("new")
    assert new is not None
    assert new.finished_at is not None
    since = new.finished_at - dt.timedelta(seconds=30)
    assert await told(jobs, "delete_many", before=since) == ["old"]
    assert await told(jobs, "delete_many", before=since) == []
    assert await told(jobs, "cancel_many", after=since) == ["waits-new"]
    assert await told(jobs, "replay_many", after=since, error="new") == ["new"]


async def test_waiting_and_running_jobs_are_cancelled(jobs: JobQueue) -> None:
    ids = await jobs.enqueue_many([JobSpec(n, task="a" if n % 2 else "b", delay=5 * (n > 3)) for n in range(8)])
    held = await only(jobs)
    assert sorted(await told(jobs, "cancel_many", task="a")) == sorted(ids[1::2])
    assert await told(jobs, "cancel_many", state=JobState.IN_FLIGHT) == [held.id]
    assert await tally(jobs) == (3, 0, 0, 5)


async def test_finished_jobs_are_deleted(jobs: JobQueue) -> None:
    ids = await failed(jobs)
    await jobs.enqueue_many(range(3))
    await jobs.ack(*await jobs.claim(9))
    assert len(await told(jobs, "delete_many", state=JobState.SUCCEEDED)) == 3
    assert sorted(await told(jobs, "delete_many", state=JobState.FAILED)) == sorted(ids)
    assert await tally(jobs) == (0, 0, 0, 0)


@CHECKED_FIRST
@pytest.mark.parametrize(
    ("what", "state"),
    [
        ("cancel_many", JobState.FAILED),
        ("cancel_many", JobState.SUCCEEDED),
        ("delete_many", JobState.READY),
        ("delete_many", JobState.IN_FLIGHT),
    ],
)
async def test_what_a_state_forbids_is_refused(jobs: JobQueue, what: str, state: JobState) -> None:
    with pytest.raises(JobStateError, match=f"is not possible for jobs that are {state}"):
        await getattr(jobs, what)(state)


@CHECKED_FIRST
@pytest.mark.parametrize(
    ("which", "message"),
    [
        ({"task": ""}, "task must be a non-empty string"),
        ({"error": ValueError}, "error must be a non-empty string"),
        ({"before": 5}, "before must be a datetime with a time zone, not 5"),
        ({"after": dt.datetime(2030, 1, 1)}, "after must be a datetime with a time zone"),
        ({"count": 0}, "count must be an integer of at least 1"),
    ],
    ids=repr,
)
async def test_what_no_job_can_have_is_refused(jobs: JobQueue, which: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        await jobs.replay_many(**which)
