"""Rows a second of each way between Spark and a topic, against what one writes by hand in the same Spark job."""

from __future__ import annotations

import asyncio
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pyarrow
import redis
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f
from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition

from conquiet import Outgoing, Retention
from conquiet.spark import TopicSink, register
from conquiet.sync import Broker, EmbeddedRedis
from tests.bench.report import Row, Section
from tests.rigs.spark_workers import workers

pa: Any = pyarrow
ROWS = 1_000_000
BATCH = 100_000
ROUNDS = 3
SMALL_BATCHES = 40
MEMORY_ROWS = 10_000_000
STEP = 1_000_000
PIPELINE = 1_000


class ByHand:
    """A plain ``redis-py`` pipeline, in ``foreachPartition`` or without Spark."""

    def __init__(self, url: str, stream: str) -> None:
        self._url = url
        self._stream = stream

    def __call__(self, rows: Iterable[Any]) -> None:
        with redis.Redis.from_url(self._url) as client, client.pipeline(transaction=False) as pipe:
            for row in rows:
                pipe.execute_command("XADD", self._stream, "*", "payload", row[1], "key", row[0])
                if len(pipe) == PIPELINE:
                    pipe.execute()
            pipe.execute()


class Trickle(DataSource):
    """A stream of Python that needs nothing: two tasks with a row each, in every batch."""

    @classmethod
    def name(cls) -> str:
        return "trickle"

    def schema(self) -> str:
        return "n INT"

    def streamReader(self, schema: Any) -> DataSourceStreamReader:
        return TrickleReader()


class TrickleReader(DataSourceStreamReader):
    """Has the next batch ready whenever it is asked."""

    def initialOffset(self) -> dict[str, Any]:
        return {"batch": 0}

    def latestOffset(self, start: Any = None, limit: Any = None) -> dict[str, Any]:
        return {"batch": start["batch"] + 1}

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        return [InputPartition(0), InputPartition(1)]

    def read(self, partition: InputPartition) -> Iterator[tuple[int]]:
        yield (partition.value,)


def session() -> SparkSession:
    os.environ["PYSPARK_PYTHON"] = sys.executable
    root = str(Path(__file__).parents[2])
    os.environ["PYTHONPATH"] = root
    spark = (
        SparkSession.builder.master("local[2]")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.driver.host", "127.0.0.1")
        .getOrCreate()
    )
    spark.sparkContext.setLogLevel("OFF")
    register(spark)
    spark.dataSource.register(Trickle)
    return spark


def messages(spark: SparkSession, count: int) -> DataFrame:
    """Keys, and payloads of about 100 bytes."""
    payload = f.concat(f.lit('{"n":'), f.col("id"), f.lit(',"text":"'), f.repeat(f.lit("x"), 80), f.lit('"}'))
    return spark.range(0, count, 1, 2).select(
        f.concat(f.lit("k"), f.col("id") % 1000).alias("key"), payload.alias("payload")
    )


