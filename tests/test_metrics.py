"""The names that a scrape shows are a contract."""

from __future__ import annotations

import pytest
from prometheus_client import REGISTRY, CollectorRegistry, generate_latest

from conquiet import metrics
from conquiet.metrics import queue_metrics

GOLDEN = (
    "conquiet_queue_messages_ack_total",
    "conquiet_queue_messages_claimed_total",
    "conquiet_queue_messages_read_total",
    "conquiet_queue_read_latency_seconds",
)


def exposed(registry: CollectorRegistry) -> list[str]:
    """The names of the families, as in the ``# TYPE`` lines of a scrape."""
    lines = [line.split() for line in generate_latest(registry).decode().splitlines()]
    names = {words[2] for words in lines if words[:2] == ["#", "TYPE"]}
    return sorted(name for name in names if name.startswith("conquiet") and not name.endswith("_created"))


def test_the_golden_list_is_what_a_registry_exposes() -> None:
    """spec 1 §7: required metrics, by their exact names."""
    registry = CollectorRegistry()
    queue_metrics("s", registry)
    assert exposed(registry) == sorted(metrics.NAMES)


def test_the_golden_list_is_the_specified_one() -> None:
    """spec 1 §7: a name that changed would break somebody's dashboard."""
    assert [name for name in metrics.NAMES if name.startswith("conquiet_queue")] == list(GOLDEN)


def test_the_default_registry_exposes_nothing_else() -> None:
    queue_metrics("s")
    assert exposed(REGISTRY) == sorted(metrics.NAMES)


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
    {"read": lambda: verbs.read(1, 0.1), "acked": lambda: verbs.acked(1), "claimed": lambda: verbs.claimed(1)}[verb]()
    assert "metrics failed" in caplog.text
