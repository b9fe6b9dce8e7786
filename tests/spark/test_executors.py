"""Facades of conquiet.sync in the functions that Spark runs: each task is served, and no connection stays."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as f

from conquiet.sync import Broker, JobQueue, Outgoing, QueueConfig, RedisStore, RedisStreamsQueue
from tests.spark.conftest import Home
from tests.spark.looking import asked
from tests.sync.looking import Eye, looking, named, until

pytestmark = [pytest.mark.any_server, pytest.mark.timeout(600)]

TASKS = 12
ROWS = 240
SLOTS = 2
"""Tasks that run at the same time."""


@dataclass(frozen=True)
class Site:
    """A topic, a queue of jobs and a stream; their URL makes connections that can be counted."""

    home: Home
    url: str
    eye: Eye
    name: str

    @property
    def broker(self) -> Broker:
        return Broker.connect(self.url, namespace=self.home.namespace)

    @property
    def jobs(self) -> JobQueue:
        return JobQueue(RedisStore.connect(self.url), self.name)

    @property
    def stream(self) -> RedisStreamsQueue:
        return RedisStreamsQueue.connect(self.url, QueueConfig(self.name, "group", "consumer"))

    def sent(self) -> int:
        return sum(part.length for part in self.home.broker.admin.describe_topic("orders").by_partition)

    def connections(self) -> int:
        return len(self.eye.clients(self.name))


@pytest.fixture
def site(home: Home) -> Iterator[Site]:
    home.broker.create_topic("orders", partitions=2)
    name, url = named(home.url)
    with looking(home.url) as eye:
        yield Site(home, url, eye, name)


def frame(spark: SparkSession) -> DataFrame:
    return spark.range(0, ROWS, 1, TASKS)


def count_here(url: str, name: str) -> int:
    """How many connections of that name there are, asked from a task."""
    with looking(url) as eye:
        return len(eye.clients(name))


# --- with a block, as the documentation shows ------------------------------------------------------------------------


def test_each_kind_in_foreach_partition(spark: SparkSession, site: Site) -> None:
    url, namespace, name = site.url, site.home.namespace, site.name

    def send(rows: Iterable[Row]) -> None:
        numbers = [row["id"] for row in rows]
        with Broker.connect(url, namespace=namespace) as broker:
            broker.send_batch("orders", map(Outgoing, numbers))
        with RedisStore.connect(url) as store:
            JobQueue(store, name).enqueue_many(numbers)
        with RedisStreamsQueue.connect(url, QueueConfig(name, "group", "consumer")) as queue:
            queue.enqueue_many({"n": number} for number in numbers)

    frame(spark).foreachPartition(send)
    assert site.connections() == 0
    assert site.sent() == asked(site.home, "XLEN", name) == ROWS
    with RedisStore.connect(site.home.url) as store:
        assert sum(JobQueue(store, name).counts().values()) == ROWS


# --- closed over, and never closed -----------------------------------------------------------------------------------


def by_foreach_partition(spark: SparkSession, broker: Broker, count: Callable[[], int], place: Path) -> int:
    seen = spark.sparkContext.accumulator(0)

    def send(rows: Iterable[Row]) -> None:
        broker.send_batch("orders", [Outgoing(row["id"]) for row in rows])
        seen.add(count())

    frame(spark).foreachPartition(send)
    return seen.value // TASKS


def by_map_in_arrow(spark: SparkSession, broker: Broker, count: Callable[[], int], place: Path) -> int:
    import pyarrow as pa

    def send(batches: Iterable[Any]) -> Iterator[Any]:
        for batch in batches:
            broker.send_batch("orders", map(Outgoing, batch.column("id").to_pylist()))
            yield pa.RecordBatch.from_pydict({"seen": [count()]})

    rows = frame(spark).mapInArrow(send, "seen LONG").collect()
    return max(row["seen"] for row in rows)


def by_pandas_udf(spark: SparkSession, broker: Broker, count: Callable[[], int], place: Path) -> int:
    pd: Any = pytest.importorskip("pandas")

    def send(ids: Any) -> Any:
        broker.send_batch("orders", [Outgoing(int(id)) for id in ids])
        return pd.Series([count()] * len(ids))

    send.__annotations__ = {"ids": pd.Series, "return": pd.Series}
    udf: Any = f.pandas_udf(send, "long")  # type: ignore[call-overload]
    rows = frame(spark).select(udf("id").alias("seen")).collect()
    return max(row["seen"] for row in rows)


def by_foreach_batch(spark: SparkSession, broker: Broker, count: Callable[[], int], place: Path) -> int:
    source = place / "source"
    frame(spark).write.parquet(str(source))
    seen: list[int] = []

    def send(batch: DataFrame, number: int) -> None:
        own = Broker.__new__(Broker)  # as another process would get it
        own.__setstate__(broker.__getstate__())
        own.send_batch("orders", [Outgoing(row["id"]) for row in batch.collect()])
        seen.append(count())

    stream = spark.readStream.schema("id LONG").option("maxFilesPerTrigger", 3).parquet(str(source))
    writer = stream.writeStream.foreachBatch(send).option("checkpointLocation", str(place / "checkpoint"))
    writer.trigger(availableNow=True).start().awaitTermination()
    assert len(seen) >= 3
    return max(seen)


WAYS = {
    "foreachPartition": by_foreach_partition,
    "mapInArrow": by_map_in_arrow,
    "foreachBatch": by_foreach_batch,
    **({"pandas_udf": by_pandas_udf} if find_spec("pandas") else {}),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_facade_that_nobody_closes(spark: SparkSession, site: Site, tmp_path: Path, way: str) -> None:
    """Every task has one of its own, and as many connections stay open as tasks run, not as have run."""
    broker = site.broker
    seen = WAYS[way](spark, broker, partial(count_here, site.home.url, site.name), tmp_path)
    assert site.sent() == ROWS
    assert 1 <= seen <= 2 * SLOTS + 1
    del broker
    until(lambda: site.connections() == 0, "the end of all connections")


def add_and_leave(spark: SparkSession, site: Site) -> int:
    """Enqueue all rows; how many jobs there are."""
    jobs, stream = site.jobs, site.stream

    def add(rows: Iterable[Row]) -> None:
        numbers = [row["id"] for row in rows]
        jobs.enqueue_many(numbers)
        stream.enqueue_many({"n": number} for number in numbers)

    frame(spark).foreachPartition(add)
    return sum(jobs.counts().values())


def test_jobs_and_a_queue_that_nobody_closes(spark: SparkSession, site: Site) -> None:
    assert add_and_leave(spark, site) == ROWS
    assert asked(site.home, "XLEN", site.name) == ROWS
    until(lambda: site.connections() == 0, "the end of all connections")


def send_and_fail(spark: SparkSession, site: Site, word: str) -> None:
    broker = site.broker

    def fail(rows: Iterable[Row]) -> None:
        broker.send_batch("orders", [Outgoing(row["id"]) for row in rows])
        raise RuntimeError(word)

    with pytest.raises(Exception, match=word):
        frame(spark).foreachPartition(fail)


def test_a_task_that_fails_leaves_no_connection(spark: SparkSession, site: Site) -> None:
    send_and_fail(spark, site, secrets.token_hex(4))
    until(lambda: site.connections() == 0, "the end of all connections")
