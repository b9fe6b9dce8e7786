"""For users' own tests: messages and jobs to call handlers with, and a broker with a private server and a clock.

A handler is a function, and a test can call it: no server is needed.

::

    await handle(message({"id": 1}, key="customer-7"))
    await send_email(job({"to": "ann@example.org"}, attempts=2))

For what happens around it, retries and dead letters included, there is a real server::

    async with embedded_broker() as (broker, clock):
        await broker.create_topic("orders")
        await broker.send("orders", {"id": 1})
        async with broker.subscribe("orders", group="billing", handler=handle):
            await drain(broker, "orders", "billing", clock=clock)
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from typing import Any, Final

from conquiet.jobs import Job
from conquiet.kit import codec as json
from conquiet.kit.clock import ManualClock
from conquiet.kit.ids import nonce, sortable
from conquiet.message import Message, Outgoing
from conquiet.topics import Broker, Codec, GroupInfo
from conquiet.topics.codec import JSON
from conquiet.topics.format import envelope
from conquiet.topics.server.topics import TopicLike
from conquiet.wire.embedded import EmbeddedRedis

__all__ = ["ManualClock", "drain", "embedded_broker", "job", "message"]

_LOOK: Final = 0.01
_STEP: Final = 1.0


def message(
    payload: Any = None,
    *,
    key: str | None = None,
    headers: Mapping[str, str] | None = None,
    topic: str = "topic",
    partition: int = 0,
    group: str = "group",
    id: str | None = None,
    message_id: str | None = None,
    retry_count: int = 0,
    max_retries: int | None = None,
    replayed_from: str | None = None,
    epoch: int = 1,
    codec: Codec = JSON,
) -> Message:
    """A message as a handler gets it, for a test that calls the handler.

    It is encoded and decoded as on its way through Redis, so what ``send`` refuses is refused here, and the payload is
    what ``codec`` reads. ``retry_count`` is 0 at the first delivery. Without an ``id`` it was sent just now.
    """
    made = Message()
    made.topic, made.partition, made.group, made.epoch = topic, partition, group, epoch
    sent = Outgoing(payload, key, headers, message_id, max_retries)
    entry = [value if isinstance(value, bytes) else str(value).encode() for value in envelope.fields_of(sent, codec)]
    envelope.fill(made, id or f"{time.time_ns() // 1_000_000}-0", entry, codec)
    made.retry_count, made.replayed_from = retry_count, replayed_from
    return made


def job(
    payload: Any = None,
    *,
    id: str | None = None,
    queue: str = "queue",
    priority: int = 0,
    attempts: int = 1,
    max_retries: int | None = None,
    last_error: str | None = None,
    worker: str = "worker",
    lease_ttl: float = 5.0,
) -> Job:
    """A job as a handler gets it, claimed for attempt number ``attempts``, for a test that calls the handler.

    The payload is encoded and decoded as on its way through a store: what ``enqueue`` refuses is refused here.
    """
    now = time.time_ns() // 1_000_000
    waiting = Job(
        id=sortable() if id is None else id,
        queue=queue,
        raw=json.encode(payload),
        priority=priority,
        attempts=attempts - 1,
        max_retries=max_retries,
        last_error=last_error,
        enqueued_ms=now,
        ready_ms=now,
    )
    return waiting.claimed(worker, now, int(lease_ttl * 1000), nonce())


@asynccontextmanager
async def embedded_broker(**options: Any) -> AsyncGenerator[tuple[Broker, ManualClock]]:
    """A broker on a redis-server of its own that goes with it, and the clock by which its leases and retries run.

    ``options`` are those of ``Broker``.
    """
    clock = ManualClock()
    async with EmbeddedRedis() as server, Broker(server.url, clock=clock, **options) as broker:
        yield broker, clock


async def drain(
    broker: Broker, topic: TopicLike, group: str, *, clock: ManualClock | None = None, timeout: float = 10.0
) -> None:
    """Return when a group has finished everything that was sent to a topic; ``TimeoutError`` if that takes too long.

    What is finished was handled or is a dead letter. With a ``clock``, whatever waits for its next attempt need not
    be waited for: the clock is moved until it is due.
    """
    async with asyncio.timeout(timeout):
        while not _is_finished(info := await broker.admin.describe_group(topic, group)):
            if clock is not None and _only_waits(info):
                clock.advance(_STEP)
            await asyncio.sleep(_LOOK)


def _is_finished(info: GroupInfo) -> bool:
    return info.lag == 0 and info.pending == 0


def _only_waits(info: GroupInfo) -> bool:
    """Whether nothing is left but messages that wait for another attempt."""
    return info.lag == 0 and info.pending == sum(part.retry_depth for part in info.partitions)
