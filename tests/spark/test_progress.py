"""The group of a query: what operators see of it, who is kept out, and what retention makes of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from conquiet.errors import ConfigError, GroupLostError
from conquiet.spark import streaming
from conquiet.sync import Broker, SubscribeOptions
from conquiet.topics import Retention
from tests.conftest import Server
from tests.spark.conftest import Home
from tests.spark.planning import Checkpoint, Query, delete_topic, fill, stream_of, values
from tests.sync.looking import looking

GROUP = "reports"


@contextmanager
def query(home: Home, checkpoint: Checkpoint | None = None, /, **options: object) -> Iterator[Query]:
    run = Query(home, "orders", checkpoint, group=GROUP, **options)
    try:
        yield run
    finally:
        run.stop()


def lag(broker: Broker) -> int:
    info = broker.admin.describe_group("orders", GROUP)
    assert (info.owner, info.pending, info.consumers, info.members) == ("spark", 0, 0, ())
    return info.lag


def places(broker: Broker) -> list[str | None]:
    return [part.last_delivered_id for part in broker.admin.describe_group("orders", GROUP).partitions]


@pytest.mark.cluster_too
def test_progress_is_what_was_read(home: Home) -> None:
    home.broker.create_topic("orders", partitions=2)
    ids = fill(home.broker, "orders", *range(10))
    with query(home, maxRowsPerBatch=4) as run:
        assert run.plan()
        assert lag(home.broker) == 10
        assert len(run.read(run.slices())) == 4
        assert run.plan()  # only now it is known that the first batch is done
        assert lag(home.broker) == 6
        assert places(home.broker)[0] == ids[3]
        assert len(run.rows()) == 6
        assert lag(home.broker) == 0  # though there was no batch after the last one
        lone = fill(home.broker, "orders", 10, 11, partition=1)
        assert lag(home.broker) == 2
        assert values(run.rows()) == [10, 11]
        assert places(home.broker) == [ids[-1], lone[-1]]
    assert home.broker.admin.list_groups("orders") == [GROUP]


def test_a_restart_tells_what_it_finds_done(home: Home) -> None:
    home.broker.create_topic("orders")
    fill(home.broker, "orders", *range(5))
    with query(home) as run:
        assert run.plan()
        assert len(run.read(run.slices())) == 5  # and is killed before anybody was told
    assert lag(home.broker) == 5
    fill(home.broker, "orders", 5)
    with query(home, run.checkpoint) as again:
        assert again.plan()
        assert lag(home.broker) == 1
        assert values(again.rows()) == [5]
    assert lag(home.broker) == 0


def test_it_begins_where_the_query_does(home: Home) -> None:
    home.broker.create_topic("orders")
    ids = fill(home.broker, "orders", *range(5))
    with query(home, startId=ids[3]) as run:
        assert run.plan()
        assert lag(home.broker) == 2
    with looking(home.url) as eye:
        eye.ask("XTRIM", stream_of(home, "orders"), "MAXLEN", 1)
    home.broker.admin.delete_group("orders", GROUP)
    with query(home) as run:
        assert run.plan()
        assert lag(home.broker) == 1
    home.broker.admin.delete_group("orders", GROUP)
    with query(home, startingOffsets="latest") as run:
        assert not run.plan()
        assert lag(home.broker) == 0


def test_growth_takes_the_group_along(home: Home) -> None:
    home.broker.create_topic("orders")
    fill(home.broker, "orders", 1)
    with query(home) as run:
        assert values(run.rows()) == [1]
        home.broker.admin.grow("orders", 2)
        fill(home.broker, "orders", 2, 3, partition=1)
        assert lag(home.broker) == 2
        assert values(run.rows()) == [2, 3]
        assert lag(home.broker) == 0


def test_copies_for_the_group_itself_are_read(home: Home) -> None:
    home.broker.create_topic("orders")
    with looking(home.url) as eye:
        for number, group in enumerate((GROUP, "billing")):
            eye.ask("XADD", stream_of(home, "orders"), "*", "payload", number, "timestamp", 5, "onlyGroup", group)
    with query(home) as run:
        assert values(run.rows()) == [0]
        assert lag(home.broker) == 0


# --- who is kept out -----------------------------------------------------------------------------------------------


@pytest.mark.any_server
def test_a_group_with_members_is_refused(home: Home) -> None:
    home.broker.create_topic("orders")
    fill(home.broker, "orders", 1)
    with home.broker.consume("orders", group=GROUP) as messages:
        assert messages.next(20) is not None
        with query(home) as run, pytest.raises(ConfigError, match=f"group {GROUP!r} .* has live members"):
            run.batches()
    assert home.broker.admin.describe_group("orders", GROUP).owner == "members"


@pytest.mark.any_server
def test_nobody_subscribes_to_the_group_of_a_query(home: Home) -> None:
    home.broker.create_topic("orders")
    fill(home.broker, "orders", 1)
    with query(home) as run:
        assert values(run.rows()) == [1]
        fill(home.broker, "orders", 2)
        options = SubscribeOptions(handle_signals=False)
        with (
            pytest.raises(ConfigError, match="is a Spark query's, and nobody can subscribe"),
            home.broker.consume("orders", group=GROUP, options=options) as messages,
        ):
            messages.next(20)
        assert values(run.rows()) == [2]
        assert lag(home.broker) == 0


@pytest.mark.any_server
def test_a_group_that_was_deleted_ends_the_query_at_once(home: Home, caplog: pytest.LogCaptureFixture) -> None:
    """A restart makes it again: nobody deletes the group of a query that he wants to go on with it."""
    home.broker.create_topic("orders")
    fill(home.broker, "orders", 1)
    with query(home) as run:
        assert values(run.rows()) == [1]
        home.broker.admin.delete_group("orders", GROUP)
        fill(home.broker, "orders", 2)
        assert run.plan()
        assert values(run.read(run.slices())) == [2]
        with pytest.raises(GroupLostError, match=f"group {GROUP!r} is gone"):
            run.plan()
        assert "asked again" not in caplog.text
    fill(home.broker, "orders", 3)
    with query(home, run.checkpoint) as again:
        assert values(again.rows()) == [3]
        assert lag(home.broker) == 0


@pytest.mark.any_server
def test_a_topic_that_was_made_again_with_fewer_partitions(home: Home) -> None:
    home.broker.create_topic("orders", partitions=2)
    fill(home.broker, "orders", 1, partition=1)
    with query(home) as run:
        assert values(run.rows()) == [1]
    delete_topic(home.broker, "orders")
    home.broker.create_topic("orders")
    fill(home.broker, "orders", 2)
    with query(home, run.checkpoint, failOnDataLoss=False) as again:
        assert values(again.rows()) == [2]
        assert lag(home.broker) == 0


@pytest.mark.any_server
def test_a_legacy_stream_has_no_room_for_it(home: Home) -> None:
    with looking(home.url) as eye:
        eye.ask("XADD", f"{home.namespace}:orders", "*", "data", "{}")
    with query(home) as run, pytest.raises(ConfigError, match="legacy stream"):
        run.batches()


# --- retention -----------------------------------------------------------------------------------------------------


def test_retention_waits_for_the_query(home: Home) -> None:
    home.broker.create_topic("orders")
    fill(home.broker, "orders", *range(10))
    with query(home, maxRowsPerBatch=4) as run:
        assert run.plan()
        home.broker.admin.trim("orders", max_len=1)
        assert len(run.read(run.slices())) == 4
        assert run.plan()
        assert home.broker.admin.trim("orders", max_len=1) == 4
        assert values(run.rows()) == list(range(4, 10))
        assert home.broker.admin.trim("orders", max_len=1) == 5


def test_an_idle_query_is_still_served(home: Home, monkeypatch: pytest.MonkeyPatch, server: Server) -> None:
    """Retention would not wait for a group that nobody has served for long, and remove what it has not read."""
    monkeypatch.setattr(streaming, "_SHOWN", 0.0)
    home.broker.create_topic("orders", retention=Retention(group_expiry=3600))
    fill(home.broker, "orders", 1)
    stream = stream_of(home, "orders")
    with query(home) as run, looking(home.url) as eye:
        assert values(run.rows()) == [1]
        [lease] = [key for key in eye.ask("KEYS", f"*{home.namespace}*lease*") if stream in key]
        eye.ask("HSET", lease, "until_ms", 5)
        assert run.batches() == []
        assert int(eye.ask("HGET", lease, "until_ms")) > 5


# --- in Spark ------------------------------------------------------------------------------------------------------


def wait(running: StreamingQuery, condition: Callable[[], bool]) -> None:
    """Until ``condition`` is met, as long as the test may take: the first batch of a Spark takes its time."""
    while not condition():
        assert not running.awaitTermination(1)


@pytest.mark.any_server
@pytest.mark.timeout(180)
def test_a_running_query_tells_of_its_last_batch(spark: SparkSession, home: Home, tmp_path: Path) -> None:
    home.broker.create_topic("orders", partitions=2)
    fill(home.broker, "orders", *range(5))
    frame = spark.readStream.format("conquiet").options(**home.of("orders", group=GROUP, maxRowsPerBatch=3)).load()
    batches: list[int] = []

    def keep(batch: DataFrame, number: int) -> None:
        batches.append(batch.count())

    writer = frame.writeStream.foreachBatch(keep).option("checkpointLocation", str(tmp_path))
    running = writer.trigger(processingTime="200 milliseconds").start()
    try:
        wait(running, lambda: GROUP in home.broker.admin.list_groups("orders"))
        wait(running, lambda: lag(home.broker) == 0)
        assert sum(batches) == 5
        home.broker.admin.grow("orders", 3)
        fill(home.broker, "orders", 5, 6, partition=2)
        wait(running, lambda: sum(batches) == 7 and lag(home.broker) == 0)
    finally:
        running.stop()
    assert running.exception() is None
