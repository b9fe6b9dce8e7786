"""A worker of jobs in a process of its own, which notes what it does; ends with code 0 on SIGTERM.

A job decides what is done with it: its payload's ``do`` is ``done``, ``once`` (the first attempt fails), ``always``
(each one does), ``slow`` (the first attempt never ends), ``burn`` (nothing but computing for ``work`` seconds, without
a turn for anybody else), ``hang`` (never ends at a worker with ``--hang``), or ``stubborn`` (will not be cancelled).
With ``--gate`` nothing ends before that file exists. While the file of ``--mute`` exists, no renewal is
sent. With ``--late`` the answers to claims come only when the worker has been told to stop.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import random
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from typing import Any, cast

from prometheus_client import REGISTRY

from conquiet import Backoff, Job, JobQueue, JobStore, JobWorker, PostgresStore, RedisStore, RetryPolicy
from conquiet.jobs.job import Settlement
from conquiet.jobs.store import Claimed, Lease, Wanted
from tests.system.jobs_check import MAX_RETRIES
from tests.system.jobs_log import Pen

__all__ = ["QUEUE", "store_at"]

QUEUE = "work"


def store_at(url: str, space: str) -> RedisStore | PostgresStore:
    """The store at ``url``, with a namespace or schema of its own."""
    if url.startswith("postgresql://"):
        return PostgresStore.connect(url, schema=space)
    return RedisStore.connect(url, namespace=space)


class Witness:
    """A store that notes what it is told and what it answers, and otherwise is the one behind it."""

    def __init__(self, store: JobStore, pen: Pen, mute: str) -> None:
        self._store = store
        self._pen = pen
        self._mute = mute
        self.is_late: Callable[[], bool] = lambda: False
        """Whether answers to claims are still on their way."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def clone(self) -> Witness:
        return Witness(self._store.clone(), self._pen, self._mute)

    def apart(self) -> Witness:
        return self.clone()

    async def claim(self, queue: str, wanted: Wanted) -> Claimed:
        claimed = await self._store.claim(queue, wanted)
        if claimed.jobs:
            jobs = [(job.id, job.lease_token, job.attempts, job.claimed_ms or 0) for job in claimed.jobs]
            self._pen.claimed(jobs)
            while self.is_late():  # noqa: ASYNC110 - a signal ends it
                await asyncio.sleep(0.005)
        return claimed

    async def settle(self, queue: str, settlements: Sequence[Settlement]) -> list[bool]:
        if not any(one.job_id for one in settlements):  # a question whether outcomes are taken at all: of no job
            return await self._store.settle(queue, settlements)
        number = self._pen.say([(one.job_id, one.token, one.kind) for one in settlements])
        answers = await self._store.settle(queue, settlements)
        self._pen.said(number, answers)
        return answers

    async def renew(self, queue: str, leases: Sequence[Lease], ttl_ms: int) -> list[bool]:
        while self._mute and os.path.exists(self._mute):  # noqa: ASYNC110 - another process removes it
            await asyncio.sleep(0.005)
        renewed = await self._store.renew(queue, leases, ttl_ms)
        refused = [(lease.job_id, lease.token) for lease, done in zip(leases, renewed, strict=True) if not done]
        if refused:
            self._pen.refused(refused)
        return renewed


class Work:
    """The handler, for the loop and for threads."""

    def __init__(self, arguments: argparse.Namespace, pen: Pen) -> None:
        self._gate: str = arguments.gate
        self._may_hang: bool = arguments.hang
        self._pen = pen

    async def handle(self, job: Job) -> dict[str, int]:
        number = self._pen.begin(job.id, job.lease_token, job.attempts)
        try:
            await self._work(job, job.payload["do"], job.payload.get("work", 0.0))
        except asyncio.CancelledError:
            self._pen.end(number, "cancelled")
            raise
        except Exception:
            self._pen.end(number, "failed")
            raise
        self._pen.end(number, "done")
        return {"token": job.lease_token}

    def handle_in_thread(self, job: Job) -> dict[str, int]:
        number = self._pen.begin(job.id, job.lease_token, job.attempts)
        while not self._is_open():
            time.sleep(0.005)
        self._pen.end(number, "done")
        return {"token": job.lease_token}

    async def _work(self, job: Job, do: str, seconds: float) -> None:
        if do == "burn":
            burn(seconds)
        elif seconds:
            await asyncio.sleep(random.random() * 2 * seconds)
        if (do == "slow" and job.attempts == 1) or (do == "hang" and self._may_hang):
            await asyncio.Event().wait()
        while not self._is_open():
            try:
                await asyncio.sleep(0.005)
            except asyncio.CancelledError:
                if do != "stubborn":
                    raise
        if do == "always" or (do == "once" and job.attempts == 1):
            raise RuntimeError("as it was asked to")

    def _is_open(self) -> bool:
        return not self._gate or os.path.exists(self._gate)


def burn(seconds: float) -> None:
    """Compute, and nothing else."""
    deadline, number = time.monotonic() + seconds, 1
    while time.monotonic() < deadline:
        for _ in range(10_000):
            number = number * 6364136223846793005 % 18446744073709551629


def refusals() -> dict[str, int]:
    """What was refused to this process, as its metrics count it."""
    return {
        sample.labels["operation"]: int(sample.value)
        for family in REGISTRY.collect()
        for sample in family.samples
        if sample.name == "conquiet_jobs_stale_total" and sample.value
    }


async def serve(arguments: argparse.Namespace, pen: Pen) -> None:
    async with AsyncExitStack() as stack:
        store = store_at(arguments.url, arguments.space)
        await stack.enter_async_context(store)
        witness = Witness(store, pen, arguments.mute)
        queue = JobQueue(
            cast("JobStore", witness),
            QUEUE,
            lease_ttl=arguments.lease_ttl,
            retry=RetryPolicy(max_retries=MAX_RETRIES, backoff=Backoff(base=0.02, cap=0.2)),
        )
        work = Work(arguments, pen)
        worker = JobWorker(
            queue,
            work.handle_in_thread if arguments.threads else work.handle,
            concurrency=arguments.concurrency,
            execution_timeout=arguments.timeout,
            drain_timeout=arguments.drain,
            name=arguments.name,
        )
        if arguments.late:
            witness.is_late = lambda: worker.health().healthy
        pen.note("ready")
        await worker.run()
    pen.note("refused", refusals())


def arguments_of(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    for required in ("url", "space", "name", "log"):
        parser.add_argument(f"--{required}", required=True)
    parser.add_argument("--lease-ttl", type=float, default=2.0)
    parser.add_argument("--concurrency", type=int, default=10)
    parser.add_argument("--timeout", type=float)
    parser.add_argument("--drain", type=float, default=30.0)
    parser.add_argument("--gate", default="")
    parser.add_argument("--mute", default="")
    parser.add_argument("--hang", action="store_true")
    parser.add_argument("--threads", action="store_true", help="run a plain function")
    parser.add_argument("--late", action="store_true")
    return parser.parse_args(words)


def main() -> None:
    arguments = arguments_of(sys.argv[1:])
    logging.basicConfig(level=logging.ERROR)
    pen = Pen(arguments.log)
    asyncio.run(serve(arguments, pen))
    pen.note("ended")


if __name__ == "__main__":
    main()
