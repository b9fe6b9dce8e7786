"""Every Prometheus name, label and bucket of the library, once.

The rooms call the verbs below; no verb ever raises, and each is called only after Redis has answered.
``READ_LATENCY`` covers a whole read, the waiting for a message included.
"""

from __future__ import annotations

import inspect
import logging
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial, wraps
from itertools import accumulate
from typing import Any, Final, Literal, ParamSpec, TypeAlias, TypeVar, cast

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

__all__ = [
    "NAMES",
    "GroupGauges",
    "GroupMetrics",
    "GroupPartitionGauges",
    "PartitionGauges",
    "ProducerMetrics",
    "QueueMetrics",
    "TopicsCollector",
    "group_metrics",
    "producer_metrics",
    "queue_metrics",
]

_log = logging.getLogger("conquiet.metrics")

_P = ParamSpec("_P")
_T = TypeVar("_T")
_F = TypeVar("_F", bound="_Families")

_Values: TypeAlias = dict[str, dict[tuple[str, ...], float]]

Operation: TypeAlias = Literal["ack", "retry", "dead_letter", "take", "release", "renew"]
Result: TypeAlias = Literal["ack", "retry", "dead_letter", "fenced"]

ACKED: Final = "conquiet_queue_messages_ack_total"
CLAIMED: Final = "conquiet_queue_messages_claimed_total"
READ: Final = "conquiet_queue_messages_read_total"
READ_LATENCY: Final = "conquiet_queue_read_latency_seconds"

_PARTITION: Final = ("topic", "partition")
_GROUP: Final = ("topic", "partition", "group")
_OWNER: Final = ("topic", "partition", "group", "consumer")
_MEMBER: Final = ("topic", "group", "consumer")

_TOPICS: Final[dict[str, tuple[tuple[str, ...], str]]] = {
    "ack_seconds": (_MEMBER, "Round trips that acknowledged messages."),
    "acks_total": (_OWNER, "Messages that Redis acknowledged."),
    "claims_total": (_OWNER, "Pending messages taken over from another owner."),
    "collector_up": ((), "1 if the state of all topics could be read for this scrape, else 0."),
    "consumed_total": (_OWNER, "Messages taken from a partition."),
    "dead_letters_total": (_OWNER, "Messages given up."),
    "dropped_total": (_PARTITION, "Messages lost to a hard cap."),
    "duplicates_total": (_PARTITION, "Sends suppressed because their message ID was known."),
    "end_to_end_seconds": (_MEMBER, "From the producer's timestamp to the acknowledgment."),
    "fenced_total": ((*_OWNER, "operation"), "Refused to an owner that had lost its lease."),
    "ghosts_total": (_GROUP, "Pending IDs whose entry was gone."),
    "handle_seconds": ((*_OWNER, "result"), "Duration of handler calls."),
    "inflight": (_MEMBER, "Messages taken and not settled."),
    "lag": (_GROUP, "Entries not yet given to the group."),
    "leases_lost_total": (_OWNER, "Leases that ended without a release."),
    "length": (_PARTITION, "Entries of a partition."),
    "oldest_pending_age_seconds": (_GROUP, "Age of the oldest pending entry."),
    "partitions_owned": (_MEMBER, "Partitions whose lease a consumer holds."),
    "partitions_unowned": (("topic", "group"), "Partitions whose lease nobody holds."),
    "pending": (_GROUP, "Entries given to the group and not acknowledged."),
    "produced_total": (_PARTITION, "Messages added."),
    "rebalances_total": (_MEMBER, "Changes of a consumer's partitions."),
    "retries_total": (_OWNER, "Messages put off for a retry."),
    "retry_depth": (_GROUP, "Messages waiting for a retry."),
}
"""The labels and the meaning of each ``conquiet_topics_...``."""

NAMES: Final = (ACKED, CLAIMED, READ, READ_LATENCY, *(f"conquiet_topics_{what}" for what in _TOPICS))
"""The golden list: what a scrape shows, in order."""

# From a local round trip to the default block of five seconds, and to a minute's.
_READ_BUCKETS: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)

