"""What a plain program needs beside the facades of topics: handlers on its own thread, deliveries without ``await``."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import conquiet as core
from conquiet import Message, SubscribeOptions
from conquiet.sync._portal import Errand, Inbox, call, current_inbox, plain
from conquiet.topics.server.topics import TopicLike

__all__ = ["CallersSubscription", "Delivery", "admin_of", "consume", "subscribe"]


class Delivery(core.Delivery):
    __doc__ = core.Delivery.__doc__
    __slots__ = ()

    def ack(self) -> None:  # type: ignore[override]  # pyright: ignore[reportIncompatibleMethodOverride]
        call(super().ack)

    def retry(self, *, delay: float | None = None, error: str = "") -> None:  # type: ignore[override]  # pyright: ignore[reportIncompatibleMethodOverride]
        call(super().retry, delay=delay, error=error)

    def reject(self, reason: str = "") -> None:  # type: ignore[override]  # pyright: ignore[reportIncompatibleMethodOverride]
        call(super().reject, reason)

    ack.__doc__ = core.Delivery.ack.__doc__
    retry.__doc__ = core.Delivery.retry.__doc__
    reject.__doc__ = core.Delivery.reject.__doc__


class CallersSubscription(core.Subscription):
    """A subscription whose handler, one at a time, runs on the thread that is in ``wait``; else nothing is begun."""

    _inbox: Inbox | None = None

    async def wait(self) -> None:
        """As the core's, and meanwhile the calling thread handles messages."""
        self._check_entered()
        self._inbox = current_inbox()
        self._handling.is_open = True
        self._handling.wake()
        try:
            await super().wait()
        finally:
            self._handling.is_open = False

    async def handle(self, handler: Callable[[Any], Any], message: Message | Sequence[Message]) -> Any:
        """Run ``handler`` on the thread that waits."""
        assert self._inbox is not None
        loop = asyncio.get_running_loop()

        def run() -> Any:
            try:
                return handler(message)
            except Exception:
                raise
            except BaseException as error:
                # It ends the wait of the thread; the message must not be held for ever.
                failure = RuntimeError(f"the handler raised {type(error).__name__}")
                loop.call_soon_threadsafe(errand.fail, failure)
                raise

        errand = Errand(run)
        self._inbox.put(errand)
        return await errand.done


def subscribe(
    broker: core.Broker,
    topic: TopicLike | Sequence[TopicLike],
    *,
    group: str,
    handler: Callable[[Any], Any],
    options: SubscribeOptions | None,
) -> core.Subscription:
    """A core subscription for a plain handler: in a pool of threads, or on the thread that waits if one is enough."""
    batches = isinstance(options, SubscribeOptions) and options.batch_handler
    plain("handler", handler, "messages" if batches else "message")
    if not isinstance(options, SubscribeOptions) or options.max_inflight > 1:
        return broker.subscribe(topic, group=group, handler=handler, options=options)
    made: list[CallersSubscription] = []

    async def handle(message: Any) -> Any:
        return await made[0].handle(handler, message)

    made.append(broker._consumer(CallersSubscription, topic, group, options, handler=handle))
    made[0]._handling.is_open = False
    return made[0]


def consume(
    broker: core.Broker, topic: TopicLike | Sequence[TopicLike], *, group: str, options: SubscribeOptions | None
) -> core.Messages:
    """Core messages whose deliveries are settled without ``await``."""
    return broker._consumer(core.Messages, topic, group, options, delivery=Delivery)


def admin_of(broker: core.Broker) -> core.Admin:
    """The administration of a broker."""
    return broker.admin
