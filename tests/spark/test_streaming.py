"""A topic as a stream: what is planned and read, without a Spark but for the end."""

from __future__ import annotations

import json
import logging
import random
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from pyspark.sql import DataFrame, SparkSession

from conquiet.errors import ConfigError, DataLostError, QueueError, UnknownTopicError
from conquiet.kit.entry_ids import after, before
from conquiet.kit.entry_ids import order as id_order
from conquiet.spark.versions import LIMITS_BATCHES
from conquiet.sync import Broker
from tests.conftest import Rung, Server
from tests.rigs.servers import on_a_port_in_sync
from tests.spark.conftest import Home
from tests.spark.planning import Checkpoint, Query, delete_topic, fill, stream_of, values
from tests.sync.looking import looking

LOST = "were removed before they were read; failOnDataLoss=false goes on without them"
ALL = 1_000_000


@contextmanager
def query(home: Home, checkpoint: Checkpoint | None = None, /, **options: object) -> Iterator[Query]:
    run = Query(home, "orders", checkpoint, **options)
    try:
        yield run
    finally:
        run.stop()


def rows_of(home: Home, checkpoint: Checkpoint, /, **options: object) -> list[int]:
    """What a query that is started again reads."""
    with query(home, checkpoint, **options) as run:
        return values(run.rows())


def trim(home: Home, by: str, leave: int, topic: str = "orders") -> None:
    if by == "retention":
        assert leave
        home.broker.admin.trim(topic, max_len=leave)
        return
    with looking(home.url) as eye:
        eye.ask("XTRIM", stream_of(home, topic), "MAXLEN", leave)


# --- batches -------------------------------------------------------------------------------------------------------


@pytest.mark.cluster_too
@pytest.mark.parametrize("most", [1, 2, 7, 50, None])
def test_each_batch_is_bounded_and_all_is_read_once(home: Home, most: int | None) -> None:
    home.broker.create_topic("orders", partitions=4)
    sizes = (0, 3, 10, 25)
    for partition, size in enumerate(sizes):
        fill(home.broker, "orders", *range(100 * partition, 100 * partition + size), partition=partition)
    with query(home, **({} if most is None else {"maxRowsPerBatch": most})) as run:
        batches = run.batches()
    assert all(0 < len(batch) <= (most or ALL) for batch in batches)
    rows = [row for batch in batches for row in batch]
    assert values(rows) == [100 * partition + at for partition, size in enumerate(sizes) for at in range(size)]
    for partition in range(4):  # in their order, over all batches
        ids = [id_order(row["id"]) for row in rows if row["partition"] == partition]
        assert ids == sorted(ids)


def test_a_server_that_counts_fills_each_batch(home: Home, server: Server) -> None:
    home.broker.create_topic("orders", partitions=3)
    for partition, size in enumerate((2, 17, 9)):
        fill(home.broker, "orders", *range(size), partition=partition)
    with query(home, maxRowsPerBatch=10) as run:
        sizes = [len(batch) for batch in run.batches()]
    assert sum(sizes) == 28
    assert server.release < (7, 0) or sizes == [10, 10, 8]


def test_a_small_batch_leaves_no_partition_out(home: Home) -> None:
    """One partition gets as much as is read; the other has its turn nevertheless."""
    home.broker.create_topic("orders", partitions=3)
    fill(home.broker, "orders", 1, 2, 3, partition=2)
    with query(home, maxRowsPerBatch=1) as run:
        read: list[int] = []
        for _ in range(8):
            fill(home.broker, "orders", 0)
            assert run.plan()
            batch = run.read(run.slices())
            assert len(batch) == 1
            read += values(batch)
    assert [number for number in read if number] == [1, 2, 3]


@pytest.mark.any_server
def test_the_slices_of_a_batch_are_disjoint(home: Home) -> None:
    home.broker.create_topic("orders")
    with looking(home.url) as eye:
        for number in range(100):
            eye.ask("XADD", stream_of(home, "orders"), f"{1_000 + number // 3}-{number}", "payload", number)
    with query(home, splits=4) as run:
        assert run.plan()
        slices = run.slices()
        assert len(slices) == 4
        assert values(run.read(slices)) == list(range(100))


