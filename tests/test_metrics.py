"""The names that a scrape shows are a contract."""

from __future__ import annotations

import inspect
import itertools
import random
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import Metric

from conquiet import metrics
from conquiet.metrics import (
    GroupGauges,
    GroupMetrics,
    GroupPartitionGauges,
    JobGauges,
    JobMetrics,
    JobsCollector,
    PartitionGauges,
    ProducerMetrics,
    QueueMetrics,
    TopicsCollector,
    balance_metrics,
    group_metrics,
    job_metrics,
    producer_metrics,
    queue_metrics,
)
from conquiet.metrics.families import BulkHistogram
from conquiet.metrics.names import BALANCE, JOBS, QUEUE, TOPICS, Family

GOLDEN = (
    "conquiet_queue_messages_ack_total",
    "conquiet_queue_messages_claimed_total",
    "conquiet_queue_messages_read_total",
    "conquiet_queue_read_latency_seconds",
)

PARTITION = ("topic", "partition")
GROUP = ("topic", "partition", "group")
OWNER = ("topic", "partition", "group", "consumer")
MEMBER = ("topic", "group", "consumer")

GOLDEN_TOPICS = {
    "conquiet_topics_ack_seconds": ("histogram", MEMBER),
    "conquiet_topics_acks_total": ("counter", OWNER),
    "conquiet_topics_claims_total": ("counter", OWNER),
    "conquiet_topics_collector_up": ("gauge", ()),
    "conquiet_topics_consumed_total": ("counter", OWNER),
    "conquiet_topics_dead_letters_total": ("counter", OWNER),
    "conquiet_topics_dropped_total": ("counter", PARTITION),
    "conquiet_topics_duplicates_total": ("counter", PARTITION),
    "conquiet_topics_end_to_end_seconds": ("histogram", MEMBER),
    "conquiet_topics_fenced_total": ("counter", (*OWNER, "operation")),
    "conquiet_topics_ghosts_total": ("counter", GROUP),
    "conquiet_topics_handle_seconds": ("histogram", (*OWNER, "result")),
    "conquiet_topics_inflight": ("gauge", MEMBER),
    "conquiet_topics_lag": ("gauge", GROUP),
    "conquiet_topics_leases_lost_total": ("counter", OWNER),
    "conquiet_topics_length": ("gauge", PARTITION),
    "conquiet_topics_oldest_pending_age_seconds": ("gauge", GROUP),
    "conquiet_topics_partitions_owned": ("gauge", MEMBER),
    "conquiet_topics_partitions_unowned": ("gauge", ("topic", "group")),
    "conquiet_topics_pending": ("gauge", GROUP),
    "conquiet_topics_produced_total": ("counter", PARTITION),
    "conquiet_topics_rebalances_total": ("counter", MEMBER),
    "conquiet_topics_retries_total": ("counter", OWNER),
    "conquiet_topics_retry_depth": ("gauge", GROUP),
}

CONSUMER = ("service", "consumer")

GOLDEN_BALANCE = {
    "conquiet_balance_acquired_total": ("counter", CONSUMER),
    "conquiet_balance_added_total": ("counter", CONSUMER),
    "conquiet_balance_claims_total": ("counter", (*CONSUMER, "result")),
    "conquiet_balance_ended_total": ("counter", (*CONSUMER, "how")),
    "conquiet_balance_owned": ("gauge", CONSUMER),
    "conquiet_balance_recovered_total": ("counter", CONSUMER),
    "conquiet_balance_renewed_total": ("counter", CONSUMER),
    "conquiet_balance_set_aside_total": ("counter", CONSUMER),
    "conquiet_balance_sweep_lag_seconds": ("histogram", ("service",)),
}

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

ROUND_TRIPS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
WAITS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60),
    *(300, 1800, 3600, 21600, 86400),
)

GOLDEN_BUCKETS = {
    "conquiet_balance_sweep_lag_seconds": ROUND_TRIPS,
    "conquiet_jobs_run_seconds": (
        *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60),
        *(300, 1800, 3600, 21600),
    ),
    "conquiet_jobs_wait_seconds": WAITS,
    "conquiet_queue_read_latency_seconds": ROUND_TRIPS,
    "conquiet_topics_ack_seconds": ROUND_TRIPS,
    "conquiet_topics_end_to_end_seconds": WAITS,
    "conquiet_topics_handle_seconds": (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.1, 0.5, 1, 5, 30, 300),
}

