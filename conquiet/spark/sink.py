"""Rows into a topic, from any DataFrame: as the function of ``foreachPartition``, and as one call."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from pyspark import SparkContext, TaskContext
from pyspark.accumulators import Accumulator
from pyspark.sql import DataFrame, Row
from pyspark.sql.types import StructType

from conquiet.errors import ConfigError
from conquiet.kit import rules
from conquiet.spark.connection import connected, find, not_legacy, opened
from conquiet.spark.failures import briefly, plainly
from conquiet.spark.options import Place
from conquiet.spark.rows import Columns, Layout
from conquiet.spark.writing import done_with, write_rows
from conquiet.sync._portal import call
from conquiet.topics.produce.once import Write

__all__ = ["TopicSink", "Written", "publish"]


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
    sessions: what another job sends is added, though it be the same rows. ``written`` counts the rows of finished
    tasks. A row does not tell a ``TIMESTAMP_NTZ`` from an instant, so here it is taken for one, in the zone of the
    worker; :func:`publish` knows better.
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
        namespace: str = "",
    ) -> None:
        self._place = Place(url, topic, namespace)
        opened(self._place)  # a bad URL is the caller's to see now
        for what, column in (("key", key), ("payload", payload), ("headers", headers), ("id_column", id_column)):
            if column is not None:
                rules.text(what, column)
        self._columns = Columns(key, payload, headers, id_column, rules.flag("null_keys", null_keys))
        self._schema: StructType | None = None
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
            raise ConfigError("there is no SparkContext here that could count: make the sink in the driver")
        return Written(self._rows.value, self._repeated.value)

    @briefly
    def __call__(self, rows: Iterable[Row]) -> None:
        """Send the rows of one partition."""
        done = write_rows(self._place, self._write(), self._layout, rows, self._schema, self._places_of_task())
        if self._rows is not None and self._repeated is not None:
            self._rows.add(done.rows)
            self._repeated.add(done.repeated)

    def _write(self) -> Write:
        """One a stage of a job: its retries have its number, and an RDD that is used again brings the same pickle."""
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
        context = SparkContext._active_spark_context
        return None if context is None else context.accumulator(0)


class _Once(TopicSink):
    """A sink for one DataFrame, whose write is over when that is written."""

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__  # the driver has to know the name, too

    def _write(self) -> Write:
        return Write(self._name, by_id=self._columns.id is not None)

    def prepare(self, frame: DataFrame) -> None:
        """Refuse what cannot be written before any task begins."""
        Layout.of(frame.columns, self._columns).check(frame.schema)
        self._schema = frame.schema
        with connected(self._place) as instance:
            not_legacy(call(find, instance, self._place))

    def clean_up(self) -> None:
        """Do not remember for days what was written: it will not be repeated."""
        done_with(self._place, self._write())


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
    namespace: str = "",
) -> Written:
    """Send all rows of ``frame`` to a topic, as :class:`TopicSink` does; what was written, once all is.

    Columns, types, the topic and the server are checked before the first row. If a task fails for good, its error is
    raised as it was in the task, and what other tasks have written stays.
    """
    sink = _Once(
        url,
        topic,
        key=key,
        payload=payload,
        headers=headers,
        id_column=id_column,
        null_keys=null_keys,
        namespace=namespace,
    )
    sink.prepare(frame)
    with plainly():
        frame.foreachPartition(sink)
    sink.clean_up()
    return sink.written
