"""SIGTERM and SIGINT end a consumer process gracefully, even one that blocks for a minute."""

from __future__ import annotations

import secrets
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from redis.asyncio import Redis

from conquiet import QueueConfig, RedisStreamsQueue
from tests.rigs.waiting import eventually

pytestmark = pytest.mark.system


@pytest.mark.parametrize("flavour", ["async", "sync"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_blocked_consumer_ends(url: str, number: signal.Signals, flavour: str, tmp_path: Path) -> None:
    stream = f"t:{secrets.token_hex(6)}"
    config = QueueConfig(stream, "group", "test")
    async with RedisStreamsQueue.connect(url, config) as queue, Redis.from_url(url, decode_responses=True) as eye:
        await queue.enqueue({"n": 1})
        await queue.read()  # in somebody else's hands: nothing may touch it

        async def is_blocked() -> bool:
            return bool((await eye.info("clients"))["blocked_clients"])

        command = [sys.executable, "-W", "error", "-m", "tests.system.consumer", url, stream, "name"]
        with subprocess.Popen([*command, str(tmp_path / "log"), "60000", flavour], stderr=subprocess.PIPE) as process:
            try:
                await eventually(is_blocked, "the consumer blocks")
                process.send_signal(number)
                assert process.wait(30) == 0  # half of its block
                assert process.stderr is not None
                assert process.stderr.read() == b""
            finally:
                process.kill()
        stats = await queue.backlog_stats()
        assert (stats.pending, stats.pending_by_consumer) == (1, {"test": 1})
