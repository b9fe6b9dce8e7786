"""Bounded reads: which entries are read, what becomes of each, and what Spark makes of them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import pytest
from pyspark.errors import AnalysisException
from pyspark.sql import DataFrame, SparkSession

from conquiet.errors import ConfigError, UnknownTopicError
from conquiet.kit.entry_ids import order as id_order
from conquiet.spark import TopicDataSource
from conquiet.spark.options import ReadOptions
from conquiet.spark.reading import batch_slices, columns
from tests.spark.conftest import Home
from tests.spark.planning import fill, read_all, stream_of, values
from tests.sync.looking import looking

LAST = (1 << 64) - 1


@contextmanager
def adding(home: Home, topic: str = "orders", partition: int = 0) -> Iterator[Any]:
    """Appends entries as anybody could: an ID, and then names and values."""
    with looking(home.url) as eye:
        yield lambda id, *words: eye.ask("XADD", stream_of(home, topic, partition), id, *words)


def headers_of(row: dict[str, Any]) -> dict[str, str] | None:
    return None if row["headers"] is None else dict(row["headers"])


def frame(spark: SparkSession, home: Home, topic: str = "orders", **options: object) -> DataFrame:
    return spark.read.format("conquiet").options(**home.of(topic, **options)).load()


# --- which entries -------------------------------------------------------------------------------------------------


@pytest.mark.cluster_too
def test_all_that_is_there(home: Home) -> None:
    home.broker.create_topic("orders", partitions=3)
    assert read_all(home, "orders") == []
    ids = fill(home.broker, "orders", 0, 1, 2) + fill(home.broker, "orders", 3, 4, partition=2)
    rows = read_all(home, "orders")
    assert values(rows) == [0, 1, 2, 3, 4]
    assert [(row["id"], row["partition"]) for row in rows] == [(id, 0 if at < 3 else 2) for at, id in enumerate(ids)]


def test_what_comes_after_planning_is_not_read(home: Home) -> None:
    home.broker.create_topic("orders")
    ids = fill(home.broker, "orders", 0, 1)
    [part] = batch_slices(ReadOptions.of(home.of("orders")))
    assert part.until == ids[-1]


@pytest.mark.any_server
def test_ranges_of_ids(home: Home) -> None:
    home.broker.create_topic("orders", partitions=2)
    for partition in range(2):
        with adding(home, partition=partition) as add:
            for ms, seq in ((100, 0), (100, 1), (200, 0), (200, 7), (300, 0)):
                add(f"{ms}-{seq}", "payload", ms + seq)

    def both(*numbers: int) -> list[int]:
        return [*numbers, *numbers]

    found = {
        "all": read_all(home, "orders"),
        "from": read_all(home, "orders", startId="200-0"),
        "from a millisecond": read_all(home, "orders", startId="200"),
        "from between": read_all(home, "orders", startId="100-5"),
        "to": read_all(home, "orders", endId="200-0"),
        "to a millisecond": read_all(home, "orders", endId="200"),
        "both": read_all(home, "orders", startId="100-1", endId="200-6"),
        "one": read_all(home, "orders", startId="200-7", endId="200-7"),
        "behind": read_all(home, "orders", startId="300-1"),
        "before": read_all(home, "orders", endId="99"),
        "the wrong way round": read_all(home, "orders", startId="300-0", endId="100-0"),
        "beyond": read_all(home, "orders", startId="0", endId=f"{LAST}-{LAST}"),
        "from when": read_all(home, "orders", startTime="200"),
        "before when": read_all(home, "orders", endTime="200"),
        "when": read_all(home, "orders", startTime="1970-01-01T00:00:00.2Z", endTime="1970-01-01T00:00:00.201Z"),
        "long after": read_all(home, "orders", startTime="9" * 30),
        "after": read_all(home, "orders", startingOffsets='{"0": "200-0", "1": "300-0"}'),
        "after some": read_all(home, "orders", startingOffsets='{"1": "200-7"}'),
        "after some to": read_all(home, "orders", startingOffsets='{"1": "200-0"}', endId="200"),
        "latest": read_all(home, "orders", startingOffsets="latest"),
    }
    whole = (100, 101, 200, 207, 300)
    assert {what: values(rows) for what, rows in found.items()} == {
        "all": both(*whole),
        "from": both(200, 207, 300),
        "from a millisecond": both(200, 207, 300),
        "from between": both(200, 207, 300),
        "to": both(100, 101, 200),
        "to a millisecond": both(100, 101, 200, 207),
        "both": both(101, 200),
        "one": both(207),
        "behind": [],
        "before": [],
        "the wrong way round": [],
        "beyond": both(*whole),
        "from when": both(200, 207, 300),
        "before when": both(100, 101),
        "when": both(200, 207),
        "long after": [],
        "after": [207, 300],
        "after some": [*whole, 300],
        "after some to": [100, 101, 200, 207, 207],
        "latest": [],
    }


@pytest.mark.any_server
@pytest.mark.parametrize("splits", [1, 2, 3, 7, 1_000])
def test_splits_are_disjoint_and_give_the_same(home: Home, splits: int) -> None:
    home.broker.create_topic("orders", partitions=2)
    with adding(home) as add:
        for number in range(40):
            add(f"{1_000 + number // 5}-{number % 5}", "payload", number)  # several a millisecond
    with adding(home, partition=1) as add:
        add("5-0", "payload", 40)
        add("900000-0", "payload", 41)
    options = ReadOptions.of(home.of("orders", splits=splits))
    slices = batch_slices(options)
    assert max(len([part for part in slices if part.partition == partition]) for partition in (0, 1)) <= splits
    assert len(slices) >= min(splits, 8)
    for partition in (0, 1):
        mine = [part for part in slices if part.partition == partition]
        for one, other in pairwise(mine):
            assert one.until == other.since
            assert id_order(one.since) < id_order(one.until)
    rows = read_all(home, "orders", splits=splits)
    assert values(rows) == list(range(42))
    assert values(read_all(home, "orders", splits=splits, startId="1002-3", endId="1005-1")) == list(range(13, 27))


@pytest.mark.any_server
@pytest.mark.parametrize("size", [1, 3, 10, 11, 100_000])
def test_pages_of_any_size(home: Home, size: int) -> None:
    home.broker.create_topic("orders")
    fill(home.broker, "orders", *range(11))
    assert values(read_all(home, "orders", pageSize=size)) == list(range(11))


@pytest.mark.any_server
def test_large_entries(home: Home) -> None:
    home.broker.create_topic("orders")
    texts = [str(number) * (3 << 20) for number in range(4)]
    for text in texts:
        home.broker.send("orders", text)
    assert [json.loads(row["payload"]) for row in read_all(home, "orders", pageSize=3)] == texts


@pytest.mark.any_server
def test_what_cannot_be_read(home: Home) -> None:
    with pytest.raises(UnknownTopicError):
        read_all(home, "orders")
    home.broker.create_topic("orders")
    with pytest.raises(ConfigError, match="partition 1, but topic 'orders' has the partitions 0 to 0"):
        read_all(home, "orders", startingOffsets='{"1": "5-0"}')


# --- what becomes of an entry --------------------------------------------------------------------------------------


@pytest.mark.any_server
def test_entries_that_others_wrote(home: Home) -> None:
    """One that is strange neither fails the read nor changes the rows beside it."""
    home.broker.create_topic("orders")
    with adding(home) as add:
        add("1-0", "payload", "{}", "timestamp", "5000", "key", "k")
        add("2-0", "key", "k", "payload", "[1]", "timestamp", "6000", "headers", '{"a": "b"}')
        add("3-0", "something", "else")
        add("4-0", "data", '{"legacy": 1}')
        add("5-0", "payload", b"\xff\xfe", "timestamp", "7000", "key", b"\xe9")
        add("6-0", "payload", "x", "timestamp", "9" * 30, "headers", "no JSON")
        add("7-0", "payload", "x", "timestamp", "soon", "headers", "[1]")
        add("8-0", "payload", "x", "timestamp", "300000000000000", "headers", '{"n": 1, "o": {"p": [true]}, "q": null}')
        add("9-0", "payload", "", "timestamp", "-1", "key", "", "headers", "{}")
        add("10-0", "data", "1", "data", "2", "payload", "3")
        add(f"{LAST}-1", "payload", "x", "timestamp", str(LAST))
    rows = read_all(home, "orders", pageSize=4)
    found = [(row["payload"], row["key"], headers_of(row)) for row in rows]
    assert found == [
        ("{}", "k", None),
        ("[1]", "k", {"a": "b"}),
        (None, None, None),
        ('{"legacy": 1}', None, None),
        ("\ufffd\ufffd", "\ufffd", None),
        ("x", None, None),
        ("x", None, None),
        ("x", None, {"n": "1", "o": '{"p":[true]}', "q": None}),
        ("", "", {}),
        ("3", None, None),
        ("x", None, None),
    ]
    times = [row["timestamp"] and round(row["timestamp"].timestamp() * 1000) for row in rows]
    assert times == [5000, 6000, 3, 4, 7000, 6, 7, 8, 9, 10, None]
    assert [row["id"] for row in rows] == [*(f"{number}-0" for number in range(1, 11)), f"{LAST}-1"]


@pytest.mark.any_server
def test_copies_for_one_group_are_for_no_other(home: Home) -> None:
    home.broker.create_topic("orders")
    with adding(home) as add:
        add("1-0", "payload", "1")
        add("2-0", "payload", "2", "timestamp", "5", "onlyGroup", "billing")
        add("3-0", "payload", "3", "timestamp", "5", "replayedFrom", "0/1-0")
    assert values(read_all(home, "orders")) == [1, 3]


@pytest.mark.any_server
def test_a_page_of_nothing_but_copies(home: Home) -> None:
    home.broker.create_topic("orders")
    with adding(home) as add:
        for number in range(1, 6):
            add(f"{number}-0", "payload", number, "onlyGroup", "billing")
        add("9-0", "payload", "9")
    assert values(read_all(home, "orders", pageSize=2)) == [9]
    assert read_all(home, "orders", pageSize=2, schema="a INT", endId="5") == []


@pytest.mark.any_server
def test_a_legacy_stream(home: Home) -> None:
    with looking(home.url) as eye:
        for number in range(3):
            eye.ask("XADD", f"{home.namespace}:old", f"{number + 1}-0", "data", json.dumps({"n": number}))
    rows = read_all(home, "old")
    assert [(row["payload"], row["topic"], row["partition"]) for row in rows] == [
        (f'{{"n": {number}}}', "old", 0) for number in range(3)
    ]


# --- in Spark ------------------------------------------------------------------------------------------------------


@pytest.mark.any_server
@pytest.mark.timeout(180)
def test_the_columns_of_a_dataframe(spark: SparkSession, home: Home) -> None:
    home.broker.create_topic("orders", partitions=2)
    home.broker.create_topic("empty")
    with adding(home) as add:
        add("1700000000000-0", "payload", '{"n": 1}', "timestamp", "1700000000123", "key", "ann")
        add("1700000000001-0", "payload", '{"n": "one"}', "timestamp", "1700000000124", "headers", '{"a": "b"}')
    with adding(home, partition=1) as add:
        add("1700000000002-0", "something", "else")
    plain = frame(spark, home, splits=2)
    assert plain.dtypes == [
        ("payload", "string"),
        ("key", "string"),
        ("headers", "map<string,string>"),
        ("topic", "string"),
        ("partition", "int"),
        ("id", "string"),
        ("timestamp", "timestamp"),
    ]
    rows = plain.selectExpr("*", "unix_millis(timestamp) AS ms").drop("timestamp").orderBy("id").collect()
    assert [tuple(row) for row in rows] == [
        ('{"n": 1}', "ann", None, "orders", 0, "1700000000000-0", 1_700_000_000_123),
        ('{"n": "one"}', None, {"a": "b"}, "orders", 0, "1700000000001-0", 1_700_000_000_124),
        (None, None, None, "orders", 1, "1700000000002-0", 1_700_000_000_002),
    ]
    parsed = frame(spark, home, schema="n INT").selectExpr("payload.n", "payload IS NULL", "_corrupt", "id")
    assert [tuple(row)[:3] for row in parsed.orderBy("id").collect()] == [
        (1, False, None),
        (None, False, '{"n": "one"}'),
        (None, True, None),
    ]
    assert frame(spark, home, "empty").count() == 0


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"group": "g"}, "group is for streams"),
        ({"maxRowsPerBatch": "5"}, "maxRowsPerBatch is for streams"),
        ({"strtId": "5"}, "did you mean 'startId'"),
    ],
)
def test_what_is_no_bounded_read(options: dict[str, str], text: str) -> None:
    source = TopicDataSource({"url": "redis://localhost", "topic": "orders", **options})
    with pytest.raises(ConfigError, match=text):
        source.reader(columns())


@pytest.mark.parametrize(
    ("options", "text"),
    [({"endId": "5"}, "a stream has no end"), ({"deadLetters": "true"}, "dead letters are read in")],
)
def test_what_is_no_stream(options: dict[str, str], text: str) -> None:
    source = TopicDataSource({"url": "redis://localhost", "topic": "orders", **options})
    with pytest.raises(ConfigError, match=text):
        source.streamReader(columns())


@pytest.mark.any_server
@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"topic": "nowhere"}, "UnknownTopicError: there is no topic 'nowhere'"),
        ({"topic": "orders", "schema": "a WHATEVER"}, "ConfigError: schema: expected a type"),
    ],
)
def test_what_the_user_is_told(spark: SparkSession, home: Home, options: dict[str, str], text: str) -> None:
    home.broker.create_topic("orders")
    with pytest.raises(AnalysisException, match=text):
        spark.read.format("conquiet").options(**home.options, **options).load().count()
