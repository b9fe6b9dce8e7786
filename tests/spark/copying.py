"""A program of Spark: fills a topic by ``foreachPartition``, then copies it to another as a stream; ends when it has.

Begun again after whatever end, it goes on from its checkpoint.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from pyspark.sql import SparkSession
from pyspark.sql import functions as f

from conquiet.spark import TopicSink, register


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser()
    for name in ("--url", "--namespace", "--directory"):
        parser.add_argument(name, required=True)
    parser.add_argument("--rows", type=int, required=True)
    parser.add_argument("--batches", type=int, required=True)
    given = parser.parse_args()
    os.environ["PYSPARK_PYTHON"] = sys.executable
    directory = Path(given.directory)
    spark = (
        SparkSession.builder.master("local[2,20]")
        .config("spark.ui.enabled", "false")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.ui.showConsoleProgress", "false")
        .getOrCreate()
    )
    spark.sparkContext.setLogLevel("OFF")
    register(spark)
    options = {"url": given.url, "namespace": given.namespace}
    filled = directory / "filled"
    if not filled.exists():
        rows = spark.range(0, given.rows, 1, 8).select(
            f.concat(f.lit("k"), f.col("id") % 100).alias("key"),
            f.to_json(f.struct(f.col("id").alias("n"))).alias("payload"),
        )
        rows.foreachPartition(TopicSink(given.url, "in", namespace=given.namespace))
        filled.touch()
    query = (
        spark.readStream.format("conquiet")
        .options(topic="in", maxRowsPerBatch=str(given.rows // given.batches), group="copying", **options)
        .load()
        .select("payload", "key")
        .writeStream.format("conquiet")
        .options(topic="out", checkpointLocation=str(directory / "checkpoint"), **options)
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    spark.stop()


if __name__ == "__main__":
    main()
