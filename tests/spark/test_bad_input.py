"""What is said to whoever writes with Spark what cannot be written: by a sentence of ours, and soon."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from typing import Any, Final

import pytest
from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as F

from conquiet import Retention
from conquiet.errors import ConfigError, ConquietError, PayloadError, QueueError, TopicFullError, UnknownTopicError
from conquiet.kit import retrying
from conquiet.spark import TopicSink, publish
from conquiet.spark.failures import plainly, said
from conquiet.spark.options import Place
from conquiet.spark.writing import done_with
from conquiet.sync import Broker, EmbeddedRedis
from conquiet.topics.produce import once
from tests.spark.conftest import Home
from tests.spark.looking import asked, payloads

pytestmark = [pytest.mark.any_server, pytest.mark.timeout(180)]

SHORT: Final = 600
"""Characters that a user is shown at most of what is found before the first task."""
NOBODY: Final = "redis://127.0.0.1:1"


@pytest.fixture
def frame(spark: SparkSession) -> DataFrame:
    return spark.range(4).selectExpr("id", "cast(id as string) as customer", "'1' as text")


# --- found by the driver ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"topic": "nope"}, "there is no topic 'nope'"),
        ({"keyy": "customer"}, "there is no option 'keyy': did you mean 'key'?"),
        ({"url": "http://localhost"}, "a Redis URL starts with redis://"),
        ({"url": NOBODY}, "127.0.0.1:1"),
        ({"key": "nope"}, "key is column 'nope', but there are only id, customer, text"),
    ],
    ids=str,
)
def test_a_write_that_cannot_be_meant_is_refused_by_the_driver(
    frame: DataFrame, home: Home, options: dict[str, str], text: str
) -> None:
    home.broker.create_topic("orders", partitions=1)
    with pytest.raises(PySparkException) as caught:
        frame.write.format("conquiet").options(**{**home.of("orders"), **options}).mode("append").save()
    shown = str(caught.value)
    assert text in shown
    assert len(shown) < SHORT
    assert isinstance(said(shown), ConquietError)
    assert payloads(home, "orders") == []


def test_a_frame_that_cannot_be_sent_is_refused_by_the_driver(frame: DataFrame, home: Home) -> None:
    home.broker.create_topic("orders", partitions=1)
    binary = frame.withColumn("raw", F.lit(b"x").cast("binary"))
    with pytest.raises(PySparkException) as caught:
        binary.write.format("conquiet").options(**home.of("orders")).mode("append").save()
    assert "raw is of type binary, which JSON cannot carry" in str(caught.value)
    assert len(str(caught.value)) < SHORT
    assert payloads(home, "orders") == []


def test_publish_looks_before_the_first_task(frame: DataFrame, home: Home) -> None:
    home.broker.create_topic("orders", partitions=1)
    refusals: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"topic": "nope"}, UnknownTopicError, "there is no topic 'nope'"),
        ({"key": "nope"}, ConfigError, "key is column 'nope', but there are only id, customer, text"),
        ({"frame": frame.withColumn("raw", F.lit(b"x"))}, PayloadError, "raw is of type binary"),
        (
            {"key": "price", "frame": frame.withColumn("price", F.lit(0.5))},
            ConfigError,
            "key is column 'price' of type",
        ),
        ({"url": NOBODY}, QueueError, "127.0.0.1:1"),
        ({"url": "redis:/nowhere"}, ConfigError, "URL"),
        ({"null_keys": "yes"}, ConfigError, "null_keys"),
        ({"key": 3}, ConfigError, "key"),
    ]
    for wrong, kind, text in refusals:
        arguments: dict[str, Any] = {"frame": frame, "url": home.url, "topic": "orders", "namespace": home.namespace}
        with pytest.raises(kind, match=text) as caught:
            publish(**{**arguments, **wrong})
        assert len(str(caught.value)) < SHORT
        assert caught.value.__cause__ is None or isinstance(caught.value, QueueError)
    assert payloads(home, "orders") == []


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"url": "http://localhost"}, "a Redis URL starts with redis://"),
        ({"url": ""}, "url"),
        ({"topic": "with space"}, "topic"),
        ({"namespace": "with space"}, "namespace"),
        ({"key": ""}, "key"),
        ({"id_column": 7}, "id_column"),
        ({"null_keys": "no"}, "null_keys"),
    ],
    ids=str,
)
def test_a_sink_that_cannot_be_meant_is_refused_when_it_is_made(wrong: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        TopicSink(**{"url": NOBODY, "topic": "orders", **wrong})


# --- found in a row ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("columns", "row", "kind", "text"),
    [
        (
            {"key": "k"},
            Row(k=None),
            ConfigError,
            "partition 0, row 2: column 'k' is null: a key is needed; nullKeys='allow' sends such rows without one",
        ),
        ({"id_column": "k"}, Row(k=""), ConfigError, "partition 0, row 2: column 'k' is null or empty: each row needs"),
        ({"headers": "h"}, Row(k="", h={"a": None}), ConfigError, "partition 0, row 2: column 'h' has the header 'a'"),
        ({}, Row(k=float("nan")), PayloadError, "partition 0, row 2, column 'k' is nan, which JSON cannot carry"),
        ({}, Row(k=[b"x"]), PayloadError, r"partition 0, row 2, column 'k\[0\]' is a bytes"),
        ({"payload": "k"}, Row(k="{"), PayloadError, "partition 0, row 2, column 'k' is not JSON text"),
        ({"payload": "k"}, Row(k=None), PayloadError, "partition 0, row 2, column 'k' is null: a message has"),
    ],
    ids=str,
)
def test_a_row_that_cannot_be_sent_is_named(
    home: Home, columns: dict[str, Any], row: Row, kind: type[Exception], text: str
) -> None:
    home.broker.create_topic("orders", partitions=1)
    fine: dict[str, Any] = {"k": "1", "h": None}
    rows = [*[Row(**{name: fine[name] for name in row.asDict()}) for _ in range(2)], row]
    with pytest.raises(kind, match=text) as caught:
        TopicSink(home.url, "orders", namespace=home.namespace, **columns)(rows)
    assert type(caught.value) is kind
    assert payloads(home, "orders") == []


def test_an_error_of_a_task_is_raised_as_it_was(spark: SparkSession, home: Home) -> None:
    home.broker.create_topic("orders", partitions=1)
    frame = spark.range(0, 8, 1, 2).selectExpr("id", "if(id = 6, double('NaN'), 1.5D) as rate")
    with pytest.raises(PayloadError) as caught:
        publish(frame, home.url, "orders", namespace=home.namespace)
    place, reason = "partition 1, row 2, column 'rate'", "is nan, which JSON cannot carry"
    assert str(caught.value) == f"payload cannot be carried as JSON: {place} {reason}"
    assert (caught.value.path, caught.value.reason) == (place, reason)
    assert isinstance(caught.value.__cause__, PySparkException | Py4JJavaError)  # the latter before 4.1
    assert [payload["id"] for payload in payloads(home, "orders")] in ([], [0, 1, 2, 3])  # what others wrote stays


def test_an_error_of_a_source_s_task_ends_with_our_sentence(spark: SparkSession, home: Home) -> None:
    home.broker.create_topic("orders", partitions=1)
    frame = spark.range(0, 4, 1, 1).selectExpr("'1' as payload", "if(id = 3, null, 'a') as customer")
    with pytest.raises(PySparkException) as caught:
        frame.write.format("conquiet").options(**home.of("orders", key="customer")).mode("append").save()
    error = said(str(caught.value))
    assert type(error) is ConfigError
    assert str(error).startswith("partition 0, row 3: column 'customer' is null: a key is needed; nullKeys='allow'")
    assert payloads(home, "orders") == []
    frame.write.format("conquiet").options(**home.of("orders", key="customer", nullKeys="allow")).mode("append").save()
    assert payloads(home, "orders") == [1, 1, 1, 1]


# --- servers and topics -----------------------------------------------------------------------------------


def test_a_server_that_stops_for_good_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retrying, "_RETRIES", 1)
    with EmbeddedRedis() as server:
        with Broker.connect(server.url) as broker:
            broker.create_topic("orders", partitions=1)

        def rows() -> Iterator[Row]:
            for n in range(20_000):
                if n == 3_000:
                    server.close()
                yield Row(n=n)

        with pytest.raises(QueueError, match="stream:topic:orders:p:0' at ") as caught:
            TopicSink(server.url, "orders")(rows())
        assert len(str(caught.value)) < SHORT


def test_a_write_has_succeeded_though_its_server_went_then(caplog: pytest.LogCaptureFixture) -> None:
    done_with(Place(NOBODY, "orders"), once.Write("export"))
    [record] = caplog.records
    assert "topic 'orders': what was written is remembered for 8 days: " in record.getMessage()


def test_a_topic_that_is_full_is_told_of(home: Home) -> None:
    home.broker.create_topic("orders", partitions=1, retention=Retention(max_len=5, on_full="reject"))
    with home.broker.consume("orders", group="slow"):
        pass
    with pytest.raises(
        TopicFullError, match="partition 0 of topic 'orders' holds 0 unfinished entries of 5 that it may"
    ):
        TopicSink(home.url, "orders", namespace=home.namespace)(Row(n=n) for n in range(6))


def test_a_plain_stream_is_not_written_to(home: Home) -> None:
    name = f"{home.namespace}-plain"
    asked(home, "XADD", name, "*", "data", "{}")
    with pytest.raises(ConfigError, match="is a plain stream, not a topic: create_topic makes one to write to"):
        TopicSink(home.url, name)([Row(n=1)])


# --- what Spark makes of it -------------------------------------------------------------------------------


REPORT: Final = """An exception was thrown from the Python worker:
Traceback (most recent call last):
  File "worker.py", line 1, in main
    raise failure
{}
 SQLSTATE: 38000
