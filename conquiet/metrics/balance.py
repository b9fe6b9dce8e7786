"""What balanced streams count, by service and consumer. Stream names are no labels: there is no end to them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal, TypeAlias, get_args

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from conquiet.metrics.families import Families, counters, gauges, histograms, never_raises, of
from conquiet.metrics.names import BALANCE

__all__ = ["BalanceMetrics", "LeaseEnd", "balance_metrics"]

LeaseEnd: TypeAlias = Literal["finished", "released", "lost"]
"""How a consumer came to own a stream no longer."""

_BY_CONSUMER: Final = ("service", "consumer")


@never_raises
class BalanceMetrics:
    """What one consumer does with the streams of its service, as Redis has answered."""

    def __init__(self, families: _BalanceFamilies, service: str, consumer: str) -> None:
        labels = (service, consumer)
        self._counters = {
            what: counter.labels(*labels)
            for what, counter in families.counters.items()
            if BALANCE[what].labels == _BY_CONSUMER
        }
        ended = families.counters["ended_total"]
        self._ended = {end: ended.labels(*labels, end) for end in get_args(LeaseEnd)}
        claims = families.counters["claims_total"]
        self._claims = {result: claims.labels(*labels, result) for result in ("claimed", "refused")}
        self._labels = labels
        self._families = families
        self._lag = families.histograms["sweep_lag_seconds"].labels(service)

    def added(self, count: int) -> None:
        """So many streams were handed in."""
        self._counters["added_total"].inc(count)

    def acquired(self, count: int, recovered: int) -> None:
        """So many streams are owned from now on, of which others had left ``recovered``."""
        self._counters["acquired_total"].inc(count)
        self._counters["recovered_total"].inc(recovered)

    def renewed(self, count: int) -> None:
        """So many leases were renewed."""
        self._counters["renewed_total"].inc(count)

    def ended(self, how: LeaseEnd, count: int) -> None:
        """So many streams are not owned any more."""
        self._ended[how].inc(count)

    def claimed(self, *, refused: bool) -> None:
        """Somebody asked for one stream."""
        self._claims["refused" if refused else "claimed"].inc()

    def set_aside(self, count: int) -> None:
        """So many entries of the input were no streams."""
        self._counters["set_aside_total"].inc(count)

    def owned(self, count: int) -> None:
        """So many streams are owned now."""
        self._families.owned[self._labels] = float(count)

    def swept(self, lag: float) -> None:
        """The oldest lease that a sweep found had run out so many seconds before."""
        self._lag([lag])


def balance_metrics(service: str, consumer: str, registry: CollectorRegistry | None = None) -> BalanceMetrics:
    """The metrics of one consumer, in Prometheus' default registry unless another is given."""
    return BalanceMetrics(of(registry, _BalanceFamilies), service, consumer)


class _BalanceFamilies(Families):
    def __init__(self) -> None:
        self.counters = counters(BALANCE)
        self.histograms = histograms(BALANCE)
        self.owned: dict[tuple[str, ...], float] = {}
        self.families = (*self.counters.values(), *self.histograms.values(), _Owned(self.owned))


class _Owned(Collector):
    """How many streams each consumer owns."""

    def __init__(self, owned: Mapping[tuple[str, ...], float]) -> None:
        self._owned = owned

    def collect(self) -> list[Metric]:
        return gauges({BALANCE["owned"]: dict(self._owned)})

    describe = collect
