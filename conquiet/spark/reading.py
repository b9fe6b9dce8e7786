"""Ranges of entries as Arrow record batches."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec
import pyarrow
from pyspark.sql.types import (
    BinaryType,
    IntegerType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from conquiet.errors import ConfigError, DataLostError, MalformedMessageError
from conquiet.kit import codec
from conquiet.kit.entry_ids import before
from conquiet.message import DATA
from conquiet.spark.connection import connected, find
from conquiet.spark.cutting import Slice, cuts, is_before, pieces, upper
from conquiet.spark.offsets import Spot
from conquiet.spark.options import Place, ReadOptions
from conquiet.spark.versions import arrow_schema
from conquiet.sync._bridge import items
from conquiet.sync._portal import call
from conquiet.topics.outside import End, Instance, Topic, ends, pages
from conquiet.wire.streams import Entry

__all__ = [
    "Seen",
    "batch_slices",
    "check_places",
    "columns",
    "header_text",
    "is_text",
    "look",
    "lost",
    "not_text",
    "read_slice",
    "tasks_of",
]

pa: Any = pyarrow  # it has no types
_log = logging.getLogger("conquiet.spark")
_LATEST_MS: Final = 253_402_300_799_999
"""The end of the year 9999, after which no time can be told."""


def columns(binary: bool = False) -> StructType:
    """The columns of a read."""
    fields = [
        StructField("payload", BinaryType() if binary else StringType()),
        StructField("key", StringType()),
        StructField("headers", MapType(StringType(), StringType())),
        StructField("topic", StringType()),
        StructField("partition", IntegerType()),
        StructField("id", StringType()),
        StructField("timestamp", TimestampType()),
    ]
    return StructType(fields)


@dataclass(frozen=True, slots=True)
class Seen:
    """A partition as it is now."""

    topic: Topic
    stream: str
    end: End


async def look(instance: Instance, places: Sequence[Place]) -> dict[Spot, Seen]:
    """All partitions of these topics."""
    found: dict[Spot, Seen] = {}
    for place in places:
        topic = await find(instance, place)
        for index, end in enumerate(await ends(instance, topic)):
            found[place.topic, index] = Seen(topic, topic.stream(instance.keys, index), end)
    return found


def batch_slices(options: ReadOptions) -> list[Slice]:
    """What a bounded read reads: all that is there now, within the bounds that the user has set."""
    with connected(options.place) as instance:
        return call(_planned, instance, options)


async def _planned(instance: Instance, options: ReadOptions) -> list[Slice]:
    seen = await look(instance, options.places)
    check_places(options, seen)
    whole = [part for spot, now in seen.items() if (part := _bounded(options, spot, now)) is not None]
    found = await cuts(instance, whole, tasks_of(options, len(seen)))
    for part in whole:
        part.expected = None  # retention goes on while it is read, and is no reason to fail
    return [piece for part, ids in zip(whole, found, strict=True) for piece in pieces(part, ids)]


def _bounded(options: ReadOptions, spot: Spot, now: Seen) -> Slice | None:
    (topic, partition), end = spot, now.end
    if end.first is None:
        return None
    since = options.since or options.starts.get(topic, {}).get(partition) or options.start
    since = {"earliest": before(end.first), "latest": end.last}.get(since, since)
    until = options.until or options.ends.get(topic, {}).get(partition) or "latest"
    until = end.last if until == "latest" else min(end.last, until, key=upper)
    is_all = until == end.last and since == before(end.first)
    found = Slice(topic, partition, now.stream, since, until, end.length if is_all else None)
    return found if is_before(since, until) else None


def tasks_of(options: ReadOptions, partitions: int) -> int:
    """How many tasks the user wants at least."""
    return options.tasks or (options.splits * partitions if options.splits > 1 else 0)


def check_places(options: ReadOptions, seen: Mapping[Spot, Seen]) -> None:
    """``ConfigError`` if the user has said where to begin or to end in a partition that there is not."""
    for option, offsets in (("startingOffsets", options.starts), ("endingOffsets", options.ends)):
        for topic, places in offsets.items():
            count = sum(1 for name, _ in seen if name == topic)
            if places and max(places) >= count:
                many = f"topic {topic!r} has the partitions 0 to {count - 1}"
                raise ConfigError(f"{option} tells of partition {max(places)}, but {many}")


class Table:
    """Makes record batches of entries, as Spark wants them for a schema."""

    def __init__(self, part: Slice, schema: StructType, group: str | None) -> None:
        self._part = part
        self._schema = arrow_schema(schema)
        self._group = None if group is None else group.encode()

    def batch(self, entries: Sequence[Entry]) -> Any:
        """The entries as rows; those that are addressed to another group are not among them."""
        ids: list[bytes] = []
        payloads: list[bytes | None] = []
        keys: list[bytes | None] = []
        times: list[int | None] = []
        headers: list[Any] | None = None
        payload: bytes | None
        key: bytes | None
        given: bytes | None
        for id, entry in entries:
            size = len(entry)
            if size == 6 and entry[4] == b"key" and entry[2] == b"timestamp" and entry[0] == b"payload":
                payload, time, key, given = entry[1], entry[3], entry[5], None
            elif size == 4 and entry[2] == b"timestamp" and entry[0] == b"payload":
                payload, time, key, given = entry[1], entry[3], None, None
            else:
                fields = dict(zip(entry[::2], entry[1::2], strict=True))
                if fields.get(b"onlyGroup", self._group) != self._group:
                    continue
                payload = fields.get(b"payload", fields.get(DATA) if size == 2 else None)
                key, time, given = fields.get(b"key"), fields.get(b"timestamp", b""), fields.get(b"headers")
            if given is not None:
                headers = [None] * len(ids) if headers is None else headers
                headers.append(_headers(given))
            elif headers is not None:
                headers.append(None)
            ids.append(id)
            payloads.append(payload)
            keys.append(key)
            times.append(int(time) if len(time) == 13 and time.isdigit() else _moment(time, id))
        return self._arranged(ids, payloads, keys, times, headers)

    def _arranged(
        self,
        ids: list[bytes],
        payloads: list[bytes | None],
        keys: list[bytes | None],
        times: list[int | None],
        headers: list[Any] | None,
    ) -> Any:
        schema, count = self._schema, len(ids)
        made: dict[str, Any] = {
            "payload": self._payloads(ids, payloads, schema.field("payload").type),
            "key": _strings(keys),
            "headers": pa.array([None] * count if headers is None else headers, schema.field("headers").type),
            "topic": pa.array([self._part.topic] * count, pa.string()),
            "partition": pa.array([self._part.partition] * count, pa.int32()),
            "id": pa.array(ids, pa.string()),
            "timestamp": pa.array(times, pa.timestamp("ms", "UTC")).cast(schema.field("timestamp").type),
        }
        return pa.RecordBatch.from_arrays([made[name] for name in schema.names], schema=schema)

    def _payloads(self, ids: list[bytes], payloads: list[bytes | None], kind: Any) -> Any:
        try:
            return pa.array(payloads, kind)
        except (pa.ArrowInvalid, UnicodeDecodeError):
            at = next(at for at, payload in enumerate(payloads) if payload is not None and not is_text(payload))
        raise not_text(self._part.stream, ids[at].decode(), payloads[at])


def is_text(payload: bytes) -> bool:
    """Whether it is UTF-8."""
    try:
        payload.decode()
    except UnicodeDecodeError:
        return False
    return True


def not_text(stream: str, id: str, payload: bytes | None) -> MalformedMessageError:
    """What is said of a payload that is no text, where text is wanted."""
    reason = "its payload is not UTF-8; option('payloadType', 'binary') reads payloads as bytes"
    return MalformedMessageError(stream, id, [b"payload", payload or b""], reason)


def read_slice(options: ReadOptions, schema: StructType, part: Slice) -> Iterator[Any]:
    """The entries of a slice; ``DataLostError`` if fewer are there than there were, and that matters to the user."""
    table = Table(part, schema, options.group)
    count = 0
    with connected(options.place) as instance:
        for page in items(pages(instance, part.stream, part.since, part.until, options.page)):
            count += len(page)
            yield table.batch(page)
    if part.expected is not None and count < part.expected:
        lost(options, (part.topic, part.partition), part.expected - count)


def lost(options: ReadOptions, spot: Spot, count: int | None) -> None:
    """Entries were removed before they were read."""
    number = "entries" if count is None else f"{count} entries"
    topic, partition = spot
    text = f"topic {topic!r}, partition {partition}: {number} were removed before they were read"
    if options.fail_on_loss:
        raise DataLostError(f"{text}; failOnDataLoss=false goes on without them")
    _log.warning("%s", text)


def _strings(values: Sequence[bytes | None]) -> Any:
    try:
        return pa.array(values, pa.string())
    except (pa.ArrowInvalid, UnicodeDecodeError):
        return pa.array([None if value is None else value.decode(errors="replace") for value in values], pa.string())


def _moment(time: bytes, id: bytes) -> int | None:
    """When the producer says that it was; where that is no time, when the entry was given its ID."""
    if time.isdigit() and (ms := int(time)) <= _LATEST_MS:
        return ms
    return ms if (ms := int(id.partition(b"-")[0])) <= _LATEST_MS else None


def _headers(raw: bytes) -> Any:
    try:
        found = codec.decode(raw)
    except codec.UNREADABLE:
        return None
    if not isinstance(found, dict):
        return None
    pairs: dict[Any, Any] = found  # pyright: ignore[reportUnknownVariableType]
    return [(str(name), header_text(value)) for name, value in pairs.items()]


def header_text(value: Any) -> str | None:
    """A header's text; of what is none, which only others than conquiet write, the JSON."""
    return value if value is None or isinstance(value, str) else msgspec.json.encode(value).decode()
