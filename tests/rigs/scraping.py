"""What a scrape of the default registry shows, of one name only, and how a test gets one without others' series.

Without that, by the end of a long session there were series of thousands of tests' queues, topics and streams: to
collect them for one value took seconds.
"""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import REGISTRY, Counter
from prometheus_client.core import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from conquiet.metrics.families import BulkHistogram, _made

__all__ = ["families", "forget", "samples", "value"]


def forget() -> None:
    """Remove every series of the default registry; what still counts in one counts unseen."""
    for (_, registry), made in list(_made.items()):
        counters = [part for family in made.families for part in _counters(family)] if registry is REGISTRY else []
        for counter in counters:
            counter.clear()


def _counters(family: Collector) -> list[Counter]:
    if isinstance(family, BulkHistogram):
        return [family._counts, family._sums]
    return [family] if isinstance(family, Counter) else []


def samples(name: str) -> Iterator[Sample]:
    """Every series of ``name``, which is that of a sample: with ``_total``, ``_count`` and the like."""
    for family in REGISTRY.restricted_registry([name]).collect():
        yield from (sample for sample in family.samples if sample.name == name)


def value(name: str, **labels: str) -> float | None:
    """The value of the series with exactly these labels, if there is one."""
    return next((sample.value for sample in samples(name) if sample.labels == labels), None)


def families(prefix: str) -> list[Metric]:
    """The families whose names begin so, with all of their samples."""
    names = [name for name in list(REGISTRY._names_to_collectors) if name.startswith(prefix)]
    return list(REGISTRY.restricted_registry(names).collect())
