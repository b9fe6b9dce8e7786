"""Subscribing with a handler, as a user sees it."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest

from conquiet import (
    Broker,
    ConfigError,
    Message,
    Outgoing,
    UnknownTopicError,
)
from conquiet.kit.clock import ManualClock
from tests.contracts.topics_flavours import FLAVOURS, Recorder, buried, finished, impatient, opened, serving
from tests.rigs.lanes import chosen
from tests.rigs.waiting import LONG, eventually

PAYLOAD = {"id": 1, "text": "Zoë €\x00", "list": [None, True, 1.5, 2**60], "deep": {"": {}}}
HEADERS = {"trace": "abc", "ünïcode": "✓"}


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


async def test_a_message_is_delivered_as_it_was_sent(broker: Broker) -> None:
    await broker.create_topic("orders", partitions=3)
    seen = Recorder()
    async with broker.subscribe("orders", group="g", handler=seen, options=impatient()):
        id = await broker.send("orders", PAYLOAD, key="customer-7", headers=HEADERS, message_id="m1", max_retries=9)
        await seen.saw(1)
    [message] = seen.messages
    assert (message.topic, message.partition, message.id, message.group) == ("orders", id.partition, id, "g")
    assert (message.key, message.payload) == ("customer-7", PAYLOAD)
    assert message.headers == {**HEADERS, "partitionId": str(id.partition)}
    assert (message.message_id, message.retry_count, message.max_retries) == ("m1", 0, 9)
    assert (message.original_id, message.replayed_from) == (f"{id.partition}/{id}", None)
    assert message.timestamp.utcoffset() is not None


async def test_returning_acknowledges(broker: Broker) -> None:
    await broker.create_topic("orders")
    seen, go = Recorder(lambda _: _held(go)), threading.Event()
    async with broker.subscribe("orders", group="g", handler=seen, options=impatient()) as subscription:
        await broker.send("orders", 1)
        await seen.saw(1)
        assert (await broker.admin.describe_group("orders", "g")).pending == 1
        assert subscription.inflight == 1
        go.set()
        await finished(broker, "orders", "g")
        await eventually(lambda: subscription.inflight == 0, "nothing in flight")


def _held(go: threading.Event) -> None:
    assert go.wait(LONG)


async def test_several_handlers_run_at_once_and_never_two_of_a_key(broker: Broker) -> None:
    await broker.create_topic("orders", partitions=2)
    together, keys = threading.Barrier(4), defaultdict[str | None, list[Any]](list)

    def handle(message: Message) -> None:
        keys[message.key].append(message.payload)
        together.wait(LONG)  # nobody gets further before all four keys are here

    await broker.send_batch("orders", [Outgoing(n, key=f"k{n % 4}") for n in range(20)])
    async with broker.subscribe("orders", group="g", handler=handle, options=impatient(max_inflight=8)):
        await finished(broker, "orders", "g")
    assert keys == {f"k{n}": list(range(n, 20, 4)) for n in range(4)}


async def test_a_serial_subscription_keeps_the_order_of_each_partition(broker: Broker) -> None:
    """spec 3: One serial worker per owned partition to preserve order."""
    await broker.create_topic("orders", partitions=2)
    await broker.send_batch("orders", [Outgoing(n, partition=n % 2) for n in range(30)])
    at_once, most, seen = [0], [0], Recorder()

    def handle(message: Message) -> None:
        at_once[0] += 1
        most[0] = max(most[0], at_once[0])
        seen(message)
        at_once[0] -= 1

    async with serving(broker.subscribe("orders", group="g", handler=handle, options=impatient(max_inflight=1))):
        await finished(broker, "orders", "g")
    assert most == [1]
    for partition in (0, 1):
        mine = [message.payload for message in seen.messages if message.partition == partition]
        assert mine == list(range(partition, 30, 2))


async def test_a_batch_handler_gets_several_and_answers_for_each(broker: Broker) -> None:
    await broker.create_topic("orders")
    await broker.send_batch("orders", [Outgoing(n) for n in range(10)])
    batches: list[list[Any]] = []

    def handle(messages: Sequence[Message]) -> list[BaseException | None]:
        batches.append([message.payload for message in messages])
        return [ValueError("three") if message.payload == 3 else None for message in messages]

    options = impatient(batch_handler=True, batch_size=10, max_retries=1)
    async with broker.subscribe("orders", group="g", handler=handle, options=options):
        await finished(broker, "orders", "g")
        [letter] = await buried(broker, "orders")
    assert (letter.payload, letter.error, letter.attempts) == (3, "three", 2)
    assert sorted(n for batch in batches for n in batch) == [0, 1, 2, 3, 3, 4, 5, 6, 7, 8, 9]
    assert len(batches) < 11


async def test_two_groups_each_get_everything(broker: Broker) -> None:
    await broker.create_topic("orders", partitions=3)
    one, other = Recorder(), Recorder()
    async with (
        broker.subscribe("orders", group="one", handler=one, options=impatient()),
        broker.subscribe("orders", group="other", handler=other, options=impatient()),
    ):
        await broker.send_batch("orders", [Outgoing(n) for n in range(30)])
        await finished(broker, "orders", "one", "other")
    assert sorted(one.payloads) == sorted(other.payloads) == list(range(30))


async def test_consumers_of_a_group_share_the_partitions(broker: Broker) -> None:
    """spec 3: per-partition exclusive ownership by one consumer instance."""
    await broker.create_topic("orders", partitions=4)
    one, other = Recorder(), Recorder()
    async with (
        broker.subscribe("orders", group="g", handler=one, options=impatient()) as first,
        broker.subscribe("orders", group="g", handler=other, options=impatient()) as second,
    ):
        await eventually(lambda: len(first.owned["orders"]) == len(second.owned["orders"]) == 2, "fair shares")
        assert sorted(first.owned["orders"] + second.owned["orders"]) == [0, 1, 2, 3]
        await broker.send_batch("orders", [Outgoing(n, partition=n % 4) for n in range(40)])
        await finished(broker, "orders", "g")
        info = await broker.admin.describe_group("orders", "g")
        assert {part.owner_id for part in info.partitions} == {first.consumer, second.consumer}
        owned = dict(first.owned)
    assert sorted(one.payloads + other.payloads) == list(range(40))
    assert {message.partition for message in one.messages} == set(owned["orders"])


async def test_who_leaves_hands_over_at_once(broker: Broker) -> None:
    await broker.create_topic("orders", partitions=2)
    seen = Recorder()
    options = impatient(lease_ttl=600)  # nobody waits for that to run out
    async with broker.subscribe("orders", group="g", handler=seen, options=options) as stays:
        async with broker.subscribe("orders", group="g", handler=seen, options=options) as leaves:
            await eventually(lambda: len(leaves.owned["orders"]) == 1, "a share for the second")
        await eventually(lambda: len(stays.owned["orders"]) == 2, "all for the first")
        await broker.send_batch("orders", [Outgoing(n) for n in range(10)])
        await finished(broker, "orders", "g")
    assert sorted(seen.payloads) == list(range(10))


async def test_one_subscription_may_serve_several_topics(broker: Broker) -> None:
    await broker.create_topic("orders", partitions=2)
    await broker.create_topic("refunds")
    seen = Recorder()
    async with broker.subscribe(["orders", "refunds"], group="g", handler=seen, options=impatient()) as subscription:
        assert await broker.send("orders", 1)
        assert await broker.send("refunds", 2)
        await seen.saw(2)
        assert subscription.owned == {"orders": (0, 1), "refunds": (0,)}
    assert {message.topic: message.payload for message in seen.messages} == {"orders": 1, "refunds": 2}


async def test_a_new_group_may_begin_at_the_end(broker: Broker) -> None:
    await broker.create_topic("orders")
    await broker.send("orders", "old")
    seen = Recorder()
    async with broker.subscribe("orders", group="g", handler=seen, options=impatient(start="latest")):
        await broker.send("orders", "new")
        await finished(broker, "orders", "g")
    assert seen.payloads == ["new"]


@pytest.mark.any_server
async def test_what_cannot_be_subscribed_is_an_error(broker: Broker) -> None:
    with pytest.raises(UnknownTopicError, match="nowhere"):
        async with broker.subscribe("nowhere", group="g", handler=Recorder()):
            pytest.fail("entered")
    rest: dict[str, Any] = {"topic": "orders", "group": "g", "handler": Recorder(), "options": None}
    for what, value in [
        ("group", "a:b"),
        ("group", ""),
        ("handler", 5),
        ("options", 5),
        ("topic", []),
        ("topic", None),
    ]:
        arguments = {**rest, what: value}
        with pytest.raises(ConfigError, match=what):
            broker.subscribe(arguments.pop("topic"), **arguments)
