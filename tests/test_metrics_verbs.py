"""What each verb counts, of the queue, of topics and of jobs; none of them raises."""

from __future__ import annotations

import inspect
import itertools
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Counter

from conquiet.metrics import (
    GroupMetrics,
    JobMetrics,
    ProducerMetrics,
    QueueMetrics,
    group_metrics,
    job_metrics,
    producer_metrics,
    queue_metrics,
)
from tests.metering import GOLDEN, GOLDEN_JOBS, lines, use_everything

# --- queue -------------------------------------------------------------------------------------------


def test_the_verbs_count() -> None:
    """spec 1 §7: {stream} is the one label."""
    registry = CollectorRegistry()
    verbs = queue_metrics("s", registry)
    verbs.read(3, 0.25)
    verbs.read(0, 0.25)
    verbs.acked(2)
    verbs.claimed(1)
    values = {
        name: registry.get_sample_value(name, {"stream": "s"})
        for name in (*GOLDEN[:3], f"{GOLDEN[3]}_count", f"{GOLDEN[3]}_sum")
    }
    assert list(values.values()) == [2, 1, 3, 2, 0.5]


def test_streams_are_counted_apart_and_one_stream_together() -> None:
    registry = CollectorRegistry()
    queue_metrics("a", registry).acked(1)
    queue_metrics("a", registry).acked(1)
    queue_metrics("b", registry).acked(5)
    counts = [registry.get_sample_value(GOLDEN[0], {"stream": stream}) for stream in "ab"]
    assert counts == [2, 5]


