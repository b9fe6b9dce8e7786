"""Pulling messages one by one, as a user sees it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from conquiet import (
    Broker,
    ConfigError,
    LeaseLostError,
    Messages,
    Outgoing,
)
from conquiet.kit.clock import ManualClock
from tests.contracts.topics_flavours import FLAVOURS, buried, finished, impatient, opened
from tests.rigs.lanes import chosen
from tests.rigs.waiting import LONG, eventually, turns


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture(params=chosen(FLAVOURS))
def flavour(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
async def broker(flavour: str, url: str, clock: ManualClock) -> AsyncIterator[Broker]:
    async with opened(flavour, url, clock=clock) as broker:
        yield broker


async def pull(messages: Messages) -> Any:
    found = await messages.next(LONG)
    assert found is not None
    return found


async def test_pulled_messages_are_settled_one_by_one(broker: Broker) -> None:
    await broker.create_topic("orders")
    await broker.send_batch("orders", [Outgoing(what) for what in ("ack", "retry", "reject")])
    got: list[tuple[str, int]] = []
    async with broker.consume("orders", group="g", options=impatient()) as messages:
        async for message in messages:
            got.append((message.payload, message.retry_count))
            if message.payload == "reject":
                await message.reject("no good")
            elif message.payload == "retry" and message.retry_count == 0:
                await message.retry(delay=0, error="later")
            else:
                await message.ack()
            if len(got) == 4:
                messages.stop()
        await finished(broker, "orders", "g")
        [letter] = await buried(broker, "orders")
    assert sorted(got) == [("ack", 0), ("reject", 0), ("retry", 0), ("retry", 1)]
    assert (letter.payload, letter.reason, letter.error) == ("reject", "rejected", "no good")


async def test_a_settlement_is_in_redis_when_it_returns_and_is_made_once(broker: Broker) -> None:
    await broker.create_topic("orders")
    await broker.send("orders", 1)
    async with broker.consume("orders", group="g", options=impatient()) as messages:
        message = await pull(messages)
        assert (await broker.admin.describe_group("orders", "g")).pending == 1
        await message.ack()
        assert (await broker.admin.describe_group("orders", "g")).pending == 0
        with pytest.raises(ConfigError, match="settled already"):
            await message.reject()


async def test_pulling_gives_up_after_its_timeout_and_ends_after_stop(broker: Broker) -> None:
    await broker.create_topic("orders")
    async with broker.consume("orders", group="g", options=impatient()) as messages:
        assert await messages.next(0.01) is None
        asyncio.get_running_loop().call_later(0.05, messages.stop)
        assert [message async for message in messages] == []
        assert await messages.next() is None


async def test_no_more_than_max_inflight_are_out_and_unsettled(broker: Broker) -> None:
    await broker.create_topic("orders", partitions=2)
    await broker.send_batch("orders", [Outgoing(n) for n in range(10)])
    async with broker.consume("orders", group="g", options=impatient(max_inflight=3)) as messages:
        out = [await pull(messages) for _ in range(3)]
        assert await messages.next(0.2) is None
        assert messages.inflight == 3
        await out[0].ack()
        assert (await pull(messages)).payload not in {message.payload for message in out}


async def test_what_was_pulled_and_not_settled_goes_to_the_next_consumer(broker: Broker) -> None:
    await broker.create_topic("orders")
    ids = await broker.send_batch("orders", [Outgoing(n) for n in range(3)])
    async with broker.consume("orders", group="g", options=impatient()) as messages:
        await (await pull(messages)).ack()
        unsettled = await pull(messages)
    with pytest.raises(LeaseLostError, match=ids[1]):
        await unsettled.ack()
    async with broker.consume("orders", group="g", options=impatient()) as messages:
        assert [(await pull(messages)).id for _ in range(2)] == ids[1:]


@pytest.mark.any_server
async def test_who_waits_behind_a_message_that_it_has_not_settled_is_told(
    broker: Broker, clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    """Messages of one key come one at a time: without a word this would look like an empty topic."""
    await broker.create_topic("orders", partitions=3)
    ids = [await broker.send("orders", "a secret", key="ann@example.org") for _ in range(2)]
    async with broker.consume("orders", group="g", options=impatient()) as messages:
        first = await pull(messages)
        following = asyncio.create_task(messages.next())
        await eventually(lambda: messages.inflight == 2, "the second is there, and waits")
        await turns(50)  # it would have been told too early
        assert ("next()" in caplog.text, messages.health().held_up) == (False, None)
        clock.advance(1.0)
        await eventually(lambda: "next()" in caplog.text, "a word")
        [record] = [record for record in caplog.records if "next()" in record.getMessage()]
        assert (record.name, record.levelname) == ("conquiet.topics", "WARNING")
        text = record.getMessage()
        assert f"topic 'orders', partition {ids[0].partition}, group 'g'" in text
        assert f"message {ids[1]} waits for message {ids[0]} of the same key" in text
        health = messages.health()
        assert health.healthy
        assert health.held_up is not None
        assert health.held_up in text
        assert "secret" not in text
        assert "ann" not in text
        await first.ack()
        second = await following
        assert second is not None
        assert second.id == ids[1]
        assert messages.health().held_up is None
        await second.ack()
