"""What the tests of subscriptions share: numbered messages, and handlers that wait to be let go."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from conquiet import Outgoing
from conquiet.kit.clock import ManualClock
from conquiet.message import Message
from conquiet.topics import Broker
from conquiet.wire.keys import Keys
from tests.rigs.waiting import eventually

__all__ = ["Gate", "broker", "numbered", "pending"]


@pytest.fixture
async def broker(url: str, keys: Keys, clock: ManualClock) -> AsyncIterator[Broker]:
    async with Broker(url, namespace=keys.namespace, clock=clock) as broker:
        await broker.create_topic("orders", partitions=2)
        yield broker


def numbered(count: int, **more: Any) -> list[Outgoing]:
    return [Outgoing(number, **more) for number in range(count)]


async def pending(broker: Broker) -> int:
    return (await broker.admin.describe_group("orders", "g")).pending


class Gate:
    """Holds handlers up until it is opened, and knows how many are inside."""

    def __init__(self) -> None:
        self.opened = asyncio.Event()
        self.entered = 0

    async def __call__(self, message: Message) -> None:
        self.entered += 1
        await self.opened.wait()

    async def holds(self, count: int) -> None:
        await eventually(lambda: self.entered >= count, f"{count} handlers inside")
        assert self.entered == count
