"""Rows of any DataFrame into a topic: whole, in order, and none twice when tasks are tried again."""

from __future__ import annotations

import json
import os
import pickle
import random
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
from pyspark import TaskContext
from pyspark.cloudpickle import dumps as cloudpickled
from pyspark.sql import Row, SparkSession
from pyspark.sql import functions as F
from redis import Redis

from conquiet.errors import ConfigError
from conquiet.spark import TopicSink, Written, publish
from conquiet.spark.options import Place
from conquiet.spark.rows import Columns, Layout
from conquiet.spark.writing import write_rows
from conquiet.topics.produce.once import Appended, Write
from tests.spark.conftest import ROOT, Home
from tests.spark.looking import asked, entries, payloads, stream
from tests.sync.looking import until

pytestmark = [pytest.mark.any_server, pytest.mark.timeout(180)]


def sink(home: Home, topic: str = "orders", **more: Any) -> TopicSink:
    return TopicSink(home.url, topic, namespace=home.namespace, **more)


# --- without a Spark: a sink is a function of rows --------------------------------------------------------


def test_a_payload_is_a_text_a_struct_or_all_columns(home: Home) -> None:
    home.broker.create_topic("orders", partitions=1)
    sink(home)([Row(payload='{"n": 1.50}', key="a", headers={"h": "1"}, other=1)])
    sink(home, payload="body", key="id", id_column="id")([Row(id=7, body=Row(n=2, list=[1, None]))])
    sink(home, key="customer", headers="meta")(
        [Row(customer="b", n=3, meta=None), Row(customer="c", n=4, meta={"x": "y"})]
    )
    found = entries(home, "orders")
    assert all(int(entry.pop("timestamp")) > 1_600_000_000_000 for entry in found)
    assert found == [
        {"payload": '{"n": 1.50}', "key": "a", "headers": '{"h":"1"}'},
        {"payload": '{"n":2,"list":[1,null]}', "key": "7", "messageId": "7"},
        {"payload": '{"customer":"b","n":3}', "key": "b"},
        {"payload": '{"customer":"c","n":4}', "key": "c", "headers": '{"x":"y"}'},
    ]


def test_what_is_sent_is_what_a_consumer_gets(home: Home) -> None:
    home.broker.create_topic("orders", partitions=3)
    rows = [Row(customer=f"c{n % 5}", n=n) for n in range(50)]
    sink(home, key="customer")(rows)
    by_key: defaultdict[str | None, list[int]] = defaultdict(list)
    with home.broker.consume("orders", group="g") as messages:
        for _ in range(50):
            message = messages.next(10)
            assert message is not None
            by_key[message.key].append(message.payload["n"])
            message.ack()
    assert by_key == {f"c{k}": list(range(k, 50, 5)) for k in range(5)}


def test_each_call_outside_of_tasks_sends_its_rows(home: Home) -> None:
    home.broker.create_topic("orders", partitions=1)
    send = sink(home)
    for _ in range(2):
        send([Row(n=1)])
    send([])
    assert payloads(home, "orders") == [{"n": 1}, {"n": 1}]


def test_rows_without_keys_are_spread(home: Home) -> None:
    home.broker.create_topic("orders", partitions=2)
    sink(home)(Row(n=n) for n in range(2_300))
    assert [len(entries(home, "orders", partition)) for partition in (0, 1)] == [1_300, 1_000]
    assert sorted(payload["n"] for payload in payloads(home, "orders", 2)) == list(range(2_300))


def test_rows_of_ids_are_spread_by_them_and_sent_once(home: Home) -> None:
    home.broker.create_topic("orders", partitions=4)
    names = [f"id-{n % 200}" for n in range(400)]
    sink(home, id_column="id")(Row(id=name) for name in names)
    found = [[entry["messageId"] for entry in entries(home, "orders", partition)] for partition in range(4)]
    assert all(found)
    assert sorted(name for part in found for name in part) == sorted(set(names))


def test_a_call_that_failed_can_be_repeated_after_others_of_its_task(home: Home) -> None:
    home.broker.create_topic("orders", partitions=1)
    place, write, places = Place(home.url, "orders", home.namespace), Write("w"), dict[int, int]()

    def send(rows: Iterable[Row]) -> Appended:
        return write_rows(place, write, lambda row: Layout.of(row.__fields__, Columns()), rows, None, places)

    def broken() -> Iterator[Row]:
        for n in range(2_500):
            if n == 2_000:
                until(lambda: len(entries(home, "orders")) > 1, "some of it to be written")
                raise RuntimeError("these rows were meant to fail")
            yield Row(n=n)

    assert send([Row(n=0)]) == Appended(1)
    with pytest.raises(RuntimeError, match="meant to fail"):
        send(broken())
    again = send(Row(n=n) for n in range(2_500))
    assert again.repeated >= 500
    assert send([Row(n=0)]) == Appended(1)
    assert [payload["n"] for payload in payloads(home, "orders")] == [0, *range(2_500), 0]


