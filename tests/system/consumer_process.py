"""A consumer in a process of its own, which waits for a minute and notes in a file what it handled.

Iteration acknowledges nothing; ``run`` does, after the commit. It ends with code 0 once it was told to stop.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import time

import conquiet
from conquiet import QueueConfig, QueueMessage, sync


class Tx:
    def commit(self) -> None: ...
    def rollback(self) -> None: ...


class Factory:
    def begin(self) -> Tx:
        return Tx()


class Work:
    """Note each message."""

    def __init__(self, log: str, name: str, gate: str) -> None:
        # One line a message, appended in one write: lines of several processes never mix.
        self._log = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        self._name = name
        self._gate = gate

    def note(self, what: str) -> None:
        os.write(self._log, f"{self._name} {what}\n".encode())

    def handle(self, message: QueueMessage, tx: Tx) -> None:
        self.note(message.id)
        while self._gate and not os.path.exists(self._gate):
            time.sleep(0.005)


async def asynchronously(arguments: argparse.Namespace, config: QueueConfig, work: Work) -> None:
    async with (
        conquiet.RedisStreamsQueue.connect(arguments.url, config) as queue,
        conquiet.QueueConsumer(queue) as consumer,
    ):
        work.note("ready")
        if arguments.how == "run":
            await consumer.run(handler=work.handle, db_factory=Factory())
        else:
            async for message in consumer.iter_messages():
                work.note(message.id)


def synchronously(arguments: argparse.Namespace, config: QueueConfig, work: Work) -> None:
    with sync.RedisStreamsQueue.connect(arguments.url, config) as queue, sync.QueueConsumer(queue) as consumer:
        work.note("ready")
        if arguments.how == "run":
            consumer.run(handler=work.handle, db_factory=Factory())
        else:
            for message in consumer.iter_messages():
                work.note(message.id)


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--flavour", choices=["core", "sync"], required=True)
    parser.add_argument("--how", choices=["iter", "run"], required=True)
    parser.add_argument("--url", required=True)
    parser.add_argument("--stream", required=True)
    parser.add_argument("--name", required=True)
    parser.add_argument("--log", required=True)
    parser.add_argument("--gate", default="", help="a handler of run returns once this file exists")
    return parser.parse_args()


def main() -> None:
    arguments = options()
    config = QueueConfig(arguments.stream, "group", arguments.name, block_ms=60_000)
    work = Work(arguments.log, arguments.name, arguments.gate)
    if arguments.flavour == "core":
        asyncio.run(asynchronously(arguments, config, work))
    else:
        synchronously(arguments, config, work)
    work.note("ended")


if __name__ == "__main__":
    main()
