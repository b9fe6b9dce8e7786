"""A queue with jobs in every state, a worker that holds some, and IDs whose jobs were removed."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict
from typing import Any, Final

from conquiet import Backoff, Job, JobQueue, JobSpec, JobState, JobStore, Keep, Reject, RetryPolicy

QUEUE: Final = "emails"
TTL: Final = 30.0
RETRY: Final = RetryPolicy(max_retries=2, backoff=Backoff(base=60.0, cap=60.0, kind="fixed"))
PAYLOAD: Final = {"to": "Zoë <z@example.org>", "n": 2**53, "parts": [None, True, 1.5, {"": []}]}


def emails(store: JobStore, **options: Any) -> JobQueue:
    """The queue, as all of its users open it."""
    return JobQueue(store, QUEUE, **{"lease_ttl": TTL, "retry": RETRY, **options})


def plain(job: Job) -> dict[str, Any]:
    """All that a job tells, as JSON has it."""
    names = ("id", "queue", "state", "priority", "attempts", "lease_token", "max_retries", "worker", "last_error")
    times = ("enqueued_ms", "ready_ms", "claimed_ms", "lease_ms", "finished_ms")
    told = {name: getattr(job, name) for name in (*names, *times)}
    failures = [asdict(attempt) for attempt in job.failures]
    return {**told, "payload": job.payload, "result": job.result, "failures": failures}


@asynccontextmanager
async def jobs(store: JobStore) -> AsyncIterator[dict[str, Any]]:
    """Play it, in a store that is open."""
    queue = emails(store)

    async def begun(id: str, worker: str = "old-worker", **options: Any) -> Job:
        """A job that was just claimed."""
        await queue.enqueue(PAYLOAD, job_id=id, **options)
        [job] = await queue.claim(1, worker)
        assert job.id == id
        return job

    await _ended(queue, begun)
    removed = await begun("removed")
    await queue.ack(removed)
    await queue.delete("removed")
    await _expired(store, begun)
    await queue.nack(await begun("waits-for-retry"), error=ValueError("a first failure"))
    held = [await begun("in-flight"), await begun("in-flight-last-try", max_retries=0)]
    held.append(await begun("in-flight-renewed"))
    await queue.heartbeat(held[2])
    await _ready(queue)
    counts = {str(state): count for state, count in (await queue.counts()).items()}
    pages = [(await queue.list_jobs(state)).jobs for state in JobState]
    yield {
        "counts": counts,
        "jobs": {job.id: plain(job) for page in pages for job in page},
        "removed_token": removed.lease_token,
    }


async def _ended(queue: JobQueue, begun: Any) -> None:
    for number in range(3):
        await queue.ack(await begun(f"purged-{number}"))
    await emails(queue.store, keep=Keep(count=1)).purge()  # the last one stays
    await queue.ack(await begun("succeeded"), result={"sent": [1, 2], "to": "Zoë"})
    await queue.ack(await begun("succeeded-without-result"))
    await queue.nack(await begun("failed", max_retries=0), error=RuntimeError("no such mailbox: Zoë"))
    await queue.nack(await begun("replayed"), error=Reject("to be tried again"))
    await queue.replay("replayed")
    [again] = await queue.claim(1, "old-worker")
    await queue.nack(again, error="again in vain", delay=60.0)
    await queue.enqueue(PAYLOAD, job_id="cancelled", delay=60.0)
    await queue.cancel("cancelled")
    await begun("cancelled-in-flight")
    await queue.cancel("cancelled-in-flight")


async def _expired(store: JobStore, begun: Any) -> None:
    """A job whose first worker died, and whose second gave it back."""
    brief = emails(store, lease_ttl=0.05)
    await brief.enqueue(PAYLOAD, job_id="expired-once")
    await brief.claim(1, "dead-worker")
    [job] = await brief.claim(1, "old-worker", timeout=10.0)
    await brief.release(job)
    [job] = await emails(store).claim(1, "old-worker")
    assert (job.id, job.attempts) == ("expired-once", 2)


async def _ready(queue: JobQueue) -> None:
    ready = [JobSpec({"n": n}, f"ready-{n}", priority=priority) for n, priority in enumerate((0, 5, -5, 0, 5))]
    later = [JobSpec(PAYLOAD, f"later-{seconds}", delay=seconds) for seconds in (60.0, 3600.0)]
    await queue.enqueue_many([*ready, *later])
    with suppress(TimeoutError):  # somebody waits for an end, and is told so by a key that runs out
        await queue.wait("ready-0", timeout=0.05)
