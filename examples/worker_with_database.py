"""Handler, commit, acknowledge: a worker that is killed between commit and acknowledgment, and what follows.

The worker books each order in SQLite. It is killed right after a commit, before Redis hears of it, so that order
is delivered a second time to the next worker. The handler is idempotent (the order's number is the primary key),
so the duplicate is absorbed and the books are right.
"""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import tempfile
from itertools import chain
from pathlib import Path

from conquiet.sync import EmbeddedRedis, QueueConfig, QueueConsumer, QueueMessage, RedisStreamsQueue

ORDERS = 6
DEADLY = 3


class Books:
    """The database: one connection, one transaction a message."""

    def __init__(self, path: str, die_after: int | None = None) -> None:
        self.connection = sqlite3.connect(path)
        self.connection.execute("CREATE TABLE IF NOT EXISTS orders (number INTEGER PRIMARY KEY, cents INTEGER)")
        self.die_after = die_after

    def begin(self) -> Books:
        return self

    def commit(self) -> None:
        self.connection.commit()
        if self.connection.execute("SELECT count(*) FROM orders").fetchone()[0] == self.die_after:
            print("worker-1: committed, and killed before the acknowledgment", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)

    def rollback(self) -> None:
        self.connection.rollback()


def book(message: QueueMessage, books: Books) -> None:
    order = message.payload
    cursor = books.connection.execute("INSERT OR IGNORE INTO orders VALUES (?, ?)", (order["number"], order["cents"]))
    again = "" if cursor.rowcount else " (seen before: absorbed)"
    print(f"booked order {order['number']}{again}", flush=True)


def config_of(name: str) -> QueueConfig:
    return QueueConfig(stream_key="orders", consumer_group="books", consumer_name=name, block_ms=500)


def first_worker(url: str, path: str) -> None:
    with RedisStreamsQueue.connect(url, config_of("worker-1")) as queue:
        QueueConsumer(queue).run(handler=book, db_factory=Books(path, die_after=DEADLY))


def second_worker(url: str, path: str) -> None:
    books = Books(path)
    with RedisStreamsQueue.connect(url, config_of("worker-2")) as queue, QueueConsumer(queue) as consumer:
        # First what the dead worker left, since nothing takes that over by itself; then the rest.
        for message in chain(queue.claim_stale(min_idle_ms=0), iter(consumer.next, None)):
            book(message, books)
            books.commit()
            queue.ack(message)


def main() -> None:
    with tempfile.TemporaryDirectory() as place, EmbeddedRedis() as server:
        path = str(Path(place) / "books.db")
        with RedisStreamsQueue.connect(server.url, config_of("producer")) as queue:
            queue.enqueue_many([{"number": number, "cents": 1000} for number in range(1, ORDERS + 1)])
            script = [sys.executable, __file__, server.url, path]
            subprocess.run(script, check=False)
            second_worker(server.url, path)
            total = Books(path).connection.execute("SELECT count(*), sum(cents) FROM orders").fetchone()
            print(f"{total[0]} orders, {total[1]} cents, {queue.backlog_stats().pending} not acknowledged")


if __name__ == "__main__":
    if len(sys.argv) == 3:
        first_worker(sys.argv[1], sys.argv[2])
    else:
        main()
