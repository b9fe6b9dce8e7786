"""The options of ``format("conquiet")``: what each means, and which go together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal
from uuid import uuid4

from conquiet.errors import ConfigError
from conquiet.kit import rules
from conquiet.spark.given import (
    Given,
    Offsets,
    entry_id,
    flag,
    integer,
    offsets,
    positive,
    seconds,
    since_id,
    time_bound,
    topics,
)
from conquiet.topics.produce.once import Write
from conquiet.wire.keys import name

__all__ = ["ALIASES", "NAME", "Place", "ReadOptions", "WriteOptions"]

PATIENCE: Final = 60.0
_READ: Final = (
    *("url", "subscribe", "namespace", "serverPatience"),
    *("startId", "endId", "startingTimestamp", "endingTimestamp", "startingOffsets", "endingOffsets"),
    *("minPartitions", "splits", "pageSize", "maxOffsetsPerTrigger", "maxBytesPerTrigger"),
    *("failOnDataLoss", "group", "payloadType", "deadLetters"),
)
_WRITE: Final = (
    *("url", "topic", "namespace", "serverPatience"),
    *("key", "payload", "headers", "idColumn", "nullKeys", "writeId", "batchId", "acceptDuplicates"),
)
NAME: Final = "writeName"
"""An option for ``publish`` alone, which asks afterwards what its write did."""
ALIASES: Final = {
    "topic": "subscribe",
    "startTime": "startingTimestamp",
    "endTime": "endingTimestamp",
    "maxRowsPerBatch": "maxOffsetsPerTrigger",
}
"""Names of earlier versions, which reads still know."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a topic is."""

    url: str
    topic: str
    namespace: str = ""
    patience: float = PATIENCE
    """For how many seconds a server may be away."""

    def __post_init__(self) -> None:
        rules.number("serverPatience", self.patience, least=0)
        rules.text("url", self.url)
        name("topic", self.topic)
        if self.namespace:
            name("namespace", self.namespace)


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """What is read. IDs are those after which and up to which."""

    place: Place
    """Of the first topic."""
    topics: tuple[str, ...]
    since: str | None = None
    """For every partition; ``None``: where ``start`` says."""
    until: str | None = None
    start: Literal["earliest", "latest"] = "earliest"
    starts: Offsets = field(default_factory=dict[str, Mapping[int, str]])
    """For single partitions: the ID after which. The others are read from where ``start`` says."""
    ends: Offsets = field(default_factory=dict[str, Mapping[int, str]])
    tasks: int | None = None
    """How many there are at least; ``None``: one a partition."""
    splits: int = 1
    page: int = 2_000
    limit: int | None = None
    size: int | None = None
    """The bytes of a batch."""
    fail_on_loss: bool = True
    group: str | None = None
    binary: bool = False
    dead_letters: bool = False

    @property
    def places(self) -> tuple[Place, ...]:
        """Of all topics."""
        return tuple(replace(self.place, topic=topic) for topic in self.topics)

    @property
    def is_limited(self) -> bool:
        """Whether a batch of a stream has a bound."""
        return self.limit is not None or self.size is not None

    @classmethod
    def of(cls, options: Mapping[str, str]) -> ReadOptions:
        """What a user's options say; ``ConfigError`` that names what cannot be meant."""
        given = Given(options, _READ, ALIASES)
        given.one_of("startId", "startingTimestamp", "startingOffsets")
        given.one_of("endId", "endingTimestamp", "endingOffsets")
        given.one_of("minPartitions", "splits")
        url, named = given.needed("url"), given.needed("subscribe")
        subscribed: tuple[str, ...] = given.as_("subscribe", topics, (named,))
        start, starts = given.as_("startingOffsets", offsets(("earliest", "latest"), subscribed), ("earliest", {}))
        _, ends = given.as_("endingOffsets", offsets(("latest",), subscribed), ("latest", {}))
        found = cls(
            _place(given, url, subscribed[0]),
            subscribed,
            given.as_("startId", since_id, None) or given.as_("startingTimestamp", time_bound, None),
            given.as_("endId", entry_id, None) or given.as_("endingTimestamp", time_bound, None),
            start or "earliest",
            starts,
            ends,
            given.as_("minPartitions", positive, None),
            given.as_("splits", positive, 1),
            given.as_("pageSize", positive, 2_000),
            given.as_("maxOffsetsPerTrigger", positive, None),
            given.as_("maxBytesPerTrigger", positive, None),
            given.as_("failOnDataLoss", flag, True),
            given.as_("group", lambda text: name("group", text), None),
            given.as_("payloadType", _payload_type, "text") == "binary",
            given.as_("deadLetters", flag, False),
        )
        if len(found.places) > 1 and found.dead_letters:
            raise ConfigError("deadLetters are of one topic")
        if found.dead_letters and (found.group or found.is_ranged):
            raise ConfigError("deadLetters cannot be combined with group, or a range of IDs or times")
        return found

    @property
    def is_ranged(self) -> bool:
        """Whether not everything is read."""
        return bool(self.since or self.until or self.starts or self.ends or self.start != "earliest")

    def of_streams_only(self) -> str | None:
        """An option that bounded reads have no use for, if it is given."""
        named: dict[str, Any] = {
            "group": self.group,
            "maxOffsetsPerTrigger": self.limit,
            "maxBytesPerTrigger": self.size,
        }
        return next((option for option, value in named.items() if value is not None), None)


