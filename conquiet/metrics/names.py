"""Every Prometheus name, label and bucket of the library, once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, TypeAlias

__all__ = ["BALANCE", "GROUP", "JOBS", "MEMBER", "NAMES", "OWNER", "PARTITION", "QUEUE", "TOPICS", "Family", "Room"]


@dataclass(frozen=True, slots=True)
class Family:
    """A name that a scrape shows, with its labels and its meaning; histograms have ``buckets``."""

    name: str
    labels: tuple[str, ...]
    meaning: str
    buckets: tuple[float, ...] = ()

    @property
    def is_counter(self) -> bool:
        """Whether it only rises."""
        return self.name.endswith("_total")

    @property
    def is_histogram(self) -> bool:
        """Whether it shows how values are spread."""
        return bool(self.buckets)


Room: TypeAlias = Mapping[str, Family]
"""The families of a room, each by the part of its name that comes after the room's."""


def _room(room: str, *families: Family) -> Room:
    prefix = f"conquiet_{room}_"
    named = (Family(prefix + one.name, one.labels, one.meaning, one.buckets) for one in families)
    return MappingProxyType({family.name.removeprefix(prefix): family for family in named})


# From a local round trip to the default block of five seconds, and to a minute's.
_ROUND_TRIPS: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
# To a day: a message or a job may have waited for somebody to take it.
_WAITS: Final = (*_ROUND_TRIPS[1:], 300, 1800, 3600, 21600, 86400)
# Few, because each partition of each consumer has them.
_HANDLERS: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.1, 0.5, 1, 5, 30, 300)
# To six hours: a job may be long, since its lease is renewed.
_RUNS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 1800, 3600, 21600)

_CONSUMER: Final = ("service", "consumer")

BALANCE: Final = _room(
    "balance",
    Family("acquired_total", _CONSUMER, "Streams that a consumer came to own."),
    Family("added_total", _CONSUMER, "Streams handed in."),
    Family("claims_total", (*_CONSUMER, "result"), "Streams asked for by name: claimed, or refused."),
    Family("ended_total", (*_CONSUMER, "how"), "Streams that a consumer owns no longer: finished, released or lost."),
    Family("owned", _CONSUMER, "Streams that a consumer owns."),
    Family("recovered_total", _CONSUMER, "Streams taken over from an owner that was lost."),
    Family("renewed_total", _CONSUMER, "Leases renewed."),
    Family("set_aside_total", _CONSUMER, "Entries of the input that were no streams."),
    Family("sweep_lag_seconds", ("service",), "How long a lease had run out when a sweep found it.", _ROUND_TRIPS),
)

_JOBS: Final = ("queue",)

JOBS: Final = _room(
    "jobs",
    Family("cancelled_total", _JOBS, "Jobs called off."),
    Family("claimed_total", _JOBS, "Jobs leased to a worker."),
    Family("collector_up", (), "1 if the state of all queues could be read for this scrape, else 0."),
    Family("enqueued_total", _JOBS, "Jobs added."),
    Family("expired_total", _JOBS, "Leases found to have run out."),
    Family("failed_total", _JOBS, "Jobs given up."),
    Family("released_total", _JOBS, "Jobs given back before they were begun."),
    Family("replayed_total", _JOBS, "Failed jobs made ready again."),
    Family("retried_total", _JOBS, "Jobs put off for a retry."),
    Family("run_seconds", (*_JOBS, "result"), "Duration of handler calls.", _RUNS),
    Family(
        "stale_total", (*_JOBS, "operation"), "Refused to a worker whose lease another claim or a cancel had ended."
    ),
    Family("stored", (*_JOBS, "state"), "Jobs that the store has."),
    Family("succeeded_total", _JOBS, "Jobs done."),
    Family("wait_seconds", _JOBS, "From the moment since which a job could be claimed to its claim.", _WAITS),
)

_STREAM: Final = ("stream",)

QUEUE: Final = _room(
    "queue",
    Family("messages_ack_total", _STREAM, "Messages that Redis acknowledged."),
    Family("messages_claimed_total", _STREAM, "Stale messages claimed."),
    Family("messages_read_total", _STREAM, "Messages read."),
    Family("read_latency_seconds", _STREAM, "Duration of reads that Redis answered, blocking included.", _ROUND_TRIPS),
)

PARTITION: Final = ("topic", "partition")
"""The labels of what is counted by partition."""
GROUP: Final = ("topic", "partition", "group")
"""The labels of what is counted by group and partition."""
OWNER: Final = ("topic", "partition", "group", "consumer")
"""The labels of what the owner of a partition does there."""
MEMBER: Final = ("topic", "group", "consumer")
"""The labels of what a consumer does as a whole."""

TOPICS: Final = _room(
    "topics",
    Family("ack_seconds", MEMBER, "Round trips that acknowledged messages.", _ROUND_TRIPS),
    Family("acks_total", OWNER, "Messages that Redis acknowledged."),
    Family("claims_total", OWNER, "Pending messages taken over from another owner."),
    Family("collector_up", (), "1 if the state of all topics could be read for this scrape, else 0."),
    Family("consumed_total", OWNER, "Messages taken from a partition."),
    Family("dead_letters_total", OWNER, "Messages given up."),
    Family("dropped_total", PARTITION, "Messages lost to a hard cap."),
    Family("duplicates_total", PARTITION, "Sends suppressed because their message ID was known."),
    Family("end_to_end_seconds", MEMBER, "From the producer's timestamp to the acknowledgment.", _WAITS),
    Family("fenced_total", (*OWNER, "operation"), "Refused to an owner that had lost its lease."),
    Family("ghosts_total", GROUP, "Pending IDs whose entry was gone."),
    Family("handle_seconds", (*OWNER, "result"), "Duration of handler calls.", _HANDLERS),
    Family("inflight", MEMBER, "Messages taken and not settled."),
    Family("lag", GROUP, "Entries not yet given to the group."),
    Family("leases_lost_total", OWNER, "Leases that ended without a release."),
    Family("length", PARTITION, "Entries of a partition."),
    Family("oldest_pending_age_seconds", GROUP, "Age of the oldest pending entry."),
    Family("partitions_owned", MEMBER, "Partitions whose lease a consumer holds."),
    Family("partitions_unowned", ("topic", "group"), "Partitions whose lease nobody holds."),
    Family("pending", GROUP, "Entries given to the group and not acknowledged."),
    Family("produced_total", PARTITION, "Messages added."),
    Family("rebalances_total", MEMBER, "Changes of a consumer's partitions."),
    Family("retries_total", OWNER, "Messages put off for a retry."),
    Family("retry_depth", GROUP, "Messages waiting for a retry."),
)

NAMES: Final = tuple(family.name for room in (BALANCE, JOBS, QUEUE, TOPICS) for family in room.values())
"""The golden list: what a scrape shows, in order."""
