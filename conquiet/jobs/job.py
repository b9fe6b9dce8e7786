"""A job and the only ways in which it changes. Pure: no store, no clock, no chance.

::

    (new) --enqueue--> READY --claim--> IN_FLIGHT --ack--> SUCCEEDED
                         ^                  |-----retry, release, expire (attempts left)-----> READY
                         |                  '-----fail, expire (none left), cancel-----------> FAILED
                         |-- replay -- FAILED <-- cancel -- READY

Whatever is not drawn cannot happen. What leaves IN_FLIGHT by the worker's word needs the token of its claim.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Any, Final, Literal, TypeAlias

from msgspec import Struct
from msgspec.structs import replace

from conquiet.errors import JobStateError
from conquiet.kit import codec

__all__ = ["CANCELLED", "EXPIRED", "HISTORY", "TRANSITIONS", "Attempt", "Job", "JobState", "NewJob", "Settlement"]

EXPIRED: Final = "lease expired"
"""The error of an attempt whose worker was not heard of in time."""
CANCELLED: Final = "cancelled"
"""The error of a job that was cancelled."""
HISTORY: Final = 20
"""How many failed attempts a job remembers, the last ones."""


class JobState(StrEnum):
    """Where a job is in its life: in exactly one of these at any time."""

    READY = "ready"
    """To be claimed, now or once its time has come."""
    IN_FLIGHT = "in_flight"
    """Leased to a worker. Claimable again once the lease has run out."""
    SUCCEEDED = "succeeded"
    """Done; never run again."""
    FAILED = "failed"
    """Given up or cancelled; run again only if it is replayed."""


Event: TypeAlias = Literal[
    "claim", "ack", "retry", "fail", "release", "expire", "exhaust", "cancel", "replay", "renew", "delete"
]

SettlementKind: TypeAlias = Literal["ack", "retry", "fail", "release"]

TRANSITIONS: Final[Mapping[tuple[JobState, Event], JobState | None]] = MappingProxyType(
    {
        (JobState.READY, "claim"): JobState.IN_FLIGHT,
        (JobState.READY, "cancel"): JobState.FAILED,
        (JobState.IN_FLIGHT, "renew"): JobState.IN_FLIGHT,
        (JobState.IN_FLIGHT, "ack"): JobState.SUCCEEDED,
        (JobState.IN_FLIGHT, "retry"): JobState.READY,
        (JobState.IN_FLIGHT, "release"): JobState.READY,
        (JobState.IN_FLIGHT, "expire"): JobState.READY,
        (JobState.IN_FLIGHT, "exhaust"): JobState.FAILED,
        (JobState.IN_FLIGHT, "fail"): JobState.FAILED,
        (JobState.IN_FLIGHT, "cancel"): JobState.FAILED,
        (JobState.FAILED, "replay"): JobState.READY,
        (JobState.FAILED, "delete"): None,
        (JobState.SUCCEEDED, "delete"): None,
    }
)
"""Every legal change: the state after it, or ``None`` where nothing is left."""

# What is made for each job on its way is a ``Struct``: several times as fast to make as a frozen dataclass.


class NewJob(Struct, frozen=True, gc=False):
    """A job that is about to be added; ``payload`` is JSON, ``delay_ms`` is how long it is not to be claimed."""

    id: str
    payload: bytes
    priority: int = 0
    delay_ms: int = 0
    max_retries: int | None = None


@dataclass(frozen=True, slots=True)
class Attempt:
    """A try that did not succeed. ``error`` is its first line."""

    number: int
    worker: str
    started_ms: int
    ended_ms: int
    error: str

    @property
    def started_at(self) -> dt.datetime:
        """When the job was claimed for it."""
        return _moment(self.started_ms)

    @property
    def ended_at(self) -> dt.datetime:
        """When it was given up, or its lease had run out."""
        return _moment(self.ended_ms)


class Settlement(Struct, frozen=True, gc=False):
    """What a worker says became of a job; it counts only with the ``token`` and ``claim_id`` of the job's last claim.

    ``error`` is kept as the job's last error; ``brief``, its first line, among the attempts.
    """

    job_id: str
    token: int
    kind: SettlementKind
    delay_ms: int = 0
    error: str = ""
    brief: str = ""
    result: bytes | None = None
    claim_id: str = ""
    seconds: float | None = None
    """How long the handler took, for metrics; no store keeps it."""

    @staticmethod
    def of(job: Job, kind: SettlementKind, **more: Any) -> Settlement:
        """The settlement of ``job`` by the worker that claimed it; ``more`` are the other fields."""
        return Settlement(job.id, job.lease_token, kind, claim_id=job.claim_id, **more)

    def size(self) -> int:
        """About how many bytes it is on its way to a store."""
        return len(self.job_id) + len(self.error) + len(self.result or b"")

    def words(self) -> int:
        """How many words it is in a request, at most."""
        return {"ack": 4, "retry": 6, "fail": 5}.get(self.kind, 3)


class Job(Struct, frozen=True, kw_only=True):
    """A job as its store had it at one moment; a later look may find another. Times are the store's."""

    id: str
    queue: str
    raw: bytes
    """The payload as JSON."""
    state: JobState = JobState.READY
    priority: int = 0
    """Larger is sooner."""
    attempts: int = 0
    """How often it was claimed: the attempt under way included, released ones not."""
    lease_token: int = 0
    """Rises with each claim; only the last one's counts. At least the store's time in ms, and higher than the token of
    any job that was removed from the queue; 0 while it was never claimed."""
    claim_id: str = ""
    """No two claims have the same: also not if the store lost the first one and has given its token again."""
    max_retries: int | None = None
    """Its own limit, which overrides the queue's policy."""
    worker: str | None = None
    """Who holds it, or held it last."""
    last_error: str | None = None
    raw_result: bytes | None = None
    failures: tuple[Attempt, ...] = ()
    """The last attempts that did not succeed, oldest first; at most 20."""
    enqueued_ms: int = 0
    ready_ms: int = 0
    """From when on it may be claimed."""
    claimed_ms: int | None = None
    lease_ms: int | None = None
    """Until when it is leased; only in flight."""
    finished_ms: int | None = None

    @property
    def payload(self) -> Any:
        """What was enqueued."""
        return codec.decode(self.raw)

    @property
    def result(self) -> Any:
        """What its handler returned; ``None`` if nothing, or not yet."""
        return None if self.raw_result is None else codec.decode(self.raw_result)

    @property
    def is_finished(self) -> bool:
        """Whether it has succeeded or failed."""
        return self.state in (JobState.SUCCEEDED, JobState.FAILED)

    @property
    def enqueued_at(self) -> dt.datetime:
        """When it was enqueued."""
        return _moment(self.enqueued_ms)

    @property
    def retry_at(self) -> dt.datetime | None:
        """From when on a waiting job may be claimed, if it was delayed or has failed before; else ``None``."""
        is_put_off = self.state is JobState.READY and self.ready_ms > self.enqueued_ms
        return _moment(self.ready_ms) if is_put_off else None

    @property
    def claimed_at(self) -> dt.datetime | None:
        """When it was claimed last."""
        return None if self.claimed_ms is None else _moment(self.claimed_ms)

    @property
    def lease_expires_at(self) -> dt.datetime | None:
        """Until when it is leased; ``None`` unless in flight."""
        return None if self.lease_ms is None else _moment(self.lease_ms)

    @property
    def finished_at(self) -> dt.datetime | None:
        """When it succeeded or failed for good."""
        return None if self.finished_ms is None else _moment(self.finished_ms)

    # --- how it changes ---------------------------------------------------------------------------------------

    def claimed(self, worker: str, now: int, ttl_ms: int, claim_id: str = "", above: int = 0) -> Job:
        """Leased to ``worker``; the token of any claim before is stale.

        It is higher than the job's last one and than ``above``, and at least the time: so it rises even if the last
        one is forgotten.
        """
        return replace(
            self._after("claim"),
            worker=worker,
            attempts=self.attempts + 1,
            lease_token=max(self.lease_token + 1, above + 1, now),
            claim_id=claim_id,
            claimed_ms=now,
            lease_ms=now + ttl_ms,
        )

    def renewed(self, now: int, ttl_ms: int) -> Job:
        """Leased for longer."""
        return replace(self._after("renew"), lease_ms=now + ttl_ms)

    def settled(self, settlement: Settlement, now: int) -> Job:
        """As its worker says."""
        kind = settlement.kind
        if kind == "ack":
            return replace(self._ended("ack", now), raw_result=settlement.result)
        if kind == "release":
            return replace(
                self._after("release"), attempts=self.attempts - 1, worker=None, claimed_ms=None, lease_ms=None
            )
        failed = self._failed(settlement.brief, now)
        if kind == "fail":
            return replace(failed._ended("fail", now), last_error=settlement.error)
        ready = now + settlement.delay_ms
        return replace(failed._after("retry"), last_error=settlement.error, ready_ms=ready, lease_ms=None)

    def expired(self, now: int, max_retries: int) -> Job:
        """Its lease has run out, which has cost an attempt."""
        assert self.lease_ms is not None
        failed = replace(self._failed(EXPIRED, self.lease_ms), last_error=EXPIRED)
        most = max_retries if self.max_retries is None else self.max_retries
        if self.attempts > most:
            return failed._ended("exhaust", now)
        return replace(failed._after("expire"), ready_ms=self.lease_ms, lease_ms=None)

    def cancelled(self, now: int) -> Job:
        """Cancelled; the token of the worker that runs it is stale."""
        if self.state is JobState.IN_FLIGHT:
            failed = replace(self._failed(CANCELLED, now), lease_token=self.lease_token + 1)
            return replace(failed._ended("cancel", now), last_error=CANCELLED)
        return replace(self._ended("cancel", now), last_error=CANCELLED)

    def replayed(self, now: int) -> Job:
        """To be run again, as if for the first time."""
        return replace(self._after("replay"), attempts=0, ready_ms=now, finished_ms=None, worker=None, claimed_ms=None)

    def check(self, event: Event) -> None:
        """Raise ``JobStateError`` unless ``event`` can happen to it now."""
        if (self.state, event) not in TRANSITIONS:
            raise JobStateError(f"job {self.id!r} of queue {self.queue!r} is {self.state}: {event} is not possible")

    def _after(self, event: Event) -> Job:
        self.check(event)
        state = TRANSITIONS[self.state, event]
        assert state is not None
        return replace(self, state=state)

    def _ended(self, event: Event, now: int) -> Job:
        return replace(self._after(event), finished_ms=now, lease_ms=None)

    def _failed(self, brief: str, now: int) -> Job:
        assert self.claimed_ms is not None
        attempt = Attempt(self.attempts, self.worker or "", self.claimed_ms, now, brief)
        return replace(self, failures=(*self.failures, attempt)[-HISTORY:])


def _moment(ms: int) -> dt.datetime:
    return dt.datetime.fromtimestamp(ms / 1000, dt.UTC)