@dataclass(frozen=True, slots=True)
class WriteOptions:
    """What is written, and which columns it is made of."""

    place: Place
    key: str | None = None
    payload: str | None = None
    headers: str | None = None
    id_column: str | None = None
    null_keys: Literal["refuse", "allow"] = "refuse"
    write_id: str | None = None
    batch_id: int = 0
    accept_duplicates: bool = False
    name: str = field(default_factory=lambda: uuid4().hex, compare=False)
    """What a write is known by that cannot be repeated."""

    def write(self) -> Write:
        """The write that these are the options of."""
        goes_on = self.write_id is not None
        by_id = self.id_column is not None
        return Write(self.write_id or self.name, self.batch_id, by_id, goes_on, self.accept_duplicates)

    def told(self) -> dict[str, str]:
        """The same as a user would give them."""
        named = {
            "url": self.place.url,
            "topic": self.place.topic,
            "namespace": self.place.namespace or None,
            "serverPatience": str(self.place.patience),
            "key": self.key,
            "payload": self.payload,
            "headers": self.headers,
            "idColumn": self.id_column,
            "nullKeys": self.null_keys,
            "writeId": self.write_id,
            "batchId": None if self.write_id is None else str(self.batch_id),
            "acceptDuplicates": str(self.accept_duplicates).lower(),
            NAME: self.name,
        }
        return {option: value for option, value in named.items() if value is not None}

    @classmethod
    def of(cls, options: Mapping[str, str]) -> WriteOptions:
        """What a user's options say; ``ConfigError`` that names what cannot be meant."""
        own = {key: value for key, value in options.items() if key.lower() == NAME.lower()}
        given = Given({key: value for key, value in options.items() if key not in own}, _WRITE, {})
        found = cls(
            _place(given, given.needed("url"), given.needed("topic")),
            given.text("key"),
            given.text("payload"),
            given.text("headers"),
            given.text("idColumn"),
            given.as_("nullKeys", lambda text: rules.one_of("nullKeys", text, ("refuse", "allow")), "refuse"),
            given.as_("writeId", lambda text: name("writeId", text), None),
            given.as_("batchId", lambda text: rules.integer("batchId", integer(text), least=0), 0),
            given.as_("acceptDuplicates", flag, False),
            *own.values(),
        )
        if "batchId" in given and found.write_id is None:
            raise ConfigError("batchId needs a writeId: the name that a repeated write is known by")
        return found


def _place(given: Given, url: str, topic: str) -> Place:
    return Place(url, topic, given.as_("namespace", str, ""), given.as_("serverPatience", seconds, PATIENCE))


def _payload_type(text: str) -> str:
    if text not in ("text", "binary"):
        raise ValueError("it must be text or binary")
    return text
