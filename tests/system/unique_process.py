"""Many callers in one process that enqueue jobs for a few unique keys, until the process is killed or told to leave."""

from __future__ import annotations

import asyncio
import random
import sys

from conquiet import DuplicateJobError, JobQueue, Unique
from tests.system.jobs_process import QUEUE, store_at


async def main(url: str, space: str, callers: int, keys: int) -> None:
    async with store_at(url, space) as store:
        queue = JobQueue(store, QUEUE)

        async def call() -> None:
            while True:
                key = f"k{random.randrange(keys)}"
                try:
                    await queue.enqueue({"unique": key}, unique=Unique(key))
                except DuplicateJobError:
                    await asyncio.sleep(0)

        await asyncio.gather(*(call() for _ in range(callers)))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])))
