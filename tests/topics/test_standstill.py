"""Who pulls and waits for itself is told so, and nobody else is."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from conquiet import Broker, Delivery, Messages
from conquiet.kit.clock import ManualClock
from conquiet.wire.keys import Keys
from tests.rigs.waiting import LONG, eventually, turns
from tests.topics.consuming import answers, impatient

pytestmark = pytest.mark.any_server


@pytest.fixture
async def broker(url: str, keys: Keys, clock: ManualClock) -> AsyncIterator[Broker]:
    async with Broker(url, namespace=keys.namespace, clock=clock) as broker:
        await broker.create_topic("orders")
        yield broker


@pytest.fixture
async def messages(broker: Broker) -> AsyncIterator[Messages]:
    async with broker.consume("orders", group="g", options=impatient(max_inflight=10)) as messages:
        yield messages


async def pull(messages: Messages) -> Delivery:
    found = await messages.next(LONG)
    assert found is not None
    return found


async def two_of_a_key(broker: Broker, messages: Messages) -> Delivery:
    """The first of them, with the second behind it."""
    for number in range(2):
        await broker.send("orders", number, key="k")
    first = await pull(messages)
    await eventually(lambda: messages.inflight == 2, "both are there")
    return first


async def waiting(messages: Messages) -> asyncio.Task[Delivery | None]:
    task = asyncio.create_task(messages.next())
    await asyncio.sleep(0)  # it has begun to wait
    return task


def words(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [text for text in caplog.messages if "next()" in text]


async def later(clock: ManualClock, seconds: float) -> None:
    clock.advance(seconds)
    await turns(50)  # it has said too much by then, if it does


@pytest.mark.slow
async def test_a_word_comes_once_a_minute(
    broker: Broker, messages: Messages, clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    first = await two_of_a_key(broker, messages)
    following = await waiting(messages)
    for seconds, count in ((1, 1), (1, 1), (56, 1), (3, 2), (30, 2), (31, 3)):
        await later(clock, seconds)
        await eventually(lambda count=count: len(words(caplog)) == count, f"{count} words")  # type: ignore[misc]
    await first.ack()
    assert await following is not None


async def test_short_waits_one_after_the_other_are_told_as_well(
    broker: Broker, messages: Messages, clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    await two_of_a_key(broker, messages)

    async def is_told() -> bool:
        assert await messages.next(0.001) is None
        clock.advance(0.4)
        return bool(words(caplog))

    await eventually(is_told, "a word")
    assert "of the same key" in caplog.text


async def test_who_has_all_that_it_may_have_is_told(
    broker: Broker, messages: Messages, clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    for number in range(11):
        await broker.send("orders", number)
    out = [await pull(messages) for _ in range(10)]
    following = await waiting(messages)
    clock.advance(1.0)
    await eventually(lambda: bool(words(caplog)), "a word")
    assert "max_inflight=10" in caplog.text
    assert "max_inflight=10" in str(messages.health().held_up)
    for delivery in out:
        await delivery.ack()
    assert await following is not None
    assert messages.health().held_up is None


@pytest.mark.parametrize("order", ["unordered", "block_key", "block_partition"])
async def test_who_waits_for_others_is_told_nothing(
    order: Any, broker: Broker, clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    """For news; for a message that waits for its next attempt, and those behind it; behind one that is settled."""
    options = impatient(order=order)
    async with broker.consume("orders", group="g", options=options) as messages:
        following = await waiting(messages)
        await later(clock, 10)
        await broker.send("orders", 1, key="k")
        first = await following
        assert first is not None
        await first.retry(delay=1000)
        await broker.send("orders", 2, key="k")
        if order == "unordered":
            await (await pull(messages)).ack()
        else:
            await answers(broker)  # the second is taken by then
        following = await waiting(messages)
        for _ in range(3):
            await later(clock, 10)
        assert (words(caplog), messages.health().held_up) == ([], None)
        messages.stop()
        assert await following is None


async def test_leaving_says_nothing(
    broker: Broker, messages: Messages, clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    await two_of_a_key(broker, messages)
    following = await waiting(messages)
    await messages.aclose()
    assert await following is None
    await later(clock, 10)
    assert (words(caplog), messages.health().held_up) == ([], None)