_TOPICS_BUCKETS: Final[dict[str, tuple[float, ...]]] = {
    "ack_seconds": _READ_BUCKETS,
    # To a day: a message may have waited for its consumer.
    "end_to_end_seconds": (*_READ_BUCKETS[1:], 300, 1800, 3600, 21600, 86400),
    # Few, because each partition of each consumer has them.
    "handle_seconds": (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.1, 0.5, 1, 5, 30, 300),
}


def _never_raises(owner: type[_T]) -> type[_T]:
    """``owner``, with the failures of its verbs in the log and nowhere else."""
    for name, member in list(vars(owner).items()):
        if inspect.isfunction(member) and not name.startswith("_"):
            setattr(owner, name, _quiet(member))
    return owner


def _quiet(verb: Callable[_P, None]) -> Callable[_P, None]:
    @wraps(verb)
    def quiet(*args: _P.args, **kwargs: _P.kwargs) -> None:
        try:
            verb(*args, **kwargs)
        except Exception:
            _log.exception("metrics failed")

    return quiet


class _Families:
    """The families of a room. A registry takes each name once, so they are made once for each registry."""

    families: tuple[Collector, ...]


_made: Final[dict[tuple[type[_Families], CollectorRegistry], _Families]] = {}


def _of(registry: CollectorRegistry | None, kind: type[_F]) -> _F:
    """The one ``kind`` of ``registry``, whichever thread asks first; a family that is refused counts unseen."""
    place = registry or REGISTRY
    if (kind, place) not in _made:
        made = kind()
        if _made.setdefault((kind, place), made) is made:
            for family in made.families:
                _quiet(place.register)(family)
    return cast("_F", _made[kind, place])


class _BulkHistogram(Collector):
    """Takes a batch for the price of a few values, because its buckets are counters; the client's takes one a call."""

    def __init__(self, what: str, bounds: Sequence[float]) -> None:
        self._name = f"conquiet_topics_{what}"
        self._labels, self._meaning = _TOPICS[what]
        self._bounds = (*bounds, float("inf"))
        self._les = (*(str(float(bound)) for bound in bounds), "+Inf")
        self._counts = Counter(f"{self._name}_bucket", self._meaning, (*self._labels, "le"), registry=None)
        self._sums = Counter(f"{self._name}_sum", self._meaning, self._labels, registry=None)

    def labels(self, *at: str) -> Callable[[Sequence[float]], None]:
        """What observes values under these labels."""
        counts = [self._counts.labels(*at, le) for le in self._les]
        total = self._sums.labels(*at)

        def observe(values: Sequence[float]) -> None:
            # A duration is negative when a producer's clock is ahead of ours; it counts as none.
            ordered = sorted([value if value > 0 else 0.0 for value in values])
            start = 0
            while start < len(ordered):
                bucket = bisect_left(self._bounds, ordered[start])
                end = bisect_right(ordered, self._bounds[bucket], start)
                counts[bucket].inc(end - start)
                start = end
            total.inc(sum(ordered))

        return observe

    def collect(self) -> list[Metric]:
        family = HistogramMetricFamily(self._name, self._meaning, labels=self._labels)
        sums = _values(self._sums)  # before the counts, because they are made before their sum
        counts = _values(self._counts)
        for at, total in sums.items():
            cumulated = accumulate(counts[(*at, le)] for le in self._les)
            family.add_metric(at, list(zip(self._les, cumulated, strict=True)), total)
        return [family]

    describe = collect


def _values(counter: Counter) -> dict[tuple[str, ...], float]:
    samples = (sample for metric in counter.collect() for sample in metric.samples)
    return {tuple(sample.labels.values()): sample.value for sample in samples if sample.name.endswith("_total")}


def _gauges(values: _Values) -> list[Metric]:
    families: list[Metric] = []
    for what, by_labels in values.items():
        labels, meaning = _TOPICS[what]
        families.append(family := GaugeMetricFamily(f"conquiet_topics_{what}", meaning, labels=labels))
        for at, value in by_labels.items():
            family.add_metric(at, value)
    return families


@_never_raises
class QueueMetrics:
    """What happened to one stream's messages, as counted from Redis' own answers."""

    def __init__(self, families: _QueueFamilies, stream: str) -> None:
        self._read = families.read.labels(stream)
        self._acked = families.acked.labels(stream)
        self._claimed = families.claimed.labels(stream)
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
    return QueueMetrics(_of(registry, _QueueFamilies), stream)


