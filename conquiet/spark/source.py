"""The Data Source ``conquiet``: topics as DataFrames and streams of Spark, in both directions."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final
from uuid import uuid4

from pyspark import TaskContext
from pyspark.sql import SparkSession
from pyspark.sql.datasource import (
    DataSource,
    DataSourceArrowWriter,
    DataSourceReader,
    DataSourceStreamReader,
    DataSourceStreamWriter,
    DataSourceWriter,
    InputPartition,
    WriterCommitMessage,
)
from pyspark.sql.types import StructType

from conquiet.errors import ConfigError
from conquiet.spark import deadletters
from conquiet.spark.connection import connected, find, not_legacy, opened
from conquiet.spark.failures import briefly
from conquiet.spark.options import ReadOptions, WriteOptions
from conquiet.spark.reading import Slice, batch_slices, columns, read_slice
from conquiet.spark.rows import Columns, Layout
from conquiet.spark.streaming import TopicStreamReader
from conquiet.spark.versions import HANDS_OVER_ARROW, StreamWriter
from conquiet.spark.writing import done_with, say, totals, write_batches, write_rows
from conquiet.sync._portal import call
from conquiet.topics.produce.once import Appended, Write, begin

__all__ = ["TopicDataSource", "register"]

_log = logging.getLogger("conquiet.spark")
_QUERY: Final = "sql.streaming.queryId"
_BATCH: Final = "streaming.sql.batchId"


def register(spark: SparkSession) -> None:
    """Make ``format("conquiet")`` known to a session."""
    spark.dataSource.register(TopicDataSource)


class TopicDataSource(DataSource):
    """A topic. All options are described in the documentation of this package."""

    @classmethod
    def name(cls) -> str:
        """What ``format`` takes."""
        return "conquiet"

    @briefly
    def schema(self) -> StructType:
        """The columns of a read."""
        options = ReadOptions.of(self.options)
        opened(options.place)
        return deadletters.columns() if options.dead_letters else columns(options.schema)

    @briefly
    def reader(self, schema: StructType) -> DataSourceReader:
        """A bounded read."""
        options = ReadOptions.of(self.options)
        if options.group is not None:
            raise ConfigError("group is for streams: a bounded read has no progress to publish")
        if options.limit is not None:
            raise ConfigError("maxRowsPerBatch is for streams: a bounded read is one batch")
        return deadletters.LetterReader(options, schema) if options.dead_letters else TopicReader(options, schema)

    @briefly
    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        """An unbounded read."""
        options = ReadOptions.of(self.options)
        if options.dead_letters:
            raise ConfigError("dead letters are read in batches, not as a stream")
        if options.until is not None:
            raise ConfigError("a stream has no end: endId and endTime are for bounded reads")
        return TopicStreamReader(options, schema)

    @briefly
    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        """One write."""
        found = TopicWriter(*_checked(self.options, schema, overwrite), schema)
        found.begin()
        return found

    @briefly
    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:
        """A write of batch after batch."""
        options, layout = _checked(self.options, schema, overwrite)
        if options.write_id is not None:
            raise ConfigError("writeId is for single writes: a stream is known by its query")
        return TopicStreamWriter(options, layout, schema)


def _checked(options: Any, schema: StructType, overwrite: bool) -> tuple[WriteOptions, Layout]:
    if overwrite:
        raise ConfigError("a topic can only be appended to: mode('append') or outputMode('append')")
    found = WriteOptions.of(options)
    wanted = Columns(found.key, found.payload, found.headers, found.id_column, found.null_keys == "allow")
    layout = Layout.of(schema.fieldNames(), wanted)
    layout.check(schema)
    with connected(found.place) as instance:
        not_legacy(call(find, instance, found.place))
    return found, layout


# --- reading -------------------------------------------------------------------------------------------------------


class TopicReader(DataSourceReader):
    """Reads what a topic holds when the read is planned."""

    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        self._options = options
        self._schema = schema

    @briefly
    def partitions(self) -> list[InputPartition]:
        """One slice a partition, or as many as the user wants."""
        # Spark takes an empty list for a list of one.
        return [*batch_slices(self._options)] or [InputPartition(None)]

    def read(self, partition: InputPartition) -> Iterator[Any]:
        """The entries of a slice."""
        return read_slice(self._options, self._schema, partition) if isinstance(partition, Slice) else iter(())


# --- writing -------------------------------------------------------------------------------------------------------


@dataclass
class TaskDone(WriterCommitMessage):
    """What one task has written."""

    done: Appended


class TopicWriter(DataSourceArrowWriter):
    """One write. What a task that is tried again has written already is not written again."""

    def __init__(self, options: WriteOptions, layout: Layout, schema: StructType) -> None:
        self._given = options
        self._layout = layout
        self._schema = schema
        name = uuid4().hex if options.write_id is None else options.write_id
        goes_on = options.write_id is not None
        self._write = Write(name, options.batch_id, options.id_column is not None, goes_on)

    def begin(self) -> None:
        """Refuse what cannot be repeated any more before the first task, if this may be a repetition."""
        place = self._given.place
        if self._write.goes_on:
            with connected(place) as instance:
                call(begin, instance, call(find, instance, place), self._write)

    @briefly
    def write(self, iterator: Iterator[Any]) -> TaskDone:
        """Write the rows of one task."""
        return TaskDone(write_batches(self._given.place, self._write, self._layout, self._schema, iterator))

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        """All tasks are done."""
        say(f"topic {self._given.place.topic!r}: {dict(totals(messages))}")
        if not self._write.goes_on:
            done_with(self._given.place, self._write)

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        """Some task has failed for good: what the others have written stays."""
        found = dict(totals(messages))
        _log.warning("topic %r: the write failed; what was written stays: %s", self._given.place.topic, found)


class TopicStreamWriter(StreamWriter):
    """Batch after batch. A batch that is repeated after a restart adds nothing that it had added."""

    def __init__(self, options: WriteOptions, layout: Layout, schema: StructType) -> None:
        self._given = options
        self._layout = layout
        self._schema = schema

    @briefly
    def write(self, iterator: Iterator[Any]) -> TaskDone:
        """Write the rows of one task of one batch."""
        place, write = self._given.place, self._batch()
        if HANDS_OVER_ARROW:
            return TaskDone(write_batches(place, write, self._layout, self._schema, iterator))
        return TaskDone(write_rows(place, write, self._layout_of, iterator, self._schema))

    def _layout_of(self, row: Any) -> Layout:
        return self._layout

    def _batch(self) -> Write:
        context = TaskContext.get()
        query = None if context is None else context.getLocalProperty(_QUERY)
        batch = None if context is None else context.getLocalProperty(_BATCH)
        by_id = self._given.id_column is not None
        if query is None or batch is None:
            _log.warning("this Spark does not tell which batch is written: a batch that is repeated is written again")
            return Write(uuid4().hex, by_id=by_id)
        return Write(query, int(batch), by_id, goes_on=True)

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        """All tasks of a batch are done."""
        say(f"topic {self._given.place.topic!r}, batch {batchId}: {dict(totals(messages))}")

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        """The batch has failed; it is the same batch when the query is restarted."""
        found = dict(totals(messages))
        _log.warning("topic %r, batch %d failed; what was written stays: %s", self._given.place.topic, batchId, found)
