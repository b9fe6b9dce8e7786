"""The writer of record batches, called as Spark calls it, but without a Spark."""

from __future__ import annotations

import pickle
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.types import BinaryType, StringType, StructField, StructType

from conquiet.spark import TopicDataSource, Written
from conquiet.spark.cutting import Slice
from conquiet.spark.options import NAME, ReadOptions, WriteOptions
from conquiet.spark.reading import batch_slices, columns, read_slice
from conquiet.spark.sink import _outcome
from conquiet.spark.versions import arrow_schema
from tests.spark.conftest import Home
from tests.spark.looking import asked, entries, payloads

pytestmark = pytest.mark.any_server


def write(options: dict[str, str], schema: StructType, *tasks: list[Any]) -> None:
    """One write, whose tasks and end are in other processes than its beginning."""
    writer: Any = pickle.loads(pickle.dumps(TopicDataSource(options).writer(schema, overwrite=False)))
    messages = [pickle.loads(pickle.dumps(writer.write(iter(task)))) for task in tasks]
    pickle.loads(pickle.dumps(writer)).commit(messages)


def batches(home: Home, topic: str, **options: object) -> list[Any]:
    """What a read gives."""
    found = ReadOptions.of(home.of(topic, **options))
    parts: list[Slice] = batch_slices(found)
    return [batch for part in parts for batch in read_slice(found, columns(found.binary), part)]


@pytest.mark.parametrize("kind", ["text", "binary"])
def test_what_was_read_is_written_as_it_was(home: Home, kind: str) -> None:
    for topic in ("orders", "copy"):
        home.broker.create_topic(topic)
    home.broker.send("orders", {"n": 1}, key="k", headers={"a": 'b"', "c": ""})
    home.broker.send("orders", {"n": 2})
    home.broker.send("orders", 3, headers={"x": "y", "z": "ä"})
    write(home.of("copy"), columns(kind == "binary"), batches(home, "orders", payloadType=kind))
    copied, sent = entries(home, "copy"), entries(home, "orders")
    for entry in (*copied, *sent):
        del entry["timestamp"]
    assert copied == sent


def test_bytes_that_are_no_json_are_sent_as_they_are(home: Home) -> None:
    for topic in ("orders", "copy"):
        home.broker.create_topic(topic)
    every = bytes(range(256))
    schema = StructType([StructField("payload", BinaryType()), StructField("key", StringType())])
    batch = pa.RecordBatch.from_pylist([{"payload": every, "key": "k"}], schema=arrow_schema(schema))
    write(home.of("orders"), schema, [batch])
    write(home.of("copy"), columns(binary=True), batches(home, "orders", payloadType="binary"))
    assert [row["payload"] for batch in batches(home, "copy", payloadType="binary") for row in batch.to_pylist()] == [
        every
    ]


def test_a_write_leaves_its_totals_where_publish_finds_them(home: Home) -> None:
    home.broker.create_topic("orders", partitions=2)
    schema = StructType([StructField("payload", StringType())])
    rows = [{"payload": str(n)} for n in range(6)]
    task = [pa.RecordBatch.from_pylist(rows, schema=arrow_schema(schema))]
    place = WriteOptions.of(home.of("orders")).place
    plain = WriteOptions(place)
    assert plain.told()[NAME] == plain.write().name
    assert WriteOptions.of(plain.told()).write() == plain.write()
    assert _outcome(place, plain.write()) is None
    write(plain.told(), schema, task)
    assert _outcome(place, plain.write()) == Written(6, 0)
    keys = asked(home, "KEYS", f"{home.namespace}:*writ*")
    assert keys
    assert all(0 < asked(home, "PTTL", key) <= 3_600_000 for key in keys)
    named = WriteOptions(place, write_id="nightly", batch_id=4)
    for wanted in (Written(6, 0), Written(0, 6)):
        write(named.told(), schema, task)
        assert _outcome(place, named.write()) == wanted
    write({**home.of("orders"), "writeId": "nightly", "batchId": "5"}, schema)
    assert _outcome(place, named.write()) is None
    assert len(payloads(home, "orders", 2)) == 12