@pytest.mark.any_server
def test_nothing_new_is_no_batch(home: Home) -> None:
    home.broker.create_topic("orders", partitions=2)
    with query(home) as run:
        assert run.batches() == []
        fill(home.broker, "orders", 1)
        assert [values(batch) for batch in run.batches()] == [[1]]
        assert run.batches() == []


@pytest.mark.any_server
def test_what_is_available_now_is_where_it_ends(home: Home) -> None:
    home.broker.create_topic("orders")
    fill(home.broker, "orders", 1, 2, 3)
    with query(home, maxRowsPerBatch=2) as run:
        run.reader.prepareForTriggerAvailableNow()
        fill(home.broker, "orders", 4)
        home.broker.admin.grow("orders", 2)
        fill(home.broker, "orders", 5, partition=1)
        assert [values(batch) for batch in run.batches()] == [[1, 2], [3]]
        assert run.reader.reportLatestOffset().keys() == {"0", "1"}
    assert rows_of(home, run.checkpoint) == [4, 5]


@pytest.mark.any_server
@pytest.mark.parametrize("most", [{}, {"maxRowsPerBatch": 2}])
def test_a_query_that_begins_behind_its_end(home: Home, most: dict[str, int]) -> None:
    """Spark asks for the end of all that is available first, and where to begin after that."""
    home.broker.create_topic("orders", partitions=2)
    fill(home.broker, "orders", 1)
    with query(home, startingOffsets="latest", **most) as run:
        run.reader.prepareForTriggerAvailableNow()
        fill(home.broker, "orders", 2)
        assert run.batches() == []
    fill(home.broker, "orders", 3)
    assert rows_of(home, run.checkpoint, **most) == [3]


def test_a_restart_goes_on_exactly(home: Home) -> None:
    """Whenever it was stopped: between batches, or with one planned whose outcome nobody knows."""
    chance = random.Random(7)
    home.broker.create_topic("orders", partitions=3)
    checkpoint, sent, read = Checkpoint(), 0, Counter[int]()
    for _ in range(25):
        for _ in range(chance.randrange(6)):
            fill(home.broker, "orders", sent, partition=chance.randrange(3))
            sent += 1
        with query(home, checkpoint, maxRowsPerBatch=4) as run:
            for _ in range(chance.randrange(3)):
                if run.plan():
                    slices = run.slices()
                    if chance.random() < 0.7:
                        read.update(values(run.read(slices)))
    read.update(rows_of(home, checkpoint, maxRowsPerBatch=4))
    assert read == Counter(range(sent))


@pytest.mark.any_server
def test_a_batch_that_is_read_again_is_the_same(home: Home) -> None:
    home.broker.create_topic("orders")
    fill(home.broker, "orders", 1, 2)
    with query(home) as run:
        assert run.plan()
    fill(home.broker, "orders", 3, 4)
    with query(home, run.checkpoint) as again:
        assert [values(batch) for batch in again.batches()] == [[1, 2], [3, 4]]


@pytest.mark.any_server
def test_growth_is_noticed(home: Home) -> None:
    home.broker.create_topic("orders")
    fill(home.broker, "orders", 1)
    with query(home, startingOffsets="latest") as run:
        assert values(run.rows()) == []
        fill(home.broker, "orders", 2)
        home.broker.admin.grow("orders", 3)
        fill(home.broker, "orders", 3, partition=2)
        assert values(run.rows()) == [2, 3]
    home.broker.admin.grow("orders", 4)
    fill(home.broker, "orders", 4, partition=3)
    fill(home.broker, "orders", 5, partition=1)
    assert rows_of(home, run.checkpoint) == [5, 4]


@pytest.mark.any_server
def test_what_older_versions_of_spark_do_not_tell(home: Home) -> None:
    """Before 4.2 it is not said where a batch begins, nor how much it may have."""
    home.broker.create_topic("orders")
    ids = fill(home.broker, "orders", 1, 2, 3)
    with query(home, maxRowsPerBatch=2) as run:
        run.reader.initialOffset()
        assert [run.reader.latestOffset()["0"][0] for _ in range(3)] == [ids[1], ids[2], ids[2]]


