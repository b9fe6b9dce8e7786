"""What a store of jobs promises, whichever it is. The contract suite holds every store to these words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Protocol

from msgspec import Struct

from conquiet.errors import ConfigError
from conquiet.jobs.job import Job, JobState, NewJob, Settlement
from conquiet.kit import rules
from conquiet.kit.clock import Clock

__all__ = [
    "MOST_BYTES",
    "MOST_CLAIMED",
    "Claim",
    "Claimed",
    "Expired",
    "JobPage",
    "JobRetention",
    "JobStore",
    "Keep",
    "Lease",
    "Wanted",
    "numbered",
]

MOST_CLAIMED: Final = 1000
"""How many jobs one call claims at most: the server does nothing else meanwhile."""
MOST_BYTES: Final = 8 << 20
"""How many bytes of jobs one call reads or writes, give or take one job."""


@dataclass(frozen=True, slots=True)
class JobRetention:
    """How long finished jobs are kept: none older than ``age`` seconds, at most ``count``; ``None`` is no limit."""

    age: float | None = 7 * 86_400.0
    count: int | None = 100_000

    def __post_init__(self) -> None:
        if self.age is not None:
            rules.number("age", self.age, least=0)
        if self.count is not None:
            rules.integer("count", self.count, least=0)


Keep = JobRetention
"""The former name of :class:`JobRetention`."""


class Lease(Struct, frozen=True, gc=False):
    """A job that is held, and by which claim."""

    job_id: str
    token: int
    claim_id: str = ""

    @staticmethod
    def of(job: Job) -> Lease:
        """The lease by which ``job`` was claimed."""
        return Lease(job.id, job.lease_token, job.claim_id)


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a claim asks for.

    Jobs are claimed in the order of priority (larger first), then of the moment since which they may be claimed,
    then of enqueueing. But of the ``count``, up to ``retries`` go first to jobs that were tried before, and then up to
    ``oldest`` to those that have waited longest, whatever their priority (of equals the more urgent first), so that
    nothing starves. The answer is in claim order.

    At most :data:`MOST_CLAIMED` jobs are given at a time, and fewer if their payloads come to more than
    :data:`MOST_BYTES`: who has a share comes first then too, and there is always one.
    """

    count: int
    worker: str
    ttl_ms: int
    max_retries: int
    retries: int = 0
    oldest: int = 0
    claim_id: str = ""
    """Of the caller's making, and that of no other claim; without, the store makes one."""
    waits: bool = False
    """Whether the caller waits for :meth:`JobStore.news` if it gets less than it wants: it may be told first."""

    def bounded(self) -> Wanted:
        """The same, but for no more jobs than are given at a time."""
        if self.count <= MOST_CLAIMED:
            return self
        share = MOST_CLAIMED // 5
        return replace(self, count=MOST_CLAIMED, retries=min(self.retries, share), oldest=min(self.oldest, share))


class Claim(Struct, frozen=True, gc=False):
    """What is the same of all jobs that one call claims; ``id`` is that of no other call."""

    queue: str
    worker: str
    ttl_ms: int
    id: str


@dataclass(frozen=True, slots=True)
class Expired:
    """A lease that was found to have run out, and whether the job has failed by that."""

    job_id: str
    failed: bool


@dataclass(frozen=True, slots=True)
class Claimed:
    """What a claim got.

    ``next_ms`` is in how many milliseconds more may be there by the passing of time: a job falls due or a lease runs
    out; ``None`` if nothing waits for its time. ``mark`` is for :meth:`JobStore.news`.
    """

    jobs: Sequence[Job]
    expired: Sequence[Expired] = ()
    next_ms: int | None = None
    mark: str = ""


@dataclass(frozen=True, slots=True)
class JobPage:
    """Some jobs of one state, and where to go on; ``cursor`` is ``None`` after the last page."""

    jobs: Sequence[Job]
    cursor: str | None


def numbered(cursor: str | None) -> int:
    """The number that a page's cursor is, in stores where it is one; 0 is the beginning."""
    if cursor is None:
        return 0
    try:
        return int(cursor)
    except (TypeError, ValueError):
        raise ConfigError(f"cursor must be one that a page gave, not {cursor!r}") from None


