"""What type checkers must see of the synchronous API of jobs; read by them, never run.

Lines that must be errors carry a comment that becomes an error itself, for mypy and for pyright, when they are not.
"""

# pyright: reportUnnecessaryTypeIgnoreComment=error

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping, Sequence
from typing import Any, assert_type

from redis.asyncio import Redis, RedisCluster

import conquiet
from conquiet.sync import (
    Address,
    Attempt,
    ConfigError,
    ConquietError,
    DuplicateJobError,
    Job,
    JobHealth,
    JobPage,
    JobQueue,
    JobRetention,
    JobSpec,
    JobState,
    JobStateError,
    JobWorker,
    Keep,
    LeaseError,
    MemoryStore,
    PostgresStore,
    RedisStore,
    RetryPolicy,
    StaleLeaseError,
    UnknownJobError,
)


def ways_to_a_store(client: Redis, cluster: RedisCluster, address: Address) -> None:
    assert_type(MemoryStore(), MemoryStore)
    assert_type(RedisStore.connect("redis://localhost", namespace="blue"), RedisStore)
    assert_type(RedisStore(client), RedisStore)
    assert_type(RedisStore(cluster), RedisStore)
    assert_type(RedisStore(address), RedisStore)
    assert_type(PostgresStore.connect("postgresql://localhost", schema="jobs", pool_size=4), PostgresStore)
    assert_type(PostgresStore("postgresql://localhost").sql(since=1), str)


def the_stores(memory: MemoryStore, redis: RedisStore, postgres: PostgresStore) -> None:
    with memory as one, redis as two, postgres as three:
        assert_type((one, two, three), tuple[MemoryStore, RedisStore, PostgresStore])
    assert_type(postgres.migrate(), int)
    for store in (memory, redis, postgres):
        assert_type(store.open(), None)
        assert_type(store.close(), None)


def the_jobs(store: RedisStore) -> None:
    queue = JobQueue(
        store, "emails", lease_ttl=5, retry=RetryPolicy(), keep=JobRetention(age=None), keep_failed=Keep(count=1)
    )
    assert_type(queue.name, str)
    assert_type(queue.store, MemoryStore | PostgresStore | RedisStore)
    assert_type(queue.lease_ttl, float)
    assert_type(queue.retry, RetryPolicy)
    assert_type(queue.enqueue({"to": "a@b.c"}), str)
    assert_type(queue.enqueue(None, job_id="a", priority=1, delay=0.5, max_retries=None, connection=None), str)
    assert_type(queue.enqueue_many([1, JobSpec("two", job_id="b", priority=-1, delay=1)]), list[str])
    assert_type(queue.enqueue_many(n for n in range(3)), list[str])
    jobs = queue.claim(count=10, worker="w-1", timeout=1.5)
    assert_type(jobs, list[Job])
    assert_type(queue.claim(), list[Job])
    assert_type(queue.heartbeat(*jobs), None)
    assert_type(queue.ack(*jobs, result={"sent": True}), None)
    assert_type(queue.nack(*jobs, error=ValueError("no"), delay=1), None)
    assert_type(queue.nack(jobs[0], error="no"), None)
    assert_type(queue.release(*jobs), None)


def looking_after_jobs(queue: JobQueue) -> None:
    assert_type(queue.get("a"), Job | None)
    assert_type(queue.counts(), Mapping[JobState, int])
    page = queue.list_jobs(JobState.FAILED, count=10, cursor=None)
    assert_type(page, JobPage)
    assert_type(page.jobs, Sequence[Job])
    assert_type(page.cursor, str | None)
    assert_type(queue.wait("a", timeout=None), Job)
    assert_type(queue.replay("a"), Job)
    assert_type(queue.cancel("a"), bool)
    assert_type(queue.delete("a"), None)
    assert_type(queue.purge(), int)
    assert_type(queue.collector().close(), None)


def a_job(job: Job) -> None:
    assert_type(job.id, str)
    assert_type(job.queue, str)
    assert_type(job.payload, Any)
    assert_type(job.result, Any)
    assert_type(job.state, JobState)
    assert_type(job.priority, int)
    assert_type(job.attempts, int)
    assert_type(job.lease_token, int)
    assert_type(job.max_retries, int | None)
    assert_type(job.worker, str | None)
    assert_type(job.last_error, str | None)
    assert_type(job.failures, tuple[Attempt, ...])
    assert_type(job.failures[0].started_at, dt.datetime)
    assert_type(job.is_finished, bool)
    assert_type(job.enqueued_at, dt.datetime)
    assert_type(job.retry_at, dt.datetime | None)
    assert_type(job.claimed_at, dt.datetime | None)
    assert_type(job.lease_expires_at, dt.datetime | None)
    assert_type(job.finished_at, dt.datetime | None)


