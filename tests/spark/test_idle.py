"""A query without news asks the server seldom, and hears of news at once."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
from pyspark.sql import SparkSession

from conquiet.spark import register, streaming
from tests.rigs.waiting import LONG
from tests.spark.conftest import Home
from tests.spark.looking import asked
from tests.spark.planning import Query, fill, values
from tests.sync.looking import looking, named, until

PARTITIONS = 8
MOST = 100
"""Commands a second, those within scripts included."""


def commands(home: Home, prefix: str = "cmdstat_") -> int:
    """How many the server has run."""
    stats = asked(home, "INFO", "commandstats")
    return sum(found["calls"] for name, found in stats.items() if name.startswith(prefix))


def now(home: Home) -> int:
    """The server's time in seconds."""
    return int(asked(home, "TIME")[0])


@contextmanager
def idle_query(home: Home, **options: object) -> Iterator[tuple[Query, dict[str, object]]]:
    """A query that has read all there is, and where it stands."""
    home.broker.create_topic("orders", partitions=PARTITIONS)
    fill(home.broker, "orders", *range(3))
    run = Query(home, "orders", **options)
    try:
        assert len(run.rows()) == 3  # the last question of which found nothing
        yield run, json.loads(run.checkpoint.reached)
    finally:
        run.stop()


@pytest.mark.parametrize("group", [None, "reports"])
def test_it_runs_few_commands(home: Home, group: str | None) -> None:
    with idle_query(home, **({} if group is None else {"group": group})) as (run, place):
        run.latest(place)
        before, polls = commands(home), 5
        for _ in range(polls):
            assert run.latest(place) == place
        # A question takes at least as long as it waits.
        assert commands(home) - before <= MOST * streaming._LULL * polls


@pytest.mark.cluster_too
def test_news_end_the_wait(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming, "_LULL", 3 * LONG)
    with idle_query(home) as (run, place), ThreadPoolExecutor(1) as thread:
        asking = thread.submit(run.latest, place)
        fill(home.broker, "orders", 3, partition=5)
        assert asking.result(2 * LONG) != place
        assert values(run.rows()) == [3]


def test_it_waits(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming, "_LULL", 3 * LONG)
    name, url = named(home.url)
    watched = Home(url, home.broker, home.namespace, {**home.options, "url": url})
    with idle_query(watched) as (run, place), ThreadPoolExecutor(1) as thread, looking(home.url) as eye:
        asking = thread.submit(run.latest, place)
        until(lambda: eye.blocked(name) == 1, "one connection waits for all partitions")
        assert not asking.done()
        fill(home.broker, "orders", 3, partition=7)
        assert asking.result(2 * LONG) != place


@pytest.mark.any_server
def test_it_does_not_keep_another_source_of_its_query_waiting(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch that others have something for is committed here too."""
    monkeypatch.setattr(streaming, "_LULL", 10 * LONG)
    with idle_query(home) as (run, place):
        for _ in range(3):
            run.reader.commit(place)
            assert run.latest(place) == place


@pytest.mark.any_server
def test_what_is_available_now_is_not_waited_for(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming, "_LULL", 10 * LONG)
    with idle_query(home) as (run, place):
        run.reader.prepareForTriggerAvailableNow()
        assert [run.latest(place) for _ in range(3)] == [place] * 3


def test_a_partition_that_the_topic_gains_is_noticed(home: Home) -> None:
    with idle_query(home) as (run, place):
        assert run.latest(place) == place
        home.broker.admin.grow("orders", PARTITIONS + 1)
        until(lambda: str(PARTITIONS) in run.latest(place), "it reads the new partition")


@pytest.mark.any_server
def test_a_report_of_where_the_topic_ends_costs_no_command(home: Home) -> None:
    with idle_query(home) as (run, place):
        fill(home.broker, "orders", 3)
        end = run.latest(place)
        before = commands(home, "cmdstat_xinfo")
        assert run.reader.reportLatestOffset() == end
        assert commands(home, "cmdstat_xinfo") == before


@pytest.mark.any_server
@pytest.mark.timeout(600)
def test_spark_asks_seldom_with_its_default_trigger(spark: SparkSession, home: Home) -> None:
    home.broker.create_topic("orders", partitions=PARTITIONS)
    fill(home.broker, "orders", *range(3))
    register(spark)
    query = spark.readStream.format("conquiet").options(**home.of("orders")).load().writeStream.format("noop").start()
    try:
        query.processAllAvailable()
        begun, before = now(home), commands(home, "cmdstat_xinfo")
        until(lambda: now(home) >= begun + 4, "some seconds are over")
        looks = (commands(home, "cmdstat_xinfo") - before) / PARTITIONS
        assert 0 < looks <= (now(home) - begun + 1) / streaming._LULL
    finally:
        query.stop()
