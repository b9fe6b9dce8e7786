"""What one task of Spark writes: its rows become texts, and go out in chunks, each of which is appended once."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final, TypeAlias

import pyarrow
from pyarrow import compute
from pyspark import TaskContext
from pyspark.sql.types import BinaryType, StringType, StructType

from conquiet.errors import ConquietError
from conquiet.spark.connection import connected, find, not_legacy
from conquiet.spark.options import Place
from conquiet.spark.rows import Layout, Unfit, are_json, as_texts, by_type, header_texts
from conquiet.sync._portal import call
from conquiet.topics.produce.once import Appended, Appender, Cutter, Write, begin, finish, forget

__all__ = ["TaskWriter", "finished", "say", "total", "write_batches", "write_rows"]

pa: Any = pyarrow  # it has no types
pc: Any = compute
_log = logging.getLogger("conquiet.spark")
_Texts: TypeAlias = Iterable[str | bytes]
_Column: TypeAlias = Iterable[str | None] | None
_Made: TypeAlias = tuple[str | bytes, str | None, str | None, str | None]
"""A row's payload, key, headers and ID."""
_ESCAPED: Final = b'"\\' + bytes(range(32))
"""What stands in JSON otherwise than in a text."""
_PAGE: Final = 1_000
"""Rows that are turned into bytes at a time."""


def say(text: str) -> None:
    """Tell what a task has done, to whoever has set up the logger ``conquiet.spark`` for that."""
    _log.info("%s", text)


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
    if layout.payload is None:
        return False
    columns = list(zip(*page, strict=True))
    payloads = as_texts(columns[layout.payload])
    keys = None if layout.key is None else as_texts(columns[layout.key])
    ids = None if layout.id is None else as_texts(columns[layout.id])
    headers = None if layout.headers is None else header_texts(columns[layout.headers])
    if payloads is None or type(columns[layout.payload][0]) is not str or not are_json(payloads):
        return False
    if (layout.key is not None and keys is None) or (layout.headers is not None and headers is None):
        return False
    if layout.id is not None and (ids is None or "" in ids):
        return False
    writer.add(payloads, keys, headers, ids)
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
    kind = None if at is None else schema.fields[at].dataType
    if at is None or not isinstance(kind, StringType | BinaryType):
        _add_rows(writer, layout, _rows_of(schema, batch), first, part)
        return
    payloads = batch.column(at).to_pylist()
    keys = None if layout.key is None else _texts(batch.column(layout.key))
    ids = None if layout.id is None else _texts(batch.column(layout.id))
    headers, is_fit = (None, True) if layout.headers is None else _headers(batch.column(layout.headers))
    is_fit = is_fit and (None not in payloads if isinstance(kind, BinaryType) else are_json(payloads))
    is_fit = is_fit and (keys is None or layout.null_keys or None not in keys)
    if not is_fit or (ids is not None and (None in ids or "" in ids)):
        _add_each(writer, layout, _rows_of(schema, batch), first, part)  # which says what is wrong, and where
        return
    writer.add(payloads, keys, headers, ids)


def _headers(column: Any) -> tuple[list[str | None] | None, bool]:
    """A column of maps as JSON texts, by columns too; or whether they have to be looked at one by one."""
    if column.null_count == len(column):
        return None, True
    names, texts = column.keys, column.items
    if names.null_count or texts.null_count:
        return None, False
    if any(_has_escapes(words.buffers()[2]) for words in (names, texts)):
        return header_texts([None if value is None else dict(value) for value in column.to_pylist()]), True
    pairs = pc.binary_join_element_wise('"', names, '":"', texts, '"', "")
    lists = pa.ListArray.from_arrays(column.offsets, pairs)
    objects = pc.binary_join_element_wise("{", pc.binary_join(lists, ","), "}", "")
    is_empty = pc.equal(pc.list_value_length(lists), 0)
    return pc.if_else(is_empty, pa.scalar(None, pa.string()), objects).to_pylist(), True


def _has_escapes(texts: Any) -> bool:
    """Whether a buffer of texts has something that JSON writes otherwise."""
    return texts is not None and len(bytes(texts).translate(None, _ESCAPED)) < texts.size


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


def finished(place: Place, write: Write, done: Appended) -> None:
    """Keep what a write did for whoever asks, and remember what it wrote for an hour only if nobody can repeat it.

    That this may fail does not make a failure of the write.
    """
    try:
        with connected(place) as instance:
            topic = call(find, instance, place)
            call(finish, instance, topic, write, done.rows, done.repeated)
            if not write.goes_on:
                call(forget, instance, topic, write, topic.partitions)
    except ConquietError as error:
        _log.warning("topic %r: all is written, but what was written is not told: %s", place.topic, error)


def total(messages: Iterable[Any]) -> Appended:
    """What the tasks of a write have told, added up."""
    return sum((message.done for message in messages if message is not None), Appended())
