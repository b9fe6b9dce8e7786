"""What Prometheus is told: verbs for the rooms to call, and collectors that are asked at each scrape.

No verb ever raises, and each is called only after the backend has answered. Every name, label and bucket is in
``conquiet.metrics.names``.
"""

from __future__ import annotations

from conquiet.metrics.balance import BalanceMetrics, LeaseEnd, balance_metrics
from conquiet.metrics.jobs import JobGauges, JobMetrics, JobOperation, JobResult, JobsCollector, job_metrics
from conquiet.metrics.names import NAMES
from conquiet.metrics.queue import QueueMetrics, queue_metrics
from conquiet.metrics.topics import (
    GroupGauges,
    GroupMetrics,
    GroupPartitionGauges,
    Operation,
    PartitionGauges,
    ProducerMetrics,
    Result,
    TopicsCollector,
    group_metrics,
    producer_metrics,
)

__all__ = [
    "NAMES",
    "BalanceMetrics",
    "GroupGauges",
    "GroupMetrics",
    "GroupPartitionGauges",
    "JobGauges",
    "JobMetrics",
    "JobOperation",
    "JobResult",
    "JobsCollector",
    "LeaseEnd",
    "Operation",
    "PartitionGauges",
    "ProducerMetrics",
    "QueueMetrics",
    "Result",
    "TopicsCollector",
    "balance_metrics",
    "group_metrics",
    "job_metrics",
    "producer_metrics",
    "queue_metrics",
]
