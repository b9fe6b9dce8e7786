"""A server that goes away comes back, or it does not: for how long Spark's processes wait for it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from conquiet.errors import ConfigError, QueueError
from conquiet.spark import register
from conquiet.spark.connection import PatientInstance, opened
from conquiet.spark.failures import Patience
from conquiet.spark.options import Place, ReadOptions, WriteOptions
from conquiet.sync import Broker, EmbeddedRedis, Outgoing
from conquiet.topics.outside import pages
from conquiet.wire.address import Address
from conquiet.wire.connections import Connections
from tests.conftest import Rung
from tests.rigs.asking import ask
from tests.rigs.clocks import WatchedClock
from tests.spark.conftest import Home
from tests.spark.looking import asked, payloads
from tests.sync.looking import until

SECONDS = 60.0
STEP = 3.0
"""The longest wait between two tries."""


class Restarted:
    """A server that a test stops, and starts again at the same place with its data."""

    def __init__(self, binary: str, directory: Path) -> None:
        self._binary = binary
        self._directory = directory
        self._server = self._start(None)
        self.url = self._server.url

    def _start(self, port: int | None) -> EmbeddedRedis:
        server = EmbeddedRedis(binary=self._binary, appendonly=True, directory=self._directory, port=port)
        return server.__enter__()

    def stop(self) -> None:
        self._server.__exit__(None, None, None)

    def start(self) -> None:
        self._server = self._start(int(self.url.rsplit(":", 1)[1]))


@pytest.fixture
def restarted(rung: Rung, tmp_path: Path) -> Iterator[Restarted]:
    if not rung.binary:
        pytest.skip("needs a server's binary")
    server = Restarted(rung.binary, tmp_path / "data")
    yield server
    server.stop()


@asynccontextmanager
async def asking(url: str, clock: WatchedClock, *, begun: bool = True) -> AsyncIterator[PatientInstance]:
    link = Connections(Address.of(url))
    try:
        yield PatientInstance(link, clock=clock, patience=Patience(SECONDS, begun=begun))
    finally:
        await link.aclose()


async def away_for(clock: WatchedClock, seconds: float) -> None:
    """Let time pass, from wait to wait."""
    until = clock.monotonic() + seconds
    while (left := until - clock.monotonic()) > 0:
        await clock.waited_on()
        before = clock.waits
        clock.advance(min(STEP, left))
        if left > STEP:
            await clock.waited_again(before)


# --- the patience ------------------------------------------------------------------------------------------------


@pytest.mark.any_server
async def test_an_outage_that_is_shorter_is_waited_out(restarted: Restarted, caplog: pytest.LogCaptureFixture) -> None:
    clock = WatchedClock()
    async with asking(restarted.url, clock) as instance:
        await instance.ask("SET", "here", "1")
        restarted.stop()
        answer = asyncio.create_task(instance.ask("GET", "here"))
        await away_for(clock, SECONDS - STEP)
        restarted.start()
        clock.advance(STEP)
        assert await answer == b"1"
    assert any("the server is away" in line for line in caplog.messages)


@pytest.mark.any_server
async def test_an_outage_that_is_longer_is_a_failure_for_all_who_ask(restarted: Restarted) -> None:
    clock = WatchedClock()
    async with asking(restarted.url, clock) as instance:
        restarted.stop()
        try:
            answer = asyncio.create_task(instance.ask("GET", "here"))
            await away_for(clock, SECONDS)
            clock.advance(STEP)
            with pytest.raises(QueueError):
                await answer
            before = clock.waits
            with pytest.raises(QueueError):
                await instance.ask("GET", "here")  # whoever asked may try again, and is not to wait once more
            assert clock.waits == before
        finally:
            restarted.start()
        assert await instance.ask("GET", "here") is None
        restarted.stop()
        try:
            again = asyncio.create_task(instance.ask("GET", "here"))  # another outage has a time of its own
            await clock.waited_on()
        finally:
            restarted.start()
        clock.advance(STEP)
        assert await again is None


@pytest.mark.any_server
async def test_the_pages_of_a_task_wait_no_longer_than_that(restarted: Restarted) -> None:
    clock = WatchedClock()
    for number in range(3):
        await ask(restarted.url, "XADD", "s", f"1-{number + 1}", "n", number)
    async with asking(restarted.url, clock) as instance:
        restarted.stop()
        reading = pages(instance, "s", "0-0", "9-0", 1)
        page = asyncio.ensure_future(anext(reading))
        await away_for(clock, SECONDS - STEP)
        restarted.start()
        clock.advance(STEP)
        assert [id for id, _ in await page] == [b"1-1"]
        assert [id async for found in reading for id, _ in found] == [b"1-2", b"1-3"]


@pytest.mark.any_server
async def test_a_refusal_is_not_repeated(url: str) -> None:
    clock = WatchedClock()
    async with asking(url, clock) as instance:
        await instance.ask("SET", "conquiet-outage", "text")
        with pytest.raises(QueueError, match="WRONGTYPE"):
            await instance.ask("HGET", "conquiet-outage", "field")
        await instance.ask("DEL", "conquiet-outage")
    assert clock.waits == 0


@pytest.mark.any_server
async def test_what_has_not_begun_is_not_waited_for(restarted: Restarted) -> None:
    clock = WatchedClock()
    restarted.stop()
    try:
        async with asking(restarted.url, clock, begun=False) as instance:
            with pytest.raises(QueueError):
                await instance.ask("GET", "here")
    finally:
        restarted.start()
    assert clock.waits == 0


# --- the option --------------------------------------------------------------------------------------------------


def test_the_user_says_how_long() -> None:
    given = {"url": "redis://localhost", "topic": "orders"}
    assert ReadOptions.of(given).place.patience == WriteOptions.of(given).place.patience == 60
    for options in (ReadOptions, WriteOptions):
        assert options.of({**given, "serverPatience": "2.5"}).place == Place(**given, patience=2.5)
        for wrong in ("long", "-1", "inf", ""):
            with pytest.raises(ConfigError, match="serverPatience"):
                options.of({**given, "serverPatience": wrong})


def test_a_task_is_in_the_middle_of_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    place = Place("redis://localhost", "orders", patience=2.5)
    for context, begun in ((None, False), (object(), True)):
        monkeypatch.setattr("pyspark.TaskContext._taskContext", context)
        instance = opened(place)
        assert isinstance(instance, PatientInstance)
        assert vars(instance.patience)["_begun"] is begun
        assert vars(instance.patience)["_seconds"] == 2.5


# --- in Spark ----------------------------------------------------------------------------------------------------


@pytest.mark.any_server
@pytest.mark.timeout(600)
def test_a_restart_of_the_server_does_not_end_a_stream(
    spark: SparkSession, restarted: Restarted, tmp_path: Path
) -> None:
    options = {"url": restarted.url}
    with Broker.connect(restarted.url) as broker:
        home = Home(restarted.url, broker, "", options)
        broker.create_topic("in", partitions=2)
        broker.create_topic("out")
        broker.send_batch("in", map(Outgoing, range(1_000)))
        register(spark)
        query = (
            spark.readStream.format("conquiet")
            .options(**home.of("in", maxRowsPerBatch=100))
            .load()
            .select("payload")
            .writeStream.format("conquiet")
            .options(**home.of("out", checkpointLocation=tmp_path / "checkpoint"))
            .start()
        )
        try:
            for share in (200, 500):
                until(lambda share=share: len(payloads(home, "out")) >= share, f"{share} rows are copied")
                restarted.stop()
                restarted.start()
            broker.send_batch("in", map(Outgoing, range(1_000, 1_100)))
            query.processAllAvailable()
            assert query.isActive
        finally:
            query.stop()
        assert sorted(payloads(home, "out")) == list(range(1_100))
        assert asked(home, "XLEN", "stream:topic:out:p:0") == 1_100


def test_no_line_is_beyond_the_loggers(capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> None:
    from conquiet.spark.writing import say

    say("nobody asked")
    assert capfd.readouterr() == ("", "")
    with caplog.at_level(logging.INFO, "conquiet.spark"):
        say("100 % of it")
    assert caplog.messages == ["100 % of it"]
