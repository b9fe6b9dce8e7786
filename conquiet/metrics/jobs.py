"""What jobs count, by queue. Worker and job IDs are no labels: they would leave series behind for ever."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, Literal, TypeAlias, get_args

from prometheus_client import CollectorRegistry

from conquiet.metrics.families import Families, Observe, Scrape, Told, counters, histograms, never_raises, of
from conquiet.metrics.names import JOBS

__all__ = ["JobGauges", "JobMetrics", "JobOperation", "JobResult", "JobsCollector", "job_metrics"]

JobOperation: TypeAlias = Literal["ack", "retry", "fail", "release", "renew"]
"""What a worker whose lease had ended was refused."""
JobResult: TypeAlias = Literal["succeeded", "retried", "failed", "lost"]
"""What became of a handler's call; ``lost`` is that its lease had ended meanwhile."""

_QUEUE: Final = ("queue",)


def _counts(what: str) -> Callable[[Any, int], None]:
    """The verb that counts so many jobs."""

    def verb(self: JobMetrics, count: int) -> None:
        self._counters[what].inc(count)

    verb.__doc__ = JOBS[what].meaning
    return verb


@never_raises
class JobMetrics:
    """What happens to one queue's jobs, as the store has answered; a verb takes a whole batch."""

    def __init__(self, families: _JobsFamilies, queue: str) -> None:
        self._queue = queue
        self._families = families
        # All at once, because a rate needs the zero that comes before the first event.
        self._counters = {
            what: counter.labels(queue) for what, counter in families.counters.items() if JOBS[what].labels == _QUEUE
        }
        stale = families.counters["stale_total"]
        self._stale = {operation: stale.labels(queue, operation) for operation in get_args(JobOperation)}

    enqueued = _counts("enqueued_total")
    succeeded = _counts("succeeded_total")
    retried = _counts("retried_total")
    failed = _counts("failed_total")
    released = _counts("released_total")
    cancelled = _counts("cancelled_total")
    replayed = _counts("replayed_total")
    expired = _counts("expired_total")

    def claimed(self, count: int, waits: Sequence[float]) -> None:
        """So many jobs were leased, each so many seconds after it could have been."""
        self._counters["claimed_total"].inc(count)
        if waits:
            self._waits(waits)

    def stale(self, operation: JobOperation, count: int) -> None:
        """``operation`` was refused for so many jobs, because their leases had ended."""
        self._stale[operation].inc(count)

    def ran(self, result: JobResult, seconds: Sequence[float]) -> None:
        """Handler calls of these durations ended with ``result``."""
        self._runs[result](seconds)

    # Made when they are needed: who only enqueues has no use for their many series.
    @cached_property
    def _waits(self) -> Observe:
        return self._families.histograms["wait_seconds"].labels(self._queue)

    @cached_property
    def _runs(self) -> dict[JobResult, Observe]:
        runs = self._families.histograms["run_seconds"]
        return {result: runs.labels(self._queue, result) for result in get_args(JobResult)}


def job_metrics(queue: str, registry: CollectorRegistry | None = None) -> JobMetrics:
    """The metrics of ``queue``, in Prometheus' default registry unless another is given."""
    return JobMetrics(of(registry, _JobsFamilies), queue)


class _JobsFamilies(Families):
    def __init__(self) -> None:
        self.counters = counters(JOBS)
        self.histograms = histograms(JOBS)
        self.families = (*self.counters.values(), *self.histograms.values())


@dataclass(frozen=True, slots=True)
class JobGauges:
    """How many jobs of a queue are in a state."""

    queue: str
    state: str
    count: int


class JobsCollector(Scrape):
    """Shows the states of stored jobs at each scrape; ``conquiet_jobs_collector_up`` is 0 if that failed."""

    what = "jobs"
    up = JOBS["collector_up"]
    shown = (JOBS["stored"],)

    def told(self, record: JobGauges) -> list[Told]:
        """How many jobs are in a state."""
        return [(JOBS["stored"], (record.queue, str(record.state)), float(record.count))]
