"""The names, types and labels that are promised, and a use of everything that is counted."""

from __future__ import annotations

from collections.abc import Sequence

from prometheus_client import CollectorRegistry, generate_latest

from conquiet.metrics import (
    GroupGauges,
    GroupPartitionGauges,
    JobGauges,
    JobsCollector,
    PartitionGauges,
    TopicsCollector,
    balance_metrics,
    group_metrics,
    job_metrics,
    producer_metrics,
    queue_metrics,
)

__all__ = ["COUNTED", "GOLDEN", "GOLDEN_JOBS", "OWNER", "RECORDS", "lines", "use_balance", "use_everything"]


GOLDEN = (
    "conquiet_queue_messages_ack_total",
    "conquiet_queue_messages_claimed_total",
    "conquiet_queue_messages_read_total",
    "conquiet_queue_read_latency_seconds",
)
OWNER = ("topic", "partition", "group", "consumer")

GOLDEN_JOBS = {
    "conquiet_jobs_cancelled_total": ("counter", ("queue",)),
    "conquiet_jobs_claimed_total": ("counter", ("queue",)),
    "conquiet_jobs_collector_up": ("gauge", ()),
    "conquiet_jobs_enqueued_total": ("counter", ("queue",)),
    "conquiet_jobs_expired_total": ("counter", ("queue",)),
    "conquiet_jobs_failed_total": ("counter", ("queue",)),
    "conquiet_jobs_released_total": ("counter", ("queue",)),
    "conquiet_jobs_replayed_total": ("counter", ("queue",)),
    "conquiet_jobs_retried_total": ("counter", ("queue",)),
    "conquiet_jobs_run_seconds": ("histogram", ("queue", "result")),
    "conquiet_jobs_stale_total": ("counter", ("queue", "operation")),
    "conquiet_jobs_stored": ("gauge", ("queue", "state")),
    "conquiet_jobs_succeeded_total": ("counter", ("queue",)),
    "conquiet_jobs_wait_seconds": ("histogram", ("queue",)),
}

COUNTED = (JobGauges("q", "ready", 4), JobGauges("q", "in_flight", 0))

RECORDS = (
    PartitionGauges("t", 0, 10),
    PartitionGauges("t", 1, 11),
    GroupPartitionGauges("t", "g", 0, pending=3, lag=4, retry_depth=2, oldest_pending_age=1.5),
    GroupPartitionGauges("t", "g", 1, pending=0, lag=None, retry_depth=0, oldest_pending_age=None),
    GroupGauges("t", "g", unowned=1),
)


def use_balance(registry: CollectorRegistry | None) -> None:
    balance = balance_metrics("v", "c", registry)
    balance.added(2)
    balance.acquired(5, 3)
    balance.renewed(7)
    balance.ended("lost", 1)
    balance.claimed(refused=True)
    balance.set_aside(4)
    balance.owned(6)
    balance.swept(0.4)


def use_everything(registry: CollectorRegistry | None = None) -> tuple[TopicsCollector, JobsCollector]:
    """Call every verb once."""
    queue_metrics("s", registry)
    use_balance(registry)
    jobs = job_metrics("q", registry)
    jobs.enqueued(9)
    jobs.claimed(3, [0.002, 0.5, 3])
    jobs.succeeded(4)
    jobs.retried(5)
    jobs.failed(6)
    jobs.released(7)
    jobs.cancelled(8)
    jobs.replayed(2)
    jobs.stale("renew", 10)
    jobs.expired(11)
    jobs.ran("lost", [0.25, 2])
    sent = producer_metrics("t", registry)
    sent.produced(0, 5)
    sent.duplicate(0, 2)
    sent.dropped(0, 1)
    group = group_metrics("t", "g", "c", registry)
    group.consumed(0, 9)
    group.acked(0, 6, 0.002)
    group.retried(0, 2)
    group.dead_lettered(0, 1)
    group.fenced(0, "ack", 4)
    group.claimed(0, 3)
    group.ghosts(0, 7)
    group.rebalanced()
    group.lease_lost(0)
    group.handled(0, "ack", [0.001, 0.3])
    group.end_to_end([0.5, 0.7, 100])
    group.inflight(8)
    group.owned(2)
    return TopicsCollector(lambda: RECORDS, registry), JobsCollector(lambda: COUNTED, registry)


def lines(registry: CollectorRegistry, but: Sequence[str] = ("_bucket", "_created")) -> list[str]:
    text = generate_latest(registry).decode().splitlines()
    return [line for line in text if line[0] != "#" and not any(part in line for part in but)]
