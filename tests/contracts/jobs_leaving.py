"""Processes that leave the loop of a worker, with jobs at hand, and go on."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
from typing import Any, Final

import psycopg
from redis import Redis

from conquiet import JobQueue, JobState, JobStore, JobWorker
from conquiet.kit.clock import ManualClock
from conquiet.kit.loopthread import PRIVATE_LOOP
from tests.contracts.jobs_flavours import Backend
from tests.jobs.working import AT_ONCE, Gate
from tests.rigs.clocks import next_beat
from tests.rigs.waiting import eventually
from tests.sync.scripts import say

__all__ = ["closed", "returned"]

TTL: Final = 30.0
NAME: Final = f"l-{secrets.token_hex(6)}"
IDS: Final = ["a", "b", "c"]
CLOCK: Final = ManualClock()


def returned(kind: str, *words: str) -> None:
    """The program's main coroutine returns, and ``asyncio.run`` cancels whatever is there, all at once."""
    backend = _backend(kind, words)
    store = _store(backend)

    async def look() -> None:
        queue = _queue(store)
        found = [await queue.get(id) for id in IDS]
        assert all(job is not None and job.state is JobState.READY for job in found), found
        assert sorted(job.attempts for job in found if job is not None) == [0, 1, 1], found
        await _claim_all(queue)

    asyncio.run(_begin(store))
    _is_silent()
    asyncio.run(look())
    _end()


def closed(kind: str, *words: str) -> None:
    """The loop is closed over everything: the heartbeats, which are on another, end by themselves."""
    backend = _backend(kind, words)
    store, loop = _store(backend), asyncio.new_event_loop()
    working = loop.run_until_complete(_begin(store))
    asyncio.run(_beat())
    before = _connections(backend)
    loop.close()
    asyncio.run(_beat())
    _is_silent()
    assert _connections(backend) < max(1, before), "its connection is gone"

    async def look() -> None:
        CLOCK.advance(TTL + 1)
        await _claim_all(_queue(store))

    asyncio.run(look())
    assert not working.done()
    _end()


def _backend(kind: str, words: tuple[str, ...]) -> Backend:
    where, options = (words[:1], words[1:]) if len(words) % 2 else ((), words)
    return Backend(kind, kind, where, tuple(zip(options[::2], options[1::2], strict=True)))


def _store(backend: Backend) -> Any:
    logging.getLogger("conquiet").addHandler(logging.NullHandler())
    logging.getLogger("asyncio").addHandler(logging.NullHandler())
    return backend.make("core", CLOCK)


def _queue(store: JobStore) -> JobQueue:
    return JobQueue(store, NAME, lease_ttl=TTL, retry=AT_ONCE)


async def _begin(store: JobStore) -> asyncio.Task[None]:
    """A worker with two of three jobs at hand."""
    gate, queue = Gate(), _queue(store)
    for id in IDS:
        await queue.enqueue(id, job_id=id)
    worker = JobWorker(queue, gate, concurrency=2, handle_signals=False)
    working = asyncio.get_running_loop().create_task(worker.run())
    await gate.entered(2)
    return working


async def _beat() -> None:
    """One heartbeat, or what comes instead of it."""
    await next_beat(CLOCK)
    tasks = _beating()
    CLOCK.advance(TTL / 3 + 0.1)

    async def is_over() -> bool:
        return not _beating() or await _is_due_again()

    assert tasks
    await eventually(is_over, "it has beaten, or ended")


async def _is_due_again() -> bool:
    return any(one.deadline > CLOCK.monotonic() for one in list(CLOCK._sleepers) if one.loop is PRIVATE_LOOP.loop())


def _beating() -> list[str]:
    tasks = asyncio.all_tasks(PRIVATE_LOOP.loop())
    return [task.get_name() for task in tasks if task.get_name().startswith("conquiet")]


def _is_silent() -> None:
    async def nobody() -> None:
        await eventually(lambda: not _beating(), "nothing is left on the private loop")

    asyncio.run(nobody())


def _connections(backend: Backend) -> int:
    """How many the server has, but for the one that asks."""
    if backend.store == "RedisStore":
        with Redis.from_url(backend.where[0]) as client:
            return len(client.client_list()) - 1
    if backend.store == "PostgresStore":
        with psycopg.connect(backend.where[0], autocommit=True) as connection:
            query = "SELECT FROM pg_stat_activity WHERE application_name = 'conquiet'"
            return connection.execute(query).rowcount
    return 0


async def _claim_all(queue: JobQueue) -> None:
    assert sorted(job.id for job in await queue.claim(10)) == IDS


def _end() -> None:
    say("fine")
    os._exit(0)  # what the loop has left would be complained about