@pytest.mark.any_server
def test_a_legacy_stream_can_be_read(home: Home) -> None:
    with looking(home.url) as eye:
        for number in range(5):
            eye.ask("XADD", f"{home.namespace}:orders", "*", "data", number)
    with query(home, maxRowsPerBatch=3) as run:
        assert [values(batch) for batch in run.batches()] == [[0, 1, 2], [3, 4]]


def test_a_topic_that_is_not_there(home: Home) -> None:
    with query(home) as run, pytest.raises(UnknownTopicError, match="no topic 'orders'"):
        run.batches()


# --- where it begins -----------------------------------------------------------------------------------------------


def test_it_begins_at_the_end(home: Home) -> None:
    home.broker.create_topic("orders", partitions=2)
    fill(home.broker, "orders", 1, 2)
    with query(home, startingOffsets="latest", maxRowsPerBatch=5) as run:
        assert run.rows() == []
        fill(home.broker, "orders", 3)
        fill(home.broker, "orders", 4, partition=1)
        assert values(run.rows()) == [3, 4]


@pytest.mark.parametrize("most", [{}, {"maxRowsPerBatch": 2}])
def test_it_begins_after_ids(home: Home, most: dict[str, int]) -> None:
    home.broker.create_topic("orders", partitions=3)
    ids = fill(home.broker, "orders", 0, 1, 2, 3)
    fill(home.broker, "orders", 4, 5, partition=1)
    lone = fill(home.broker, "orders", 6, 7, partition=2)
    starts = json.dumps({"0": ids[1], "2": lone[1]})
    with query(home, startingOffsets=starts, **most) as run:
        assert values(run.rows()) == [2, 3, 4, 5]
        fill(home.broker, "orders", 8, partition=2)
        assert values(run.rows()) == [8]


@pytest.mark.any_server
def test_partitions_that_are_not_there(home: Home) -> None:
    home.broker.create_topic("orders", partitions=2)
    with query(home, startingOffsets='{"2": "5-0"}') as run, pytest.raises(ConfigError, match="partition 2, but topic"):
        run.batches()


@pytest.mark.parametrize("most", [{}, {"maxRowsPerBatch": 2}])
def test_it_begins_with_an_id(home: Home, most: dict[str, int]) -> None:
    home.broker.create_topic("orders")
    ids = fill(home.broker, "orders", 0, 1, 2, 3)
    for start, wanted in ((ids[2], [2, 3]), (after(ids[2]), [3]), (before(ids[0]), [0, 1, 2, 3]), ("0", [0, 1, 2, 3])):
        with query(home, startId=start, **most) as run:
            assert values(run.rows()) == wanted


@pytest.mark.parametrize("hours", [-1, 0, 1])
@pytest.mark.parametrize("most", [{}, {"maxRowsPerBatch": 2}])
def test_a_time_before_or_after_all_entries_is_no_loss(home: Home, hours: int, most: dict[str, int]) -> None:
    """Nobody has lost entries that are older than the topic, or that have not come yet."""
    home.broker.create_topic("orders", partitions=2)
    fill(home.broker, "orders", 0, 1, 2)
    time = (datetime.now(UTC) + timedelta(hours=hours, seconds=1)).isoformat()
    with query(home, startTime=time, **most) as run:
        assert values(run.rows()) == ([0, 1, 2] if hours < 0 else [])
        fill(home.broker, "orders", 3, 4)
        assert values(run.rows()) == [3, 4]


@pytest.mark.parametrize("by", ["retention", "XTRIM"])
def test_what_was_removed_before_it_began_is_no_loss(home: Home, by: str) -> None:
    home.broker.create_topic("orders")
    ids = fill(home.broker, "orders", 0, 1, 2, 3, 4)
    trim(home, by, 2)
    for options in ({}, {"startId": ids[1]}, {"startingOffsets": json.dumps({"0": ids[0]})}, {"maxRowsPerBatch": 1}):
        with query(home, **options) as run:
            assert values(run.rows()) == [3, 4]


