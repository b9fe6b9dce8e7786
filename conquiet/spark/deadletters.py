"""Dead letters as DataFrames: read them, choose by any filter, and give the chosen ones back to their topic."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import pyarrow
from pyspark.sql import DataFrame, Row
from pyspark.sql.datasource import DataSourceReader, InputPartition
from pyspark.sql.types import IntegerType, MapType, StringType, StructField, StructType, TimestampType

from conquiet.errors import ConfigError, ConquietError, GroupLostError
from conquiet.spark.connection import connected, find, opened
from conquiet.spark.failures import briefly, plainly
from conquiet.spark.options import Place, ReadOptions
from conquiet.spark.reading import header_text
from conquiet.spark.versions import arrow_schema
from conquiet.sync._bridge import items
from conquiet.sync._portal import call
from conquiet.topics import outside
from conquiet.topics.outside import DeadLetter, Instance

pa: Any = pyarrow  # it has no types

__all__ = ["LetterReader", "columns", "replay"]


def columns() -> StructType:
    """What is told of a dead letter. ``id`` is its own, by which it is replayed."""
    text, number, time = StringType(), IntegerType(), TimestampType()
    kinds = {
        "id": text,
        "payload": text,
        "key": text,
        "headers": MapType(text, text),
        "topic": text,
        "partition": number,
        "group": text,
        "original_id": text,
        "attempts": number,
        "crashes": number,
        "reason": text,
        "error_type": text,
        "error": text,
        "traceback": text,
        "first_failed_at": time,
        "failed_at": time,
        "consumer": text,
    }
    return StructType([StructField(name, kind) for name, kind in kinds.items()])


class LetterReader(DataSourceReader):
    """Reads all dead letters of a topic, in one task: there should be few."""

    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        self._options = options
        self._schema = schema

    @briefly
    def partitions(self) -> list[InputPartition]:
        """One."""
        with connected(self._options.place) as instance:
            call(find, instance, self._options.place)  # a topic that is not there is the user's to see now
        return [InputPartition(0)]

    def read(self, partition: InputPartition) -> Iterator[Any]:
        """All letters, the oldest first."""
        schema = arrow_schema(self._schema)
        with connected(self._options.place) as instance:
            topic = call(find, instance, self._options.place)
            for page in items(outside.letter_pages(instance, topic, "-", "+")):
                rows = [_row(letter) for letter in page]
                arrays = [pa.array([row[name] for row in rows], schema.field(name).type) for name in schema.names]
                yield pa.RecordBatch.from_arrays(arrays, schema=schema)


def _row(letter: DeadLetter) -> dict[str, Any]:
    named = {name: getattr(letter, name, None) for name in columns().fieldNames()}
    named["payload"] = letter.raw.decode(errors="replace") if letter.raw else None
    named["headers"] = [(name, header_text(value)) for name, value in letter.headers.items()] or None
    return named


def replay(frame: DataFrame, url: str, topic: str, *, namespace: str = "") -> int:
    """Give the dead letters whose column ``id`` is in ``frame`` back to the groups that gave up on them; how many.

    What is not there any more is left out, so a task that is tried again does no harm. If some are refused, as when
    their group is gone, the others are replayed nevertheless, and then there is an error.
    """
    place = Place(url, topic, namespace)
    opened(place)
    if "id" not in frame.columns:
        raise ConfigError(f"a dead letter is known by its column 'id', but there are only {', '.join(frame.columns)}")
    with connected(place) as instance:
        call(find, instance, place)
    with plainly():
        ids = frame.select("id").dropna().distinct()
        answers = ids.rdd.mapPartitions(lambda rows: [_replayed(place, rows)]).collect()
    refusals = [answer for answer in answers if isinstance(answer, ConquietError)]
    if refusals:
        raise refusals[0]
    return sum(answer for answer in answers if isinstance(answer, int))


def _replayed(place: Place, rows: Iterable[Row]) -> int | ConquietError:
    """How many letters were replayed, or why some were not: an error here would only be tried again."""
    ids = [row["id"] for row in rows]
    if not ids:
        return 0
    with connected(place) as instance:
        try:
            return call(_replay, instance, place, ids)
        except (ConfigError, GroupLostError) as error:
            return error.with_traceback(None)


async def _replay(instance: Instance, place: Place, ids: list[str]) -> int:
    topic = await find(instance, place)
    return await outside.replay(instance, topic, ids)
