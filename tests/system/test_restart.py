"""The server is killed and comes back with its data: the failure is seen, nothing is lost, the queue goes on."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from conquiet import EmbeddedRedis, QueueConfig, QueueConsumer, QueueError, RedisStreamsQueue
from tests.conftest import Rung

pytestmark = pytest.mark.system


def a_server(rung: Rung, port: int | None, place: Path) -> EmbeddedRedis:
    settings = {"appendfsync": "always"}
    return EmbeddedRedis(binary=rung.binary, port=port, directory=place, appendonly=True, settings=settings)


async def test_a_restart_in_the_middle_of_everything(rung: Rung, tmp_path: Path) -> None:
    first = a_server(rung, None, tmp_path)
    await first.open()
    url, port = first.url, int(first.url.rsplit(":", 1)[1])
    queue = RedisStreamsQueue.connect(url, QueueConfig("orders", "group", "consumer"))
    sent = await queue.enqueue_many([{"n": number} for number in range(100)])
    [held] = await queue.read(1000, 1)

    reader = RedisStreamsQueue.connect(url, QueueConfig("empty", "group", "consumer"))
    reading = asyncio.get_running_loop().create_task(QueueConsumer(reader).next(60_000))
    await reader.backlog_stats()
    os.kill(first.pid, signal.SIGKILL)
    with pytest.raises(QueueError) as caught:
        await reading
    assert caught.value.__cause__ is not None
    with pytest.raises(QueueError):
        await queue.enqueue({"n": "lost in the crash"})
    await first.aclose()

    async with a_server(rung, port, tmp_path):
        await queue.ack(held)
        rest = await queue.read(1000, 1000)
        assert [held.id, *(message.id for message in rest)] == sent
        await queue.ack(*rest)
        assert (await queue.backlog_stats()).pending == 0
        assert await reader.enqueue({"n": 1})
        await queue.aclose()
        await reader.aclose()
