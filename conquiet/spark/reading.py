"""Ranges of entries as Arrow record batches."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, Final

import msgspec
import pyarrow
from pyspark.sql.datasource import InputPartition
from pyspark.sql.types import (
    IntegerType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from conquiet.errors import ConfigError, DataLostError
from conquiet.kit import codec
from conquiet.kit.entry_ids import after, before, order
from conquiet.message import DATA
from conquiet.spark.connection import connected, find
from conquiet.spark.options import ReadOptions
from conquiet.spark.payload import PayloadParser, schema_of
from conquiet.spark.versions import arrow_schema
from conquiet.sync._bridge import items
from conquiet.sync._portal import call
from conquiet.topics.outside import End, Instance, Topic, ends, pages
from conquiet.wire.streams import Entry

__all__ = ["CORRUPT", "Slice", "batch_slices", "check_starts", "columns", "header_text", "lost", "read_slice", "split"]

pa: Any = pyarrow  # it has no types
_log = logging.getLogger("conquiet.spark")
CORRUPT: Final = "_corrupt"
_LATEST_MS: Final = 253_402_300_799_999
"""The end of the year 9999, after which no time can be told."""


def columns(schema: str | None = None) -> StructType:
    """The columns of a read; with a schema of the payload, that is a struct, and what does not fit is apart."""
    payload = StringType() if schema is None else schema_of(schema)
    fields = [
        StructField("payload", payload),
        StructField("key", StringType()),
        StructField("headers", MapType(StringType(), StringType())),
        StructField("topic", StringType()),
        StructField("partition", IntegerType()),
        StructField("id", StringType()),
        StructField("timestamp", TimestampType()),
    ]
    return StructType(fields if schema is None else [*fields, StructField(CORRUPT, StringType())])


class Slice(InputPartition):
    """Entries of one partition: those after an ID up to another. ``expected`` is how many, if that is known."""

    def __init__(self, partition: int, stream: str, since: str, until: str, expected: int | None = None) -> None:
        super().__init__((partition, since, until))
        self.partition = partition
        self.stream = stream
        self.since = since
        self.until = until
        self.expected = expected


def batch_slices(options: ReadOptions) -> list[Slice]:
    """What a bounded read reads: all that is there now, within the bounds that the user has set."""
    with connected(options.place) as instance:
        topic, found = call(_look, instance, options)
        check_starts(options, topic)
        slices: list[Slice] = []
        for partition, end in enumerate(found):
            since = options.since or (options.starts or {}).get(str(partition))
            if since is None:
                since = before(end.first) if end.first is not None and options.start == "earliest" else end.last
            until = end.last if options.until is None else min(end.last, options.until, key=_upper)
            stream = topic.stream(instance.keys, partition)
            slices += split(Slice(partition, stream, since, until), end, options.splits)
        return slices


def check_starts(options: ReadOptions, topic: Topic) -> None:
    """``ConfigError`` if the user has said where to begin in a partition that there is not."""
    for partition in options.starts or ():
        if int(partition) >= topic.partitions:
            many = f"topic {options.place.topic!r} has the partitions 0 to {topic.partitions - 1}"
            raise ConfigError(f"startingOffsets tells of partition {partition}, but {many}")


async def _look(instance: Instance, options: ReadOptions) -> tuple[Topic, list[End]]:
    topic = await find(instance, options.place)
    return topic, await ends(instance, topic)


def _upper(id: str) -> tuple[int, float]:
    ms, seq = order(id)
    return (ms, seq if "-" in id else float("inf"))


def split(whole: Slice, end: End, count: int) -> list[Slice]:
    """A slice as up to ``count`` slices of equal lengths of time, which is what an ID tells of its entry."""
    if end.first is None or not _is_before(whole.since, whole.until):
        return []
    low = max(order(after(whole.since))[0], order(end.first)[0])
    high = order(whole.until)[0]
    count = min(count, high - low + 1)
    if count <= 1:
        return [whole]
    cuts = [low + (high - low + 1) * step // count for step in range(1, count)]
    bounds = [whole.since, *(before(f"{ms}-0") for ms in cuts), whole.until]
    return [
        Slice(whole.partition, whole.stream, since, until)
        for since, until in pairwise(bounds)
        if _is_before(since, until)
    ]


def _is_before(one: str, other: str) -> bool:
    return order(one) < _upper(other)


class Table:
    """Makes record batches of entries, as Spark wants them for a schema."""

    def __init__(self, topic: str, schema: StructType, parser: PayloadParser | None, group: str | None) -> None:
        self._topic = topic
        self._schema = arrow_schema(schema)
        self._parser = parser
        self._group = None if group is None else group.encode()

    def batch(self, partition: int, entries: Sequence[Entry]) -> Any:
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
        return self._arranged(partition, ids, payloads, keys, times, headers)

    def _arranged(
        self,
        partition: int,
        ids: list[bytes],
        payloads: list[bytes | None],
        keys: list[bytes | None],
        times: list[int | None],
        headers: list[Any] | None,
    ) -> Any:
        schema, count = self._schema, len(ids)
        made: dict[str, Any] = {
            "key": _strings(keys),
            "headers": pa.array([None] * count if headers is None else headers, schema.field("headers").type),
            "topic": pa.array([self._topic] * count, pa.string()),
            "partition": pa.array([partition] * count, pa.int32()),
            "id": pa.array(ids, pa.string()),
            "timestamp": pa.array(times, pa.timestamp("ms", "UTC")).cast(schema.field("timestamp").type),
        }
        if self._parser is None:
            made["payload"] = _strings(payloads)
        else:
            made["payload"], made[CORRUPT] = self._parser.columns(payloads)
        return pa.RecordBatch.from_arrays([made[name] for name in schema.names], schema=schema)


def read_slice(options: ReadOptions, schema: StructType, part: Slice) -> Iterator[Any]:
    """The entries of a slice; ``DataLostError`` if fewer are there than there were, and that matters to the user."""
    parser = None if options.schema is None else PayloadParser(schema_of(options.schema))
    table = Table(options.place.topic, schema, parser, options.group)
    count = 0
    with connected(options.place) as instance:
        for page in items(pages(instance, part.stream, part.since, part.until, options.page)):
            count += len(page)
            yield table.batch(part.partition, page)
    if part.expected is not None and count < part.expected:
        lost(options, part.partition, part.expected - count)


def lost(options: ReadOptions, partition: int, count: int | None) -> None:
    """Entries were removed before they were read."""
    number = "entries" if count is None else f"{count} entries"
    text = f"topic {options.place.topic!r}, partition {partition}: {number} were removed before they were read"
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