\tat org.apache.spark.api.python.BasePythonRunner.x(PythonRunner.scala:1097)
\tat java.base/java.lang.Thread.run(Thread.java:840)
"""


@pytest.mark.parametrize(
    "error",
    [
        ConfigError("partition 1, row 0: column 'it''s' is null"),
        UnknownTopicError("there is no topic 'x'\nin two lines"),
        TopicFullError("partition 0 is full"),
        QueueError("'k' at localhost: gone"),
        PayloadError("partition 1, row 0, column 'a.b'", "is nan, which JSON cannot carry"),
        PayloadError("a.b", "is of type binary"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_our_error_is_found_in_a_report(error: ConquietError) -> None:
    found = said(REPORT.format(f"conquiet.errors.{type(error).__name__}: {error}"))
    assert type(found) is type(error)
    assert str(found) == str(error)
    if isinstance(error, QueueError):
        assert isinstance(found, QueueError)
        assert found.entry_ids == ()
    assert str(pickle.loads(pickle.dumps(found))) == str(error)


def test_the_last_of_our_errors_counts() -> None:
    text = REPORT.format("conquiet.errors.QueueError: first") + REPORT.format("conquiet.errors.ConfigError: second")
    assert str(said(text)) == "second"
    assert said(REPORT.format("ValueError: not ours")) is None


def test_what_is_not_ours_is_left_alone() -> None:
    def fail(error: Exception) -> Callable[[], None]:
        def failing() -> None:
            with plainly():
                raise error

        return failing

    for error in (ValueError("not ours"), ConfigError("ours already")):
        with pytest.raises(type(error)) as caught:
            fail(error)()
        assert caught.value is error
    with pytest.raises(ConfigError, match=r"^second$") as told:
        fail(RuntimeError(REPORT.format("conquiet.errors.ConfigError: second")))()
    assert isinstance(told.value.__cause__, RuntimeError)
