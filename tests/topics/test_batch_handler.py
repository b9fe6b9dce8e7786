"""Handlers of whole batches, with an outcome for each message."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest

from conquiet import Outgoing, Reject
from conquiet.kit.clock import ManualClock
from conquiet.message import Message
from conquiet.topics import Broker
from conquiet.wire.keys import Keys
from tests.topics.consuming import buried, finished, impatient

pytestmark = pytest.mark.cluster_too


@pytest.fixture
async def broker(url: str, keys: Keys, clock: ManualClock) -> AsyncIterator[Broker]:
    async with Broker(url, namespace=keys.namespace, clock=clock) as broker:
        await broker.create_topic("orders", partitions=2)
        yield broker


def numbered(count: int, **more: Any) -> list[Outgoing]:
    return [Outgoing(number, **more) for number in range(count)]


async def test_a_batch_handler_decides_for_each_message(broker: Broker) -> None:
    batches: list[list[Any]] = []

    async def handle(batch: Sequence[Message]) -> list[BaseException | None]:
        batches.append([message.payload for message in batch])
        assert len({message.partition for message in batch}) == 1
        return [_verdict(message) for message in batch]

    await broker.send_batch("orders", numbered(30, partition=1))
    options = impatient(batch_handler=True, batch_size=10)
    async with broker.subscribe("orders", group="g", handler=handle, options=options):
        await finished(broker, "orders", "g")
        letters = await buried(broker, "orders", 3)
    assert [letter.payload for letter in letters] == [0, 10, 20]
    firsts = list(dict.fromkeys(number for batch in batches for number in batch))
    assert firsts == list(range(30))
    assert max(map(len, batches)) == 10
    assert sorted(number for batch in batches for number in batch) == sorted([*range(30), 5, 15, 25])


def _verdict(message: Message) -> BaseException | None:
    if message.payload % 10 == 0:
        return Reject("ten")
    return RuntimeError() if message.payload % 5 == 0 and message.retry_count == 0 else None


@pytest.mark.any_server
async def test_a_batch_handler_may_empty_its_list(broker: Broker) -> None:
    got: list[Any] = []

    async def handle(batch: Sequence[Message]) -> None:
        assert isinstance(batch, list)
        got.extend(message.payload for message in batch)
        batch.clear()

    await broker.send_batch("orders", numbered(30, partition=1))
    options = impatient(batch_handler=True, batch_size=10, drain_timeout=0.1)
    async with broker.subscribe("orders", group="g", handler=handle, options=options):
        await finished(broker, "orders", "g")
    assert got == list(range(30))


@pytest.mark.any_server
async def test_a_batch_handler_that_returns_nothing_has_handled_all(broker: Broker) -> None:
    got: list[Any] = []

    def handle(batch: Sequence[Message]) -> None:
        got.extend(message.payload for message in batch)

    async with broker.subscribe("orders", group="g", handler=handle, options=impatient(batch_handler=True)):
        await broker.send_batch("orders", numbered(20))
        await finished(broker, "orders", "g")
    assert sorted(got) == list(range(20))


@pytest.mark.any_server
async def test_a_batch_handler_that_raises_has_failed_for_all(broker: Broker) -> None:
    async def handle(batch: Sequence[Message]) -> None:
        raise Reject("all of it")

    await broker.send_batch("orders", numbered(3, partition=0))
    async with broker.subscribe("orders", group="g", handler=handle, options=impatient(batch_handler=True)):
        letters = await buried(broker, "orders", 3)
    assert {letter.error for letter in letters} == {"all of it"}


@pytest.mark.any_server
@pytest.mark.parametrize("answer", [[None], 7, "ab", [True, False]])
async def test_outcomes_that_do_not_fit_are_failures_of_the_whole_batch(broker: Broker, answer: Any) -> None:
    async def handle(batch: Sequence[Message]) -> Any:
        return answer

    await broker.send_batch("orders", numbered(2, partition=0))
    options = impatient(batch_handler=True, max_retries=0)
    async with broker.subscribe("orders", group="g", handler=handle, options=options):
        letters = await buried(broker, "orders", 2)
        await finished(broker, "orders", "g")
    assert {letter.error_type for letter in letters} == {"conquiet.errors.ConfigError"}


@pytest.mark.any_server
async def test_batches_of_a_partition_never_overlap(broker: Broker) -> None:
    busy, overlaps = set[int](), list[int]()

    async def handle(batch: Sequence[Message]) -> None:
        partition = batch[0].partition
        overlaps.extend({partition} & busy)
        busy.add(partition)
        await asyncio.sleep(0.001)  # the work itself, in which another batch could begin
        busy.discard(partition)

    options = impatient(batch_handler=True, batch_size=3)
    async with broker.subscribe("orders", group="g", handler=handle, options=options):
        for _ in range(5):
            await broker.send_batch("orders", numbered(10))
        await finished(broker, "orders", "g")
    assert overlaps == []
