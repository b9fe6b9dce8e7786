"""One job for a unique key: while it is not finished, while it is not started, or for a window of time."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from conquiet import ConfigError, DuplicateJobError, JobQueue, JobRetention, JobSpec, JobState, Unique
from conquiet.kit.clock import ManualClock
from tests.contracts.jobs_flavours import CHECKED_FIRST, TTL, Site, only, tally

pytest_plugins = ("tests.contracts.jobs_fixtures",)

ONE = Unique("one")


async def is_taken(jobs: JobQueue, unique: Unique = ONE) -> bool:
    try:
        await jobs.enqueue("another", unique=unique)
    except DuplicateJobError as error:
        return error.is_unique
    return False


async def test_a_second_job_is_refused_until_the_first_has_finished(jobs: JobQueue) -> None:
    id = await jobs.enqueue("first", unique=ONE)
    with pytest.raises(DuplicateJobError, match=f"has a job with the ID '{id}' for this unique key already"):
        await jobs.enqueue("second", unique=ONE)
    assert await tally(jobs) == (1, 0, 0, 0)
    job = await only(jobs)
    assert await is_taken(jobs)
    await jobs.nack(job, delay=0)
    assert await is_taken(jobs)
    await jobs.release(await only(jobs), delay=0)
    assert await is_taken(jobs)
    await jobs.ack(await only(jobs))
    assert not await is_taken(jobs)
    assert await is_taken(jobs), "now the other has it"
    assert await tally(jobs) == (1, 0, 1, 0)


@pytest.mark.parametrize("end", ["reject", "cancel", "cancel in flight", "delete", "expire"])
async def test_however_a_job_ends_its_key_is_free(jobs: JobQueue, clock: ManualClock, end: str) -> None:
    id = await jobs.enqueue("first", unique=ONE, max_retries=0)
    job = None if end == "cancel" else await only(jobs)
    assert await is_taken(jobs)
    if job is not None and end == "reject":
        await jobs.nack(job)
    elif end.startswith("cancel"):
        await jobs.cancel(id)
    elif end == "expire":
        clock.advance(TTL + 1)
        assert await jobs.claim() == []
    elif job is not None:
        await jobs.ack(job)
        await jobs.delete(id)
    assert not await is_taken(jobs)


async def test_until_started_a_second_job_may_wait_while_the_first_runs(jobs: JobQueue) -> None:
    unique = Unique("one", until="started")
    await jobs.enqueue("first", unique=unique)
    assert await is_taken(jobs, unique)
    first = await only(jobs)
    await jobs.enqueue("second", unique=unique)
    assert await is_taken(jobs, unique)
    await jobs.release(first)
    assert await is_taken(jobs, unique)
    assert [job.payload for job in await jobs.claim(9)] == ["first", "second"]
    assert not await is_taken(jobs, unique), "what was claimed once was started, also if it was given back"


async def test_a_key_is_held_for_a_window_and_no_longer(site: Site, clock: ManualClock) -> None:
    jobs, unique = site.queue(keep=JobRetention(count=0)), Unique("one", within=60)
    await jobs.enqueue("first", unique=unique)
    assert await is_taken(jobs, unique)
    await jobs.ack(await only(jobs))
    assert await is_taken(jobs, unique), "finished or not"
    assert await jobs.purge() == 1
    assert await is_taken(jobs, unique), "nor does it matter that it is gone"
    clock.advance(55)
    assert await is_taken(jobs, unique)
    clock.advance(6)
    assert not await is_taken(jobs, unique)
    assert await is_taken(jobs, unique)
    clock.advance(61)
    assert not await is_taken(jobs, unique), "though the job of the last window waits still"


async def test_without_a_key_it_is_the_task_and_the_payload(jobs: JobQueue) -> None:
    await jobs.enqueue({"a": 1, "b": [2]}, task="send", unique=Unique(), key="tenant", headers={"trace": "1"})
    with pytest.raises(DuplicateJobError):
        await jobs.enqueue({"b": [2], "a": 1}, task="send", unique=Unique(), key="other", priority=5)
    for payload, task in (({"a": 1, "b": [3]}, "send"), ({"a": 1, "b": [2]}, "other"), ({"a": 1, "b": [2]}, None)):
        await jobs.enqueue(payload, task=task, unique=Unique())
    await jobs.enqueue({"a": 1, "b": [2]}, task="send")
    assert await tally(jobs) == (5, 0, 0, 0)


async def test_the_existing_one_may_be_given_instead(jobs: JobQueue) -> None:
    unique = Unique("one", on_conflict="existing")
    id = await jobs.enqueue("first", unique=unique)
    assert [await jobs.enqueue("second", unique=unique) for _ in range(3)] == [id] * 3
    assert (await only(jobs)).payload == "first"
    assert await jobs.enqueue("second", unique=unique) == id
    assert await tally(jobs) == (0, 1, 0, 0)


async def test_one_that_waits_may_be_replaced(jobs: JobQueue, clock: ManualClock) -> None:
    unique = Unique("one", on_conflict="replace")
    first = await jobs.enqueue("first", unique=unique, delay=60)
    second = await jobs.enqueue("second", unique=unique, delay=60)
    third = await jobs.enqueue("third", unique=unique)
    told = [await jobs.get(id) for id in (first, second, third)]
    assert [(job.state, job.last_error) for job in told if job] == [
        (JobState.FAILED, "replaced"),
        (JobState.FAILED, "replaced"),
        (JobState.READY, None),
    ]
    clock.advance(61)
    [job] = await jobs.claim(9)
    assert job.payload == "third"
    with pytest.raises(DuplicateJobError) as caught:
        await jobs.enqueue("fourth", unique=unique)
    assert caught.value.job_ids == (third,), "what runs is not replaced"
    await jobs.ack(job)
    await jobs.enqueue("fourth", unique=unique)
    assert await tally(jobs) == (1, 0, 1, 2)


async def test_bulk_enqueues_skip_and_say_which(jobs: JobQueue) -> None:
    there = await jobs.enqueue("there", unique=Unique("a"))
    specs = [JobSpec(n, unique=Unique(key) if key else None) for n, key in enumerate(["a", "b", "", "b", "c", "a"])]
    ids = await jobs.enqueue_many([*specs, "plain"])
    assert ids.skipped == (0, 3, 5)
    assert (ids[0], ids[5], ids[3]) == (there, there, ids[1])
    assert [job.payload for job in await jobs.claim(20)] == ["there", 1, 2, 4, "plain"]
    assert (await jobs.enqueue_many([1, 2])).skipped == ()


async def test_an_id_that_is_taken_adds_nothing_and_takes_no_key(jobs: JobQueue) -> None:
    await jobs.enqueue(1, job_id="a")
    with pytest.raises(DuplicateJobError) as caught:
        await jobs.enqueue_many([JobSpec(1, "b", unique=ONE), JobSpec(1, "a")])
    assert (caught.value.job_ids, caught.value.is_unique) == (("a",), False)
    with pytest.raises(DuplicateJobError) as caught:
        await jobs.enqueue(1, job_id="a", unique=ONE)
    assert not caught.value.is_unique
    assert not await is_taken(jobs)
    with pytest.raises(DuplicateJobError) as caught:
        await jobs.enqueue_many([JobSpec(1, "c", unique=Unique("two")), JobSpec(1, "a", unique=Unique("two"))])
    assert (caught.value.job_ids, caught.value.is_unique) == (("a",), False), "that comes first"
    assert not await is_taken(jobs, Unique("two"))


@pytest.mark.parametrize("on_conflict", ["raise", "existing"])
async def test_of_fifty_that_come_at_once_one_is_added(jobs: JobQueue, on_conflict: Any) -> None:
    unique = Unique("one", on_conflict=on_conflict)

    async def attempt(n: int) -> str | None:
        try:
            return await jobs.enqueue(n, unique=unique)
        except DuplicateJobError:
            return None

    found = await asyncio.gather(*(attempt(n) for n in range(50)))
    [job] = await jobs.claim(99)
    assert [id for id in found if id is not None] == [job.id] * (1 if on_conflict == "raise" else 50)
    assert await tally(jobs) == (0, 1, 0, 0)


async def test_of_many_that_replace_each_other_at_once_one_is_left(jobs: JobQueue) -> None:
    unique = Unique("one", on_conflict="replace")
    ids = await asyncio.gather(*(jobs.enqueue(n, unique=unique) for n in range(12)))
    [job] = await jobs.claim(99)
    assert job.id in ids
    assert await tally(jobs) == (0, 1, 0, 11)


async def test_queues_have_keys_of_their_own(site: Site) -> None:
    one, other = site.queue(), site.queue()
    await one.enqueue(1, unique=ONE)
    assert not await is_taken(other)


async def test_a_replay_is_not_refused_and_has_its_key_again_if_no_other_has(jobs: JobQueue) -> None:
    id = await jobs.enqueue("first", unique=ONE)
    await jobs.cancel(id)
    await jobs.replay(id)
    assert await is_taken(jobs)
    await jobs.cancel(id)
    assert not await is_taken(jobs)
    assert (await jobs.replay(id)).state is JobState.READY
    assert await tally(jobs) == (2, 0, 0, 0)


async def test_keys_are_forgotten_with_their_jobs(site: Site, clock: ManualClock) -> None:
    jobs = site.queue(keep=JobRetention(count=0))
    for n in range(20):
        await jobs.enqueue(n, unique=Unique(f"k{n}", within=5 if n % 2 else None))
    await jobs.ack(*await jobs.claim(99))
    clock.advance(6)
    assert await jobs.purge() == 20
    for n in range(20):
        assert not await is_taken(jobs, Unique(f"k{n}", within=5 if n % 2 else None))
    assert await tally(jobs) == (20, 0, 0, 0)


@CHECKED_FIRST
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"key": ""}, "key must be a non-empty string, not ''"),
        ({"within": 0}, "within must be a positive number of seconds, not 0"),
        ({"until": "claimed"}, "until must be one of 'finished', 'started', not 'claimed'"),
        ({"on_conflict": "ignore"}, "on_conflict must be one of 'raise', 'existing', 'replace', not 'ignore'"),
    ],
    ids=repr,
)
async def test_what_cannot_be_meant_is_refused(jobs: JobQueue, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Unique(**options)
    with pytest.raises(ConfigError, match="unique must be a Unique"):
        await jobs.enqueue(1, unique="one")  # type: ignore[arg-type]