class Bench:
    """One server, one Spark, and topics that are made anew for each round."""

    def __init__(self, server: EmbeddedRedis, spark: SparkSession) -> None:
        self._spark = spark
        self._url = server.url
        self._broker = Broker.connect(server.url)
        self._number = 0
        self._frame = messages(spark, ROWS).cache()
        self._frame.count()

    def _topic(self) -> str:
        self._number += 1
        name = f"bench-{self._number}"
        self._broker.create_topic(name, partitions=2)
        return name

    def rate(self, run: Callable[[str], None], source: str | None = None) -> float:
        """Rows a second, the median of some rounds after one that does not count."""
        rates: list[float] = []
        for _ in range(ROUNDS + 1):
            topic = source or self._topic()
            start = time.perf_counter()
            run(topic)
            rates.append(ROWS / (time.perf_counter() - start))
            if source is None:
                self._broker.admin.delete_topic(topic, force=True)
        found = statistics.median(rates[1:])
        print(f"{run.__name__}: {found:,.0f}/s", file=sys.stderr)
        return found

    def options(self, topic: str) -> dict[str, str]:
        return {"url": self._url, "topic": topic}

    # --- writing --------------------------------------------------------------------------------------------------

    def hand_in_spark(self, topic: str) -> None:
        self._frame.foreachPartition(ByHand(self._url, f"stream:topic:{topic}:p:0"))

    def hand_alone(self, topic: str) -> None:
        text = "x" * 80
        rows = ((f"k{n % 1000}", f'{{"n":{n},"text":"{text}"}}') for n in range(ROWS))
        ByHand(self._url, f"stream:topic:{topic}:p:0")(rows)

    def sink(self, topic: str) -> None:
        self._frame.foreachPartition(TopicSink(self._url, topic))

    def write(self, topic: str) -> None:
        self._frame.write.format("conquiet").options(**self.options(topic)).mode("append").save()

    # --- reading --------------------------------------------------------------------------------------------------

    def filled(self) -> str:
        topic = self._topic()
        self.write(topic)
        return topic

    def hand_read(self, topic: str) -> None:
        """One process, ranges of 5000 to Arrow."""
        with redis.Redis.from_url(self._url, protocol=2) as client:
            connection: Any = client.connection_pool.get_connection()
            for index in range(2):
                since = "-"
                while True:
                    stream = f"stream:topic:{topic}:p:{index}"
                    connection.send_command("XRANGE", stream, since, "+", "COUNT", 5_000)
                    rows = [(id, entry[1], entry[5]) for id, entry in connection.read_response(disable_decoding=True)]
                    if not rows:
                        break
                    ids, payloads, keys = zip(*rows, strict=True)
                    pa.record_batch([pa.array(ids), pa.array(payloads), pa.array(keys)], names=["id", "payload", "key"])
                    since = f"({ids[-1].decode()}"

    def read(self, topic: str) -> None:
        frame = self._spark.read.format("conquiet").options(**self.options(topic)).load()
        frame.write.format("noop").mode("append").save()

    def stream(self, topic: str) -> None:
        with tempfile.TemporaryDirectory() as directory:
            query = (
                self._spark.readStream.format("conquiet")
                .options(maxRowsPerBatch=str(BATCH), **self.options(topic))
                .load()
                .writeStream.format("noop")
                .option("checkpointLocation", directory)
                .trigger(availableNow=True)
                .start()
            )
            query.awaitTermination()

    def batch_time(self, source: str, **options: str) -> float:
        """The milliseconds that a batch takes with next to nothing in it, as Spark tells; the median."""
        with tempfile.TemporaryDirectory() as directory:
            frame = self._spark.readStream.format(source).options(**options).load()
            query = frame.writeStream.format("noop").option("checkpointLocation", directory).start()
            took: dict[int, float] = {}
            while len(took) < SMALL_BATCHES:
                time.sleep(0.2)
                for report in query.recentProgress:
                    if report["numInputRows"]:
                        took[report["batchId"]] = report["durationMs"]["triggerExecution"]
                if (failure := query.exception()) is not None:
                    raise failure
            query.stop()
            return statistics.median(list(took.values())[5:])

    def small_batches(self) -> tuple[float, float]:
        """Of a source that needs nothing, and of ours."""
        topic = self._topic()
        self._broker.send_batch(topic, [Outgoing(n) for n in range(2 * SMALL_BATCHES)])
        empty = self.batch_time("trickle")
        return empty, self.batch_time("conquiet", maxRowsPerBatch="2", **self.options(topic))

    # --- memory ---------------------------------------------------------------------------------------------------

    def memory(self) -> tuple[float, float]:
        """Megabytes that a worker grows by for each million rows, and that it has more than an idle one at the end."""
        topic = "memory"
        self._broker.create_topic(topic, partitions=2, retention=Retention(max_len=50_000))
        sizes: list[tuple[int, float]] = []
        frame = messages(self._spark, STEP)
        self._spark.range(0, 2, 1, 2).foreachPartition(idly)
        idle = largest_worker()
        for done in range(STEP, MEMORY_ROWS + 1, STEP):
            frame.foreachPartition(TopicSink(self._url, topic))
            sizes.append((done, largest_worker()))
        print(f"memory: {idle:.1f} idle, then {[round(size, 1) for _, size in sizes]}", file=sys.stderr)
        late = sizes[len(sizes) // 5 :]
        slope = statistics.linear_regression([done / 1e6 for done, _ in late], [size for _, size in late]).slope
        return slope, sizes[-1][1] - idle


def idly(rows: Iterable[Any]) -> None:
    """Take the rows, and do nothing."""
    for _ in rows:
        pass


def largest_worker() -> float:
    """The most memory that a worker of this Spark has, in megabytes."""
    sizes = [0.0]
    for process in workers(psutil.Process()):
        with suppress(psutil.NoSuchProcess):
            sizes.append(process.memory_info().rss / 1e6)
    return max(sizes)


async def run() -> Section:
    return await asyncio.to_thread(_run)


def _run() -> Section:
    spark = session()
    try:
        with EmbeddedRedis(unix_socket=False) as server:
            bench = Bench(server, spark)
            return _section(bench, f"{server.version}, PySpark {spark.version}")
    finally:
        spark.stop()


def _section(bench: Bench, server: str) -> Section:
    slope, above = bench.memory()  # before there are workers that have done anything else
    hand = bench.rate(bench.hand_in_spark)
    alone = bench.rate(bench.hand_alone)
    sink, write = bench.rate(bench.sink), bench.rate(bench.write)
    topic = bench.filled()
    hand_read = bench.rate(bench.hand_read, topic)
    read, stream = bench.rate(bench.read, topic), bench.rate(bench.stream, topic)
    empty, ours = bench.small_batches()
    in_spark, no_spark, by_hand = "pipeline in Spark", "pipeline, no Spark", "read by hand"
    rows = [
        _row(f"by hand: `redis-py` pipeline of {PIPELINE} in `foreachPartition`", hand),
        _row("by hand: the same without Spark, one process", alone),
        _row("`foreachPartition(TopicSink)`", sink, in_spark, hand, 1.4),
        _row("`foreachPartition(TopicSink)`", sink, no_spark, alone),
        _row("`write.format('conquiet')`", write, in_spark, hand, 2.2),
        _row("`write.format('conquiet')`", write, no_spark, alone),
        _row("by hand: `XRANGE` of 5000 to Arrow, no Spark, one process", hand_read),
        _row("`read.format('conquiet')`, 2 partitions", read, by_hand, hand_read, 0.9),
        _row("`read.format('conquiet')`, 2 partitions", read, in_spark, hand, 3.5),
        _row(f"`readStream`, `availableNow`, {BATCH:,} rows a batch", stream, "batch read", read, 0.25),
        _row(f"batches a second of a source that needs nothing ({empty:.0f} ms each)", 1000 / empty),
        _row(
            f"batches a second of `readStream` with two rows each ({ours:.0f} ms)",
            1000 / ours,
            "that",
            1000 / empty,
            0.83,
        ),
    ]
    note = (
        f"{ROWS:,} messages of about 100 bytes, `local[2]`, medians of {ROUNDS}. A worker that sends "
        f"{MEMORY_ROWS:,} rows to a topic with retention grows by {slope:.2f} MB a million rows (goal: 1), and ends "
        f"{above:.0f} MB above an idle one (goal: 40)."
    )
    return Section("spark", server, rows, note)


def _row(work: str, rate: float, base: str = "", other: float | None = None, goal: float | None = None) -> Row:
    return Row(work, rate, None, base, None if other is None else rate / other, goal)
