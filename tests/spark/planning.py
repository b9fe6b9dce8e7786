"""A streaming query as Spark runs it, batch after batch, but in this process and on a checkpoint in memory."""

from __future__ import annotations

import json
import pickle
from dataclasses import dataclass, field
from typing import Any

from pyspark.sql.datasource import InputPartition

from conquiet.errors import UnknownTopicError
from conquiet.kit.entry_ids import order as id_order
from conquiet.spark.options import ReadOptions
from conquiet.spark.reading import Slice, batch_slices, columns, read_slice
from conquiet.spark.streaming import TopicStreamReader
from conquiet.spark.versions import LIMITS_BATCHES
from conquiet.sync import Broker
from conquiet.wire.keys import Keys
from tests.spark.conftest import Home

__all__ = ["Checkpoint", "Query", "Rows", "fill", "read_all", "stream_of", "values"]

Rows = list[dict[str, Any]]


def stream_of(home: Home, topic: str, partition: int = 0) -> str:
    """The key of a partition."""
    return Keys(home.namespace).partition(topic, partition)


def fill(broker: Broker, topic: str, *numbers: int, partition: int = 0) -> list[str]:
    """Send numbers; their IDs."""
    return [str(broker.send(topic, number, partition=partition)) for number in numbers]


def values(rows: Rows) -> list[int]:
    """The numbers that were sent, in the order of their IDs."""
    return [int(row["payload"]) for row in sorted(rows, key=lambda row: (row["partition"], id_order(row["id"])))]


def read_all(home: Home, topic: str, **options: object) -> Rows:
    """What a bounded read gives."""
    found = ReadOptions.of(home.of(topic, **options))
    slices: list[Slice] = pickle.loads(pickle.dumps(batch_slices(found)))
    schema = columns(found.schema)
    return [row for part in slices for batch in read_slice(found, schema, part) for row in batch.to_pylist()]


@dataclass
class Checkpoint:
    """What Spark keeps: the batches that were planned, and how many of them are done."""

    start: str = ""
    planned: list[str] = field(default_factory=list)
    done: int = 0

    @property
    def reached(self) -> str:
        return self.planned[self.done - 1] if self.done else self.start


class Query:
    """One run of a query."""

    def __init__(self, home: Home, topic: str, checkpoint: Checkpoint | None = None, /, **options: object) -> None:
        given = ReadOptions.of(home.of(topic, **options))
        self.reader = TopicStreamReader(given, columns(given.schema))
        self._tasks: TopicStreamReader = pickle.loads(pickle.dumps(self.reader))  # Spark's tasks have another one
        self.checkpoint = Checkpoint() if checkpoint is None else checkpoint

    def plan(self) -> bool:
        """Plan the next batch; whether there is one. One that was planned and not done comes first."""
        kept = self.checkpoint
        if not kept.start:
            kept.start = json.dumps(self.reader.initialOffset())
        if len(kept.planned) > kept.done:
            return True
        start = kept.reached
        end = json.dumps(self.latest(json.loads(start)))
        if end == start:
            return False
        kept.planned.append(end)
        if kept.done:
            self.reader.commit(json.loads(kept.reached))
        return True

    def latest(self, start: dict[str, Any]) -> dict[str, Any]:
        """Where the next batch ends, asked for as this version of Spark does."""
        if not LIMITS_BATCHES:
            return self.reader.latestOffset()
        return self.reader.latestOffset(start, self.reader.getDefaultReadLimit())

    def slices(self) -> list[InputPartition]:
        """What the planned batch reads."""
        kept = self.checkpoint
        found = self.reader.partitions(json.loads(kept.reached), json.loads(kept.planned[kept.done]))
        return list(pickle.loads(pickle.dumps(found)))

    def read(self, slices: list[InputPartition]) -> Rows:
        """The rows of a batch, which is done then."""
        rows = [row for part in slices for batch in self._tasks.read(part) for row in batch.to_pylist()]
        self.checkpoint.done += 1
        return rows

    def batches(self) -> list[Rows]:
        """Every batch until there is nothing more."""
        found: list[Rows] = []
        while self.plan():
            found.append(self.read(self.slices()))
        return found

    def rows(self) -> Rows:
        """All of them together."""
        return [row for batch in self.batches() for row in batch]

    def stop(self) -> None:
        """Close what Spark leaves open."""
        self.reader.stop()


def delete_topic(broker: Broker, topic: str) -> None:
    """Delete a topic that is there."""
    broker.admin.delete_topic(topic, force=True)
    try:
        broker.admin.describe_topic(topic)
    except UnknownTopicError:
        return
    raise AssertionError("the topic is still there")
