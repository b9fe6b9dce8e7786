"""What users decide about a broker, a topic, a subscription and its dead letters."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Final, Literal, Self, TypedDict

from conquiet.errors import ConfigError
from conquiet.kit import entry_ids, rules
from conquiet.kit.clock import SYSTEM_CLOCK, Clock
from conquiet.kit.handlers import checked
from conquiet.kit.options import check, instance
from conquiet.kit.policy import RetryPolicy
from conquiet.topics.codec import JSON, Codec
from conquiet.topics.format.partitioner import NAMED, Partitioner
from conquiet.wire.keys import name

__all__ = ["BrokerKeywords", "BrokerOptions", "DeadLetterPolicy", "Retention", "SubscribeOptions", "TopicDefaults"]

OnFull = Literal["grow", "reject", "drop"]
Order = Literal["unordered", "block_key", "block_partition"]
OnGroupLost = Literal["fail", "earliest", "latest", "resume"]

_ON_FULL: Final = ("grow", "reject", "drop")
_ORDER: Final = ("unordered", "block_key", "block_partition")
_ON_GROUP_LOST: Final = ("fail", "earliest", "latest", "resume")


@dataclass(frozen=True, slots=True, kw_only=True)
class Retention:
    """What a topic keeps. Nothing that some group has not finished is ever removed, unless ``on_full="drop"``.

    ``max_len`` is per partition, ``max_age`` in seconds. ``delete_acked`` removes what all groups have finished.
    ``on_full`` says what happens at ``max_len`` when all of it is unfinished: ``grow`` beyond it, ``reject``
    writers with ``TopicFullError``, or ``drop`` the oldest and count it. A group without consumers for
    ``group_expiry`` seconds stops holding the rest back. The dead letters have limits of their own.
    """

    max_len: int | None = None
    max_age: float | None = None
    delete_acked: bool = False
    on_full: OnFull = "grow"
    group_expiry: float | None = None
    trim_interval: float = 10.0
    dead_letter_max_len: int | None = None
    dead_letter_max_age: float | None = None

    def __post_init__(self) -> None:
        check(self, rules.integer, "max_len", "dead_letter_max_len", least=1)
        check(self, rules.seconds, "max_age", "group_expiry", "trim_interval", "dead_letter_max_age")
        check(self, rules.flag, "delete_acked")
        rules.one_of("on_full", self.on_full, _ON_FULL)
        if self.on_full != "grow" and self.max_len is None:
            raise ConfigError(f"on_full={self.on_full!r} needs a max_len")

    @property
    def trims(self) -> bool:
        """Whether there is ever anything to remove."""
        return self.max_len is not None or self.max_age is not None or self.delete_acked

    def plain(self) -> dict[str, Any]:
        """As JSON values."""
        return asdict(self)

    @classmethod
    def from_plain(cls, values: Mapping[str, Any]) -> Self:
        """From JSON values, also of a newer version: what is not known here is left out."""
        return cls(**{name: value for name, value in values.items() if name in cls.__slots__})


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicDefaults:
    """How topics are made that a broker creates on first use."""

    partitions: int = 1
    retention: Retention = field(default_factory=Retention)
    partitioner: str = "murmur2"

    def __post_init__(self) -> None:
        check(self, rules.integer, "partitions", least=1)
        check(self, rules.one_of, "partitioner", choices=tuple(NAMED))
        check(self, instance, "retention", of=Retention)


class BrokerKeywords(TypedDict, total=False):
    """:class:`BrokerOptions` as type checkers see them at a call."""

    namespace: str
    codec: Codec
    partitioner: Partitioner | None
    auto_create: TopicDefaults | None
    dedup_window: float
    dedup_size: int
    clock: Clock


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerOptions:
    """What ``Broker`` takes beside the address, checked."""

    namespace: str = ""
    codec: Codec = JSON
    partitioner: Partitioner | None = None
    auto_create: TopicDefaults | None = None
    dedup_window: float = 600.0
    dedup_size: int = 100_000
    clock: Clock = SYSTEM_CLOCK

    def __post_init__(self) -> None:
        for method in ("encode", "decode"):
            if not callable(getattr(self.codec, method, None)):
                raise ConfigError(f"codec must have a method {method}, not be {self.codec!r}")
        if self.partitioner is not None and not callable(self.partitioner):
            raise ConfigError(f"partitioner must be callable, not {self.partitioner!r}")
        check(self, instance, "auto_create", of=TopicDefaults)
        check(self, rules.seconds, "dedup_window")
        check(self, rules.integer, "dedup_size", least=1)
        check(self, instance, "clock", of=Clock)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadLetterPolicy:
    """What a dead letter tells beside the entry itself.

    ``drop_headers`` names headers that are left out; ``transform`` gets the entry's fields (names to raw values)
    and returns those to store instead. Both act before the letter leaves the partition.
    """

    max_error_chars: int = 4000
    include_traceback: bool = True
    drop_headers: tuple[str, ...] = ()
    transform: Callable[[dict[bytes, bytes]], Mapping[bytes, bytes]] | None = None

    def __post_init__(self) -> None:
        rules.integer("max_error_chars", self.max_error_chars, least=0)
        rules.flag("include_traceback", self.include_traceback)
        if not isinstance(self.drop_headers, tuple) or not all(isinstance(one, str) for one in self.drop_headers):
            raise ConfigError(f"drop_headers must be a tuple of strings, not {self.drop_headers!r}")
        if self.transform is not None:
            checked("transform", self.transform, "fields")


@dataclass(frozen=True, slots=True, kw_only=True)
class SubscribeOptions:
    """How a subscription takes, handles and settles messages; see ``docs/topics.md`` for each."""

    batch_size: int = 100
    poll_timeout: float = 1.0
    max_inflight: int = 100
    max_partitions: int | None = None
    partition_modulo: int | None = None
    partition_remainder: int | None = None
    lease_ttl: float = 15.0
    retry: RetryPolicy = field(default_factory=RetryPolicy)
    dead_letter: DeadLetterPolicy = field(default_factory=DeadLetterPolicy)
    order: Order = "unordered"
    order_across_growth: bool = True
    start: str | float | dt.datetime = "earliest"
    on_group_lost: OnGroupLost = "fail"
    handler_timeout: float | None = None
    max_processing_time: float | None = None
    batch_handler: bool = False
    max_crashes: int = 5
    drain_timeout: float = 30.0
    handle_signals: bool = True
    consumer: str | None = None

    def __post_init__(self) -> None:
        check(self, rules.integer, "batch_size", "max_inflight", "max_partitions", "max_crashes", least=1)
        check(
            self, rules.seconds, "poll_timeout", "lease_ttl", "handler_timeout", "max_processing_time", "drain_timeout"
        )
        check(self, rules.flag, "order_across_growth", "batch_handler", "handle_signals")
        check(self, rules.one_of, "order", choices=_ORDER)
        check(self, rules.one_of, "on_group_lost", choices=_ON_GROUP_LOST)
        check(self, instance, "retry", of=RetryPolicy)
        check(self, instance, "dead_letter", of=DeadLetterPolicy)
        check(self, name, "consumer")
        self._check_order()
        self._check_pinning()
        _ = self.start_id

    def _check_order(self) -> None:
        if self.retry.mode == "requeue" and self.order != "unordered":
            raise ConfigError(f"a requeued message goes behind the others: order {self.order!r} needs mode='park'")
        if self.batch_handler and self.order != "unordered":
            raise ConfigError(f"a batch_handler gets whole runs of a partition: order {self.order!r} is not for it")

    def _check_pinning(self) -> None:
        if (self.partition_modulo is None) != (self.partition_remainder is None):
            raise ConfigError("partition_modulo and partition_remainder go together")
        if self.partition_modulo is not None:
            rules.integer("partition_modulo", self.partition_modulo, least=1)
            rules.integer("partition_remainder", self.partition_remainder, least=0)

    @property
    def start_id(self) -> str:
        """Where a new group begins, as Redis wants it."""
        return entry_ids.start("start", self.start)
