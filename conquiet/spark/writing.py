"""What one task of Spark writes: its rows become texts, and go out in chunks, each of which is appended once."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any, Final, TypeAlias

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.types import StringType, StructType

from conquiet.errors import ConquietError
from conquiet.spark.connection import connected, find, not_legacy
from conquiet.spark.options import Place
from conquiet.spark.rows import Layout, Unfit, are_json, as_texts, by_type
from conquiet.sync._portal import call
from conquiet.topics.produce.once import Appended, Appender, Cutter, Write, begin, forget

__all__ = ["TaskWriter", "done_with", "say", "totals", "write_batches", "write_rows"]

_log = logging.getLogger("conquiet.spark")
_Texts: TypeAlias = Iterable[str]
_Column: TypeAlias = Iterable[str | None] | None
_Made: TypeAlias = tuple[str, str | None, str | None, str | None]
"""A row's payload, key, headers and ID."""
_PAGE: Final = 1_000
"""Rows that are turned into bytes at a time."""


def say(text: str) -> None:
    """Put a line into the task's log, which is standard error unless logging is set up."""
    if _log.isEnabledFor(logging.INFO):
        _log.info(text)
    else:
        sys.stderr.write(f"conquiet.spark: {text}\n")


@dataclass(frozen=True, slots=True)
class TaskWriter:
    """Has the rows of one task sent in chunks, while the next ones are made."""

    cutter: Cutter
    appender: Appender

    def add(self, payloads: _Texts, keys: _Column, headers: _Column, ids: _Column) -> None:
        """Take rows, in order."""
        for chunk in self.cutter.add(payloads, keys, headers, ids):
            call(self.appender.put, chunk)

    def finish(self) -> Appended:
        """Send what is left; what became of all rows, once Redis has them."""
        for chunk in self.cutter.rest():
            call(self.appender.put, chunk)
        return call(self.appender.drain)


@contextmanager
def _writing(place: Place, write: Write, part: int, places: Mapping[int, int] | None = None) -> Generator[TaskWriter]:
    """A way to write to ``place``, closed at the end of the block."""
    with connected(place) as instance:
        topic = not_legacy(call(find, instance, place))
        cutter = Cutter(topic, call(begin, instance, topic, write), part, places)
        appender = Appender(instance, topic, write, part)
        try:
            yield TaskWriter(cutter, appender)
        finally:
            call(appender.aclose)  # what is not written is given up


def write_rows(
    place: Place,
    write: Write,
    layout_of: Callable[[Any], Layout],
    rows: Iterable[Any],
    schema: StructType | None = None,
    places: dict[int, int] | None = None,
) -> Appended:
    """Write the rows of one task, given as ``Row`` objects; ``layout_of`` gives the layout for the first one.

    Rows do not tell the types of their values; where that matters, ``schema`` does. A task that brings its rows in
    several calls gives each the same ``places``, which move on when all rows of a call are written: a call that fails
    can be repeated.
    """
    part, first, layout = _part(), 0, None
    converts = None
    if schema is not None and by_type(schema) is not None:
        converts = [by_type(field.dataType) for field in schema.fields]
    source = iter(rows)
    with _writing(place, write, part, places) as writer:
        while page := list(islice(source, _PAGE)):
            layout = layout_of(page[0]) if layout is None else layout
            values = page if converts is None else [_typed(row, converts) for row in page]
            _add_rows(writer, layout, values, first, part)
            first += len(page)
        done = writer.finish()
        if places is not None:
            places.update(writer.cutter.places)
        return _told(place, write, part, done)


def write_batches(place: Place, write: Write, layout: Layout, schema: StructType, batches: Iterable[Any]) -> Appended:
    """Write the rows of one task, given as Arrow record batches."""
    part, first = _part(), 0
    with _writing(place, write, part) as writer:
        for batch in batches:
            _add_batch(writer, layout, schema, batch, first, part)
            first += batch.num_rows
        return _told(place, write, part, writer.finish())


def _part() -> int:
    context = TaskContext.get()
    return 0 if context is None else context.partitionId()


def _add_rows(writer: TaskWriter, layout: Layout, page: Sequence[Any], first: int, part: int) -> None:
    if not _has_added_texts(writer, layout, page):
        _add_each(writer, layout, page, first, part)


