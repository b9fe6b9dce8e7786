"""The names that a scrape shows are a contract."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from conquiet import metrics
from conquiet.metrics import (
    queue_metrics,
)
from conquiet.metrics.names import BALANCE, JOBS, QUEUE, TOPICS, Family
from tests.metering import GOLDEN, GOLDEN_JOBS, OWNER, use_everything

PARTITION = ("topic", "partition")
GROUP = ("topic", "partition", "group")
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


def exposed(registry: CollectorRegistry) -> list[str]:
    """The names of the families, as in the ``# TYPE`` lines of a scrape."""
    lines = [line.split() for line in generate_latest(registry).decode().splitlines()]
    names = {words[2] for words in lines if words[:2] == ["#", "TYPE"]}
    return sorted(name for name in names if name.startswith("conquiet") and not name.endswith("_created"))


def test_the_golden_list_is_what_a_registry_exposes() -> None:
    """spec 1 §7: required metrics, by their exact names."""
    registry = CollectorRegistry()
    use_everything(registry)
    assert exposed(registry) == list(metrics.NAMES)


def test_the_golden_list_is_the_specified_one() -> None:
    """spec 1 §7: a name that changed would break somebody's dashboard."""
    assert [name for name in metrics.NAMES if name.startswith("conquiet_queue")] == list(GOLDEN)
    assert (*GOLDEN_BALANCE, *GOLDEN_JOBS, *GOLDEN, *GOLDEN_TOPICS) == metrics.NAMES


@pytest.mark.slow
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