class JobStore(Protocol):
    """Keeps the jobs of any number of queues.

    Each method is atomic: a crash in the middle leaves all of it done or nothing, and two callers never see each
    other half done. Every failure of the backend is a ``QueueError``; whether a call that failed was done is not known.
    All times are the store's own, plus the clock's offset.
    """

    @property
    def clock(self) -> Clock:
        """Moves time in tests."""
        ...

    async def open(self) -> None:
        """Make sure that the store can be used; safe to repeat. ``async with`` does it."""
        ...

    async def aclose(self) -> None:
        """Close all connections; safe to repeat."""
        ...

    def clone(self) -> JobStore:
        """The same store over connections of its own, for another event loop; to be closed by the caller."""
        ...

    def apart(self) -> JobStore:
        """The former name of :meth:`clone`."""
        ...

    async def add(self, queue: str, jobs: Sequence[NewJob], connection: Any = None) -> None:
        """Add all of ``jobs`` or none: ``DuplicateJobError`` names the IDs that are taken, or given twice.

        ``connection`` is a connection of the caller's, for stores that can write in the
        caller's own transaction; for others it is a ``ConfigError``.
        """
        ...

    async def claim(self, queue: str, wanted: Wanted) -> Claimed:
        """First give up every lease that has run out, then lease what is wanted.

        A lease that has run out makes its job claimable again under the same ID, unless no attempt is left: then the
        job has failed. No job is handed out twice at a time. At most a few hundred leases are given up in one call.

        Each job's token is higher than its last one, than that of any job that was removed from the queue, and at least
        the store's time in milliseconds. With the claim's own ID, which never repeats, it tells this claim from all
        others, also from one that the store has lost.
        """
        ...

    async def leased(self, queue: str, claim_ids: Sequence[str], left_ms: int) -> list[Lease]:
        """What these claims have leased, for a caller that did not get their answers; nothing is changed.

        ``left_ms`` is for how many milliseconds at least such leases go on: what ends before that need not be found.
        """
        ...

    async def renew(self, queue: str, leases: Sequence[Lease], ttl_ms: int) -> list[bool]:
        """Extend leases to ``ttl_ms`` from now; false for each whose job is not in flight by that claim."""
        ...

    async def settle(self, queue: str, settlements: Sequence[Settlement]) -> list[bool]:
        """Apply each settlement, or nothing of it: false where the job is not in flight by that claim.

        The claim decides, not the time: a lease that has run out still counts while no other worker has the job.
        """
        ...

    async def find(self, queue: str, ids: Sequence[str]) -> list[Job | None]:
        """The jobs of these IDs, ``None`` for each that there is not."""
        ...

    async def counts(self, queue: str) -> Mapping[JobState, int]:
        """How many jobs are in each state."""
        ...

    async def page(self, queue: str, state: JobState, count: int, cursor: str | None) -> JobPage:
        """Jobs in ``state``. One that stays in it while all pages are read is met exactly once."""
        ...

    async def replay(self, queue: str, id: str) -> Job | None:
        """Make a failed job ready again; ``None`` if there is no such job. ``ConfigError`` if it has not failed."""
        ...

    async def cancel(self, queue: str, id: str) -> Job | None:
        """Fail a job that is not finished; ``None`` if there is none. One that is finished stays as it is."""
        ...

    async def delete(self, queue: str, id: str) -> Job | None:
        """Remove a finished job; ``None`` if there is none. ``ConfigError`` if it is not finished."""
        ...

    async def purge(self, queue: str, state: JobState, keep: JobRetention) -> int:
        """Remove finished jobs, the oldest first, that ``keep`` does not keep; how many. Up to a thousand a call."""
        ...

    async def news(self, queue: str, mark: str, seconds: float) -> None:
        """Return once something may be claimable that was not when ``mark`` was given, or after ``seconds``.

        Of several that wait, and said so when they claimed, as few may be told as there are jobs: one that is told
        has to claim at once. May return for no reason. A job that only fell due by time is not news.
        """
        ...

    async def finished(self, queue: str, id: str, seconds: float | None) -> Job | None:
        """The job once it has succeeded or failed; ``None`` after ``seconds``, or if it is not there."""
        ...
