"""What a job is for: its task, its key, its headers, and the moment from which on it may be claimed."""

from __future__ import annotations

import asyncio
import datetime as dt
from typing import Any

import pytest

from conquiet import ConfigError, JobQueue, JobSpec, JobState
from conquiet.kit.clock import ManualClock
from tests.contracts.jobs_flavours import CHECKED_FIRST, every, only, tally

pytest_plugins = ("tests.contracts.jobs_fixtures",)

FIELDS: list[dict[str, Any]] = [
    {},
    {"task": "shop.send"},
    {"key": "tenant-7"},
    {"headers": {"traceparent": "00-ab"}},
    {"task": "é 😀\n1 2", "key": "-", "headers": {"": "", "ü": "a\nb", "-": "\u2028"}},
    {"task": "x" * 200, "key": "😀" * 200, "headers": {"long": "y" * 5000}},
]


async def test_task_key_and_headers_are_kept_through_the_life_of_a_job(jobs: JobQueue) -> None:
    for number, fields in enumerate(FIELDS):
        id = await jobs.enqueue({"n": number}, **fields)
        seen = [await jobs.get(id), first := await only(jobs)]
        await jobs.nack(first, delay=0)
        seen += [await jobs.get(id), second := await only(jobs)]
        await jobs.ack(second, result="done")
        seen += [await jobs.get(id), *(j for j in (await jobs.list_jobs(JobState.SUCCEEDED)).jobs if j.id == id)]
        for job in seen:
            assert job is not None
            assert (job.task, job.key, job.headers) == (
                fields.get("task"),
                fields.get("key"),
                fields.get("headers", {}),
            )
            assert job.payload == {"n": number}


async def test_of_many_each_has_its_own_fields(jobs: JobQueue) -> None:
    specs = [JobSpec(number, **fields) for number, fields in enumerate(FIELDS * 3)]
    ids = await jobs.enqueue_many(["plain", *specs, "plain"])
    found = {job.id: job for job in await every(jobs)}
    told = [(found[id].payload, found[id].task, found[id].key, found[id].headers) for id in ids]
    plain: tuple[Any, ...] = ("plain", None, None, {})
    fields = [(one.payload, one.task, one.key, dict(one.headers or {})) for one in specs]
    assert told == [plain, *fields, plain]


async def test_callers_at_the_same_time_each_keep_their_own(jobs: JobQueue) -> None:
    ids = await asyncio.gather(*(jobs.enqueue(n, **FIELDS[n % len(FIELDS)]) for n in range(20)))
    for number, id in enumerate(ids):
        job = await jobs.get(id)
        assert job is not None
        fields = FIELDS[number % len(FIELDS)]
        assert (job.payload, job.task, job.key) == (number, fields.get("task"), fields.get("key"))
        assert job.headers == fields.get("headers", {})


async def test_a_replayed_or_cancelled_job_keeps_its_fields(jobs: JobQueue) -> None:
    await jobs.enqueue(1, job_id="a", **FIELDS[4])
    await jobs.cancel("a")
    job = await jobs.replay("a")
    assert (job.task, job.key, job.headers) == (FIELDS[4]["task"], FIELDS[4]["key"], FIELDS[4]["headers"])
    assert (await only(jobs)).headers == FIELDS[4]["headers"]


async def test_a_job_is_not_claimable_before_its_moment(jobs: JobQueue, clock: ManualClock) -> None:
    first = await jobs.get(await jobs.enqueue("now"))
    assert first is not None
    at = first.enqueued_at + dt.timedelta(seconds=60)
    id, later = await jobs.enqueue_many([JobSpec("soon", at=at), JobSpec("later", delay=3600)])
    await jobs.enqueue("elsewhere", job_id="b", at=at.astimezone(dt.timezone(dt.timedelta(hours=9))))
    job, other = await jobs.get(id), await jobs.get("b")
    assert job is not None
    assert other is not None
    assert (job.retry_at, other.retry_at, job.state) == (at, at, JobState.READY)
    now = await only(jobs, count=9)
    assert now.payload == "now"
    await jobs.ack(now)
    clock.advance(50)
    assert await jobs.claim(9) == []
    clock.advance(11)
    assert [one.payload for one in await jobs.claim(9)] == ["soon", "elsewhere"]
    assert (await jobs.get(later)) is not None


async def test_a_moment_that_is_past_is_now(jobs: JobQueue) -> None:
    await jobs.enqueue("first")
    await jobs.enqueue("second", at=dt.datetime(2001, 1, 1, tzinfo=dt.UTC))
    await jobs.enqueue("third", at=dt.datetime(1901, 1, 1, tzinfo=dt.UTC))
    found = await jobs.claim(9)
    assert [job.payload for job in found] == ["first", "second", "third"], "it is not before those that waited"
    assert [job.ready_ms - job.enqueued_ms for job in found] == [0, 0, 0]


async def test_the_last_moment_of_all_is_a_moment(jobs: JobQueue, clock: ManualClock) -> None:
    at = dt.datetime(9999, 12, 31, 23, 59, 59, tzinfo=dt.UTC)
    await jobs.enqueue(1, at=at, job_id="a")
    clock.advance(86_400 * 365)
    assert await jobs.claim() == []
    job = await jobs.get("a")
    assert job is not None
    assert job.retry_at == at


@CHECKED_FIRST
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"task": ""}, "task must be a non-empty string, not ''"),
        ({"task": 7}, "task must be a non-empty string, not 7"),
        ({"key": "x" * 201}, "key must be at most 200 characters without NUL"),
        ({"key": "a\0"}, "key must be at most 200 characters without NUL"),
        ({"headers": ["a"]}, r"headers must be a mapping of strings to strings, not \['a'\]"),
        ({"headers": {"a": 1}}, "headers must be strings, not {'a': 1}"),
        ({"headers": {1: "a"}}, "headers must be strings, not {1: 'a'}"),
        ({"headers": {"a": "\ud800"}}, "headers must be valid Unicode"),
        ({"at": dt.datetime(2030, 1, 1)}, "at must be a datetime with a time zone"),
        ({"at": 1.5}, "at must be a datetime with a time zone, not 1.5"),
        ({"at": dt.datetime(2030, 1, 1, tzinfo=dt.UTC), "delay": 1}, "a job has a delay or a moment, not both"),
    ],
    ids=repr,
)
async def test_what_a_job_cannot_have_is_refused(jobs: JobQueue, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        await jobs.enqueue(1, **options)
    with pytest.raises(ConfigError, match=message):
        await jobs.enqueue_many(["good", JobSpec(1, **options)])
    assert await tally(jobs) == (0, 0, 0, 0)
