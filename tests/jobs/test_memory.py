"""What a call of the memory store costs does not grow with the jobs in the queue."""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable
from types import FrameType
from typing import Any

import pytest

from conquiet import JobQueue, JobRetention, MemoryStore

_FEW, _MANY = 200, 20_000


async def _calls(work: Callable[[], Awaitable[object]]) -> int:
    """How many functions ``work`` calls, in Python or in C."""
    count = 0

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(profile)
    try:
        await work()
    finally:
        sys.setprofile(None)
    return count


async def _cost(jobs: int) -> int:
    queue = JobQueue(MemoryStore(), "q", lease_ttl=60)
    await queue.enqueue_many(range(jobs))
    await queue.ack(*await queue.claim(jobs // 4))
    await queue.claim(jobs // 4)

    async def life() -> None:
        await queue.enqueue(1, priority=1)
        [job] = await queue.claim()
        await queue.heartbeat(job)
        await queue.ack(job)

    return await _calls(life)


@pytest.mark.slow
async def test_the_cost_of_a_job_does_not_grow_with_the_queue() -> None:
    assert await _cost(_MANY) < 1.5 * await _cost(_FEW)


async def test_what_has_left_a_line_does_not_pile_up_there() -> None:
    store = MemoryStore()
    queue = JobQueue(store, "q", lease_ttl=60, keep=JobRetention(count=0))
    await queue.enqueue("stays", priority=-1)
    for _ in range(1000):
        await queue.enqueue(1)
        await queue.ack(*await queue.claim(worker="w"))
        await queue.purge()
    jobs = await queue.claim(2)
    for _ in range(1000):
        await queue.heartbeat(*jobs)
    lines = [value for value in vars(store._queues["q"]).values() if hasattr(value, "_entries")]
    assert len(lines) == 5
    assert max(len(line._entries) for line in lines) < 200
