"""How a consumer of balanced streams behaves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from conquiet.errors import ConfigError
from conquiet.kit import rules
from conquiet.kit.clock import SYSTEM_CLOCK, Clock

__all__ = ["BalanceOptions", "KeyspaceHint"]

KeyspaceHint: TypeAlias = Literal["listen", "enable"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BalanceOptions:
    """What ``StreamBalancer`` takes beside the address, checked."""

    service: str
    consumer: str
    lease_ttl: float
    max_streams: int
    auto_claim: bool
    rebalance: bool | None
    progress_timeout: float | None
    sweep_interval: float | None
    event_buffer: int
    keyspace_hint: KeyspaceHint | None
    handle_signals: bool
    clock: Clock = SYSTEM_CLOCK

    def __post_init__(self) -> None:
        for what in ("service", "consumer"):
            rules.name(what, getattr(self, what))
        for what in ("max_streams", "event_buffer"):
            rules.integer(what, getattr(self, what), least=1)
        for what in ("auto_claim", "handle_signals"):
            rules.flag(what, getattr(self, what))
        rules.seconds("lease_ttl", self.lease_ttl, most=rules.YEAR)
        if self.rebalance is not None:
            rules.flag("rebalance", self.rebalance)
        for what in ("progress_timeout", "sweep_interval"):
            if getattr(self, what) is not None:
                rules.seconds(what, getattr(self, what))
        if self.keyspace_hint is not None:
            rules.one_of("keyspace_hint", self.keyspace_hint, ("listen", "enable"))
        if not isinstance(self.clock, Clock):
            raise ConfigError(f"clock must be a Clock, not {self.clock!r}")

    @property
    def sweep(self) -> float:
        """The longest time between two looks for lost streams, in seconds."""
        return self.lease_ttl / 3 if self.sweep_interval is None else self.sweep_interval
