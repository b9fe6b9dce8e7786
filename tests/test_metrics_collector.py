"""Durations in bulk, the gauges of consumers, and the collectors that read when they are scraped."""

from __future__ import annotations

import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.core import Metric

from conquiet.metrics import (
    GroupGauges,
    GroupPartitionGauges,
    JobGauges,
    JobsCollector,
    PartitionGauges,
    TopicsCollector,
    group_metrics,
    producer_metrics,
)
from conquiet.metrics.families import BulkHistogram
from conquiet.metrics.names import TOPICS
from tests.metering import COUNTED, OWNER, RECORDS, lines

# --- batches of durations ----------------------------------------------------------------------------


def _samples(family: Metric) -> dict[tuple[str, str], float]:
    return {
        (sample.name.rpartition("_")[2], sample.labels.get("le", "")): sample.value
        for sample in family.samples
        if not sample.name.endswith("_created")
    }


def test_a_batch_counts_as_its_values_one_by_one() -> None:
    """The histogram of the client is the oracle, with values on the bounds too."""
    bounds = TOPICS["handle_seconds"].buckets
    bulk = BulkHistogram(TOPICS["handle_seconds"])
    oracle = Histogram("oracle", "One by one.", [*OWNER, "result"], registry=None, buckets=bounds)
    at = ("t", "0", "g", "c", "ack")
    rng = random.Random(1)
    for size in (0, 1, 2, 100, 1000):
        values = [rng.choice([rng.expovariate(1), rng.expovariate(100), rng.choice(bounds), 1e6]) for _ in range(size)]
        bulk.labels(*at)(values)
        for value in values:
            oracle.labels(*at).observe(value)
    [found], [expected] = bulk.collect(), oracle.collect()
    assert _samples(found) == pytest.approx(_samples(expected))
    assert list(_samples(found))[-3:] == [("bucket", "+Inf"), ("count", ""), ("sum", "")]


def test_the_values_of_many_threads_are_all_counted() -> None:
    registry = CollectorRegistry()
    with ThreadPoolExecutor(8) as pool:
        for group in [group_metrics("t", "g", "c", registry) for _ in range(8)]:
            for _ in range(50):
                pool.submit(group.end_to_end, [0.01] * 20)
    member = {"topic": "t", "group": "g", "consumer": "c"}
    assert registry.get_sample_value("conquiet_topics_end_to_end_seconds_count", member) == 8000
    assert registry.get_sample_value("conquiet_topics_end_to_end_seconds_bucket", {**member, "le": "0.01"}) == 8000


def test_a_duration_below_zero_counts_as_none() -> None:
    """A producer's clock may be ahead of the consumer's."""
    registry = CollectorRegistry()
    group_metrics("t", "g", "c", registry).end_to_end([-5.0, 2.0])
    member = {"topic": "t", "group": "g", "consumer": "c"}
    assert registry.get_sample_value("conquiet_topics_end_to_end_seconds_sum", member) == 2
    assert registry.get_sample_value("conquiet_topics_end_to_end_seconds_bucket", {**member, "le": "0.001"}) == 1


# --- gauges of consumers -----------------------------------------------------------------------------


def test_a_forgotten_consumer_owns_nothing_and_keeps_its_counts() -> None:
    registry = CollectorRegistry()
    group = group_metrics("t", "g", "c", registry)
    group.owned(4)
    group.inflight(2)
    group.consumed(0, 1)
    group.forget()
    group.forget()
    group.owned(0)
    assert not [line for line in lines(registry) if "_owned" in line or "_inflight" in line]
    assert [line for line in lines(registry) if "_consumed_" in line]


def test_the_gauges_of_consumers_of_one_name_are_added_up() -> None:
    registry = CollectorRegistry()
    old, new = (group_metrics("t", "g", "c", registry) for _ in range(2))
    member = {"topic": "t", "group": "g", "consumer": "c"}
    old.owned(4)
    new.owned(3)
    assert registry.get_sample_value("conquiet_topics_partitions_owned", member) == 7
    old.forget()
    assert registry.get_sample_value("conquiet_topics_partitions_owned", member) == 3


# --- the collector -----------------------------------------------------------------------------------


class Reads:
    """Counts how often it is asked, and fails when told to."""

    def __init__(self, *records: PartitionGauges | GroupPartitionGauges | GroupGauges) -> None:
        self.count = 0
        self.records = records
        self.error: Exception | None = None

    def __call__(self) -> Sequence[PartitionGauges | GroupPartitionGauges | GroupGauges]:
        self.count += 1
        if self.error:
            raise self.error
        return self.records