def the_job_workers(queue: JobQueue) -> None:
    def plain(job: Job) -> int:
        return job.attempts

    workers = [
        JobWorker(queue, plain, concurrency=2, execution_timeout=300, drain_timeout=1, name="w", handle_signals=False),
        JobWorker(queue, lambda job: None),
    ]
    for worker in workers:
        assert_type(worker.name, str)
        assert_type(worker.inflight, int)
        assert_type(worker.health(), JobHealth)
        assert_type(worker.run(), None)
        assert_type(worker.stop(), None)


def the_errors_of_jobs(duplicate: DuplicateJobError, stale: StaleLeaseError, unknown: UnknownJobError) -> None:
    errors: list[ConquietError] = [duplicate, stale, unknown]
    lease_error: LeaseError = stale
    config_error: ConfigError = unknown
    config_error = JobStateError("a job is in flight")
    assert_type((duplicate.queue, duplicate.job_ids, duplicate.enqueued), tuple[str, tuple[str, ...], tuple[str, ...]])
    assert_type(stale.job_ids, tuple[str, ...])
    assert_type((errors[0].args, lease_error.args, config_error.args)[0], tuple[Any, ...])


# --- what must be refused -------------------------------------------------------------------------------------------


def wrong_arguments_of_jobs(queue: JobQueue, store: MemoryStore, job: Job, some: Any) -> None:
    # `some` is Any: mypy may also report that a value given without its name does not fit one of the options.
    queue.enqueue()  # type: ignore[call-arg]
    queue.enqueue(1, "id")  # type: ignore[call-arg]
    queue.enqueue(1, job_id=5)  # type: ignore[arg-type]
    queue.enqueue(1, delay="soon")  # type: ignore[arg-type]
    queue.enqueue_many(5)  # type: ignore[arg-type]
    queue.claim("10")  # type: ignore[arg-type]
    queue.ack("id")  # type: ignore[arg-type]
    queue.ack([job])  # type: ignore[arg-type]
    queue.nack(job, error=5)  # type: ignore[arg-type]
    queue.list_jobs("lost")  # type: ignore[arg-type]
    JobQueue(store)  # type: ignore[call-arg]
    JobQueue("redis://localhost", "emails")  # type: ignore[arg-type]
    JobQueue(store, "emails", some)  # type: ignore[call-arg]
    JobQueue(store, "emails", retry=3)  # type: ignore[arg-type]
    JobWorker(queue)  # type: ignore[call-arg]
    JobWorker(queue, 5)  # type: ignore[arg-type]
    JobWorker(store, print)  # type: ignore[arg-type]
    RedisStore(b"redis://")  # type: ignore[arg-type]
    RedisStore("redis://localhost", some)  # type: ignore[call-arg]
    RedisStore("redis://localhost", namespase="blue")  # type: ignore[call-arg]
    RedisStore.connect("redis://localhost", namespace=5)  # type: ignore[arg-type]
    PostgresStore()  # type: ignore[call-arg]
    PostgresStore("postgresql://localhost", pool=5)  # type: ignore[call-arg]
    PostgresStore.connect("postgresql://localhost", pool_size="5")  # type: ignore[arg-type]
    JobQueue(store, "emails", lease=5.0)  # type: ignore[call-arg]
    JobWorker(queue, print, some)  # type: ignore[call-arg]
    JobWorker(queue, print, concurency=5)  # type: ignore[call-arg]
    JobWorker(queue, print, drain_timeout=None)  # type: ignore[arg-type]
    job.state = JobState.READY  # type: ignore[misc]


async def awaiting_what_is_there_of_jobs(queue: JobQueue, store: RedisStore) -> None:
    await queue.enqueue(1)  # type: ignore[misc]
    async with store:  # type: ignore[attr-defined]
        pass
    store.aclose()  # type: ignore[attr-defined]


def mixed_apis_of_jobs(store: conquiet.MemoryStore, queue: conquiet.JobQueue) -> None:
    JobQueue(store, "emails")  # type: ignore[arg-type]
    JobWorker(queue, print)  # type: ignore[arg-type]
