"""Room, memory and keys are for what can run: whatever waits, or has failed, holds up nobody else."""

from __future__ import annotations

import asyncio
import gc
import tracemalloc
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest

from conquiet import Backoff, Broker, Message, Outgoing
from conquiet.wire.keys import Keys
from tests.rigs.waiting import eventually
from tests.topics.consuming import Recorder, buried, counted, impatient

pytestmark = pytest.mark.any_server

NEVER = 1.0
"""Seconds after which it is clear that what should happen at once never does: short, as long as they are waited out."""


@pytest.fixture
async def broker(url: str, keys: Keys) -> AsyncIterator[Broker]:
    async with Broker(url, namespace=keys.namespace) as broker:
        await broker.create_topic("orders", partitions=2)
        yield broker


async def test_one_hot_key_leaves_room_for_other_partitions(broker: Broker) -> None:
    gate = asyncio.Event()

    async def handle(message: Message) -> None:
        if message.key == "hot":
            await gate.wait()

    seen = Recorder(handle)
    await broker.send_batch("orders", [Outgoing(number, key="hot", partition=0) for number in range(30)])
    await broker.send("orders", "other", key="cold", partition=1)
    options = impatient(max_inflight=10, drain_timeout=0.1)
    async with broker.subscribe("orders", group="g", handler=seen, options=options):
        try:
            await eventually(lambda: 0 in seen.payloads, "the hot key's first one runs")
            await eventually(lambda: "other" in seen.payloads, "the other one runs beside it", NEVER)
        finally:
            gate.set()


async def test_parked_messages_are_not_kept_in_memory(broker: Broker, keys: Keys) -> None:
    count, size = 40, 200_000
    await broker.send_batch("orders", [Outgoing("x" * size, partition=0)] * count)

    async def fail(message: Message) -> None:
        raise RuntimeError

    def parked() -> float:
        return counted("retries", topic="orders", group=keys.namespace)

    options = impatient(max_inflight=5, backoff=Backoff(base=1000.0, cap=1000.0, kind="fixed"))
    tracemalloc.start()
    try:
        async with broker.subscribe("orders", group=keys.namespace, handler=fail, options=options) as subscription:
            await eventually(lambda: parked() == count and subscription.inflight == 0, "all are parked")
            gc.collect()
            kept, _ = tracemalloc.get_traced_memory()
            assert kept < count * size / 2
    finally:
        tracemalloc.stop()


class Panic(BaseException):
    """As of a native module, or of a test framework."""


@pytest.mark.parametrize("batches", [False, True], ids=["", "batches"])
async def test_whatever_a_handler_raises_is_an_outcome(broker: Broker, batches: bool) -> None:
    seen: list[Any] = []

    async def handle(message: Message) -> None:
        seen.append(message.payload)
        if message.payload == "bad":
            raise Panic

    async def handle_all(messages: Sequence[Message]) -> None:
        await handle(messages[0])

    handler: Any = handle_all if batches else handle
    options = impatient(max_retries=1, drain_timeout=0.1, batch_handler=batches, batch_size=1)
    async with broker.subscribe("orders", group="g", handler=handler, options=options):
        for payload in ("bad", "good"):
            await broker.send("orders", payload, key="k", partition=0)

        async def is_settled() -> bool:
            found = await broker.admin.describe_group("orders", "g")
            return found.lag == 0 and found.pending == 0

        await eventually(is_settled, "both are settled", NEVER)
        assert [letter.payload for letter in await buried(broker, "orders")] == ["bad"]
    assert seen.count("good") == 1