@pytest.mark.parametrize("auto_describe", [False, True])
def test_to_register_a_collector_reads_nothing_and_a_scrape_reads_once(auto_describe: bool) -> None:
    registry = CollectorRegistry(auto_describe=auto_describe)
    read = Reads(*RECORDS)
    collector = TopicsCollector(read, registry)
    described = {family.name for family in collector.describe()}
    assert read.count == 0
    assert {family.name for family in registry.collect()} == described
    assert read.count == 1


def test_a_collector_can_be_collected_by_itself() -> None:
    collector = TopicsCollector(Reads(PartitionGauges("t", 0, 10)), CollectorRegistry())
    up, length = collector.collect()
    assert [(family.name, family.samples[0].value) for family in (up, length)] == [
        ("conquiet_topics_collector_up", 1),
        ("conquiet_topics_length", 10),
    ]


def test_a_read_that_fails_breaks_no_scrape(caplog: pytest.LogCaptureFixture) -> None:
    registry = CollectorRegistry()
    producer_metrics("t", registry).produced(0, 1)
    read = Reads(*RECORDS)
    TopicsCollector(read, registry)
    read.error = ConnectionError("Redis is away")
    shown = lines(registry)
    assert 'conquiet_topics_produced_total{partition="0",topic="t"} 1.0' in shown
    assert [line for line in shown if "_total" not in line] == ["conquiet_topics_collector_up 0.0"]
    assert "Redis is away" in caplog.text
    read.error = None
    assert "conquiet_topics_collector_up 1.0" in lines(registry)


def test_a_record_that_cannot_be_shown_is_a_failure() -> None:
    registry = CollectorRegistry()
    TopicsCollector(Reads(PartitionGauges("t", 0, 1), PartitionGauges("t", 1, "many")), registry)  # type: ignore[arg-type]
    assert lines(registry) == ["conquiet_topics_collector_up 0.0"]


def test_a_closed_collector_is_not_asked_and_another_can_follow() -> None:
    registry = CollectorRegistry()
    read = Reads(*RECORDS)
    collector = TopicsCollector(read, registry)
    collector.close()
    collector.close()
    assert (lines(registry), read.count) == ([], 0)
    TopicsCollector(read, registry)
    assert "conquiet_topics_collector_up 1.0" in lines(registry)


def test_collectors_of_one_registry_are_shown_together() -> None:
    registry = CollectorRegistry()
    one, two = Reads(PartitionGauges("t", 0, 1), PartitionGauges("t", 1, 1)), Reads(PartitionGauges("t", 1, 2))
    TopicsCollector(one, registry)
    TopicsCollector(two, registry)
    assert lines(registry) == [
        "conquiet_topics_collector_up 1.0",
        'conquiet_topics_length{partition="0",topic="t"} 1.0',
        'conquiet_topics_length{partition="1",topic="t"} 2.0',
    ]
    one.error = ConnectionError("away")
    assert lines(registry) == [
        "conquiet_topics_collector_up 0.0",
        'conquiet_topics_length{partition="1",topic="t"} 2.0',
    ]


def test_the_state_of_jobs_is_read_once_a_scrape_and_until_it_is_closed(caplog: pytest.LogCaptureFixture) -> None:
    registry = CollectorRegistry()
    asked: list[int] = []

    def read() -> Sequence[JobGauges]:
        asked.append(len(asked))
        if len(asked) == 2:
            raise ConnectionError("the store is away")
        return COUNTED

    collector = JobsCollector(read, registry)
    assert [family.name for family in collector.describe()] == ["conquiet_jobs_collector_up", "conquiet_jobs_stored"]
    assert asked == []
    there = [
        "conquiet_jobs_collector_up 1.0",
        'conquiet_jobs_stored{queue="q",state="ready"} 4.0',
        'conquiet_jobs_stored{queue="q",state="in_flight"} 0.0',
    ]
    assert lines(registry) == there
    assert lines(registry) == ["conquiet_jobs_collector_up 0.0"]
    assert "the state of the jobs cannot be read" in caplog.text
    assert "the store is away" in caplog.text
    assert lines(registry) == there
    collector.close()
    collector.close()
    assert (lines(registry), len(asked)) == ([], 3)


def test_topics_and_jobs_that_cannot_be_read_do_not_spoil_each_other() -> None:
    registry = CollectorRegistry()
    topics = Reads(*RECORDS)
    topics.error = ConnectionError("away")
    TopicsCollector(topics, registry)
    JobsCollector(lambda: COUNTED[:1], registry)
    assert lines(registry) == [
        "conquiet_topics_collector_up 0.0",
        "conquiet_jobs_collector_up 1.0",
        'conquiet_jobs_stored{queue="q",state="ready"} 4.0',
    ]
