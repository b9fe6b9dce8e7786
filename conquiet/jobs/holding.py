"""The leases of a worker, kept alive from the claim until the store has what became of the job."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from contextlib import suppress
from typing import Final, Protocol

from conquiet.jobs.dispatch import Dispatch
from conquiet.jobs.job import Job
from conquiet.jobs.store import JobStore, Lease
from conquiet.kit.keepalive import Keepalive
from conquiet.kit.loopthread import on_private_loop

__all__ = ["Holdings"]

_log = logging.getLogger("conquiet.jobs")
_LATE: Final = 0.6
"""The part of a lease's time after which a renewal is overdue: there should have been one after a third."""


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
        self._answered_at = 0.0
        """Local time of the last renewal that the store has answered."""
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

    async def catch_up(self) -> None:
        """Renew at once, if that was not possible for a while: a lease that has run out is ours until somebody claims.

        To be done before the next claim, which could else be the one that gives our own jobs up.
        """
        late = self._dispatch.store.clock.monotonic() - self._answered_at > self._dispatch.ttl * _LATE
        if self._held and late:
            await on_private_loop(self._beat())

    async def add(self, jobs: Iterable[Job], asked: float) -> None:
        """Keep these, which were claimed at local time ``asked``; those that are lost by now are not held."""
        if not self._held:
            self._answered_at = asked
        leases = [Lease.of(job) for job in jobs]
        self._held.update(((lease.job_id, lease.token), lease) for lease in leases)
        if leases and self._dispatch.store.clock.monotonic() - asked > self._dispatch.ttl * _LATE:
            # The answer was a long time coming.
            try:
                await on_private_loop(self._beat())
            except BaseException:
                for lease in leases:
                    self.drop(lease.job_id, lease.token)
                raise

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
        if self._loop is not None and self._loop.is_closed() and self._held:
            count = len(self._held)
            _log.warning("queue %r: its event loop was closed, %d leases run out", self._dispatch.queue, count)
            self._held.clear()  # nobody is left who could run or settle these jobs
        held = list(self._held.values())
        if not held or self._apart is None:
            return
        asked = self._dispatch.store.clock.monotonic()
        stale = await self._dispatch.renew(held, self._apart)
        self._answered_at = max(self._answered_at, asked)
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