# --- what was removed ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("by", ["retention", "XTRIM"])
@pytest.mark.parametrize("most", [{}, {"maxRowsPerBatch": 3}])
def test_what_was_removed_unread_is_an_error(
    home: Home, by: str, most: dict[str, int], caplog: pytest.LogCaptureFixture
) -> None:
    home.broker.create_topic("orders")
    fill(home.broker, "orders", 0, 1, 2)
    with query(home, **most) as run:
        assert values(run.rows()) == [0, 1, 2]
        fill(home.broker, "orders", *range(3, 10))
        trim(home, by, 4)
        assert run.plan()
        with pytest.raises(DataLostError, match=f"topic 'orders', partition 0: .*entries {LOST}"):
            run.slices()
    with pytest.raises(DataLostError, match=LOST):
        rows_of(home, run.checkpoint, **most)
    with caplog.at_level(logging.WARNING, "conquiet.spark"):
        assert rows_of(home, run.checkpoint, failOnDataLoss=False, **most) == [6, 7, 8, 9]
    assert "were removed before they were read" in caplog.text
    fill(home.broker, "orders", 10)
    assert rows_of(home, run.checkpoint, **most) == [10]


def test_a_first_batch_from_the_latest_that_was_never_done(home: Home) -> None:
    """Spark asks again where the query began, if that died before its first batch was done: entries have come since."""
    home.broker.create_topic("orders")
    fill(home.broker, "orders", 0)
    with query(home, startingOffsets="latest") as run:
        assert run.plan() is False
        fill(home.broker, "orders", 1, 2)
        assert run.plan()
    fill(home.broker, "orders", 3)
    planned = run.checkpoint.planned
    with pytest.raises(DataLostError, match=LOST):
        rows_of(home, Checkpoint(planned=planned), startingOffsets="latest")
    with query(home, Checkpoint(planned=planned), startingOffsets="latest", failOnDataLoss=False) as again:
        assert again.plan()
        assert again.read(again.slices()) == []


@pytest.mark.parametrize("first", ["beginning", "end"])
def test_what_comes_while_it_begins_is_read(home: Home, first: str) -> None:
    """Spark asks more than once where a query begins, also after it has planned the first batch."""
    home.broker.create_topic("orders")
    fill(home.broker, "orders", 0)
    with query(home, startingOffsets="latest") as run:
        if first == "beginning":
            run.reader.initialOffset()
        fill(home.broker, "orders", 1)
        end = run.reader.latestOffset()
        fill(home.broker, "orders", 2)
        start = run.reader.initialOffset()
        rows = run.read(run.reader.partitions(start, end))
        rows += run.read(run.reader.partitions(end, run.reader.latestOffset()))
        assert values(rows) == ([1, 2] if first == "beginning" else [2])


def test_a_partition_that_waits_for_its_turn_loses_nothing_in_silence(home: Home) -> None:
    home.broker.create_topic("orders", partitions=3)
    for partition in range(3):
        fill(home.broker, "orders", *range(4), partition=partition)
    with query(home, maxRowsPerBatch=2) as run:
        assert run.plan()
        before, after = json.loads(run.checkpoint.start), json.loads(run.checkpoint.planned[0])
        run.read(run.slices())
        waiting = next(partition for partition in before if before[partition] == after[partition])
        with looking(home.url) as eye:
            eye.ask("XTRIM", stream_of(home, "orders", int(waiting)), "MAXLEN", 1)
        with pytest.raises(DataLostError, match=f"partition {waiting}: .*{LOST}"):
            run.rows()


def test_where_it_begins_may_be_asked_for_late(home: Home) -> None:
    """Versions before 4.2 ask where a batch ends before they ask where it begins: nothing may be planned twice."""
    home.broker.create_topic("orders")
    ids = fill(home.broker, "orders", *range(5))
    with query(home, maxRowsPerBatch=3) as run:
        assert run.reader.latestOffset()["0"][0] == ids[4]
        assert run.reader.initialOffset()
        assert run.reader.latestOffset()["0"][0] == ids[4]