def test_a_sink_travels_and_connects_only_where_it_is_used(home: Home) -> None:
    home.broker.create_topic("orders", partitions=1)
    TopicSink("redis://127.0.0.1:1", "orders", key="customer")
    made = sink(home, key="k")
    for copy in (
        pickle.loads(pickle.dumps(made)),
        pickle.loads(
            cloudpickled(made)  # type: ignore[no-untyped-call]
        ),
    ):
        copy([Row(k="a")])
    assert len(entries(home, "orders")) == 2
    assert asked(home, "CLIENT", "LIST").count("cmd=evalsha") == 0


def test_only_a_driver_counts(home: Home) -> None:
    program = (
        "from conquiet.spark import TopicSink\n"
        "try:\n"
        "    TopicSink('redis://127.0.0.1:1', 'orders').written\n"
        "except Exception as error:\n"
        "    print(type(error).__name__, error)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "ConfigError there is no SparkContext here that could count: make the sink in the driver\n"


@pytest.mark.parametrize("rows", [[(1, 2)], [{"a": 1}], ["text"]])
def test_rows_have_names(home: Home, rows: list[Any]) -> None:
    home.broker.create_topic("orders", partitions=1)
    with pytest.raises(ConfigError, match="rows must be those of a DataFrame, with names, not "):
        sink(home)(rows)


# --- with Spark -------------------------------------------------------------------------------------------


class Failing:
    """Rows whose task fails twice, once something of it is written; with ``mix`` in another order each time."""

    def __init__(self, home: Home, *, mix: bool) -> None:
        self._url = home.url
        self._streams = [stream(home, "orders", partition) for partition in (0, 1)]
        self._mix = mix

    def __call__(self, part: int, rows: Iterable[Row]) -> Iterator[Row]:
        context = TaskContext.get()
        assert context is not None
        attempt = context.attemptNumber()
        listed = list(rows)
        if self._mix:
            random.Random(attempt).shuffle(listed)
        fails = part == 1 and attempt < 2
        for at, row in enumerate(listed):
            if fails and at == 2_500:
                self._wait(listed)
                raise RuntimeError("this task was meant to fail")
            yield row

    def _wait(self, rows: list[Row]) -> None:
        """Return once something of these rows is there."""
        own = {json.dumps({"customer": row.customer, "id": row.id}, separators=(",", ":")) for row in rows}
        deadline = time.monotonic() + 20
        with Redis.from_url(self._url, decode_responses=True) as client:
            while not any(fields["payload"] in own for name in self._streams for _, fields in client.xrange(name)):
                assert time.monotonic() < deadline
                time.sleep(0.01)


@pytest.mark.parametrize("mix", [False, True], ids=["in order", "mixed, by ID"])
def test_a_task_that_is_tried_again_adds_nothing_twice(spark: SparkSession, home: Home, mix: bool) -> None:
    home.broker.create_topic("orders", partitions=2)
    frame = spark.range(0, 5_200, 1, 2).select((F.col("id") % 7).alias("customer"), "id")
    send = sink(home, key="customer", id_column="id" if mix else None)
    frame.rdd.mapPartitionsWithIndex(Failing(home, mix=mix)).foreachPartition(send)
    by_key: defaultdict[str, list[int]] = defaultdict(list)
    for partition in (0, 1):
        for entry in entries(home, "orders", partition):
            by_key[entry["key"]].append(json.loads(entry["payload"])["id"])
    assert {key: sorted(ids) for key, ids in by_key.items()} == {str(k): list(range(k, 5_200, 7)) for k in range(7)}
    if not mix:  # and what is of one key and one task is in order
        for ids in by_key.values():
            assert [n for n in ids if n < 2_600] == sorted(n for n in ids if n < 2_600)
            assert [n for n in ids if n >= 2_600] == sorted(n for n in ids if n >= 2_600)
    done = send.written
    assert done.rows + done.repeated == 5_200
    assert done.repeated >= 500
    if mix:
        return
    # The same sink may serve another DataFrame, though it has the same rows.
    frame.limit(10).foreachPartition(send)
    assert send.written.rows == done.rows + 10
    assert len(payloads(home, "orders", 2)) == 5_210


def test_a_sink_that_outlives_its_session_drops_nothing(home: Home) -> None:
    """The stages of a second session have the same numbers as those of the first."""
    for topic in ("plain", "by-id"):
        home.broker.create_topic(topic, partitions=1)
    done = subprocess.run(
        [sys.executable, "-m", "tests.spark.sessions", "--url", home.url, "--namespace", home.namespace],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        timeout=150,
        check=True,
    )
    assert done.stdout == "[(20, 0), (20, 0)]\n"
    assert [payload["id"] for payload in payloads(home, "plain")] == [*range(10), *range(10)]
    balances = [(payload["id"], payload["balance"]) for payload in payloads(home, "by-id")]
    assert balances == [(n, balance) for balance in (1, 2) for n in range(10)]


class Copies:
    """In one task, copies of one sink that were made as for two jobs; each sends the rows of the task."""

    def __init__(self, send: TopicSink) -> None:
        self._copies = [pickle.dumps(send) for _ in range(2)]

    def __call__(self, rows: Iterable[Row]) -> None:
        context = TaskContext.get()
        assert context is not None
        listed = list(rows)
        for copy in self._copies:
            pickle.loads(copy)(listed)
        if context.attemptNumber() == 0:
            raise RuntimeError("this task was meant to fail")


@pytest.mark.parametrize("more", [{}, {"id_column": "id"}], ids=["in order", "by ID"])
def test_what_was_pickled_for_one_job_is_no_repetition_of_another(
    spark: SparkSession, home: Home, more: dict[str, Any]
) -> None:
    """Also where their stages have the same number, as those of two sessions have; tries of one task share a name."""
    home.broker.create_topic("orders", partitions=1)
    spark.range(0, 4, 1, 1).foreachPartition(Copies(sink(home, **more)))
    assert [payload["id"] for payload in payloads(home, "orders")] == [0, 1, 2, 3, 0, 1, 2, 3]


class InPieces:
    """Hands the rows of its task to a sink in pieces that may be equal; once a task has sent some, it fails."""

    def __init__(self, send: TopicSink) -> None:
        self._send = send

    def __call__(self, rows: Iterable[Row]) -> None:
        context = TaskContext.get()
        assert context is not None
        for number, row in enumerate(rows):
            self._send([Row(n=row.id // 4), Row(n=row.id // 4)])
            if number == 2 and context.attemptNumber() == 0:
                raise RuntimeError("this task was meant to fail")


def test_a_task_may_send_its_rows_in_pieces(spark: SparkSession, home: Home) -> None:
    """Pieces that are equal are other rows; those that an earlier try of the task has sent are the same."""
    home.broker.create_topic("orders", partitions=2)
    send = sink(home)
    spark.range(0, 8, 1, 2).foreachPartition(InPieces(send))
    assert sorted(payload["n"] for payload in payloads(home, "orders", 2)) == [0] * 8 + [1] * 8
    assert send.written.rows + send.written.repeated == 16
    assert send.written.repeated >= 6


def test_what_a_closure_was_made_for_once_serves_several_jobs(spark: SparkSession, home: Home) -> None:
    """An RDD keeps the pickled function: the second job gets the same bytes."""
    home.broker.create_topic("orders", partitions=1)
    send = sink(home)

    def sent(rows: Iterable[Row]) -> Iterator[int]:
        send(rows)
        yield 1

    counted = spark.range(0, 4, 1, 2).rdd.mapPartitions(sent)
    assert [counted.count(), counted.sum()] == [2, 2]
    assert sorted(payload["id"] for payload in payloads(home, "orders")) == [0, 0, 1, 1, 2, 2, 3, 3]


def test_all_that_a_frame_can_hold_is_published(spark: SparkSession, home: Home) -> None:
    home.broker.create_topic("orders", partitions=2)
    frame = spark.range(3).selectExpr(
        "id",
        "cast(id as string) as customer",
        "map('trace', concat('t', id)) as meta",
        "cast(12.10 + id as decimal(10, 2)) as price",
        "timestamp'2024-02-29 12:30:15.5' as at",
        "timestamp_ntz'2024-02-29 12:30:15' as local",
        "date'2024-02-29' as day",
        "named_struct('list', array(1, null), 'at', array(timestamp_ntz'2024-01-01 00:00:00')) as inner",
        "map('a', 0.5D) as rates",
        "cast(null as string) as nothing",
    )
    done = publish(frame, home.url, "orders", key="customer", headers="meta", id_column="id", namespace=home.namespace)
    assert done == Written(3, 0)
    found = [entry for partition in (0, 1) for entry in entries(home, "orders", partition)]
    assert sorted((entry["key"], entry["messageId"], entry["headers"]) for entry in found) == [
        (str(n), str(n), json.dumps({"trace": f"t{n}"}, separators=(",", ":"))) for n in range(3)
    ]
    first = next(entry["payload"] for entry in found if entry["key"] == "0")
    assert '"price":12.10,' in first
    assert json.loads(first) == {
        "id": 0,
        "customer": "0",
        "price": 12.1,
        "at": "2024-02-29T12:30:15.500000Z",
        "local": "2024-02-29T12:30:15",
        "day": "2024-02-29",
        "inner": {"list": [1, None], "at": ["2024-01-01T00:00:00"]},
        "rates": {"a": 0.5},
        "nothing": None,
    }
    # Nobody will repeat it: what it wrote is remembered for an hour, not for days.
    keys = asked(home, "KEYS", f"{home.namespace}:*writ*")
    assert len(keys) >= 2
    assert all(0 < asked(home, "PTTL", key) <= 3_600_000 for key in keys)
