"""A worker in a process of its own, whose handler holds the interpreter's lock until a byte comes on stdin.

::

    python -m tests.jobs.gil_worker URL QUEUE LEASE-TTL

It writes a line when the handler begins, and ends after one job.
"""

from __future__ import annotations

import asyncio
import ctypes
import sys

from conquiet import Job, JobQueue, JobWorker, RedisStore


async def main(url: str, name: str, ttl: float) -> None:
    # Unlike other ways to call C, this one does not let go of the lock: no thread of this process runs meanwhile.
    read = ctypes.PyDLL(None).read

    async def hold(job: Job) -> str:
        sys.stdout.write("began\n")
        sys.stdout.flush()
        read(0, ctypes.create_string_buffer(1), 1)
        worker.stop()
        return "held"

    async with RedisStore(url) as store:
        worker = JobWorker(JobQueue(store, name, lease_ttl=ttl), hold, concurrency=1)
        await worker.run()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], float(sys.argv[3])))
