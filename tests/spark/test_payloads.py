"""Payloads and columns through Spark: what is written is what ``to_json`` writes, and is read by ``from_json``."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import AnalysisException, PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import StructType

from conquiet.errors import ConfigError
from conquiet.spark import TopicSink, Written, parsed, publish
from tests.spark.conftest import Home
from tests.spark.looking import asked, entries, payloads

pytestmark = [pytest.mark.any_server, pytest.mark.timeout(180)]

EVERY = {
    "a_text": "'ä\"\\\\ \\n'",
    "a_float": "float(0.1)",
    "b_float": "float(1.1e-5)",
    "a_double": "double(1e22)",
    "b_double": "100D",
    "a_byte": "tinyint(-1)",
    "a_short": "smallint(2)",
    "an_int": "3",
    "a_long": "-9223372036854775808",
    "a_flag": "true",
    "a_decimal": "cast(1.10 as decimal(10, 2))",
    "b_decimal": "cast(0.0000001 as decimal(20, 10))",
    "a_day": "date'2024-02-29'",
    "a_time": "timestamp'2024-02-29 12:30:15.123'",
    "b_time": "timestamp'1900-01-01 00:00:00'",
    "local": "timestamp_ntz'2024-02-29 12:30:15.5'",
    "nothing": "cast(null as string)",
    "a_struct": "named_struct('a', cast(null as int), 'b', float(0.1), 'c', named_struct('d', cast(null as int)))",
    "a_list": "array(1, null)",
    "structs": "array(named_struct('a', cast(null as int)), null)",
    "a_map": "map('k', cast(null as int), 'j', 2)",
    "b_map": "map(1, named_struct('a', cast(null as int)))",
    "floats": "map('x', array(float(0.1), float(3.4028235e38)))",
    "empty": "array()",
    "no_map": "map()",
}


def load(spark: SparkSession, home: Home, topic: str = "orders", **options: object) -> DataFrame:
    return spark.read.format("conquiet").options(**home.of(topic, **options)).load()


def test_columns_are_written_as_to_json_writes_them(spark: SparkSession, home: Home) -> None:
    """Times apart, whose texts differ and are the same instants."""
    home.broker.create_topic("orders")
    frame = spark.range(1).selectExpr(*(f"{value} as {name}" for name, value in EVERY.items()))
    whole = F.struct(*(F.col(name) for name in EVERY))
    [by_spark] = frame.select(F.to_json(whole)).collect()[0]
    publish(frame, home.url, "orders", namespace=home.namespace)
    publish(frame.select(whole.alias("payload")), home.url, "orders", namespace=home.namespace)
    texts = [entry["payload"] for entry in entries(home, "orders")]
    assert len(texts) == 2
    assert texts[0] == texts[1]
    ours, spark_s = json.loads(texts[0]), json.loads(by_spark)
    assert list(ours) == list(spark_s)
    times = {"a_time", "b_time", "local"}
    for name in spark_s.keys() - times:
        assert ours[name] == spark_s[name], name
    read = parsed(load(spark, home), frame.select("a_time", "b_time", "local", "a_decimal").schema)
    assert (
        read.select("payload.*").distinct().collect()
        == frame.select("a_time", "b_time", "local", "a_decimal").collect()
    )


def test_rows_are_written_as_columns_are(spark: SparkSession, home: Home) -> None:
    """But for what a row does not tell: a FLOAT from a DOUBLE, a TIMESTAMP_NTZ from a TIMESTAMP."""
    for topic in ("rows", "columns"):
        home.broker.create_topic(topic)
    names = [name for name in EVERY if "float" not in name and name not in ("local", "a_struct", "b_time")]
    frame = spark.range(1).selectExpr(*(f"{EVERY[name]} as {name}" for name in names))
    frame.foreachPartition(TopicSink(home.url, "rows", namespace=home.namespace))
    frame.write.format("conquiet").options(**home.of("columns")).mode("append").save()
    [rows], [columns] = payloads(home, "rows"), payloads(home, "columns")
    assert list(rows) == list(columns)
    assert rows == columns


def test_payloads_are_parsed_by_spark(spark: SparkSession, home: Home) -> None:
    home.broker.create_topic("orders")
    for payload in ({"n": 1, "more": 2}, {"n": "one"}, [1], {}):
        home.broker.send("orders", payload)
    frame = load(spark, home)
    struct = StructType.fromDDL("n INT, s STRING")
    assert isinstance(struct, StructType)
    for schema in ("n INT, s STRING", struct):
        found = parsed(frame, schema)
        assert found.columns == [*frame.columns, "_corrupt"]
        assert found.schema["payload"].dataType.simpleString() == "struct<n:int,s:string>"
        rows = found.orderBy("id").select("payload.*", "_corrupt").collect()
        assert [tuple(row) for row in rows] == [
            (1, None, None),
            (None, None, '{"n":"one"}'),
            (None, None, "[1]"),
            (None, None, None),
        ]
    assert parsed(frame, "n INT").where("_corrupt IS NULL").select("payload.n").count() == 2
    binary = parsed(load(spark, home, payloadType="binary"), "n INT")
    assert binary.where("payload.n = 1").count() == 1
    for wrong in ("_corrupt STRING", "INT"):
        with pytest.raises(ConfigError, match="schema"):
            parsed(frame, wrong)
    with pytest.raises(ConfigError, match="there is no column 'payload', only id"):
        parsed(frame.select("id"), "n INT")


def test_a_schema_of_the_reader_is_refused_at_planning(spark: SparkSession, home: Home, tmp_path: Path) -> None:
    home.broker.create_topic("orders")
    with pytest.raises(AnalysisException, match=r"no option 'schema': conquiet\.spark\.parsed"):
        load(spark, home, schema="n INT")
    with pytest.raises(AnalysisException, match=r"conquiet\.spark\.parsed\(frame, schema\)"):
        spark.read.format("conquiet").schema("n INT").options(**home.of("orders")).load().count()
    stream = spark.readStream.format("conquiet").schema("n INT").options(**home.of("orders")).load()
    query = stream.writeStream.format("noop").option("checkpointLocation", str(tmp_path)).start()
    with pytest.raises(PySparkException, match=r"conquiet\.spark\.parsed\(frame, schema\)"):
        query.awaitTermination()


def test_a_table_is_made_and_read(spark: SparkSession, home: Home) -> None:
    """Spark hands its own options on when a table is made; what it does not hand on to a query is given again."""
    home.broker.create_topic("orders")
    home.broker.send("orders", {"n": 1})
    given = ", ".join(f"{name} '{value}'" for name, value in home.of("orders").items())
    again = ", ".join(f"{name} = '{value}'" for name, value in home.of("orders").items())
    spark.sql(f"CREATE TABLE {home.namespace} USING conquiet OPTIONS ({given})")
    try:
        found = spark.sql(f"SELECT payload FROM {home.namespace} WITH ({again})")
        assert [row.payload for row in found.collect()] == ['{"n":1}']
        with pytest.raises(AnalysisException, match="'url' is missing; Spark hands the options of a table to CREATE"):
            spark.sql(f"SELECT * FROM {home.namespace}").collect()
    finally:
        spark.sql(f"DROP TABLE {home.namespace}")
    spark.sql(f"CREATE TEMPORARY VIEW {home.namespace} USING conquiet OPTIONS ({given})")
    assert spark.table(home.namespace).count() == 1


def test_what_was_read_can_be_written(spark: SparkSession, home: Home) -> None:
    for topic in ("orders", "copy", "bytes"):
        home.broker.create_topic(topic)
    home.broker.send("orders", {"n": 1}, key="k", headers={"a": 'b"', "c": ""})
    home.broker.send("orders", {"n": 2})
    asked(home, "XADD", f"{home.namespace}:stream:topic:orders:p:0", "*", "payload", "3", "headers", '{"x":"y"}')
    assert publish(load(spark, home), home.url, "copy", namespace=home.namespace) == Written(3, 0)
    binary = load(spark, home, payloadType="binary")
    assert publish(binary, home.url, "bytes", namespace=home.namespace) == Written(3, 0)

    def told(topic: str) -> list[Any]:
        found = entries(home, topic)
        return [(entry["payload"], entry.get("key"), json.loads(entry.get("headers", "null"))) for entry in found]

    assert told("copy") == told("bytes") == told("orders")


def test_batches_of_foreach_batch_are_exact(spark: SparkSession, home: Home, tmp_path: Path) -> None:
    """One that is repeated, as after a kill, writes nothing twice; with other rows than before it says so in counts."""
    home.broker.create_topic("orders", partitions=2)
    for topic in ("published", "sunk"):
        home.broker.create_topic(topic, partitions=2)
    for n in range(40):
        home.broker.send("orders", {"n": n}, key=f"k{n % 3}")
    told: list[Any] = []

    def write(batch: DataFrame, number: int) -> None:
        terms: dict[str, Any] = {"key": "key", "namespace": home.namespace, "write_id": "sums", "batch_id": number}
        rows = batch.select("payload", "key")
        rows.foreachPartition(TopicSink(home.url, "sunk", **terms))
        told.append(publish(rows, home.url, "published", **terms))
        if len(told) == 1:
            raise RuntimeError("killed after all of it was written")

    def run() -> None:
        stream = spark.readStream.format("conquiet").options(**home.of("orders", maxOffsetsPerTrigger=30)).load()
        writer = stream.writeStream.foreachBatch(write).option("checkpointLocation", str(tmp_path))
        writer.trigger(availableNow=True).start().awaitTermination()

    with pytest.raises(PySparkException, match="killed after all of it"):
        run()
    run()
    first = told[0].rows
    assert told[:2] == [Written(first, 0), Written(0, first)]
    assert sum(one.rows for one in told) == 40
    for topic in ("published", "sunk"):
        assert Counter(payload["n"] for payload in payloads(home, topic, 2)) == Counter(range(40))
