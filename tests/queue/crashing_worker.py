"""A consumer that writes to SQLite and dies between commit and acknowledgment, as by a power cut.

python crashing_worker.py URL STREAM DATABASE
"""

from __future__ import annotations

import asyncio
import os
import sqlite3
import sys

from conquiet import QueueConfig, QueueConsumer, QueueMessage, RedisStreamsQueue


class DyingConnection(sqlite3.Connection):
    """Commits for real, and then there is nobody left."""

    def commit(self) -> None:
        super().commit()
        os._exit(7)


class Factory:
    def __init__(self, path: str) -> None:
        self.path = path

    def begin(self) -> sqlite3.Connection:
        return sqlite3.connect(self.path, factory=DyingConnection)


def handler(message: QueueMessage, tx: sqlite3.Connection) -> None:
    tx.execute("INSERT OR IGNORE INTO orders VALUES (?, ?)", (message.id, message.payload["n"]))


async def main(url: str, stream: str, path: str) -> None:
    config = QueueConfig(stream, "group", "crashing")
    async with RedisStreamsQueue.connect(url, config) as queue, QueueConsumer(queue) as consumer:
        await consumer.run(handler=handler, db_factory=Factory(path))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