class _QueueFamilies(_Families):
    def __init__(self) -> None:
        label = ["stream"]
        latency = "Duration of reads that Redis answered, blocking included."
        self.acked = Counter(ACKED, "Messages that Redis acknowledged.", label, registry=None)
        self.claimed = Counter(CLAIMED, "Stale messages claimed.", label, registry=None)
        self.read = Counter(READ, "Messages read.", label, registry=None)
        self.latency = Histogram(READ_LATENCY, latency, label, registry=None, buckets=_READ_BUCKETS)
        self.families = (self.acked, self.claimed, self.read, self.latency)


def _counts(what: str) -> Callable[[Any, int, int], None]:
    """The verb that counts so many messages at a partition."""

    def verb(self: ProducerMetrics | GroupMetrics, partition: int, messages: int) -> None:
        self._at(partition)[what].inc(messages)

    verb.__doc__ = _TOPICS[what][1]
    return verb


@_never_raises
class ProducerMetrics:
    """What was sent to one topic, by partition."""

    def __init__(self, families: _TopicsFamilies, topic: str) -> None:
        self._at = cache(partial(families.children, (_PARTITION,), topic=topic))

    produced = _counts("produced_total")
    duplicate = _counts("duplicates_total")
    dropped = _counts("dropped_total")


def producer_metrics(topic: str, registry: CollectorRegistry | None = None) -> ProducerMetrics:
    """The metrics of sending to ``topic``, in Prometheus' default registry unless another is given."""
    return ProducerMetrics(_of(registry, _TopicsFamilies), topic)


@_never_raises
class GroupMetrics:
    """What one consumer of a group does; consumers of the same name in a process are added up."""

    def __init__(self, families: _TopicsFamilies, topic: str, group: str, consumer: str) -> None:
        self.labels: Final = (topic, group, consumer)
        self.gauges: Final = {"inflight": 0.0, "partitions_owned": 0.0}
        self._at = cache(partial(families.children, (_OWNER, _GROUP), topic=topic, group=group, consumer=consumer))
        self._fenced = families.counters["fenced_total"]
        self._handled = cache(families.histograms["handle_seconds"].labels)
        self._ack = families.histograms["ack_seconds"].labels(*self.labels)
        self._end_to_end = families.histograms["end_to_end_seconds"].labels(*self.labels)
        self._rebalances = families.counters["rebalances_total"].labels(*self.labels)
        self._live = families.members.live
        self._live.add(self)

    consumed = _counts("consumed_total")
    retried = _counts("retries_total")
    dead_lettered = _counts("dead_letters_total")
    claimed = _counts("claims_total")
    ghosts = _counts("ghosts_total")

    def acked(self, partition: int, messages: int, seconds: float) -> None:
        """Redis took this many messages off the pending list, in a round trip of ``seconds``."""
        self._at(partition)["acks_total"].inc(messages)
        self._ack([seconds])

    def fenced(self, partition: int, operation: Operation, messages: int) -> None:
        """``operation`` was refused for this many messages, because the lease was lost."""
        topic, group, consumer = self.labels
        self._fenced.labels(topic, str(partition), group, consumer, operation).inc(messages)

    def rebalanced(self) -> None:
        """The partitions of this consumer changed."""
        self._rebalances.inc()

    def lease_lost(self, partition: int) -> None:
        """The lease ended without a release."""
        self._at(partition)["leases_lost_total"].inc()

    def handled(self, partition: int, result: Result, seconds: Sequence[float]) -> None:
        """Handler calls of these durations ended with ``result``."""
        topic, group, consumer = self.labels
        self._handled(topic, str(partition), group, consumer, result)(seconds)

    def end_to_end(self, seconds: Sequence[float]) -> None:
        """Messages were acknowledged, each so long after its producer's timestamp."""
        self._end_to_end(seconds)

    def inflight(self, messages: int) -> None:
        """So many messages are taken and not settled now."""
        self.gauges["inflight"] = float(messages)

    def owned(self, partitions: int) -> None:
        """So many partitions are held now."""
        self.gauges["partitions_owned"] = float(partitions)

    def forget(self) -> None:
        """The subscription has ended: its gauges are shown no more, its counts stay."""
        self._live.discard(self)


