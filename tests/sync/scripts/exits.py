"""Ways to end a program that has left everything open."""

from __future__ import annotations

import atexit
import os
import sys
import threading
from typing import Any

from conquiet.sync import EmbeddedRedis, QueueConfig, QueueConsumer, RedisStreamsQueue
from tests.sync.looking import GROUP, LONG, looking, until
from tests.sync.scripts import say

__all__ = ["leave"]

_kept: list[Any] = []
"""What is still referenced when the interpreter takes the modules apart."""


def leave(url: str, name: str, stream: str, what: str, how: str) -> None:
    """Leave ``what`` open, and end ``how``."""
    queue = RedisStreamsQueue.connect(url, QueueConfig(stream, GROUP, "consumer-1", block_ms=60_000))
    queue.enqueue({"n": 1})
    _OPENED[what](queue)
    if what in ("thread", "iterating thread"):
        with looking(url) as eye:
            until(lambda: eye.blocked(name) == 1, "a blocked read")
    say("leaving")
    if how == "exit":
        sys.exit(3)
    elif how == "error":
        raise LookupError("of the program itself")
    elif how == "os._exit":
        os._exit(4)


def _queue(queue: RedisStreamsQueue) -> None:
    [message] = queue.read()
    _kept.extend([queue, message])


def _consumer(queue: RedisStreamsQueue) -> None:
    consumer = QueueConsumer(queue).__enter__()
    assert consumer.next() is not None
    _kept.append(consumer)


def _generator(queue: RedisStreamsQueue) -> None:
    messages = QueueConsumer(queue).iter_messages()
    assert next(messages).payload == {"n": 1}
    _kept.append(messages)


def _cyclic_generator(queue: RedisStreamsQueue) -> None:
    """Found by the garbage collector only."""
    messages = QueueConsumer(queue).iter_messages()
    next(messages)
    cycle: list[Any] = [messages]
    cycle.append(cycle)


def _local_generator(queue: RedisStreamsQueue) -> None:
    consumer = QueueConsumer(queue)
    messages = consumer.iter_messages()
    next(messages)


def _server(queue: RedisStreamsQueue) -> None:
    server = EmbeddedRedis()
    server.open()
    own = RedisStreamsQueue.connect(server.url, queue.config)
    own.enqueue({"n": 1})
    say("pid", server.pid)
    _kept.extend([server, own])


def _thread(queue: RedisStreamsQueue) -> None:
    [message] = queue.read()
    queue.ack(message)
    threading.Thread(target=queue.read, daemon=True).start()


def _iterating_thread(queue: RedisStreamsQueue) -> None:
    got = threading.Event()

    def consume() -> None:
        for message in QueueConsumer(queue).iter_messages():
            queue.ack(message)
            got.set()

    threading.Thread(target=consume, daemon=True).start()
    assert got.wait(LONG)


def _at_exit(queue: RedisStreamsQueue) -> None:
    """What a program registered after its imports is run before the loop ends."""
    atexit.register(lambda: say("written", bool(queue.enqueue({"n": 2})), queue.close()))


def _worker(queue: RedisStreamsQueue) -> None:
    """A thread that is no daemon goes on when the main thread has ended, and Python waits for it."""

    def work() -> None:
        threading.main_thread().join()
        say("written", bool(queue.enqueue({"n": 2})))

    threading.Thread(target=work).start()


_OPENED = {
    "queue": _queue,
    "consumer": _consumer,
    "generator": _generator,
    "cyclic generator": _cyclic_generator,
    "local generator": _local_generator,
    "server": _server,
    "thread": _thread,
    "iterating thread": _iterating_thread,
    "at exit": _at_exit,
    "worker": _worker,
}
