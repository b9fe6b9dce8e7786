"""Every Prometheus name, label and bucket of the library, once.

The rooms call the verbs below; no verb ever raises, and each is called only after Redis has answered.
``READ_LATENCY`` covers a whole read, the waiting for a message included.
"""

from __future__ import annotations

import logging
from functools import cache
from typing import Final

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Histogram

__all__ = ["NAMES", "QueueMetrics", "queue_metrics"]

_log = logging.getLogger("conquiet.metrics")

ACKED: Final = "conquiet_queue_messages_ack_total"
CLAIMED: Final = "conquiet_queue_messages_claimed_total"
READ: Final = "conquiet_queue_messages_read_total"
READ_LATENCY: Final = "conquiet_queue_read_latency_seconds"

NAMES: Final = (ACKED, CLAIMED, READ, READ_LATENCY)
"""The golden list: what a scrape shows, in order."""

# From a local round trip to the default block of five seconds, and to a minute's.
_READ_BUCKETS: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


class QueueMetrics:
    """What happened to one stream's messages, as counted from Redis' own answers."""

    def __init__(self, families: _QueueFamilies, stream: str) -> None:
        self._read = families.read.labels(stream)
        self._acked = families.acked.labels(stream)
        self._claimed = families.claimed.labels(stream)
        self._latency = families.latency.labels(stream)

    def read(self, messages: int, seconds: float) -> None:
        """A read was answered after ``seconds``, with this many messages."""
        try:
            self._latency.observe(seconds)
            if messages:
                self._read.inc(messages)
        except Exception:
            _log.exception("metrics failed")

    def acked(self, messages: int) -> None:
        """Redis took this many messages off the pending list."""
        try:
            self._acked.inc(messages)
        except Exception:
            _log.exception("metrics failed")

    def claimed(self, messages: int) -> None:
        """This many stale messages changed their owner."""
        try:
            self._claimed.inc(messages)
        except Exception:
            _log.exception("metrics failed")


def queue_metrics(stream: str, registry: CollectorRegistry | None = None) -> QueueMetrics:
    """The metrics of ``stream``, in Prometheus' default registry unless another is given."""
    return QueueMetrics(_queue_families(registry or REGISTRY), stream)


class _QueueFamilies:
    def __init__(self, registry: CollectorRegistry) -> None:
        label = ["stream"]
        self.acked = Counter(ACKED, "Messages that Redis acknowledged.", label, registry=registry)
        self.claimed = Counter(CLAIMED, "Stale messages claimed.", label, registry=registry)
        self.read = Counter(READ, "Messages read.", label, registry=registry)
        self.latency = Histogram(
            READ_LATENCY,
            "Duration of reads that Redis answered, blocking included.",
            label,
            registry=registry,
            buckets=_READ_BUCKETS,
        )


@cache
def _queue_families(registry: CollectorRegistry) -> _QueueFamilies:
    # A registry takes each name once, so the families are made once for each registry.
    return _QueueFamilies(registry)
