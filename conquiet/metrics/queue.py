"""What the queue counts: messages of a stream, and how long reads took, the waiting for a message included."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Histogram

from conquiet.metrics.families import Families, counters, never_raises, of
from conquiet.metrics.names import QUEUE

__all__ = ["QueueMetrics", "queue_metrics"]


@never_raises
class QueueMetrics:
    """What happened to one stream's messages, as counted from Redis' own answers."""

    def __init__(self, families: _QueueFamilies, stream: str) -> None:
        self._read = families.counters["messages_read_total"].labels(stream)
        self._acked = families.counters["messages_ack_total"].labels(stream)
        self._claimed = families.counters["messages_claimed_total"].labels(stream)
        self._latency = families.latency.labels(stream)

    def read(self, messages: int, seconds: float) -> None:
        """A read was answered after ``seconds``, with this many messages."""
        self._latency.observe(seconds)
        if messages:
            self._read.inc(messages)

    def acked(self, messages: int) -> None:
        """Redis took this many messages off the pending list."""
        self._acked.inc(messages)

    def claimed(self, messages: int) -> None:
        """This many stale messages changed their owner."""
        self._claimed.inc(messages)


def queue_metrics(stream: str, registry: CollectorRegistry | None = None) -> QueueMetrics:
    """The metrics of ``stream``, in Prometheus' default registry unless another is given."""
    return QueueMetrics(of(registry, _QueueFamilies), stream)


class _QueueFamilies(Families):
    def __init__(self) -> None:
        latency = QUEUE["read_latency_seconds"]
        self.counters = counters(QUEUE)
        # The client's own, because a read is one value: there is nothing to take in bulk.
        self.latency = Histogram(latency.name, latency.meaning, latency.labels, registry=None, buckets=latency.buckets)
        self.families = (*self.counters.values(), self.latency)
