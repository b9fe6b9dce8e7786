"""For users' own tests: a broker with a private server, a clock that can be moved, and a way to wait for the end.

::

    async with embedded_broker() as (broker, clock):
        await broker.create_topic("orders")
        await broker.send("orders", {"id": 1})
        async with broker.subscribe("orders", group="billing", handler=handle):
            await drain(broker, "orders", "billing", clock=clock)
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any, Final

from conquiet.kit.clock import ManualClock
from conquiet.topics import Broker, GroupInfo
from conquiet.topics.server.topics import TopicLike
from conquiet.wire.embedded import EmbeddedRedis

__all__ = ["ManualClock", "drain", "embedded_broker"]

_LOOK: Final = 0.01
_STEP: Final = 1.0


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
