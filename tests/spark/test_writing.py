"""Writes through ``format("conquiet")``, in batches and streams: what is repeated is there once."""

from __future__ import annotations

import json
import os
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming.query import StreamingQuery

from tests.spark.conftest import Home
from tests.spark.looking import asked, entries, payloads

pytestmark = [pytest.mark.any_server, pytest.mark.timeout(180)]


def write(frame: DataFrame, home: Home, topic: str = "orders", **more: object) -> None:
    frame.write.format("conquiet").options(**home.of(topic, **more)).mode("append").save()


def ids(home: Home, topic: str, partitions: int) -> Counter[int]:
    return Counter(payload["id"] for payload in payloads(home, topic, partitions))


def remembered(home: Home) -> list[int]:
    """For how long what was written will be known yet."""
    return [asked(home, "PTTL", key) for key in asked(home, "KEYS", f"{home.namespace}:*written*")]


# --- batches ----------------------------------------------------------------------------------------------


def test_a_frame_is_appended(spark: SparkSession, home: Home) -> None:
    home.broker.create_topic("orders", partitions=3)
    frame = spark.range(0, 6_000, 1, 2).selectExpr(
        "concat('c', id % 11) as customer",
        "id",
        "cast(id / 4 as decimal(10, 2)) as price",
        "timestamp'2024-02-29 12:30:15.5' as at",
        "timestamp_ntz'2024-02-29 12:30:15' as local",
        "array(named_struct('local', timestamp_ntz'2024-01-01 00:00:00', 'n', 1)) as lines",
        "map('trace', 't1') as meta",
    )
    write(frame, home, key="customer", headers="meta")
    by_key: defaultdict[str, list[int]] = defaultdict(list)
    for partition in range(3):
        for entry in entries(home, "orders", partition):
            assert entry["headers"] == '{"trace":"t1"}'
            by_key[entry["key"]].append(json.loads(entry["payload"])["id"])
    assert {key: sorted(found) for key, found in by_key.items()} == {
        f"c{k}": list(range(k, 6_000, 11)) for k in range(11)
    }
    for found in by_key.values():
        assert [n for n in found if n < 3_000] == sorted(n for n in found if n < 3_000)
        assert [n for n in found if n >= 3_000] == sorted(n for n in found if n >= 3_000)
    [second] = [payload for payload in payloads(home, "orders", 3) if payload["id"] == 1]
    assert second == {
        "customer": "c1",
        "id": 1,
        "price": 0.25,
        "at": "2024-02-29T12:30:15.500000Z",
        "local": "2024-02-29T12:30:15",
        "lines": [{"local": "2024-01-01T00:00:00", "n": 1}],
    }
    # A write without a name cannot be repeated, and is not remembered for long; nor is it taken for another.
    assert all(0 < ms <= 3_600_000 for ms in remembered(home))
    write(frame.where("id < 10").select("customer", "id"), home, key="customer")
    assert len(payloads(home, "orders", 3)) == 6_010


def test_a_write_with_a_name_is_there_once(spark: SparkSession, home: Home) -> None:
    home.broker.create_topic("orders", partitions=2)
    frame = spark.range(0, 1_500, 1, 2).selectExpr("id as key", "concat('{\"id\":', id, '}') as payload")
    for _ in range(2):
        write(frame, home, writeId="nightly", batchId=3)
    assert ids(home, "orders", 2) == Counter(range(1_500))
    write(frame.where("id < 20"), home, writeId="nightly", batchId=4)
    assert sum(ids(home, "orders", 2).values()) == 1_520
    with pytest.raises(PySparkException) as caught:
        write(frame.coalesce(1), home, writeId="nightly", batchId=3)
    text = "batch 3 of the write 'nightly' to topic 'orders' cannot be repeated: batch 4 has begun since"
    assert text in str(caught.value)
    assert len(str(caught.value)) < 600  # the driver has seen it, before any task
    assert sum(ids(home, "orders", 2).values()) == 1_520


def test_ids_are_there_once_in_any_order(spark: SparkSession, home: Home) -> None:
    home.broker.create_topic("orders", partitions=2)
    frame = spark.range(0, 1_500, 1, 2).selectExpr("id", "id % 3 as customer")
    write(frame.where("id < 700"), home, key="customer", idColumn="id", writeId="nightly")
    write(
        frame.repartition(3, "id").sortWithinPartitions(F.desc("id")),
        home,
        key="customer",
        idColumn="id",
        writeId="nightly",
    )
    assert ids(home, "orders", 2) == Counter(range(1_500))


