"""Python workers, their tasks and the driver are killed in the middle of the work."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import orjson
import psutil
import pytest
import redis

from tests.rigs.spark_workers import workers
from tests.rigs.waiting import eventually
from tests.spark.conftest import ROOT, Home

BATCHES = 20


@contextmanager
def program(home: Home, directory: Path, rows: int) -> Generator[psutil.Process]:
    """The program under test in a group of processes of its own, none of which outlives the block."""
    words = ["--url", home.url, "--namespace", home.namespace, "--directory", str(directory)]
    command = [sys.executable, "-m", "tests.spark.copying", *words, "--rows", str(rows), "--batches", str(BATCHES)]
    with (directory / "log").open("a") as log:
        running = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            start_new_session=True,
            stdout=log,
            stderr=log,
        )
    try:
        yield psutil.Process(running.pid)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(running.pid, signal.SIGKILL)
        running.wait()


class Ledger:
    """What topics hold, by the numbers in the payloads."""

    def __init__(self, home: Home, **partitions: int) -> None:
        self._client: Any = redis.Redis.from_url(home.url)
        self._streams = {
            topic: [f"{home.namespace}:stream:topic:{topic}:p:{index}" for index in range(count)]
            for topic, count in partitions.items()
        }
        for topic, count in partitions.items():
            home.broker.create_topic(topic, partitions=count)

    def length(self, topic: str) -> int:
        return sum(self._client.xlen(stream) for stream in self._streams[topic])

    def numbers(self, topic: str) -> Counter[int]:
        found: Counter[int] = Counter()
        for stream in self._streams[topic]:
            found.update(orjson.loads(fields[b"payload"])["n"] for _, fields in self._client.xrange(stream))
        return found


@pytest.mark.any_server
@pytest.mark.timeout(600)
async def test_nothing_is_lost_and_nothing_comes_twice(home: Home, tmp_path: Path, scale: float) -> None:
    """Tasks are tried again, and a driver that was killed goes on from its checkpoint."""
    rows = max(40_000, int(200_000 * scale))
    ledger = Ledger(home, **{"in": 3, "out": 2})
    kills = 0

    async def kill_workers(driver: psutil.Process, topic: str, share: float) -> None:
        nonlocal kills
        wanted = int(rows * share)
        await eventually(
            lambda: ledger.length(topic) >= wanted or not driver.is_running(), f"{wanted} rows", seconds=200
        )
        for worker in workers(driver):
            with suppress(psutil.NoSuchProcess):
                worker.kill()
                kills += 1

    with program(home, tmp_path, rows) as driver:
        for share in (0.1, 0.3, 0.6):
            await kill_workers(driver, "in", share)
        for share in (0.05, 0.12, 0.23):
            await kill_workers(driver, "out", share)
        await eventually(lambda: ledger.length("out") >= rows * 0.4, "nearly half is copied", seconds=200)
    assert kills >= 4
    assert ledger.numbers("in") == Counter(range(rows))
    assert ledger.length("out") < rows, "it was killed too late"
    with program(home, tmp_path, rows) as driver:
        await kill_workers(driver, "out", 0.8)
        await eventually(lambda: not driver.is_running() or driver.status() == psutil.STATUS_ZOMBIE, "its end", 200)
    assert ledger.numbers("out") == Counter(range(rows))
    group = home.broker.admin.describe_group("in", "copying")
    assert (group.owner, sum(partition.pending for partition in group.partitions)) == ("spark", 0)
