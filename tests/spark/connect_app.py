"""A client of Spark Connect: writes to a topic, reads it and copies it as a stream. It has no JVM."""

from __future__ import annotations

import argparse
from typing import Any

from pyspark.sql import SparkSession

from conquiet.spark import register


def main() -> None:
    """Run it; print how many rows it has read."""
    parser = argparse.ArgumentParser()
    for name in ("--remote", "--url", "--namespace", "--directory"):
        parser.add_argument(name, required=True)
    parser.add_argument("--rows", type=int, required=True)
    given = parser.parse_args()
    builder: Any = SparkSession.builder
    spark: SparkSession = builder.remote(given.remote).getOrCreate()
    register(spark)
    options = {"url": given.url, "namespace": given.namespace}
    rows = spark.range(0, given.rows, 1, 4).selectExpr(
        "to_json(struct(id AS n)) AS payload", "CAST(id AS STRING) AS key"
    )
    rows.write.format("conquiet").options(topic="in", **options).mode("append").save()
    topic = spark.read.format("conquiet").options(topic="in", **options).load()
    print("read", topic.count(), topic.select("id", "partition").distinct().count(), flush=True)
    query = (
        spark.readStream.format("conquiet")
        .options(topic="in", maxRowsPerBatch=str(given.rows // 3), **options)
        .load()
        .select("payload", "key")
        .writeStream.format("conquiet")
        .options(topic="out", checkpointLocation=f"{given.directory}/checkpoint", **options)
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    progress = query.lastProgress
    assert progress is not None
    print("streamed", progress["sources"][0]["endOffset"], flush=True)
    spark.stop()


if __name__ == "__main__":
    main()