def _has_added_texts(writer: TaskWriter, layout: Layout, page: Sequence[Any]) -> bool:
    """Add the rows, if they have nothing but texts: by columns, which takes a third of the time."""
    if layout.payload is None or layout.headers is not None:
        return False
    columns = list(zip(*page, strict=True))
    payloads = as_texts(columns[layout.payload])
    keys = None if layout.key is None else as_texts(columns[layout.key])
    ids = None if layout.id is None else as_texts(columns[layout.id])
    if payloads is None or type(columns[layout.payload][0]) is not str or not are_json(payloads):
        return False
    if (layout.key is not None and keys is None) or (layout.id is not None and (ids is None or "" in ids)):
        return False
    writer.add(payloads, keys, None, ids)
    return True


def _add_each(writer: TaskWriter, layout: Layout, page: Sequence[Any], first: int, part: int) -> None:
    made: list[_Made] = []
    try:
        made.extend(_made(layout, row) for row in page)
    except Unfit as unfit:
        raise unfit.at(part, first + len(made)) from None
    writer.add(*zip(*made, strict=True))


def _typed(row: Sequence[Any], converts: Sequence[Callable[[Any], Any] | None]) -> tuple[Any, ...]:
    return tuple(value if convert is None else convert(value) for value, convert in zip(row, converts, strict=True))


def _made(layout: Layout, row: Any) -> _Made:
    return (
        layout.payload_of(row),
        None if layout.key is None else layout.key_of(row[layout.key]),
        None if layout.headers is None else layout.headers_of(row[layout.headers]),
        None if layout.id is None else layout.id_of(row[layout.id]),
    )


def _add_batch(writer: TaskWriter, layout: Layout, schema: StructType, batch: Any, first: int, part: int) -> None:
    if not batch.num_rows:
        return
    at = layout.payload
    is_plain = at is not None and isinstance(schema.fields[at].dataType, StringType) and layout.headers is None
    if not is_plain:
        _add_rows(writer, layout, _rows_of(schema, batch), first, part)
        return
    assert at is not None
    payloads = batch.column(at).to_pylist()
    keys = None if layout.key is None else _texts(batch.column(layout.key))
    ids = None if layout.id is None else _texts(batch.column(layout.id))
    is_fit = are_json(payloads) and (keys is None or layout.null_keys or None not in keys)
    if not is_fit or (ids is not None and (None in ids or "" in ids)):
        _add_each(writer, layout, _rows_of(schema, batch), first, part)  # which says what is wrong, and where
        return
    writer.add(payloads, keys, None, ids)


def _texts(column: Any) -> list[str | None]:
    """A column of strings or integers, as strings."""
    texts: list[str | None] = column.cast(pa.string()).to_pylist()
    return texts


def _rows_of(schema: StructType, batch: Any) -> list[tuple[Any, ...]]:
    columns: list[list[Any]] = []
    for field, column in zip(schema.fields, batch.columns, strict=True):
        values: list[Any] = column.to_pylist()
        convert = by_type(field.dataType)
        columns.append(values if convert is None else [convert(value) for value in values])
    return list(zip(*columns, strict=True))


def _told(place: Place, write: Write, part: int, done: Appended) -> Appended:
    how = "each ID once" if write.by_id else "once, if a repetition brings the same rows in the same order"
    text = f"topic {place.topic!r}: partition {part} wrote {done.rows} rows ({how})"
    if done.repeated:
        text += f", {done.repeated} more had been written before"
    say(f"{text}; batch {write.batch} of {write.name}")
    if done.differing:
        _log.warning(
            "topic %r: %d rows of partition %d came in another order than before, so some are there twice: "
            "idColumn makes that exact",
            place.topic,
            done.differing,
            part,
        )
    return done


def done_with(place: Place, write: Write) -> None:
    """Remember a write that succeeded for an hour only. That this may fail does not make a failure of the write."""
    try:
        with connected(place) as instance:
            topic = call(find, instance, place)
            call(forget, instance, topic, write, topic.partitions)
    except ConquietError as error:
        _log.warning("topic %r: what was written is remembered for 8 days: %s", place.topic, error)


def totals(messages: Iterable[Any]) -> Mapping[str, int]:
    """What the tasks of a write have told, added up."""
    return asdict(sum((message.done for message in messages if message is not None), Appended()))
