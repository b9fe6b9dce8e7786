"""Spark with a Redis Cluster and with Sentinels: a write, a read and a stream on each."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql import DataFrame, SparkSession

from conquiet.spark import TopicSink, register
from conquiet.sync import Broker
from tests.conftest import CLUSTERS
from tests.rigs.cluster import LocalCluster
from tests.rigs.sentinel import SERVICE, LocalSentinels
from tests.rigs.waiting import held
from tests.spark.conftest import Home

pytestmark = pytest.mark.timeout(600)

ROWS = 400


@pytest.fixture(scope="module")
def sentinels() -> Iterator[LocalSentinels]:
    with held(LocalSentinels(CLUSTERS[0].binary)) as found:
        yield found


@pytest.fixture(params=["cluster", "sentinels"])
def home(request: pytest.FixtureRequest) -> Iterator[Home]:
    if not CLUSTERS:
        pytest.skip("needs a server's binary")
    namespace = f"t{secrets.token_hex(4)}"
    if request.param == "cluster":
        with (
            held(LocalCluster(CLUSTERS[0].binary)) as cluster,
            Broker.connect(cluster.url, namespace=namespace) as broker,
        ):
            yield Home(cluster.url, broker, namespace, {"url": cluster.url, "namespace": namespace})
        return
    sentinels: LocalSentinels = request.getfixturevalue("sentinels")
    url = f"redis+sentinel://{','.join(f'{host}:{port}' for host, port in sentinels.seeds)}/{SERVICE}"
    with Broker.connect(url, namespace=namespace) as broker:
        yield Home(url, broker, namespace, {"url": url, "namespace": namespace})


def numbers(spark: SparkSession, home: Home, topic: str) -> list[int]:
    rows = spark.read.format("conquiet").options(**home.of(topic)).load().select("payload").collect()
    return sorted(int(row["payload"]) for row in rows)


def rows(spark: SparkSession, first: int = 0) -> DataFrame:
    return spark.range(first, first + ROWS, 1, 4).selectExpr(
        "CAST(id AS STRING) AS payload", "CAST(id % 7 AS STRING) AS key"
    )


def copying(spark: SparkSession, home: Home, place: Path) -> DataFrame:
    register(spark)
    return (
        spark.readStream.format("conquiet")
        .options(**home.of("in", maxRowsPerBatch=150, group="copying"))
        .load()
        .select("payload", "key")
        .writeStream.format("conquiet")
        .options(**home.of("out", checkpointLocation=place))
    )


def test_a_write_a_read_and_a_stream(spark: SparkSession, home: Home, tmp_path: Path) -> None:
    home.broker.create_topic("in", partitions=4)
    home.broker.create_topic("out", partitions=3)
    rows(spark).write.format("conquiet").options(**home.of("in")).mode("append").save()
    rows(spark, ROWS).foreachPartition(TopicSink(home.url, "in", namespace=home.namespace))
    assert numbers(spark, home, "in") == list(range(2 * ROWS))
    query = copying(spark, home, tmp_path).start()
    try:
        query.processAllAvailable()
        home.broker.admin.grow("in", 5)
        rows(spark, 2 * ROWS).write.format("conquiet").options(**home.of("in")).mode("append").save()
        query.processAllAvailable()
    finally:
        query.stop()
    assert numbers(spark, home, "out") == list(range(3 * ROWS))
    assert home.broker.admin.describe_group("in", "copying").owner == "spark"
