"""Rows into a topic, from any DataFrame: as the function of ``foreachPartition``, and as one call."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal
from uuid import uuid4

from pyspark import SparkContext, TaskContext
from pyspark.accumulators import Accumulator
from pyspark.sql import DataFrame, Row
from pyspark.sql.utils import is_remote

from conquiet.errors import ConfigError, QueueError
from conquiet.kit import rules
from conquiet.spark.connection import connected, find, opened
from conquiet.spark.failures import briefly, plainly
from conquiet.spark.options import Place, WriteOptions
from conquiet.spark.rows import Columns, Layout
from conquiet.spark.source import TopicDataSource
from conquiet.spark.writing import write_rows
from conquiet.sync._portal import call
from conquiet.topics.produce.once import Write, outcome
from conquiet.wire.keys import name

__all__ = ["TopicSink", "Written", "publish"]

_log = logging.getLogger("conquiet.spark")


@dataclass(frozen=True, slots=True)
class Written:
    """What a write did."""

    rows: int
    """Rows appended by the tasks that succeeded."""
    repeated: int
    """Rows that an earlier try of a task had appended, and that were not appended again."""


class TopicSink:
    """Sends the rows of each partition to a topic: ``df.foreachPartition(TopicSink(url, "orders", key="customer"))``.

    A row's payload is its column ``payload`` (or the one named), JSON text if it is a string; if there is no such
    column, an object of all columns. Rows of one ``key`` keep their order. A task returns when Redis has all of its
    rows, and connects only where it runs. Nothing is lost; a task that is tried again, or runs twice at a time, adds
    nothing twice if it brings the same rows in the same order, or with ``id_column`` in any. A function of one's own
    may call it several times in a task, with some of the rows each time. One sink may serve many DataFrames, jobs and
    sessions: what another job sends is added, though it be the same rows. With ``write_id`` and a ``batch_id`` that
    grows, a batch that another job repeats adds only what is missing, as in ``foreachBatch`` after a restart.
    ``written`` counts the rows of finished tasks. A row does not tell a ``TIMESTAMP_NTZ`` from an instant, nor a
    ``FLOAT`` from a ``DOUBLE``, so here it is taken for the latter, a time in the zone of the worker; :func:`publish`
    knows better.
    """

    def __init__(
        self,
        url: str,
        topic: str,
        *,
        key: str | None = None,
        payload: str | None = None,
        headers: str | None = None,
        id_column: str | None = None,
        null_keys: bool = False,
        write_id: str | None = None,
        batch_id: int = 0,
        accept_duplicates: bool = False,
        namespace: str = "",
    ) -> None:
        self._place = Place(url, topic, namespace)
        opened(self._place)  # a bad URL is the caller's to see now
        self._columns = _columns(key, payload, headers, id_column, null_keys)
        _check(write_id, batch_id, accept_duplicates)
        self._repeats = write_id, batch_id, accept_duplicates
        self._name = uuid4().hex
        self._rows = self._counter()
        self._repeated = self._counter()
        self._attempt: int | None = None
        self._places: dict[int, int] = {}
        """How far the calls in this try of a task are."""

    def __getstate__(self) -> dict[str, Any]:
        # Spark pickles it once for a job: all tries of the job's tasks have the same name, and no other job has it.
        return {**self.__dict__, "_name": uuid4().hex}

    @property
    def written(self) -> Written:
        """What has been written through this sink, as far as the driver knows; by tasks that have ended."""
        if self._rows is None or self._repeated is None:
            raise ConfigError(
                "there is no SparkContext here that could count: make the sink in the driver; "
                "publish counts on Spark Connect, too"
            )
        return Written(self._rows.value, self._repeated.value)

    @briefly
    def __call__(self, rows: Iterable[Row]) -> None:
        """Send the rows of one partition."""
        done = write_rows(self._place, self._write(), self._layout, rows, places=self._places_of_task())
        if self._rows is not None and self._repeated is not None:
            self._rows.add(done.rows)
            self._repeated.add(done.repeated)

    def _write(self) -> Write:
        """One a stage of a job: its retries have its number, and an RDD that is used again brings the same pickle."""
        write_id, batch, is_late = self._repeats
        if write_id is not None:
            return Write(write_id, batch, self._columns.id is not None, goes_on=True, is_late=is_late)
        context = TaskContext.get()
        # Outside of tasks nothing is tried again, and each call brings rows of its own.
        name = uuid4().hex if context is None else f"{self._name}-{context.stageId()}"
        return Write(name, by_id=self._columns.id is not None)

    def _places_of_task(self) -> dict[int, int]:
        """Where the chunks of this call begin: behind those of earlier calls in the same try of the same task."""
        context = TaskContext.get()
        attempt = None if context is None else context.taskAttemptId()
        if attempt is None or attempt != self._attempt:
            self._attempt, self._places = attempt, {}
        return self._places

    def _layout(self, row: Any) -> Layout:
        names = getattr(row, "__fields__", None)
        if names is None:
            raise ConfigError(f"rows must be those of a DataFrame, with names, not {row!r}")
        return Layout.of(names, self._columns)

    def _counter(self) -> Accumulator[int] | None:
        context = None if is_remote() else SparkContext._active_spark_context
        return None if context is None else context.accumulator(0)


def publish(
    frame: DataFrame,
    url: str,
    topic: str,
    *,
    key: str | None = None,
    payload: str | None = None,
    headers: str | None = None,
    id_column: str | None = None,
    null_keys: bool = False,
    write_id: str | None = None,
    batch_id: int = 0,
    accept_duplicates: bool = False,
    namespace: str = "",
) -> Written | None:
    """Send all rows of ``frame`` to a topic, as ``frame.write.format("conquiet")`` does; what was written, once all is.

    ``None`` if all is written, but the server cannot be reached from here, only from Spark. Columns, types, the topic
    and the server are checked before the first row. If a task fails for good, its error is raised as it was in the
    task, and what other tasks have written stays. With ``write_id`` a repetition adds only what is missing.
    """
    wanted = _columns(key, payload, headers, id_column, null_keys)
    _check(write_id, batch_id, accept_duplicates)
    place = Place(url, topic, namespace)
    opened(place)
    Layout.of(frame.columns, wanted).check(frame.schema)
    null: Literal["allow", "refuse"] = "allow" if null_keys else "refuse"
    options = WriteOptions(place, key, payload, headers, id_column, null, write_id, batch_id, accept_duplicates)
    frame.sparkSession.dataSource.register(TopicDataSource)
    with plainly():
        frame.write.format("conquiet").options(**options.told()).mode("append").save()
    return _outcome(place, options.write())


def _outcome(place: Place, write: Write) -> Written | None:
    try:
        with connected(place) as instance:
            found = call(outcome, instance, call(find, instance, place), write)
    except QueueError as error:
        _log.warning("topic %r: all is written, but how many rows is not known here: %s", place.topic, error)
        return None
    return None if found is None else Written(*found)


def _columns(key: Any, payload: Any, headers: Any, id_column: Any, null_keys: Any) -> Columns:
    for what, column in (("key", key), ("payload", payload), ("headers", headers), ("id_column", id_column)):
        if column is not None:
            rules.text(what, column)
    return Columns(key, payload, headers, id_column, rules.flag("null_keys", null_keys))


def _check(write_id: Any, batch_id: Any, accept_duplicates: Any) -> None:
    rules.flag("accept_duplicates", accept_duplicates)
    if write_id is not None:
        name("write_id", write_id)
    elif batch_id:
        raise ConfigError("batch_id needs a write_id: the name that a repeated write is known by")
    rules.integer("batch_id", batch_id, least=0)
