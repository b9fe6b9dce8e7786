"""Jobs that succeed, fail and are tried again; what became of each stays with it.

In memory, so nothing has to be installed and nothing survives: with a ``RedisStore`` or a ``PostgresStore`` in its
place, the rest is the same.
"""

from __future__ import annotations

import asyncio
import logging
import sys

from conquiet import Backoff, DuplicateJobError, Job, JobQueue, JobState, JobWorker, MemoryStore, Reject, RetryPolicy

RETRY = RetryPolicy(max_retries=2, backoff=Backoff(base=0.1, cap=5.0))


async def send(job: Job) -> dict[str, int]:
    """The work: returns what is to be kept, or raises."""
    address = job.payload["to"]
    if "@" not in address:
        raise Reject(f"{address!r} is no address")  # no use in trying again
    if address.startswith("slow") and job.attempts == 1:
        raise TimeoutError("the mail server did not answer")
    print(f"sent to {address}, attempt {job.attempts}, priority {job.priority}")
    return {"bytes": 100 * len(address)}


async def main() -> None:
    logging.basicConfig(stream=sys.stdout, format="log: %(message)s")
    async with MemoryStore() as store:
        emails = JobQueue(store, "emails", retry=RETRY)
        ids = await emails.enqueue_many([{"to": "ann@example.org"}, {"to": "slow@example.org"}, {"to": "nobody"}])
        ids.append(await emails.enqueue({"to": "boss@example.org"}, job_id="invoice-7", priority=10))
        ids.append(await emails.enqueue({"to": "later@example.org"}, delay=0.2))
        try:
            await emails.enqueue({"to": "boss@example.org"}, job_id="invoice-7")
        except DuplicateJobError as error:
            print(f"refused: {error}")

        worker = JobWorker(emails, send, concurrency=10)
        running = asyncio.create_task(worker.run())
        finished = [await emails.wait(id, timeout=30) for id in ids]
        worker.stop()
        await running

        for job in finished:
            outcome = job.result if job.state is JobState.SUCCEEDED else (job.last_error or "").partition("\n")[0]
            print(f"{job.payload['to']:18} {job.state:10} {job.attempts} attempts  {outcome}")

        # A failed job stays until somebody has looked at it.
        [failed] = (await emails.list_jobs(JobState.FAILED)).jobs
        await emails.replay(failed.id)
        print("replayed:", {str(state): count for state, count in (await emails.counts()).items()})


if __name__ == "__main__":
    asyncio.run(main())
