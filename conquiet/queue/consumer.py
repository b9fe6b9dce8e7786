"""One message after another until told to stop: the high-level API."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import ExitStack
from functools import partial
from types import TracebackType
from typing import Self, TypeVar

from conquiet.errors import ConfigError, QueueError
from conquiet.kit.handlers import checked
from conquiet.kit.lifecycle import MOMENT, Life
from conquiet.message import QueueMessage
from conquiet.queue.config import QueueConfig
from conquiet.queue.queue import RedisStreamsQueue
from conquiet.queue.transaction import DbFactory, DbTx, Handler, Transactions
from conquiet.wire.interrupt import Interrupt

__all__ = ["QueueConsumer"]

_Tx = TypeVar("_Tx", bound=DbTx)
_log = logging.getLogger("conquiet.queue")


class QueueConsumer:
    """Control flow over a queue, and nothing else: no retry, no acknowledgment of its own, no claiming.

    Holds at most one message. After :meth:`stop`, or SIGTERM or SIGINT where ``handle_signals`` is on and this
    is the main thread, no read is started and one that blocks ends at once; a message that Redis handed out in
    that instant is still delivered. From a Redis that does not answer, the read ends after a second without one, and
    what it may have handed out stays pending. What was delivered and not acknowledged stays pending. An error from
    Redis ends the iteration or the run as a ``QueueError``; nothing reconnects by itself.
    """

    def __init__(self, queue: RedisStreamsQueue, *, handle_signals: bool = True) -> None:
        if not isinstance(queue, RedisStreamsQueue):
            raise ConfigError(f"queue must be a RedisStreamsQueue, not {queue!r}")
        if queue.config.max_read_count != 1:
            raise ConfigError(f"QueueConsumer needs max_read_count=1, not {queue.config.max_read_count}")
        self._queue = queue
        self._interrupt = Interrupt()
        name = f"consumer {queue.config.consumer_name!r} of stream {queue.config.stream_key!r}"
        self._life = Life(name, _log, handle_signals=handle_signals, at_once=self._interrupt.request)
        self._entered = ExitStack()

    @property
    def config(self) -> QueueConfig:
        """The queue's configuration."""
        return self._queue.config

    @property
    def stopping(self) -> bool:
        """Whether somebody asked to stop."""
        return self._interrupt.requested

    def stop(self) -> None:
        """Start no more reads, and end the one that blocks. From any thread or signal handler, at any time."""
        self._life.stop()

    async def __aenter__(self) -> Self:
        await self._queue.open()
        self._entered.enter_context(self._life.shared())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
        self._entered.close()

    async def next(self, block_ms: int | None = None) -> QueueMessage | None:
        """The next message, or ``None`` if none came within ``block_ms`` (default: the config's) or on a stop."""
        if self._interrupt.requested:
            return None
        messages = await self._queue._read(block_ms, 1, self._interrupt)
        return messages[0] if messages else None

    async def iter_messages(self) -> AsyncIterator[QueueMessage]:
        """Messages one by one until stopped; each is pending until it is acknowledged."""
        with self._life.shared():
            while not self._interrupt.requested:
                message = await self.next()
                if message is not None:
                    yield message

    async def ack(self, message: QueueMessage) -> None:
        """Acknowledge one message; returns once Redis has done so."""
        await self._queue.ack(message)

    async def run(self, *, handler: Handler[_Tx], db_factory: DbFactory[_Tx]) -> None:
        """For each message until stopped: begin, ``handler(message, tx)``, commit, acknowledge.

        Never acknowledges before the commit, and never twice tries a message. Whatever the handler or the
        commit raises, cancellation included, rolls the transaction back unless a thread has committed it by then,
        ends the run and is raised as it is; the message stays pending. A crash between commit and acknowledgment
        delivers the message again, so what the handler writes must be idempotent. A handler that cannot be called
        so is a ``ConfigError`` at once. A stop waits for the message in hand, and then a second at most for the answer
        to its acknowledgment.

        Plain functions run on one thread of their own, all four of them, so that SQLite is content; a handler
        or a factory that is ``async`` runs on the event loop, and so does then everything else.
        """
        checked("handler", handler, "message", "tx")
        with self._life.shared(), Transactions(handler, db_factory) as transactions:
            while not self._interrupt.requested:
                message = await self.next()
                if message is not None:
                    await transactions.handle(message)
                    if not await self._interrupt.ends(partial(self.ack, message), MOMENT):
                        raise QueueError(
                            f"message {message.id}: no answer to its acknowledgment {MOMENT:g} s after a stop"
                        )
