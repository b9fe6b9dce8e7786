"""What a scrape of the default registry shows, of one name only.

By the end of a long session there are series of thousands of tests' queues, topics and streams: to collect them all for
one value takes seconds.
"""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import REGISTRY
from prometheus_client.core import Metric
from prometheus_client.samples import Sample

__all__ = ["families", "samples", "value"]


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
