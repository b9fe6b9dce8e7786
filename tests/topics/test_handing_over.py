"""A partition on its way to another owner: it arrives, or it stays, and does not stand still in between."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from conquiet import Broker, Delivery, Message, Messages
from conquiet.kit.clock import ManualClock
from conquiet.wire.keys import Keys
from tests.rigs.asking import ask
from tests.rigs.waiting import LONG, eventually
from tests.topics.consuming import Recorder, finished, hands_over, impatient

pytestmark = pytest.mark.any_server

NEVER = 1.0
"""Seconds after which it is clear that what should happen at once never does: short, as long as they are waited out."""


@pytest.fixture
async def broker(url: str, keys: Keys, clock: ManualClock) -> AsyncIterator[Broker]:
    async with Broker(url, namespace=keys.namespace, clock=clock) as broker:
        await broker.create_topic("orders", partitions=2)
        yield broker


async def pull(messages: Messages) -> Delivery:
    found = await messages.next(LONG)
    assert found is not None
    return found


async def test_a_partition_goes_on_when_nobody_wants_it_any_more(broker: Broker, url: str, keys: Keys) -> None:
    gate = asyncio.Event()

    async def epochs() -> list[str]:
        leases = [keys.lease(keys.partition("orders", partition), "g") for partition in range(2)]
        return [await ask(url, "HGET", lease, "epoch") for lease in leases]

    async def handle(message: Message) -> None:
        if message.payload == "long":
            await gate.wait()

    seen = Recorder(handle)
    async with broker.subscribe("orders", group="g", handler=seen, options=impatient()) as owner:
        try:
            for partition in range(2):
                await broker.send("orders", "long", key="k", partition=partition)
            await seen.saw(2)
            before = await epochs()
            async with broker.subscribe("orders", group="g", handler=Recorder(), options=impatient()):
                await eventually(lambda: hands_over(owner), "a hand-over that waits for its handler")
            for partition in range(2):
                await broker.send("orders", "short", key="other", partition=partition)
            await eventually(lambda: seen.payloads.count("short") == 2, "both partitions go on", NEVER)
        finally:
            gate.set()
        await finished(broker, "orders", "g")
        assert (owner.owned, await epochs()) == ({"orders": (0, 1)}, before)


async def test_a_pulled_message_that_was_forgotten_holds_its_partition_for_a_limited_time(
    broker: Broker, clock: ManualClock
) -> None:
    options = impatient(max_processing_time=5.0)
    async with broker.consume("orders", group="g", options=options) as owner:
        for partition in range(2):
            await broker.send("orders", partition, partition=partition)
        for _ in range(2):
            await pull(owner)
        async with broker.consume("orders", group="g", options=options) as other:
            clock.advance(10.0)
            await eventually(lambda: len(other.owned["orders"]) == 1, "its share")


async def test_what_a_hand_over_waits_for_is_told(
    broker: Broker, clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    async with broker.consume("orders", group="g", options=impatient()) as owner:
        for partition in range(2):
            await broker.send("orders", partition, partition=partition)
        forgotten = [await pull(owner) for _ in range(2)]
        async with broker.consume("orders", group="g", options=impatient()):
            await eventually(lambda: hands_over(owner), "a hand-over that waits for what was pulled")
            clock.advance(10.0)
            ids = [message.id for message in forgotten]
            await eventually(lambda: any(id in caplog.text for id in ids), "a word of the message", NEVER)
