"""Dead letters as DataFrames: read, chosen, and given back."""

from __future__ import annotations

from typing import Any, cast

import pytest
from pyspark.sql import DataFrame, SparkSession

from conquiet import Message, Reject
from conquiet.errors import ConfigError, GroupLostError, UnknownTopicError
from conquiet.spark import replay
from conquiet.spark.deadletters import LetterReader, columns
from conquiet.spark.options import ReadOptions
from conquiet.sync import Broker, SubscribeOptions
from conquiet.wire.keys import Keys
from tests.spark.conftest import Home
from tests.sync.looking import looking, until

QUICK = SubscribeOptions(handle_signals=False, poll_timeout=0.1)


def refuse(message: Message) -> None:
    raise Reject(f"no {message.payload['n']}")


def bury(broker: Broker, *numbers: int, groups: tuple[str, ...] = ("billing",)) -> None:
    """Send messages that groups give up on."""
    for number in numbers:
        broker.send("orders", {"n": number}, key=f"k{number % 2}", headers={"kind": "test"})
    for group in groups:
        with broker.subscribe("orders", group=group, handler=refuse, options=QUICK):
            until(lambda: len(broker.admin.dead_letters("orders", group=group)) == len(numbers), "all are given up")  # noqa: B023


def letters(home: Home) -> list[dict[str, Any]]:
    options = ReadOptions.of(home.of("orders", deadLetters=True))
    reader = LetterReader(options, columns())
    return [row for part in reader.partitions() for batch in reader.read(part) for row in batch.to_pylist()]


def handled(broker: Broker, count: int, group: str = "billing") -> list[int]:
    found: list[int] = []
    with broker.consume("orders", group=group, options=QUICK) as messages:
        while len(found) < count:
            delivery = messages.next(20)
            assert delivery is not None
            found.append(delivery.payload["n"])
            delivery.ack()
    return sorted(found)


# --- reading -------------------------------------------------------------------------------------------------------


@pytest.mark.any_server
def test_what_is_told_of_a_letter(home: Home) -> None:
    home.broker.create_topic("orders", partitions=2)
    assert letters(home) == []
    bury(home.broker, 1, 2)
    rows = letters(home)
    originals = home.broker.admin.dead_letters("orders")
    assert [row["id"] for row in rows] == [letter.id for letter in originals]
    for row, letter in zip(rows, originals, strict=True):
        assert row["payload"] == f'{{"n":{letter.payload["n"]}}}'
        assert row["key"] == f"k{letter.payload['n'] % 2}"
        assert dict(row["headers"]) == {"kind": "test"}
        assert (row["topic"], row["group"], row["partition"]) == ("orders", "billing", letter.partition)
        assert (row["original_id"], row["attempts"], row["crashes"]) == (letter.original_id, letter.attempts, 0)
        assert (row["reason"], row["error_type"], row["error"]) == (letter.reason, letter.error_type, letter.error)
        assert (row["first_failed_at"], row["failed_at"]) == (letter.first_failed_at, letter.failed_at)
        assert row["consumer"] == letter.consumer


@pytest.mark.any_server
def test_foreign_entries_among_them(home: Home) -> None:
    home.broker.create_topic("orders")
    bury(home.broker, 1)
    with looking(home.url) as eye:
        key, ask = Keys(home.namespace).dead_letters("orders"), cast("Any", eye.ask)
        ask("XADD", key, "*", "payload", b"\xff", "headers", '{"n": 1}', "key", b"\xe9")
        ask("XADD", key, "*", "what", "ever")
    _, strange, empty = letters(home)
    assert (strange["reason"], strange["partition"], strange["group"]) == ("foreign entry", -1, "")
    assert (strange["payload"], strange["key"], strange["headers"]) == ("\ufffd", "\ufffd", [("n", "1")])
    assert (empty["payload"], empty["key"], empty["headers"], empty["failed_at"]) == (None, None, None, None)


@pytest.mark.any_server
def test_of_a_topic_that_is_not_there(home: Home) -> None:
    with pytest.raises(UnknownTopicError):
        letters(home)


# --- in Spark ------------------------------------------------------------------------------------------------------


def frame(spark: SparkSession, home: Home) -> DataFrame:
    return spark.read.format("conquiet").options(**home.of("orders", deadLetters=True)).load()


@pytest.mark.any_server
@pytest.mark.timeout(180)
def test_the_chosen_ones_are_given_back(spark: SparkSession, home: Home) -> None:
    home.broker.create_topic("orders", partitions=2)
    bury(home.broker, *range(6))
    all_letters = frame(spark, home)
    odd = all_letters.where("get_json_object(payload, '$.n') % 2 = 1 AND error LIKE 'no %'")
    assert replay(odd, home.url, "orders", namespace=home.namespace) == 3
    assert handled(home.broker, 3) == [1, 3, 5]
    assert sorted(letter.payload["n"] for letter in home.broker.admin.dead_letters("orders")) == [0, 2, 4]
    # Twice the same, ones that are gone already, and none: nothing is done twice.
    both = all_letters.where("get_json_object(payload, '$.n') = 2").select("id")
    gone = spark.createDataFrame([("5-0",), (None,)], "id STRING")
    assert replay(both.union(both).union(gone), home.url, "orders", namespace=home.namespace) == 1
    assert handled(home.broker, 1) == [2]
    assert replay(gone, home.url, "orders", namespace=home.namespace) == 0


@pytest.mark.any_server
@pytest.mark.timeout(180)
def test_letters_that_are_refused(spark: SparkSession, home: Home) -> None:
    home.broker.create_topic("orders")
    bury(home.broker, 1, groups=("billing", "reports"))
    home.broker.admin.delete_group("orders", "reports", force=True)
    told = r"there is no group 'reports' on .*; \d letters were replayed"
    with pytest.raises(GroupLostError, match=told):
        replay(frame(spark, home), home.url, "orders", namespace=home.namespace)
    assert [letter.group for letter in home.broker.admin.dead_letters("orders")] == ["reports"]
    with pytest.raises(ConfigError, match="known by its column 'id', but there are only number"):
        replay(spark.range(1).toDF("number"), home.url, "orders", namespace=home.namespace)
    with pytest.raises(UnknownTopicError):
        replay(frame(spark, home), home.url, "nowhere", namespace=home.namespace)
