"""What a plain program needs beside the facades of topics: handlers on its own thread, deliveries without ``await``."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any

import conquiet as core
from conquiet import Message, SubscribeOptions
from conquiet.sync._portal import Errand, Inbox, call, current_inbox, plain
from conquiet.topics.registry import TopicLike

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


class _Seat:
    """The place of the thread that waits for a subscription; whatever comes before it sits down waits."""

    def __init__(self, handler: Callable[[Any], Any]) -> None:
        self._handler = handler
        self._inbox: Inbox | None = None
        self._early: deque[Errand] = deque()

    async def handle(self, message: Message | Sequence[Message]) -> Any:
        """Run the handler on the waiting thread."""
        errand = Errand(lambda: self._handler(message))
        if self._inbox is None:
            self._early.append(errand)
        else:
            self._inbox.put(errand)
        return await errand.done

    @contextmanager
    def taken(self, inbox: Inbox) -> Generator[None]:
        """Within the block, the thread behind ``inbox`` runs the handler."""
        self._inbox = inbox
        while self._early:
            inbox.put(self._early.popleft())
        try:
            yield
        finally:
            self._inbox = None


class CallersSubscription(core.Subscription):
    """A subscription whose handler, one at a time, runs on the thread that is in ``wait``."""

    seat: _Seat

    async def wait(self) -> None:
        """As the core's, and meanwhile the calling thread handles messages."""
        with self.seat.taken(current_inbox()):
            await super().wait()


def subscribe(
    broker: core.Broker,
    topic: TopicLike | Sequence[TopicLike],
    *,
    group: str,
    handler: Callable[[Any], Any],
    options: SubscribeOptions | None,
) -> core.Subscription:
    """A core subscription for a plain handler: in a pool of threads, or on the thread that waits if one is enough."""
    plain("handler", handler)
    if options is None or options.max_inflight > 1 or not callable(handler):
        return broker.subscribe(topic, group=group, handler=handler, options=options)
    seat = _Seat(handler)
    made = broker._consumer(CallersSubscription, topic, group, options, handler=seat.handle)
    made.seat = seat
    return made


def consume(
    broker: core.Broker, topic: TopicLike | Sequence[TopicLike], *, group: str, options: SubscribeOptions | None
) -> core.Messages:
    """Core messages whose deliveries are settled without ``await``."""
    return broker._consumer(core.Messages, topic, group, options, delivery=Delivery)


def admin_of(broker: core.Broker) -> core.Admin:
    """The administration of a broker."""
    return broker.admin