def test_a_server_that_counts_tells_how_many(home: Home, server: Server) -> None:
    home.broker.create_topic("orders")
    fill(home.broker, "orders", *range(10))
    with query(home, maxRowsPerBatch=4) as run:
        assert run.plan()
        run.read(run.slices())
        trim(home, "XTRIM", 3)
        assert run.plan()
        number = "3 entries" if server.release >= (7, 0) else "entries"
        with pytest.raises(DataLostError, match=f"partition 0: {number} were removed"):
            run.slices()


@pytest.mark.parametrize("most", [{}, {"maxRowsPerBatch": 2}])
def test_what_was_read_may_go(home: Home, most: dict[str, int]) -> None:
    home.broker.create_topic("orders")
    with query(home, **most) as run:
        fill(home.broker, "orders", *range(6))
        assert values(run.rows()) == list(range(6))
        trim(home, "retention", 3)
        fill(home.broker, "orders", 6, 7)
        assert values(run.rows()) == [6, 7]
        home.broker.admin.trim("orders", max_age=0.001)
        fill(home.broker, "orders", 8)
        assert values(run.rows()) == [8]
    home.broker.admin.trim("orders", max_age=0.001)
    fill(home.broker, "orders", 9)
    assert rows_of(home, run.checkpoint, **most) == [9]


def test_what_somebody_deletes_in_the_middle(home: Home, server: Server) -> None:
    home.broker.create_topic("orders")
    ids = fill(home.broker, "orders", *range(10))
    stream = stream_of(home, "orders")
    with looking(home.url) as eye, query(home, maxRowsPerBatch=4) as run:
        eye.ask("XDEL", stream, *ids[1:3])
        assert run.plan()
        assert values(run.read(run.slices())) == [0, 3, 4, 5]
        eye.ask("XDEL", stream, ids[0], ids[4], ids[7])
        assert run.plan()
        if server.release < (7, 0):
            assert values(run.rows()) == [6, 8, 9]
            return
        with pytest.raises(DataLostError, match=LOST):
            run.read(run.slices())


def test_what_goes_between_planning_and_reading(home: Home, server: Server) -> None:
    home.broker.create_topic("orders")
    fill(home.broker, "orders", *range(5))
    with query(home) as run:
        assert run.plan()
        slices = run.slices()
        trim(home, "XTRIM", 2)
        if server.release < (7, 0):
            assert values(run.read(slices)) == [3, 4]
            return
        with pytest.raises(DataLostError, match=f"partition 0: 3 entries {LOST}"):
            run.read(slices)


