"""Orders go through Spark into totals; the stream's process is killed with kill -9 on the way; every cent is there.

A shop publishes DataFrames of orders to the topic ``orders``. A structured stream adds them up by windows of event
time to the topic ``totals``, and keeps what comes there in Parquet. A service without Spark follows ``totals`` too. In
the middle the stream is killed, driver and JVM, and started again from its checkpoints.

``nox -s pipeline`` runs this on a Redis that it starts by itself; Java 17 or newer has to be there.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import select
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any, TypeAlias

from pyspark.sql import SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming.query import StreamingQuery

from conquiet import Broker, EmbeddedRedis, SubscribeOptions
from conquiet.spark import TopicSink, register

SHOPS = ["Lyon", "Oslo", "Porto"]
FIRST_DAY = datetime(2030, 1, 1, tzinfo=UTC)
DAYS = 6
ORDERS = DAYS * max(200, int(40_000 * float(os.environ.get("CONQUIET_TEST_SCALE", "0.1"))))
ORDER = "number LONG, shop STRING, customer STRING, amount DECIMAL(12,2), at TIMESTAMP"
TOTAL = "shop STRING, window STRING, orders LONG, cents LONG"

Order: TypeAlias = tuple[int, str, str, Decimal, datetime]
Totals: TypeAlias = dict[tuple[str, str], tuple[int, int]]
"""By shop and beginning of the window: how many orders, and their cents."""


def orders_of(day: int) -> list[Order]:
    """A day's orders, some of them up to two hours late. They are the same whenever they are asked for."""
    chance = random.Random(day)
    count = ORDERS // DAYS
    midnight = FIRST_DAY + timedelta(days=day)
    return [
        (
            day * count + number,
            chance.choice(SHOPS),
            f"customer-{chance.randrange(1_000)}",
            Decimal(chance.randrange(1, 1_000_000)) / 100,
            midnight + timedelta(seconds=max(0, 86_400 * number // count - chance.randrange(7_200))),
        )
        for number in range(count)
    ]


CLOSING: Order = (-1, "closing", "nobody", Decimal(0), FIRST_DAY + timedelta(days=DAYS + 2))
"""A window is closed by what comes long after it. This comes after all, and closes them."""


# --- the Spark processes -------------------------------------------------------------------------------------------


@contextmanager
def spark_session(name: str) -> Iterator[SparkSession]:
    """A small Spark. Its workers have to be this Python, which is not what Spark takes by itself."""
    os.environ["PYSPARK_PYTHON"] = sys.executable
    settings: dict[str, bool | float | int | str | None] = {
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1",  # a short life is not worth the best code
        "spark.driver.host": "127.0.0.1",
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.shuffle.partitions": "2",
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
    }
    # Two slots, and as on a cluster a task that fails is tried again, up to four times in all.
    spark = SparkSession.builder.master("local[2,4]").appName(name).config(map=settings).getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    try:
        yield spark
    finally:
        spark.stop()


def shop(url: str) -> None:
    """Publish the orders, day by day."""
    with spark_session("shop") as spark:
        sink = TopicSink(url, "orders", key="customer")
        for day in range(DAYS):
            spark.createDataFrame(orders_of(day), ORDER).repartition(2).foreachPartition(sink)
        spark.createDataFrame([CLOSING], ORDER).foreachPartition(sink)
        print("published", sink.written.rows, flush=True)


def stream(url: str, place: str) -> None:
    """Add the orders up until there is a line on standard input; then tell what is in Parquet."""
    with spark_session("totals") as spark:
        queries: list[StreamingQuery] = []
        for start in (add_up, keep):
            # Once for each: queries of one registration share a map of Spark's, which the start of one changes while
            # the tasks of the other are being written.
            register(spark)
            queries.append(start(spark, url, place))
        print("running", flush=True)
        while not select.select([sys.stdin], [], [], 0.5)[0]:
            for query in queries:
                if (failure := query.exception()) is not None:
                    sys.exit(str(failure)[:3_000])  # what went wrong comes first, and Java's stacks after it
        for query in queries:
            query.processAllAvailable()
            query.stop()
        rows = spark.read.parquet(f"{place}/totals").collect()
        print("parquet", json.dumps([row.asDict() for row in rows]), flush=True)


def add_up(spark: SparkSession, url: str, place: str) -> StreamingQuery:
    """Orders and cents by shop and six hours, once a day has passed since.

    A DECIMAL adds up exactly; and cents are integers, which everybody who reads JSON keeps exactly. A shuffle may bring
    the rows of a repeated batch in another order, so they are known by IDs.
    """
    totals = (
        spark.readStream.format("conquiet")
        .options(url=url, topic="orders", schema=ORDER, maxRowsPerBatch=ORDERS // 8)
        .load()
        .select("payload.*")
        .withWatermark("at", "1 day")
        .groupBy("shop", F.window("at", "6 hours"))
        .agg(F.count("*").alias("orders"), F.sum("amount").alias("amount"))
        .select(
            "shop",
            F.date_format("window.start", "yyyy-MM-dd HH:mm").alias("window"),
            "orders",
            (F.col("amount") * 100).cast("long").alias("cents"),
        )
        .withColumn("id", F.concat_ws("/", "shop", "window"))
    )
    return (
        totals.writeStream.format("conquiet")
        .options(url=url, topic="totals", key="shop", idColumn="id")
        .option("checkpointLocation", f"{place}/checkpoint-totals")
        .outputMode("append")
        .trigger(processingTime="200 milliseconds")
        .start()
    )


def keep(spark: SparkSession, url: str, place: str) -> StreamingQuery:
    """The totals as Parquet."""
    totals = spark.readStream.format("conquiet").options(url=url, topic="totals", schema=TOTAL).load()
    return (
        totals.select("payload.*")
        .writeStream.format("parquet")
        .option("checkpointLocation", f"{place}/checkpoint-parquet")
        .trigger(processingTime="200 milliseconds")
        .start(f"{place}/totals")
    )


# --- the service, and what the example does with all of them ---------------------------------------------------------


class Dashboard:
    """Follows the topic ``totals``. No Spark here."""

    def __init__(self) -> None:
        self.totals: Totals = {}
        self.again = 0

    async def run(self, url: str) -> None:
        options = SubscribeOptions(handle_signals=False)
        async with (
            Broker.connect(url) as broker,
            broker.consume("totals", group="dashboard", options=options) as messages,
        ):
            async for message in messages:
                total = message.payload
                key = total["shop"], total["window"]
                self.again += key in self.totals
                self.totals[key] = total["orders"], total["cents"]
                await message.ack()

    @property
    def orders(self) -> int:
        return sum(count for count, _ in self.totals.values())


class Program:
    """A Spark process of this example: what it says, and a log of what Spark says."""

    def __init__(self, name: str, log: Path) -> None:
        self.name = name
        self._log = log
        self._process: asyncio.subprocess.Process | None = None

    async def start(self, *arguments: str) -> None:
        with self._log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, __file__, self.name, *arguments),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                limit=1 << 24,
                start_new_session=True,  # the JVM is a child of its own: both are killed together
            )

    async def says(self, word: str) -> str:
        """The rest of the next line, which has to begin with ``word``."""
        assert self._process is not None
        assert self._process.stdout is not None
        line = (await self._process.stdout.readline()).decode()
        if not line.startswith(word):
            raise self.failure()
        return line.removeprefix(word).strip()

    def is_alive(self) -> bool:
        return self._process is not None and self._process.returncode is None

    def has_logged(self, word: str) -> bool:
        return word in self._log.read_text(errors="replace")

    def failure(self) -> SystemExit:
        return SystemExit(f"the {self.name} failed:\n{self._log.read_text(errors='replace')[-6_000:]}")

    def finish(self) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(b"finish\n")

    async def kill(self) -> None:
        if self._process is not None and self._process.returncode is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            await self._process.wait()


def expected() -> Totals:
    """The same by hand."""
    found: Totals = {}
    for day in range(DAYS):
        for _, shop, _, amount, at in orders_of(day):
            key = shop, f"{at:%Y-%m-%d} {at.hour // 6 * 6:02}:00"
            orders, cents = found.get(key, (0, 0))
            found[key] = orders + 1, cents + int(amount * 100)
    return found


class Pipeline:
    """All of it, and a clock."""

    def __init__(self, url: str, place: str) -> None:
        log = Path(place) / "spark.log"
        self.url = url
        self.place = place
        self.dashboard = Dashboard()
        self.shop = Program("shop", log)
        self.stream = Program("stream", log)
        self._began = time.monotonic()
        self._resumes_left = 2

    def say(self, text: str) -> None:
        print(f"{time.monotonic() - self._began:4.0f} s  {text}", flush=True)

    async def run(self) -> list[dict[str, Any]]:
        """What is in Parquet at the end."""
        self.say("a shop and a stream start, each with a Spark of its own")
        await self.shop.start(self.url)
        await self.stream.start(self.url, self.place)
        self.say(f"the shop has published {int(await self.shop.says('published')):,} orders")
        await self.stream.says("running")
        await self.until(ORDERS // 4)
        await self.stream.kill()
        self.say(f"killed the stream with kill -9, {self.dashboard.orders:,} of {ORDERS:,} orders in its totals")
        await self.resume()
        await self.until(ORDERS)
        self.stream.finish()
        found: list[dict[str, Any]] = json.loads(await self.stream.says("parquet"))
        return found

    async def resume(self) -> None:
        """Start the stream again, as whatever supervises a stream does when it has ended."""
        await self.stream.start(self.url, self.place)
        await self.stream.says("running")
        self.say("the stream is back, from its checkpoint")

    async def until(self, orders: int) -> None:
        """Wait until the dashboard knows of so many orders."""
        told = self.dashboard.orders
        while told < orders:
            await asyncio.sleep(0.1)
            if not self.stream.is_alive():
                # Spark has written a task that it cannot read. That is no loss: all is in the checkpoint.
                if not (self._resumes_left and self.stream.has_logged("OptionalDataException")):
                    raise self.stream.failure()
                self._resumes_left -= 1
                await self.resume()
            if self.dashboard.orders > told:
                told = self.dashboard.orders
                self.say(f"the dashboard knows of {told:,} orders in {len(self.dashboard.totals)} windows")


async def main() -> int:
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as place:
        async with EmbeddedRedis() as server, asyncio.TaskGroup() as services:
            print(f"{server.software} runs at {server.url}")
            async with Broker.connect(server.url) as broker:
                await broker.create_topic("orders", partitions=3)
                await broker.create_topic("totals", partitions=2)
            pipeline = Pipeline(server.url, place)
            following = services.create_task(pipeline.dashboard.run(server.url))
            try:
                parquet = await pipeline.run()
            finally:
                following.cancel()
                await pipeline.shop.kill()
                await pipeline.stream.kill()
    return report(pipeline.dashboard, parquet)


def report(dashboard: Dashboard, parquet: list[dict[str, Any]]) -> int:
    right = expected()
    kept = {(row["shop"], row["window"]): (row["orders"], row["cents"]) for row in parquet}
    for name, found in {"the topic": dashboard.totals, "Parquet": kept}.items():
        for key in sorted(right.keys() | found.keys()):
            if found.get(key) != right.get(key):
                print(f"wrong in {name}: {key} is {found.get(key)}, not {right.get(key)}")
    again = dashboard.again + len(parquet) - len(kept)
    if again or dashboard.totals != right or kept != right:
        print(f"totals are wrong; {again} came twice")
        return 1
    cents = sum(cents for _, cents in right.values())
    print(f"totals are right: {ORDERS:,} orders, {len(right)} windows, {cents // 100:,}.{cents % 100:02} in all,")
    print("to the cent and each of them once, in the topic and in Parquet")
    return 0


if __name__ == "__main__":
    if len(sys.argv) > 1:
        programs: dict[str, Callable[..., None]] = {"shop": shop, "stream": stream}
        programs[sys.argv[1]](*sys.argv[2:])
    elif shutil.which("java") is None and "JAVA_HOME" not in os.environ:
        sys.exit("Spark needs Java 17 or newer: put it on the PATH, or set JAVA_HOME")
    else:
        sys.exit(asyncio.run(main()))
