"""kill -9 in the middle of the work: nothing is lost, and little is done twice."""

from __future__ import annotations

import asyncio
import secrets
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from conquiet import QueueConfig, RedisStreamsQueue
from tests.rigs.waiting import eventually

pytestmark = pytest.mark.system


@contextmanager
def consumers(url: str, stream: str, log: Path, flavour: str) -> Iterator[dict[str, subprocess.Popen[bytes]]]:
    command = [sys.executable, "-W", "error", "-m", "tests.system.recovering_consumer", url, stream]
    processes = {
        name: subprocess.Popen([*command, name, str(log), "200", flavour]) for name in ("first", "second", "third")
    }
    try:
        yield processes
    finally:
        for process in processes.values():
            process.kill()
            process.wait()


async def kill_in_the_act(process: subprocess.Popen[bytes], name: str, queue: RedisStreamsQueue) -> int:
    """kill -9 while it holds messages; how many."""
    while True:
        process.send_signal(signal.SIGSTOP)  # so that what it holds can be counted
        held = (await queue.backlog_stats()).pending_by_consumer.get(name, 0)
        if held:
            process.kill()
            return held
        process.send_signal(signal.SIGCONT)
        await asyncio.sleep(0.001)  # to find it at another point of its loop


def names(log: Path) -> set[str]:
    return {line.split()[1] for line in log.read_text().splitlines()} if log.exists() else set()


def handled(log: Path) -> list[str]:
    return [line.split()[0] for line in log.read_text().splitlines()] if log.exists() else []


@pytest.mark.parametrize("flavour", ["async", "sync"])
@pytest.mark.timeout(300)
async def test_one_of_three_consumers_is_killed(url: str, flavour: str, tmp_path: Path, scale: float) -> None:
    count = max(1_000, int(10_000 * scale))
    stream, log = f"t:{secrets.token_hex(6)}", tmp_path / "handled"
    async with RedisStreamsQueue.connect(url, QueueConfig(stream, "group", "test")) as queue:
        with consumers(url, stream, log, flavour) as running:
            sent: list[str] = []

            async def all_are_at_work() -> bool:
                sent.append(await queue.enqueue({"n": "first"}))
                return names(log) == running.keys()

            await eventually(all_are_at_work, "all three consumers have handled something")
            sent += await queue.enqueue_many([{"n": number} for number in range(count - len(sent))])
            in_flight = await kill_in_the_act(running["second"], "second", queue)
            assert in_flight == 1, "a QueueConsumer holds one message"
            assert len(handled(log)) < count, "there was still work to do"

            async def all_is_done() -> bool:
                return len(set(handled(log))) == count and (await queue.backlog_stats()).pending == 0

            await eventually(all_is_done, "everything is handled and acknowledged", seconds=200)
            for name in ("first", "third"):
                running[name].send_signal(signal.SIGTERM)
            assert [running[name].wait(30) for name in ("first", "third")] == [0, 0]
    counts = Counter(handled(log))
    assert counts.keys() == set(sent)
    assert sum(counts.values()) - count <= in_flight
