"""Blocked in calls when a signal comes."""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Self

from conquiet.kit.loopthread import PRIVATE_LOOP
from conquiet.sync import QueueConfig, QueueConsumer, QueueMessage, RedisStreamsQueue
from conquiet.sync._portal import call
from tests.sync.looking import GROUP, looking, until, whatever
from tests.sync.scripts import PATIENCE, say

__all__ = ["handling", "iterating", "next_message", "reading", "second_ctrl_c", "within_cleanup"]

_LONGER = 60_000  # than any test waits


def _torn_off(url: str, name: str) -> None:
    """Wait until the server has noticed; before, it may still give the torn read a message, which stays pending."""
    with looking(url) as eye:
        until(lambda: eye.blocked(name) == 0, "the end of the read on the server")


def reading(url: str, name: str, stream: str) -> None:
    """In a read, and the queue is used again afterwards."""
    with RedisStreamsQueue.connect(url, whatever(stream)) as queue:
        say("ready")
        try:
            queue.read(block_ms=_LONGER)
        except KeyboardInterrupt:
            say("interrupted")
        _torn_off(url, name)
        queue.enqueue({"n": 1})
        [message] = queue.read()
        queue.ack(message)
        say("read", message.payload["n"])


def next_message(url: str, name: str, stream: str) -> None:
    """In a consumer's ``next``, which Ctrl-C interrupts like any call if nobody handles signals."""
    with (
        RedisStreamsQueue.connect(url, whatever(stream)) as queue,
        QueueConsumer(queue, handle_signals=False) as consumer,
    ):
        say("ready")
        try:
            consumer.next(block_ms=_LONGER)
        except KeyboardInterrupt:
            say("interrupted", consumer.stopping)
        _torn_off(url, name)
        queue.enqueue({"n": 1})
        message = consumer.next()
        assert message is not None
        say("next", message.payload["n"])


def second_ctrl_c() -> None:
    """The first Ctrl-C waits for a clean-up that does not end, the second does not."""
    release = asyncio.Event()
    released = threading.Event()

    async def stubborn() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            say("cancelled")
            await release.wait()
            say("released")
            released.set()
            raise

    async def started() -> None:
        say("ready")
        await stubborn()

    try:
        call(started)
    except KeyboardInterrupt as error:
        say("interrupted", type(error.__context__).__name__)
    PRIVATE_LOOP.loop().call_soon_threadsafe(release.set)
    assert released.wait(PATIENCE)


def within_cleanup() -> None:
    """Ctrl-C waits until the coroutine has cleaned up."""

    async def tidy() -> None:
        say("ready")
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.05)  # the clean-up itself: who does not wait for it speaks first
            say("cleaned up")

    try:
        call(tidy)
    except KeyboardInterrupt:
        say("interrupted")


class Tx:
    """Tells what happens to it, and whether on the main thread."""

    def begin(self) -> Self:
        """It is its own factory."""
        return self

    def commit(self) -> None:
        """Good."""
        say("commit", threading.current_thread() is threading.main_thread())

    def rollback(self) -> None:
        """Not so good."""
        say("rollback", threading.current_thread() is threading.main_thread())


def handling(url: str, stream: str, handle_signals: str) -> None:
    """In a handler."""
    finish: list[int] = []

    def handler(message: QueueMessage, tx: Tx) -> None:
        say("handling")
        _nap_until(lambda: consumer.stopping)
        say("stopping")
        _nap_until(lambda: finish)

    signal.signal(signal.SIGUSR1, lambda number, frame: finish.append(number))
    with RedisStreamsQueue.connect(url, whatever(stream)) as queue:
        queue.enqueue({"n": 1})
        consumer = QueueConsumer(queue, handle_signals=handle_signals == "True")
        try:
            consumer.run(handler=handler, db_factory=Tx())
        except KeyboardInterrupt:
            say("interrupted")
        say("pending", queue.backlog_stats().pending)


def _nap_until(condition: Callable[[], object]) -> None:
    while not condition():
        time.sleep(0.01)  # in which signals are heard


@contextmanager
def _as_before() -> Iterator[None]:
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    yield
    say("signals as before", (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before)


def iterating(url: str, stream: str, entered: str) -> None:
    """In an iteration, with a message given out and not acknowledged."""
    config = QueueConfig(stream, GROUP, "consumer-1", block_ms=_LONGER)
    with _as_before(), RedisStreamsQueue.connect(url, config) as queue:
        queue.enqueue({"n": 1})
        consumer = QueueConsumer(queue)
        if entered == "True":
            with consumer:
                _iterate(consumer)
        else:
            _iterate(consumer)
        say("pending", queue.backlog_stats().pending)


def _iterate(consumer: QueueConsumer) -> None:
    for message in consumer.iter_messages():
        say("got", message.payload["n"])
    say("ended", consumer.stopping)
