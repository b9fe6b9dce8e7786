"""The leases of a worker, kept alive from the claim until the store has what became of the job."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from contextlib import suppress
from typing import Protocol

from conquiet.jobs.dispatch import Dispatch
from conquiet.jobs.job import Job
from conquiet.jobs.store import JobStore, Lease
from conquiet.kit.keepalive import Keepalive
from conquiet.kit.loopthread import on_private_loop

__all__ = ["Holdings"]

_log = logging.getLogger("conquiet.jobs")


class Lost(Protocol):
    """Told of each lease that is not ours any more."""

    def __call__(self, job_id: str, token: int) -> None: ...


class Holdings:
    """Renews every lease three times in its life, on the private loop and over connections of its own.

    A handler that blocks its event loop does not delay that, nor does a slow write of results. A renewal that the
    store did not answer says nothing; one that it refused means that somebody else has the job.
    """

    def __init__(self, dispatch: Dispatch, lost: Lost) -> None:
        self._dispatch = dispatch
        self._lost = lost
        self._held: dict[tuple[str, int], Lease] = {}
        self._refused: set[tuple[str, int]] = set()
        """Leases that are lost, which the main loop may not know yet: it may be blocked."""
        self._apart: JobStore | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._keepalive = Keepalive(self._beat, dispatch.ttl / 3, dispatch.store.clock)

    async def open(self) -> None:
        """Begin to renew."""
        self._loop = asyncio.get_running_loop()
        self._apart = self._dispatch.store.apart()
        await self._keepalive.start()

    async def aclose(self) -> None:
        """Renew nothing more."""
        await self._keepalive.aclose()
        apart, self._apart = self._apart, None
        if apart is not None and apart is not self._dispatch.store:
            await on_private_loop(apart.aclose())

    def add(self, jobs: Iterable[Job]) -> None:
        """Keep these from now on."""
        self._held.update(((job.id, job.lease_token), Lease(job.id, job.lease_token)) for job in jobs)

    def drop(self, job_id: str, token: int) -> None:
        """Let go of one: it is settled or lost, or must run out."""
        self._held.pop((job_id, token), None)
        self._refused.discard((job_id, token))

    def has(self, job: Job) -> bool:
        """Whether a job is still held, as far as is known; from the claim on."""
        lease = (job.id, job.lease_token)
        return lease in self._held and lease not in self._refused

    def __len__(self) -> int:
        return len(self._held)

    async def _beat(self) -> None:
        held = list(self._held.values())
        if not held or self._apart is None:
            return
        stale = await self._dispatch.renew(held, self._apart)
        assert self._loop is not None
        self._refused.update((lease.job_id, lease.token) for lease in stale)
        for lease in stale:
            with suppress(RuntimeError):  # that loop has been closed, and all is over
                self._loop.call_soon_threadsafe(self._gone, lease)

    def _gone(self, lease: Lease) -> None:
        self._refused.discard((lease.job_id, lease.token))
        # Settled while it was being renewed: that is no loss.
        if self._held.pop((lease.job_id, lease.token), None) is not None:
            self._lost(lease.job_id, lease.token)
