"""A program of Spark whose sinks outlive a SparkContext: the same rows are sent in two of them."""

from __future__ import annotations

import argparse
import os
import sys

from pyspark import SparkConf, SparkContext
from pyspark.sql import Row

from conquiet.spark import TopicSink


def main() -> None:
    """Run it; print what each sink has written."""
    parser = argparse.ArgumentParser()
    for name in ("--url", "--namespace"):
        parser.add_argument(name, required=True)
    given = parser.parse_args()
    os.environ["PYSPARK_PYTHON"] = sys.executable
    conf = SparkConf().setMaster("local[1]").setAppName("sessions").set("spark.ui.enabled", "false")
    conf.set("spark.driver.host", "127.0.0.1")
    sinks: list[TopicSink] = []
    for balance in (1, 2):
        with SparkContext(conf=conf) as context:  # without SQL, which takes seconds to start
            context.setLogLevel("OFF")
            if not sinks:
                sinks.append(TopicSink(given.url, "plain", namespace=given.namespace))
                sinks.append(TopicSink(given.url, "by-id", id_column="id", namespace=given.namespace))
            context.parallelize([Row(id=n) for n in range(10)], 1).foreachPartition(sinks[0])
            context.parallelize([Row(id=n, balance=balance) for n in range(10)], 1).foreachPartition(sinks[1])
    print([(sink.written.rows, sink.written.repeated) for sink in sinks])


if __name__ == "__main__":
    main()