def test_a_topic_is_only_appended_to(spark: SparkSession, home: Home) -> None:
    home.broker.create_topic("orders", partitions=1)
    with pytest.raises(PySparkException) as caught:
        spark.range(1).write.format("conquiet").options(**home.of("orders")).mode("overwrite").save()
    assert "a topic can only be appended to: mode('append')" in str(caught.value)
    assert len(str(caught.value)) < 600
    assert payloads(home, "orders") == []


# --- streams ----------------------------------------------------------------------------------------------


class Flow:
    """A query from files to a topic, one file a batch, which can be made to repeat its last batch."""

    def __init__(self, spark: SparkSession, home: Home, target: str, folder: Path, *, mix: bool, by_id: bool) -> None:
        self._spark, self._home, self._mix = spark, home, mix
        self._source = folder / "source"
        self._checkpoint = folder / target
        self.target = target
        self._options: dict[str, Any] = {"key": "customer", "payload": "body"}
        if by_id:
            self._options["idColumn"] = "id"

    def start(self) -> StreamingQuery:
        reader = self._spark.readStream.schema("id LONG, customer STRING").option("maxFilesPerTrigger", 1)
        frame = reader.json(str(self._source)).withColumn("body", F.struct("id"))
        if self._mix:
            frame = frame.withColumn("dice", F.rand()).repartition(2, "dice").drop("dice")
        writer = frame.writeStream.format("conquiet").options(**self._home.of(self.target, **self._options))
        return writer.option("checkpointLocation", str(self._checkpoint)).trigger(availableNow=True).start()

    def lose_the_last_commit(self) -> int:
        """As if the driver had died between the end of the last batch's tasks and its commit."""
        commits = self._checkpoint / "commits"
        last = max(int(file.name) for file in commits.iterdir() if file.name.isdigit())
        (commits / str(last)).unlink()
        (commits / f".{last}.crc").unlink(missing_ok=True)
        return last

    def run(self) -> list[int]:
        """Run it to its end; the batches that it has run."""
        query = self.start()
        assert query.awaitTermination(120)
        return [about["batchId"] for about in query.recentProgress if about["numInputRows"]]


def bring(folder: Path, batch: int, numbers: range) -> None:
    """A file that will be the batch of that number."""
    file = folder / "source" / f"{batch}.json"
    file.parent.mkdir(exist_ok=True)
    file.write_text("".join(json.dumps({"id": n, "customer": f"c{n % 7}"}) + "\n" for n in numbers))
    os.utime(file, (1_700_000_000 + batch, 1_700_000_000 + batch))


def test_a_batch_that_is_repeated_adds_nothing_twice(spark: SparkSession, home: Home, tmp_path: Path) -> None:
    bring(tmp_path, 0, range(700))
    bring(tmp_path, 1, range(700, 2_000))
    flows = []
    for target, mix, by_id in (("same", False, False), ("by-id", True, True), ("at-least", True, False)):
        home.broker.create_topic(target, partitions=2)
        flow = Flow(spark, home, target, tmp_path, mix=mix, by_id=by_id)
        assert flow.run() == [0, 1]
        assert ids(home, target, 2) == Counter(range(2_000))
        assert flow.lose_the_last_commit() == 1
        flows.append(flow)
    bring(tmp_path, 2, range(2_000, 2_100))
    for flow in flows:
        assert flow.run() == [1, 2]
    same, known, at_least = (ids(home, flow.target, 2) for flow in flows)
    assert same == Counter(range(2_100))
    assert known == Counter(range(2_100))
    assert set(at_least) == set(range(2_100))
    assert sum(at_least.values()) > 2_100  # so the rows did come in another order
    by_key: defaultdict[str, list[int]] = defaultdict(list)
    for partition in (0, 1):
        for entry in entries(home, "same", partition):
            by_key[entry["key"]].append(json.loads(entry["payload"])["id"])
    assert by_key == {f"c{k}": list(range(k, 2_100, 7)) for k in range(7)}
