"""How the rooms count: verbs that never raise, families made once for each registry, histograms that take batches."""

from __future__ import annotations

import inspect
import logging
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import wraps
from itertools import accumulate
from typing import Any, ClassVar, Final, ParamSpec, TypeAlias, TypeVar, cast

from prometheus_client import REGISTRY, CollectorRegistry, Counter
from prometheus_client.core import GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from conquiet.metrics.names import Family, Room

__all__ = [
    "BulkHistogram",
    "Families",
    "Observe",
    "Scrape",
    "Told",
    "Values",
    "counters",
    "gauges",
    "histograms",
    "never_raises",
    "of",
]

_log = logging.getLogger("conquiet.metrics")

_P = ParamSpec("_P")
_T = TypeVar("_T")
_F = TypeVar("_F", bound="Families")

Observe: TypeAlias = Callable[[Sequence[float]], None]
"""Counts a batch of values."""
Values: TypeAlias = dict[Family, dict[tuple[str, ...], float]]
"""The values of gauges, by family and by the values of its labels."""
Told: TypeAlias = tuple[Family, tuple[str, ...], float]
"""One value of a gauge."""


def never_raises(owner: type[_T]) -> type[_T]:
    """``owner``, with the failures of its verbs in the log and nowhere else: one for each verb, not for each call.

    An object that cannot be made, because its values have no place to be kept in, counts nothing.
    """
    verbs = {
        name: member for name, member in vars(owner).items() if inspect.isfunction(member) and not name.startswith("_")
    }
    silent = type(owner.__name__, (owner,), dict.fromkeys(verbs, _count_nothing))
    for name, verb in verbs.items():
        setattr(owner, name, _quiet(verb))
    owner.__init__ = _made_or_silent(owner.__init__, silent)  # type: ignore[method-assign]
    return owner


def _count_nothing(*args: object, **kwargs: object) -> None:
    pass


def _made_or_silent(make: Callable[..., None], silent: type) -> Callable[..., None]:
    @wraps(make)
    def made(self: object, *args: object, **kwargs: object) -> None:
        try:
            make(self, *args, **kwargs)
        except Exception:
            _log.exception("metrics failed, nothing is counted")
            self.__class__ = silent

    return made


def _quiet(verb: Callable[_P, None]) -> Callable[_P, None]:
    @wraps(verb)
    def quiet(*args: _P.args, **kwargs: _P.kwargs) -> None:
        try:
            verb(*args, **kwargs)
        except Exception:
            failed = vars(args[0]).setdefault("_failed", set[object]())
            _log.log(logging.DEBUG if verb in failed else logging.ERROR, "metrics failed", exc_info=True)
            failed.add(verb)

    return quiet


class Families:
    """The families of a room. A registry takes each name once, so they are made once for each registry."""

    families: tuple[Collector, ...]


_made: Final[dict[tuple[type[Families], CollectorRegistry], Families]] = {}


def of(registry: CollectorRegistry | None, kind: type[_F]) -> _F:
    """The one ``kind`` of ``registry``, whichever thread asks first; a family that is refused counts unseen."""
    place = registry or REGISTRY
    if (kind, place) not in _made:
        made = kind()
        if _made.setdefault((kind, place), made) is made:
            for family in made.families:
                try:
                    place.register(family)
                except Exception:
                    _log.exception("metrics failed")
    return cast("_F", _made[kind, place])


def counters(room: Room) -> dict[str, Counter]:
    """The counters of ``room``, in no registry yet."""
    return {
        what: Counter(family.name, family.meaning, family.labels, registry=None)
        for what, family in room.items()
        if family.is_counter
    }


def histograms(room: Room) -> dict[str, BulkHistogram]:
    """The histograms of ``room``, in no registry yet."""
    return {what: BulkHistogram(family) for what, family in room.items() if family.is_histogram}


class BulkHistogram(Collector):
    """Takes a batch for the price of a few values, because its buckets are counters; the client's takes one a call."""

    def __init__(self, family: Family) -> None:
        self._family = family
        self._bounds = (*family.buckets, float("inf"))
        self._les = (*(str(float(bound)) for bound in family.buckets), "+Inf")
        self._counts = Counter(f"{family.name}_bucket", family.meaning, (*family.labels, "le"), registry=None)
        self._sums = Counter(f"{family.name}_sum", family.meaning, family.labels, registry=None)

    def labels(self, *at: str) -> Observe:
        """What observes values under these labels."""
        counts = [self._counts.labels(*at, le) for le in self._les]
        total = self._sums.labels(*at)

        def observe(values: Sequence[float]) -> None:
            # A duration is negative when another's clock is ahead of ours; it counts as none.
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
        """What was observed until now."""
        labels = self._family.labels
        family = HistogramMetricFamily(self._family.name, self._family.meaning, labels=labels)
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


def gauges(values: Mapping[Family, Mapping[tuple[str, ...], float]]) -> list[Metric]:
    """``values`` as a scrape wants them."""
    shown: list[Metric] = []
    for family, by_labels in values.items():
        shown.append(gauge := GaugeMetricFamily(family.name, family.meaning, labels=family.labels))
        for at, value in by_labels.items():
            gauge.add_metric(at, value)
    return shown


class Scrape(Families, Collector):
    """The base of what is read at each scrape, in the scrape's thread, until ``close``.

    What ``read`` tells is shown here and by the one scrape of its kind in ``registry``. When a reading fails, nothing
    of it is shown and ``up`` is 0; the rest of the scrape is as usual. A registry takes several collectors; a series
    that two of them tell of is shown once.
    """

    what: ClassVar[str]
    """What it shows the state of, for the log."""
    up: ClassVar[Family]
    shown: ClassVar[Sequence[Family]]

    def __init__(
        self, read: Callable[[], Sequence[Any]] | None = None, registry: CollectorRegistry | None = None
    ) -> None:
        self.reads: dict[object, Callable[[], Sequence[Any]]] = {}
        self._shared = self.reads
        self.families = (self,)
        if read is not None:
            kind = next(one for one in type(self).__mro__ if Scrape in one.__bases__)
            self._shared = of(registry, kind).reads
            self.reads[self] = self._shared[self] = read

    def told(self, record: Any) -> Iterable[Told]:
        """The values that one record of a reading tells."""
        raise NotImplementedError

    def close(self) -> None:
        """Show nothing more. May be called again."""
        self._shared.pop(self, None)

    def describe(self) -> list[Metric]:
        """What it may show; reads nothing."""
        return gauges({family: {} for family in (self.up, *self.shown)})

    def collect(self) -> list[Metric]:
        """What is told now; a value that is told twice, as it was told last."""
        reads = list(self.reads.values())
        values: Values = {self.up: {(): 1.0}} if reads else {}
        for read in reads:
            try:
                for family, at, value in [told for record in read() for told in self.told(record)]:
                    values.setdefault(family, {})[at] = value
            except Exception:
                _log.exception("the state of the %s cannot be read", self.what)
                values[self.up] = {(): 0.0}
        return gauges(values)
