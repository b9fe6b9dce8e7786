"""What an earlier version's Spark left: its stream goes on from the checkpoint, its writes are known."""

from __future__ import annotations

import asyncio
import json
import shutil
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyspark
import pytest
from pyspark.sql import SparkSession

from conquiet import ConfigError
from conquiet.sync import Broker
from conquiet.wire.keys import Keys
from tests.conftest import Rung
from tests.rigs.servers import on_a_port_in_sync
from tests.sync.looking import looking
from tests.upgrades.scenes.spark import BATCH, CHECKPOINT, GROUP, ROWS, copying, rows, write
from tests.upgrades.stored import FIXTURES, VERSIONS, Recording

pytestmark = [pytest.mark.any_server, pytest.mark.timeout(180)]


@dataclass(frozen=True)
class Left:
    """A server and a checkpoint as that version left them."""

    url: str
    checkpoint: Path
    facts: dict[str, Any]

    def numbers(self, topic: str) -> Counter[int]:
        """What a topic holds."""
        with looking(self.url) as eye:
            entries = [eye.ask("XRANGE", Keys().partition(topic, index), "-", "+") for index in (0, 1)]
        return Counter(json.loads(fields["payload"])["n"] for part in entries for _, fields in part)


@pytest.fixture(params=VERSIONS)
def left(request: pytest.FixtureRequest, rung: Rung, tmp_path: Path) -> Iterator[Left]:
    recording = Recording.loaded(request.param, "spark")
    if tuple(pyspark.__version__.split(".")[:2]) < tuple(recording.facts["pyspark"].split(".")[:2]):
        pytest.skip("the checkpoint is of a newer Spark")
    shutil.copytree(FIXTURES / request.param / CHECKPOINT, tmp_path / CHECKPOINT)
    with on_a_port_in_sync(rung.binary) as server:
        asyncio.run(recording.restore(server.url))
        yield Left(server.url, tmp_path / CHECKPOINT, dict(recording.facts))


def as_if_begun_now(left: Left) -> None:
    """Batches can be repeated for some days, and recordings get older than that."""
    with looking(left.url) as eye:
        for key in eye.ask("KEYS", "streaming:mq:topic:*:write:*"):
            assert eye.ask("HSET", key, "begun_ms", round(time.time() * 1000)) == 0


@pytest.mark.parametrize("cut_off", ["between batches", "before a batch was committed"])
def test_the_stream_goes_on_from_its_checkpoint(spark: SparkSession, left: Left, cut_off: str) -> None:
    with Broker.connect(left.url) as broker:
        group = broker.admin.describe_group("in", GROUP)
        assert (group.owner, group.lag) == ("spark", left.facts["lag"])
    if cut_off != "between batches":
        as_if_begun_now(left)
        last = max(int(file.name) for file in (left.checkpoint / "commits").glob("[0-9]*"))
        for name in (f"{last}", f".{last}.crc"):
            (left.checkpoint / "commits" / name).unlink()
    copying(spark, left.url, left.checkpoint).awaitTermination()
    assert left.numbers("out") == Counter(range(left.facts["sent"]))


def test_a_write_of_that_version_can_be_repeated_and_followed(spark: SparkSession, left: Left) -> None:
    as_if_begun_now(left)
    frame = rows(spark)
    write(frame, left.url, "written", BATCH)
    write(frame.repartition(1), left.url, "by-id", BATCH, idColumn="id")
    for topic in ("written", "by-id"):
        assert left.numbers(topic) == Counter(range(ROWS))
    with pytest.raises(Exception, match="cannot be repeated: batch 3 has begun since"):
        write(frame, left.url, "written", BATCH - 1)
    write(frame, left.url, "written", BATCH + 1)
    assert left.numbers("written") == Counter([*range(ROWS), *range(ROWS)])


def test_nobody_subscribes_to_the_group_of_a_stream(left: Left) -> None:
    with (
        Broker.connect(left.url) as broker,
        pytest.raises(ConfigError, match="is a Spark query's"),
        broker.consume("in", group=GROUP),
    ):
        pytest.fail("entered")
