"""What topics count, by partition, group and consumer, and the state of the server as a scrape finds it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Final, Literal, TypeAlias

from prometheus_client import CollectorRegistry, Counter
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from conquiet.metrics.families import Families, Scrape, Told, Values, counters, gauges, histograms, never_raises, of
from conquiet.metrics.names import GROUP, OWNER, PARTITION, TOPICS

__all__ = [
    "GroupGauges",
    "GroupMetrics",
    "GroupPartitionGauges",
    "Operation",
    "PartitionGauges",
    "ProducerMetrics",
    "Result",
    "TopicsCollector",
    "group_metrics",
    "producer_metrics",
]

Operation: TypeAlias = Literal["ack", "retry", "dead_letter", "take", "release", "renew"]
"""What an owner that had lost its lease was refused."""
Result: TypeAlias = Literal["ack", "retry", "dead_letter", "fenced"]
"""What a handler's call ended with."""


def _counts(what: str) -> Callable[[Any, int, int], None]:
    """The verb that counts so many messages at a partition."""

    def verb(self: ProducerMetrics | GroupMetrics, partition: int, messages: int) -> None:
        self._at(partition)[what].inc(messages)

    verb.__doc__ = TOPICS[what].meaning
    return verb


@never_raises
class ProducerMetrics:
    """What was sent to one topic, by partition."""

    def __init__(self, families: _TopicsFamilies, topic: str) -> None:
        self._at = cache(partial(families.children, (PARTITION,), topic=topic))

    produced = _counts("produced_total")
    duplicate = _counts("duplicates_total")
    dropped = _counts("dropped_total")


def producer_metrics(topic: str, registry: CollectorRegistry | None = None) -> ProducerMetrics:
    """The metrics of sending to ``topic``, in Prometheus' default registry unless another is given."""
    return ProducerMetrics(of(registry, _TopicsFamilies), topic)


@never_raises
class GroupMetrics:
    """What one consumer of a group does; consumers of the same name in a process are added up."""

    def __init__(self, families: _TopicsFamilies, topic: str, group: str, consumer: str) -> None:
        self.labels: Final = (topic, group, consumer)
        self.gauges: Final = {"inflight": 0.0, "partitions_owned": 0.0}
        self._at = cache(partial(families.children, (OWNER, GROUP), topic=topic, group=group, consumer=consumer))
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
    return GroupMetrics(of(registry, _TopicsFamilies), topic, group, consumer)


class _TopicsFamilies(Families):
    def __init__(self) -> None:
        self.counters = counters(TOPICS)
        self.histograms = histograms(TOPICS)
        self.members = _Members()
        self.families = (*self.counters.values(), *self.histograms.values(), self.members)

    def children(self, kinds: Sequence[tuple[str, ...]], partition: int, **labels: str) -> dict[str, Counter]:
        """The counters with such labels, all at once: a rate needs the zero that comes before the first event."""
        values = {"partition": str(partition), **labels}
        return {
            what: counter.labels(*(values[label] for label in TOPICS[what].labels))
            for what, counter in self.counters.items()
            if TOPICS[what].labels in kinds
        }


class _Members(Collector):
    """The gauges of the consumers that are not forgotten."""

    def __init__(self) -> None:
        self.live: set[GroupMetrics] = set()

    def collect(self) -> list[Metric]:
        values: Values = {TOPICS["inflight"]: {}, TOPICS["partitions_owned"]: {}}
        for member in self.live.copy():
            for what, value in member.gauges.items():
                added_up = values[TOPICS[what]]
                added_up[member.labels] = added_up.get(member.labels, 0.0) + value
        return gauges(values)

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


class TopicsCollector(Scrape):
    """Shows the state of topics and groups at each scrape; ``conquiet_topics_collector_up`` is 0 if that failed."""

    what = "topics"
    up = TOPICS["collector_up"]
    shown = tuple(TOPICS[what] for what in _SCRAPED)

    def told(self, record: _Record) -> Iterator[Told]:
        """The gauges that a record has a value for."""
        for what in _SCRAPED:
            value = getattr(record, _ATTRIBUTES.get(what, what), None)
            if value is not None:
                family = TOPICS[what]
                yield family, tuple(str(getattr(record, label)) for label in family.labels), float(value)
