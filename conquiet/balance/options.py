"""How a consumer of balanced streams behaves."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import Literal, Required, TypeAlias, TypedDict

from conquiet.kit import rules
from conquiet.kit.clock import SYSTEM_CLOCK, Clock
from conquiet.kit.ids import process_name
from conquiet.kit.options import check, instance

__all__ = ["BalanceKeywords", "BalanceOptions", "KeyspaceHint"]

KeyspaceHint: TypeAlias = Literal["listen", "enable"]


class BalanceKeywords(TypedDict, total=False):
    """:class:`BalanceOptions` as type checkers see them at a call."""

    service: Required[str]
    consumer: str | None
    lease_ttl: float
    max_streams: int
    auto_claim: bool
    rebalance: bool | None
    progress_timeout: float | None
    sweep_interval: float | None
    event_buffer: int
    keyspace_hint: KeyspaceHint | None
    drain_timeout: float
    handle_signals: bool
    clock: Clock


@dataclass(frozen=True, slots=True, kw_only=True)
class BalanceOptions:
    """What ``StreamBalancer`` takes beside the address, checked."""

    service: str
    consumer: str | None = None
    lease_ttl: float = 15.0
    max_streams: int = 1000
    auto_claim: bool = False
    rebalance: bool | None = None
    progress_timeout: float | None = None
    sweep_interval: float | None = None
    event_buffer: int = 1000
    keyspace_hint: KeyspaceHint | None = None
    drain_timeout: float = 4.0
    handle_signals: bool = True
    clock: Clock = SYSTEM_CLOCK

    def __post_init__(self) -> None:
        check(self, rules.name, "service", "consumer")
        check(self, rules.seconds, "lease_ttl", most=rules.YEAR)
        check(self, rules.seconds, "progress_timeout", "sweep_interval")
        check(self, rules.number, "drain_timeout", least=0)
        check(self, rules.integer, "max_streams", "event_buffer", least=1)
        check(self, rules.flag, "auto_claim", "rebalance", "handle_signals")
        check(self, rules.one_of, "keyspace_hint", choices=("listen", "enable"))
        check(self, instance, "clock", of=Clock)

    @property
    def name(self) -> str:
        """What the consumer is called: as its user says, else after its pod or process."""
        if self.consumer is not None:
            return self.consumer
        given = os.environ.get("POD_NAME") or os.environ.get("POD_IP")
        return re.sub(r"[^A-Za-z0-9._-]", "-", given)[:200] if given else process_name()

    @property
    def sweep(self) -> float:
        """The longest time between two looks for lost streams, in seconds."""
        return self.lease_ttl / 3 if self.sweep_interval is None else self.sweep_interval
