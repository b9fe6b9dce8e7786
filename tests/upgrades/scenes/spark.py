"""A stream of Spark that copies a topic, stopped between two batches; and writes that could still be repeated."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import pyspark
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from conquiet.spark import register
from conquiet.sync import Broker

CHECKPOINT: Final = "checkpoint"
GROUP: Final = "copying"
WRITE: Final = "nightly"
BATCH: Final = 3
ROWS: Final = 10
"""Rows of the write, and of a batch of the stream."""


@contextmanager
def session() -> Iterator[SparkSession]:
    """A Spark of one's own."""
    os.environ["PYSPARK_PYTHON"] = sys.executable
    builder = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false")
    running = builder.config("spark.driver.host", "127.0.0.1").getOrCreate()
    running.sparkContext.setLogLevel("ERROR")
    register(running)
    yield running
    running.stop()


def copying(running: SparkSession, url: str, checkpoint: Path) -> StreamingQuery:
    """The stream, which ends when it has copied what is there now."""
    source = running.readStream.format("conquiet").options(url=url, topic="in", group=GROUP, maxRowsPerBatch=str(ROWS))
    sink = source.load().select("payload", "key").writeStream.format("conquiet").options(url=url, topic="out")
    return sink.option("checkpointLocation", str(checkpoint)).trigger(availableNow=True).start()


def rows(running: SparkSession) -> DataFrame:
    """What is written by a write that has a name."""
    return running.range(0, ROWS, 1, 2).selectExpr("id", "to_json(named_struct('n', id)) as payload")


def write(frame: DataFrame, url: str, topic: str, batch: int, **more: str) -> None:
    """Such a write, or its repetition."""
    options = {"url": url, "topic": topic, "writeId": WRITE, "batchId": str(batch), **more}
    frame.write.format("conquiet").options(**options).mode("append").save()


def spark(running: SparkSession, url: str, place: Path) -> dict[str, Any]:
    """Play it."""
    with Broker.connect(url) as broker:
        broker.create_topic("in", partitions=3)
        for topic in ("out", "written", "by-id"):
            broker.create_topic(topic, partitions=2)
        for n in range(35):
            broker.send("in", {"n": n}, key=f"key-{n % 5}")
        copying(running, url, place / CHECKPOINT).awaitTermination()
        broker.admin.grow("in", 4)
        for n in range(35, 60):
            broker.send("in", {"n": n}, key=f"key-{n % 5}", partition=n % 4)
        write(rows(running), url, "written", BATCH)
        write(rows(running), url, "by-id", BATCH, idColumn="id")
        lag = broker.admin.describe_group("in", GROUP).lag
    return {"pyspark": pyspark.__version__, "sent": 60, "copied": 35, "lag": lag}