_ALL_IN_DEFAULT = """
from prometheus_client import REGISTRY
from tests.test_metrics import exposed, use_everything
for collector in use_everything():
    collector.close()
print(*exposed(REGISTRY))
"""

COUNTED = (JobGauges("q", "ready", 4), JobGauges("q", "in_flight", 0))

RECORDS = (
    PartitionGauges("t", 0, 10),
    PartitionGauges("t", 1, 11),
    GroupPartitionGauges("t", "g", 0, pending=3, lag=4, retry_depth=2, oldest_pending_age=1.5),
    GroupPartitionGauges("t", "g", 1, pending=0, lag=None, retry_depth=0, oldest_pending_age=None),
    GroupGauges("t", "g", unowned=1),
)


def exposed(registry: CollectorRegistry) -> list[str]:
    """The names of the families, as in the ``# TYPE`` lines of a scrape."""
    lines = [line.split() for line in generate_latest(registry).decode().splitlines()]
    names = {words[2] for words in lines if words[:2] == ["#", "TYPE"]}
    return sorted(name for name in names if name.startswith("conquiet") and not name.endswith("_created"))


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


def test_the_golden_list_is_what_a_registry_exposes() -> None:
    """spec 1 §7: required metrics, by their exact names."""
    registry = CollectorRegistry()
    use_everything(registry)
    assert exposed(registry) == list(metrics.NAMES)


def test_the_golden_list_is_the_specified_one() -> None:
    """spec 1 §7: a name that changed would break somebody's dashboard."""
    assert [name for name in metrics.NAMES if name.startswith("conquiet_queue")] == list(GOLDEN)
    assert (*GOLDEN_BALANCE, *GOLDEN_JOBS, *GOLDEN, *GOLDEN_TOPICS) == metrics.NAMES


def test_the_default_registry_exposes_nothing_else() -> None:
    """In a process of its own: in this one it holds the series of all tests before, which take long to write out."""
    command = [sys.executable, "-W", "error", "-c", _ALL_IN_DEFAULT]
    done = subprocess.run(command, cwd=Path(__file__).parents[1], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = set(done.stdout.split())
    assert found < set(metrics.NAMES)
    assert set(metrics.NAMES) - found == {
        "conquiet_jobs_collector_up",
        "conquiet_jobs_stored",
        "conquiet_topics_collector_up",
        "conquiet_topics_lag",
        "conquiet_topics_length",
        "conquiet_topics_oldest_pending_age_seconds",
        "conquiet_topics_partitions_unowned",
        "conquiet_topics_pending",
        "conquiet_topics_retry_depth",
    }


def test_a_room_shows_its_own_names_only() -> None:
    registry = CollectorRegistry()
    queue_metrics("s", registry)
    assert exposed(registry) == list(GOLDEN)


@pytest.mark.parametrize(
    ("room", "golden"), [("balance", GOLDEN_BALANCE), ("jobs", GOLDEN_JOBS), ("topics", GOLDEN_TOPICS)]
)
def test_the_types_and_labels_are_the_golden_ones(room: str, golden: dict[str, tuple[str, tuple[str, ...]]]) -> None:
    """spec 3: topic, partition, group, consumer and result."""
    registry = CollectorRegistry()
    use_everything(registry)
    found = {
        family.name + ("_total" if family.type == "counter" else ""): (
            family.type,
            {tuple(label for label in sample.labels if label != "le") for sample in family.samples},
        )
        for family in registry.collect()
        if family.name.startswith(f"conquiet_{room}_")
    }
    assert found == {name: (kind, {labels}) for name, (kind, labels) in golden.items()}


def test_the_buckets_are_the_golden_ones() -> None:
    registry = CollectorRegistry()
    use_everything(registry)
    found: dict[str, set[float]] = {}
    for family in registry.collect():
        for sample in family.samples:
            if "le" in sample.labels:
                found.setdefault(family.name, set()).add(float(sample.labels["le"]))
    assert found == {name: {*bounds, float("inf")} for name, bounds in GOLDEN_BUCKETS.items()}


def test_only_histograms_end_as_the_parts_of_histograms_do() -> None:
    """A gauge called ``..._count`` would be taken for the count of a histogram."""
    families: list[Family] = [*BALANCE.values(), *JOBS.values(), *QUEUE.values(), *TOPICS.values()]
    assert [one.name for one in families if one.name.endswith(("_count", "_sum", "_bucket", "_created"))] == []
    assert [one.name for one in families if one.is_counter and one.is_histogram] == []
    assert [one.name for one in families if list(one.buckets) != sorted(set(one.buckets))] == []


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