@pytest.mark.parametrize("partitions", [1, 2, 3])
@pytest.mark.parametrize("most", [{}, {"maxRowsPerBatch": 2}])
def test_a_topic_that_was_made_again(home: Home, partitions: int, most: dict[str, int]) -> None:
    """Nobody knows what the other one held that was not read. All of the new one is read, and in bounded batches."""
    home.broker.create_topic("orders", partitions=2)
    for partition in range(2):
        fill(home.broker, "orders", *range(5), partition=partition)
    with query(home, **most) as run:
        assert len(run.rows()) == 10
    delete_topic(home.broker, "orders")
    with pytest.raises(UnknownTopicError):
        rows_of(home, run.checkpoint)
    home.broker.create_topic("orders", partitions=partitions)
    sent = [10 * partition + at for partition in range(partitions) for at in range(4)]
    for number in sent:
        fill(home.broker, "orders", number, partition=number // 10)
    with pytest.raises(DataLostError, match=LOST):
        rows_of(home, run.checkpoint, **most)
    with query(home, run.checkpoint, failOnDataLoss=False, **most) as again:
        batches = again.batches()
    assert values([row for batch in batches for row in batch]) == sent
    assert all(len(batch) <= 2 for batch in batches[1:] if most)
    assert rows_of(home, run.checkpoint, **most) == []


@pytest.mark.any_server
def test_a_server_that_forgot_is_a_loss(home: Home) -> None:
    """The clock of the new one is behind, so even the IDs are smaller."""
    home.broker.create_topic("orders")
    fill(home.broker, "orders", 0, 1)
    with query(home) as run:
        assert len(run.rows()) == 2
    delete_topic(home.broker, "orders")
    home.broker.create_topic("orders")
    with looking(home.url) as eye:
        for number in range(3):
            eye.ask("XADD", stream_of(home, "orders"), f"5-{number + 1}", "payload", number)
    with pytest.raises(DataLostError, match=LOST):
        rows_of(home, run.checkpoint)
    assert rows_of(home, run.checkpoint, failOnDataLoss=False) == [0, 1, 2]


# --- a server that is not there for a while ------------------------------------------------------------------------


def test_a_restart_of_the_server_between_batches(rung: Rung, tmp_path: Path) -> None:
    if not rung.binary:
        pytest.skip("needs a server's binary")
    with on_a_port_in_sync(rung.binary, appendonly=True, directory=tmp_path) as first:
        url, port = first.url, int(first.url.rsplit(":", 1)[1])
        with Broker.connect(url) as broker:
            broker.create_topic("orders", partitions=2)
            fill(broker, "orders", 0, 1, 2)
        home = Home(url, broker, "", {"url": url})
        run = Query(home, "orders", maxRowsPerBatch=2)
        assert run.plan()
        assert values(run.read(run.slices())) == [0, 1]
    with (
        on_a_port_in_sync(rung.binary, appendonly=True, directory=tmp_path, port=port),
        Broker.connect(url) as broker,
    ):
        assert values(run.rows()) == [2]
        fill(broker, "orders", 3, partition=1)
        assert values(run.rows()) == [3]
        run.stop()


@pytest.mark.any_server
def test_the_first_question_is_not_repeated(home: Home) -> None:
    nowhere = Home("redis://127.0.0.1:1", home.broker, "", {"url": "redis://127.0.0.1:1"})
    with query(nowhere) as run, pytest.raises(QueueError):
        run.batches()


# --- in Spark ------------------------------------------------------------------------------------------------------


def stream(spark: SparkSession, home: Home, **options: object) -> DataFrame:
    return spark.readStream.format("conquiet").options(**home.of("orders", **options)).load()


def run_to_the_end(frame: DataFrame, checkpoint: Path) -> tuple[list[int], list[list[int]]]:
    """What a query reads with the trigger ``availableNow``: the numbers, and those of each batch."""
    batches: list[list[int]] = []

    def keep(batch: DataFrame, number: int) -> None:
        batches.append([int(row["payload"]) for row in batch.select("payload").collect()])

    writer = frame.writeStream.foreachBatch(keep).option("checkpointLocation", str(checkpoint))
    running = writer.trigger(availableNow=True).start()
    running.awaitTermination()
    return sorted(number for batch in batches for number in batch), batches


@pytest.mark.any_server
@pytest.mark.timeout(180)
def test_spark_reads_on_from_its_checkpoint(spark: SparkSession, home: Home, tmp_path: Path) -> None:
    home.broker.create_topic("orders", partitions=2)
    for number in range(10):
        fill(home.broker, "orders", number, partition=number % 2)
    frame = stream(spark, home, maxRowsPerBatch=4)
    numbers, batches = run_to_the_end(frame, tmp_path)
    assert numbers == list(range(10))
    # Before 4.2 nobody tells a source where a run begins: its first batch has no bound.
    assert [len(batch) for batch in batches] == ([4, 4, 2] if LIMITS_BATCHES else [10])
    fill(home.broker, "orders", 10, 11)
    home.broker.admin.grow("orders", 3)
    fill(home.broker, "orders", 12, partition=2)
    numbers, batches = run_to_the_end(frame, tmp_path)
    assert numbers == [10, 11, 12]
    assert [len(batch) for batch in batches] == [3]
    # Nothing is left of what was never read: the user sees that, and can go on.
    fill(home.broker, "orders", *range(13, 18))
    with looking(home.url) as eye:
        eye.ask("XTRIM", stream_of(home, "orders"), "MAXLEN", 2)
    with pytest.raises(Exception, match=LOST):
        run_to_the_end(frame, tmp_path)
    numbers, _ = run_to_the_end(stream(spark, home, maxRowsPerBatch=4, failOnDataLoss=False), tmp_path)
    assert numbers == [16, 17]
