"""A consumer process for tests to kill: ``... URL STREAM NAME LOG BLOCK_MS async|sync``.

Handles new messages first and abandoned ones when there are none. Each handled message is a line in the log,
``ID NAME``, written before its acknowledgment. Ends with code 0 on SIGTERM or SIGINT.
"""

from __future__ import annotations

import asyncio
import os
import sys

import conquiet
import conquiet.sync
from conquiet import QueueConfig

IDLE_MS = 3_000
"""Far longer than the handling of a message takes, or one survivor would claim another's."""


class Log:
    """What was handled, outside the library: one atomic append a message."""

    def __init__(self, path: str, name: str) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        self._name = name

    def add(self, id: str) -> None:
        os.write(self._file, f"{id} {self._name}\n".encode())


async def consume(url: str, config: QueueConfig, log: Log) -> None:
    async with (
        conquiet.RedisStreamsQueue.connect(url, config) as queue,
        conquiet.QueueConsumer(queue) as consumer,
    ):
        while not consumer.stopping:
            message = await consumer.next()
            stale = [] if message else await queue.claim_stale(IDLE_MS)
            for taken in [message] if message else stale:
                log.add(taken.id)
                await queue.ack(taken)


def consume_sync(url: str, config: QueueConfig, log: Log) -> None:
    with conquiet.sync.RedisStreamsQueue.connect(url, config) as queue, conquiet.sync.QueueConsumer(queue) as consumer:
        while not consumer.stopping:
            message = consumer.next()
            stale = [] if message else queue.claim_stale(IDLE_MS)
            for taken in [message] if message else stale:
                log.add(taken.id)
                queue.ack(taken)


if __name__ == "__main__":
    url, stream, name, path, block_ms, flavour = sys.argv[1:]
    config = QueueConfig(stream, "group", name, block_ms=int(block_ms))
    if flavour == "sync":
        consume_sync(url, config, Log(path, name))
    else:
        asyncio.run(consume(url, config, Log(path, name)))
