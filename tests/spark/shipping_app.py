"""A program for a Spark cluster that has to bring conquiet along: all that the package can do, on small topics.

It fills ``in`` by a sink, copies that to ``copy`` as a batch and to ``out`` as a stream; the topic grows meanwhile, and
as many rows again are added. It says where driver and tasks have found the package. Nothing of the tests is imported.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

import conquiet
from conquiet.spark import TopicSink, register
from conquiet.sync import Broker


def where(_: Iterable[int]) -> Iterator[str]:
    """Where a task finds the package."""
    import conquiet as theirs

    yield str(theirs.__file__)


def numbers(spark: SparkSession, first: int, count: int) -> DataFrame:
    """Rows with the numbers from ``first`` on."""
    return spark.range(first, first + count, 1, 4).select(
        f.concat(f.lit("k"), f.col("id") % 100).alias("key"),
        f.to_json(f.struct(f.col("id").alias("n"))).alias("payload"),
    )


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser()
    for name in ("--url", "--namespace", "--directory"):
        parser.add_argument(name, required=True)
    parser.add_argument("--rows", type=int, required=True)
    given = parser.parse_args()
    spark = SparkSession.builder.getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    register(spark)
    print("the driver has", conquiet.__file__, flush=True)
    print("a task has", spark.sparkContext.parallelize([0], 1).mapPartitions(where).first(), flush=True)
    options = {"url": given.url, "namespace": given.namespace}
    sink = TopicSink(given.url, "in", namespace=given.namespace)
    numbers(spark, 0, given.rows).foreachPartition(sink)
    topic = spark.read.format("conquiet").options(topic="in", **options).load()
    topic.select("payload", "key").write.format("conquiet").options(topic="copy", **options).mode("append").save()
    stream = (
        spark.readStream.format("conquiet")
        .options(topic="in", maxRowsPerBatch=str(given.rows // 4), group="copying", **options)
        .load()
        .select("payload", "key")
        .writeStream.format("conquiet")
        .options(topic="out", checkpointLocation=f"{given.directory}/checkpoint", **options)
    )
    query = stream.start()
    print("streaming", flush=True)
    with Broker.connect(given.url, namespace=given.namespace) as broker:
        broker.admin.grow("in", 5)
    numbers(spark, given.rows, given.rows).foreachPartition(sink)
    query.processAllAvailable()
    query.stop()
    spark.stop()
    print("done", flush=True)


if __name__ == "__main__":
    main()