def group_metrics(topic: str, group: str, consumer: str, registry: CollectorRegistry | None = None) -> GroupMetrics:
    """The metrics of one consumer, by its configured name: a random one would leave series behind for ever."""
    return GroupMetrics(_of(registry, _TopicsFamilies), topic, group, consumer)


class _TopicsFamilies(_Families):
    def __init__(self) -> None:
        self.counters = {
            what: Counter(f"conquiet_topics_{what}", meaning, labels, registry=None)
            for what, (labels, meaning) in _TOPICS.items()
            if what.endswith("_total")
        }
        self.histograms = {what: _BulkHistogram(what, bounds) for what, bounds in _TOPICS_BUCKETS.items()}
        self.members = _Members()
        self.families = (*self.counters.values(), *self.histograms.values(), self.members)

    def children(self, kinds: Sequence[tuple[str, ...]], partition: int, **labels: str) -> dict[str, Counter]:
        """The counters with such labels, all at once: a rate needs the zero that comes before the first event."""
        values = {"partition": str(partition), **labels}
        return {
            what: counter.labels(*(values[label] for label in _TOPICS[what][0]))
            for what, counter in self.counters.items()
            if _TOPICS[what][0] in kinds
        }


class _Members(Collector):
    """The gauges of the consumers that are not forgotten."""

    def __init__(self) -> None:
        self.live: set[GroupMetrics] = set()

    def collect(self) -> list[Metric]:
        values: _Values = {"inflight": {}, "partitions_owned": {}}
        for member in self.live.copy():
            for what, value in member.gauges.items():
                values[what][member.labels] = values[what].get(member.labels, 0.0) + value
        return _gauges(values)

    describe = collect


@dataclass(frozen=True, slots=True)
class PartitionGauges:
    """The state of a partition."""

    topic: str
    partition: int
    length: int


@dataclass(frozen=True, slots=True)
class GroupPartitionGauges:
    """The state of a group at a partition; ``None`` is not shown."""

    topic: str
    group: str
    partition: int
    pending: int
    lag: int | None
    retry_depth: int
    oldest_pending_age: float | None


@dataclass(frozen=True, slots=True)
class GroupGauges:
    """The state of a group at a topic; ``unowned`` counts partitions."""

    topic: str
    group: str
    unowned: int


_Record: TypeAlias = PartitionGauges | GroupPartitionGauges | GroupGauges

_SCRAPED: Final = ("lag", "length", "oldest_pending_age_seconds", "partitions_unowned", "pending", "retry_depth")
_ATTRIBUTES: Final = {"oldest_pending_age_seconds": "oldest_pending_age", "partitions_unowned": "unowned"}


class _Scrape(_Families, Collector):
    def __init__(self) -> None:
        self.reads: dict[object, Callable[[], Sequence[_Record]]] = {}
        self.families = (self,)

    def describe(self) -> list[Metric]:
        return _gauges({what: {} for what in ("collector_up", *_SCRAPED)})

    def collect(self) -> list[Metric]:
        reads = list(self.reads.values())
        values: _Values = {"collector_up": {(): 1.0}} if reads else {}
        for read in reads:
            try:
                for what, at, value in [told for record in read() for told in _told(record)]:
                    values.setdefault(what, {})[at] = value
            except Exception:
                _log.exception("the state of the topics cannot be read")
                values["collector_up"] = {(): 0.0}
        return _gauges(values)


def _told(record: _Record) -> Iterator[tuple[str, tuple[str, ...], float]]:
    for what in _SCRAPED:
        value = getattr(record, _ATTRIBUTES.get(what, what), None)
        if value is not None:
            yield what, tuple(str(getattr(record, label)) for label in _TOPICS[what][0]), float(value)


class TopicsCollector(_Scrape):
    """Shows at each scrape what ``read`` tells, called in the scrape's thread, until ``close``.

    When ``read`` fails, ``conquiet_topics_collector_up`` is 0 and the rest of the scrape as usual. A registry takes
    several collectors; a series that two of them tell of is shown once.
    """

    def __init__(self, read: Callable[[], Sequence[_Record]], registry: CollectorRegistry | None = None) -> None:
        super().__init__()
        self.reads[self] = read
        self._shared = _of(registry, _Scrape).reads
        self._shared[self] = read

    def close(self) -> None:
        """Show nothing more. May be called again."""
        self._shared.pop(self, None)
