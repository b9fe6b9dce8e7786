"""What a queue and its workers say to the store, and what is counted of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Final

from conquiet.errors import QueueError
from conquiet.jobs.job import Job, Settlement
from conquiet.jobs.policy import judge, shares
from conquiet.jobs.store import MOST_CLAIMED, Claimed, JobStore, Lease, Wanted
from conquiet.kit import rules
from conquiet.kit.policy import RetryPolicy
from conquiet.metrics import JobMetrics, JobOperation, job_metrics

__all__ = ["Dispatch"]

_VERBS: Final = {"ack": "succeeded", "retry": "retried", "fail": "failed", "release": "released"}


class Dispatch:
    """One queue at one store: claims, leases and outcomes, each call one round trip."""

    def __init__(
        self, store: JobStore, queue: str, ttl: float, retry: RetryPolicy, chance: Callable[[], float]
    ) -> None:
        self.store = store
        self.queue = queue
        self.ttl = ttl
        self.retry = retry
        self.metrics: JobMetrics = job_metrics(queue)
        self._ttl_ms = max(1, round(ttl * 1000))
        self._chance = chance
        self._turn = 0

    async def claim(self, count: int, worker: str) -> Claimed:
        """Lease up to ``count`` jobs, shared out so that nobody starves.

        A thousand in a round trip; where more are wanted, for a third of the lease's time, so that the first of them
        are still leased for long when the last ones come.
        """
        rules.integer("count", count, least=1)
        clock = self.store.clock
        asked = clock.monotonic()
        claimed = await self._claim(min(count, MOST_CLAIMED), worker)
        is_all = len(claimed.jobs) < MOST_CLAIMED
        while not is_all and len(claimed.jobs) < count and clock.monotonic() - asked < self.ttl / 3:
            wanted = min(count - len(claimed.jobs), MOST_CLAIMED)
            try:
                more = await self._claim(wanted, worker)
            except QueueError:
                break  # those that it has are the caller's all the same
            is_all = len(more.jobs) < wanted
            jobs, expired = [*claimed.jobs, *more.jobs], [*claimed.expired, *more.expired]
            claimed = Claimed(jobs, expired, more.next_ms, more.mark)
        return claimed

    async def _claim(self, count: int, worker: str) -> Claimed:
        share = shares(count, self._turn)
        most = self.retry.max_retries
        wanted = Wanted(count, rules.text("worker", worker), self._ttl_ms, most, share.retries, share.oldest)
        claimed = await self.store.claim(self.queue, wanted)
        if claimed.jobs:
            self._turn += 1
            waits = [((job.claimed_ms or 0) - job.ready_ms) / 1000 for job in claimed.jobs]
            self.metrics.claimed(len(waits), waits)
        if claimed.expired:
            self.metrics.expired(len(claimed.expired))
            self.metrics.failed(sum(one.failed for one in claimed.expired))
        return claimed

    async def news(self, claimed: Claimed, seconds: float) -> None:
        """Return once there may be more to claim than there was for ``claimed``, or after ``seconds``."""
        due = float("inf") if claimed.next_ms is None else claimed.next_ms / 1000
        await self.store.news(self.queue, claimed.mark, min(seconds, due))

    async def renew(self, leases: Sequence[Lease], store: JobStore | None = None) -> list[Lease]:
        """Extend leases; those that are not the caller's any more. ``store`` is another way to the same store."""
        renewed = await (store or self.store).renew(self.queue, leases, self._ttl_ms)
        return [lease for lease, done in zip(leases, renewed, strict=True) if not done]

    async def settle(self, settlements: Sequence[Settlement]) -> list[bool]:
        """Tell what became of jobs; false for each whose lease was stale, and of which nothing was changed."""
        done = await self.store.settle(self.queue, settlements)
        tally: Counter[tuple[JobOperation, bool]] = Counter(
            (one.kind, applied) for one, applied in zip(settlements, done, strict=True)
        )
        for (kind, applied), count in tally.items():
            if applied:
                getattr(self.metrics, _VERBS[kind])(count)
            else:
                self.metrics.stale(kind, count)
        return done

    def judge(self, job: Job, error: BaseException | str) -> Settlement:
        """What a failed try comes to."""
        return judge(job, error, self.retry, self._chance)