@pytest.mark.parametrize("verb", ["read", "acked", "claimed"])
def test_no_verb_raises(verb: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """spec 1 §7: never raise exceptions; the failure is in the log."""
    verbs = queue_metrics("s", CollectorRegistry())
    for child in ("_read", "_acked", "_claimed", "_latency"):
        monkeypatch.setattr(verbs, child, None)
    call = {"read": lambda: verbs.read(1, 0.1), "acked": lambda: verbs.acked(1), "claimed": lambda: verbs.claimed(1)}
    for _ in range(3):
        call[verb]()
    assert caplog.text.count("metrics failed") == 1  # not with each message


# --- topics ------------------------------------------------------------------------------------------


def test_a_scrape_shows_what_the_verbs_of_topics_counted() -> None:
    """spec 3: counters, gauges and timers."""
    registry = CollectorRegistry()
    use_everything(registry)
    owner = 'consumer="c",group="g",partition="0",topic="t"'
    member = 'consumer="c",group="g",topic="t"'
    group = 'group="g",partition="{}",topic="t"'
    assert sorted(line for line in lines(registry) if "_topics_" in line) == sorted(
        f"conquiet_topics_{line}"
        for line in (
            f"ack_seconds_count{{{member}}} 1.0",
            f"ack_seconds_sum{{{member}}} 0.002",
            f"acks_total{{{owner}}} 6.0",
            f"claims_total{{{owner}}} 3.0",
            "collector_up 1.0",
            f"consumed_total{{{owner}}} 9.0",
            f"dead_letters_total{{{owner}}} 1.0",
            'dropped_total{partition="0",topic="t"} 1.0',
            'duplicates_total{partition="0",topic="t"} 2.0',
            f"end_to_end_seconds_count{{{member}}} 3.0",
            f"end_to_end_seconds_sum{{{member}}} 101.2",
            'fenced_total{consumer="c",group="g",operation="ack",partition="0",topic="t"} 4.0',
            f"ghosts_total{{{group.format(0)}}} 7.0",
            'handle_seconds_count{consumer="c",group="g",partition="0",result="ack",topic="t"} 2.0',
            'handle_seconds_sum{consumer="c",group="g",partition="0",result="ack",topic="t"} 0.301',
            f"inflight{{{member}}} 8.0",
            f"lag{{{group.format(0)}}} 4.0",
            f"leases_lost_total{{{owner}}} 1.0",
            'length{partition="0",topic="t"} 10.0',
            'length{partition="1",topic="t"} 11.0',
            f"oldest_pending_age_seconds{{{group.format(0)}}} 1.5",
            f"partitions_owned{{{member}}} 2.0",
            'partitions_unowned{group="g",topic="t"} 1.0',
            f"pending{{{group.format(0)}}} 3.0",
            f"pending{{{group.format(1)}}} 0.0",
            'produced_total{partition="0",topic="t"} 5.0',
            f"rebalances_total{{{member}}} 1.0",
            f"retries_total{{{owner}}} 2.0",
            f"retry_depth{{{group.format(0)}}} 2.0",
            f"retry_depth{{{group.format(1)}}} 0.0",
        )
    )


def test_the_counters_of_a_partition_begin_at_zero() -> None:
    """A rate needs a zero before the first dead letter."""
    registry = CollectorRegistry()
    group_metrics("t", "g", "c", registry).consumed(3, 1)
    labels = {"topic": "t", "partition": "3", "group": "g", "consumer": "c"}
    for what in ("acks", "claims", "dead_letters", "leases_lost", "retries"):
        assert registry.get_sample_value(f"conquiet_topics_{what}_total", labels) == 0


def test_partitions_operations_and_results_are_counted_apart() -> None:
    registry = CollectorRegistry()
    group = group_metrics("t", "g", "c", registry)
    for partition, operation in itertools.product((0, 1), ("ack", "take")):
        group.fenced(partition, operation, partition + 1)  # type: ignore[arg-type]
    group.handled(0, "ack", [1])
    group.handled(0, "retry", [1, 1])
    group.handled(1, "ack", [1, 1, 1])
    shown = [line for line in lines(registry) if "_fenced_" in line or "handle_seconds_count" in line]
    assert [float(line.split()[-1]) for line in shown] == [1, 1, 2, 2, 1, 2, 3]


def test_brokers_on_one_registry_share_the_families() -> None:
    registry = CollectorRegistry()
    for _ in range(2):
        producer_metrics("t", registry).produced(0, 1)
        group_metrics("t", "g", "c", registry).acked(0, 2, 0.1)
    assert registry.get_sample_value("conquiet_topics_produced_total", {"topic": "t", "partition": "0"}) == 2
    member = {"topic": "t", "group": "g", "consumer": "c"}
    assert registry.get_sample_value("conquiet_topics_acks_total", {**member, "partition": "0"}) == 4
    assert registry.get_sample_value("conquiet_topics_ack_seconds_count", member) == 2


def test_threads_that_begin_together_share_the_families(
    caplog: pytest.LogCaptureFixture, request: pytest.FixtureRequest
) -> None:
    request.addfinalizer(partial(sys.setswitchinterval, sys.getswitchinterval()))
    sys.setswitchinterval(1e-6)
    for _ in range(20):
        registry = CollectorRegistry()
        with ThreadPoolExecutor(8) as pool:
            made = list(pool.map(lambda _, r=registry: producer_metrics("t", r), range(8)))
        for verbs in made:
            verbs.produced(0, 1)
        assert registry.get_sample_value("conquiet_topics_produced_total", {"topic": "t", "partition": "0"}) == 8
    assert caplog.text == ""


def test_a_registry_that_has_a_name_already_stops_nobody(caplog: pytest.LogCaptureFixture) -> None:
    registry = CollectorRegistry()
    Counter("conquiet_topics_produced_total", "Somebody else's.", registry=registry)
    verbs = producer_metrics("t", registry)
    verbs.produced(0, 1)
    verbs.duplicate(0, 1)
    assert "metrics failed" in caplog.text
    assert registry.get_sample_value("conquiet_topics_duplicates_total", {"topic": "t", "partition": "0"}) == 1


ARGUMENTS: dict[str, Any] = {"partition": 0, "operation": "ack", "result": "ack"}
VERBS = [
    (make, name)
    for make in (
        lambda: producer_metrics("t", CollectorRegistry()),
        lambda: group_metrics("t", "g", "c", CollectorRegistry()),
        lambda: job_metrics("q", CollectorRegistry()),
    )
    for name in vars(type(make()))
    if not name.startswith("_")
]


@pytest.mark.parametrize(("make", "verb"), VERBS, ids=[f"{type(make()).__name__}-{name}" for make, name in VERBS])
def test_no_verb_of_topics_or_jobs_raises(
    make: Callable[[], object], verb: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    verbs = make()
    for child in list(vars(verbs)):
        monkeypatch.setattr(verbs, child, None)
    method = getattr(verbs, verb)
    method(*(ARGUMENTS.get(name, 1) for name in inspect.signature(method).parameters))
    assert caplog.text.count("metrics failed") == 1


@pytest.mark.parametrize("kind", [QueueMetrics, ProducerMetrics, GroupMetrics, JobMetrics])
def test_every_verb_is_guarded(kind: type) -> None:
    verbs = [member for name, member in vars(kind).items() if not name.startswith("_")]
    assert all(inspect.isfunction(verb) and hasattr(verb, "__wrapped__") and verb.__doc__ for verb in verbs)


def test_what_is_not_a_number_is_not_shown(caplog: pytest.LogCaptureFixture) -> None:
    registry = CollectorRegistry()
    group = group_metrics("t", "g", "c", registry)
    group.inflight("many")  # type: ignore[arg-type]
    group.consumed(0, -1)
    assert caplog.text.count("metrics failed") == 2
    assert 'conquiet_topics_inflight{consumer="c",group="g",topic="t"} 0.0' in lines(registry)


# --- jobs --------------------------------------------------------------------------------------------


def test_a_scrape_shows_what_the_verbs_of_jobs_counted() -> None:
    registry = CollectorRegistry()
    use_everything(registry)
    assert sorted(line for line in lines(registry) if "_jobs_" in line and not line.endswith(" 0.0")) == sorted(
        f"conquiet_jobs_{line}"
        for line in (
            'cancelled_total{queue="q"} 8.0',
            'claimed_total{queue="q"} 3.0',
            "collector_up 1.0",
            'enqueued_total{queue="q"} 9.0',
            'expired_total{queue="q"} 11.0',
            'failed_total{queue="q"} 6.0',
            'released_total{queue="q"} 7.0',
            'replayed_total{queue="q"} 2.0',
            'retried_total{queue="q"} 5.0',
            'run_seconds_count{queue="q",result="lost"} 2.0',
            'run_seconds_sum{queue="q",result="lost"} 2.25',
            'stale_total{operation="renew",queue="q"} 10.0',
            'stored{queue="q",state="ready"} 4.0',
            'succeeded_total{queue="q"} 4.0',
            'wait_seconds_count{queue="q"} 3.0',
            'wait_seconds_sum{queue="q"} 3.502',
        )
    )
    assert 'conquiet_jobs_stored{queue="q",state="in_flight"} 0.0' in lines(registry)


def test_the_counters_of_a_queue_begin_at_zero() -> None:
    """Also those of each operation; the histograms begin with the first worker, since producers need none."""
    registry = CollectorRegistry()
    jobs = job_metrics("q", registry)
    shown = [line for line in lines(registry) if line.endswith(" 0.0")]
    counters = [name for name, (kind, _) in GOLDEN_JOBS.items() if kind == "counter"]
    assert {line.partition("{")[0] for line in shown} == set(counters)
    assert len([line for line in shown if "_stale_" in line]) == 5
    assert len(lines(registry)) == len(shown) == len(counters) + 4
    jobs.ran("failed", [1])
    assert len([line for line in lines(registry) if "_run_seconds_count" in line]) == 4


def test_a_claim_that_gets_nothing_counts_nothing() -> None:
    registry = CollectorRegistry()
    job_metrics("q", registry).claimed(0, [])
    assert registry.get_sample_value("conquiet_jobs_claimed_total", {"queue": "q"}) == 0
    assert not [line for line in lines(registry) if "_wait_" in line]


def test_queues_operations_and_results_are_counted_apart_and_one_queue_together() -> None:
    registry = CollectorRegistry()
    for queue, times in (("a", 1), ("a", 2), ("b", 4)):
        jobs = job_metrics(queue, registry)
        jobs.enqueued(times)
        jobs.stale("ack", times)
        jobs.stale("fail", times * 10)
        jobs.ran("succeeded", [1] * times)
        jobs.ran("retried", [1] * times * 10)
    value = registry.get_sample_value
    for queue, times in (("a", 3), ("b", 4)):
        assert value("conquiet_jobs_enqueued_total", {"queue": queue}) == times
        for operation, expected in (("ack", times), ("fail", times * 10), ("renew", 0)):
            assert value("conquiet_jobs_stale_total", {"queue": queue, "operation": operation}) == expected
        for result, expected in (("succeeded", times), ("retried", times * 10), ("lost", 0)):
            assert value("conquiet_jobs_run_seconds_count", {"queue": queue, "result": result}) == expected


def test_a_label_that_nobody_knows_is_not_shown(caplog: pytest.LogCaptureFixture) -> None:
    registry = CollectorRegistry()
    jobs = job_metrics("q", registry)
    jobs.stale("lunch", 1)  # type: ignore[arg-type]
    jobs.ran("lunch", [1])  # type: ignore[arg-type]
    assert caplog.text.count("metrics failed") == 2
    assert not [line for line in lines(registry) if "lunch" in line]
