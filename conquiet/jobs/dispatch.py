"""What a queue and its workers say to the store, and what is counted of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

from conquiet.errors import QueueError
from conquiet.jobs.heartbeat_store import HeartbeatStore, SharesHeartbeats
from conquiet.jobs.job import Job, Settlement
from conquiet.jobs.policy import judge, shares
from conquiet.jobs.store import MOST_CLAIMED, Claimed, JobStore, Lease, Wanted
from conquiet.jobs.unanswered import Unanswered
from conquiet.kit import rules
from conquiet.kit.holding import Holder
from conquiet.kit.ids import nonce
from conquiet.kit.policy import RetryPolicy
from conquiet.kit.retrying import Lines
from conquiet.metrics import JobMetrics, JobOperation, job_metrics

__all__ = ["Dispatch", "lease_key"]

_LOOK: Final = 5.0
"""Seconds after which a waiting worker looks without being told."""
_VERBS: Final = {"ack": "succeeded", "retry": "retried", "fail": "failed", "release": "released"}


def lease_key(job: Job) -> tuple[str, int]:
    """By which a job is known while it is leased: no two claims have the same."""
    return job.id, job.lease_token


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
        self.unanswered = Unanswered(store, queue, ttl)
        self._ttl_ms = max(1, round(ttl * 1000))
        self._chance = chance
        self._turn = 0

    async def claim(self, count: int, worker: str, *, waits: bool = False) -> Claimed:
        """Lease up to ``count`` jobs, shared out so that no job starves. If it ``waits``, :meth:`news` follows.

        A thousand in a round trip; where more are wanted, for a third of the lease's time, so that the first of them
        are still leased for long when the last ones come. First it gives back what a claim before has leased if that
        was not answered.
        """
        rules.integer("count", count, least=1)
        clock = self.store.clock
        await self.unanswered.give_back()
        asked = clock.monotonic()
        claimed = await self._claim(min(count, MOST_CLAIMED), worker, waits)
        is_all = len(claimed.jobs) < MOST_CLAIMED
        while not is_all and len(claimed.jobs) < count and clock.monotonic() - asked < self.ttl / 3:
            wanted = min(count - len(claimed.jobs), MOST_CLAIMED)
            try:
                more = await self._claim(wanted, worker, waits)
            except QueueError:
                break  # those that it has are the caller's all the same
            except BaseException:  # cancelled: the caller does not get them
                self.unanswered.doubt({job.claim_id for job in claimed.jobs}, asked)
                raise
            is_all = len(more.jobs) < wanted
            jobs, expired = [*claimed.jobs, *more.jobs], [*claimed.expired, *more.expired]
            claimed = Claimed(jobs, expired, more.next_ms, more.mark)
        return claimed

    async def _claim(self, count: int, worker: str, waits: bool) -> Claimed:
        share, lease = shares(count, self._turn), (self._ttl_ms, self.retry.max_retries)
        wanted = Wanted(count, rules.text("worker", worker), *lease, share.retries, share.oldest, nonce(), waits)
        with self.unanswered.asking(wanted.claim_id):
            claimed = await self.store.claim(self.queue, wanted)
        if claimed.jobs:
            self._turn += 1
            ages = [((job.claimed_ms or 0) - job.ready_ms) / 1000 for job in claimed.jobs]
            self.metrics.claimed(len(ages), ages)
        if claimed.expired:
            self.metrics.expired(len(claimed.expired))
            self.metrics.failed(sum(one.failed for one in claimed.expired))
        return claimed

    async def news(self, claimed: Claimed, seconds: float) -> None:
        """Return once there may be more to claim than there was for ``claimed``, or after ``seconds``.

        After five at the latest: the worker that was told of a job may have died, and a notice may be lost.
        """
        due = _LOOK if claimed.next_ms is None else claimed.next_ms / 1000
        await self.store.news(self.queue, claimed.mark, min(seconds, due, _LOOK, self.unanswered.pause))

    async def renew(self, jobs: Sequence[Job], store: JobStore | None = None) -> list[Job]:
        """Extend the leases of jobs; those whose lease is lost. ``store`` is another way to the same store."""
        if not jobs:
            return []
        renewed = await (store or self.store).renew(self.queue, [Lease.of(job) for job in jobs], self._ttl_ms)
        return [job for job, done in zip(jobs, renewed, strict=True) if not done]

    def holder(self, lost: Callable[[Job, str], None], lines: Lines) -> Holder[Job]:
        """Keeps claimed jobs leased, over connections for heartbeats alone; ``lost`` hears of each that is lost."""
        heartbeats = self.store.heartbeats if isinstance(self.store, SharesHeartbeats) else HeartbeatStore(self.store)
        apart, close = heartbeats.borrow()
        renew = partial(self.renew, store=apart)
        return Holder(lease_key, renew, lost, close, self.ttl, self.store.clock, f"queue {self.queue!r}", lines)

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
