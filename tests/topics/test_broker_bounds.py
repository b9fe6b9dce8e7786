"""Messages that are held back, and topics that are full."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from conquiet import (
    Broker,
    Outgoing,
    QueueError,
    Retention,
    TopicFullError,
)
from conquiet.kit.clock import ManualClock
from conquiet.topics.server import retention
from conquiet.wire.keys import Keys
from tests.rigs.asking import ask
from tests.rigs.waiting import LONG

pytestmark = pytest.mark.cluster_too

ORDERS = "orders"


@pytest.fixture
async def broker(url: str, keys: Keys, clock: ManualClock) -> AsyncIterator[Broker]:
    async with Broker(url, namespace=keys.namespace, clock=clock) as broker:
        yield broker


async def payloads(url: str, keys: Keys, partition: int = 0) -> list[Any]:
    rows = await ask(url, "XRANGE", keys.partition(ORDERS, partition), "-", "+")
    return [json.loads(fields["payload"]) for _, fields in rows]


# --- messages that are held back ---------------------------------------------------------------------------------


@pytest.mark.slow
async def test_a_delayed_message_arrives_when_its_time_has_come(
    broker: Broker, clock: ManualClock, url: str, keys: Keys
) -> None:
    await broker.create_topic(ORDERS)
    id = await broker.send(ORDERS, "later", key="k", headers={"a": "b"}, delay=3600)
    assert (id.startswith("delayed/"), id.partition) == (True, 0)
    async with broker.consume(ORDERS, group="g") as messages:
        await broker.send(ORDERS, "now")
        first = await messages.next(timeout=LONG)
        assert first is not None
        await first.ack()
        assert await payloads(url, keys) == ["now"]
        clock.advance(3601)
        second = await messages.next(timeout=LONG)
        assert second is not None
        assert (second.payload, second.key, second.headers["a"]) == ("later", "k", "b")
        await second.ack()
    assert await ask(url, "EXISTS", *(keys.of_partition(keys.partition(ORDERS, 0))[1:3])) == 0


@pytest.mark.slow
@pytest.mark.any_server
async def test_delayed_messages_come_in_the_order_of_their_times(broker: Broker, clock: ManualClock) -> None:
    await broker.create_topic(ORDERS)
    for delay in (30, 10, 20):
        await broker.send(ORDERS, delay, delay=delay)
    async with broker.consume(ORDERS, group="g") as messages:
        clock.advance(31)
        found = [await messages.next(timeout=LONG) for _ in range(3)]
        assert [message.payload for message in found if message is not None] == [10, 20, 30]
        for message in found:
            assert message is not None
            await message.ack()


@pytest.mark.slow
@pytest.mark.any_server
async def test_a_delayed_message_with_an_id_is_sent_once(
    broker: Broker, clock: ManualClock, url: str, keys: Keys
) -> None:
    """``message_id`` makes a repeated send harmless, also when the first one has arrived meanwhile."""
    await broker.create_topic(ORDERS)
    for _ in range(2):
        await broker.send(ORDERS, 1, message_id="m", delay=5)
    async with broker.consume(ORDERS, group="g") as messages:
        clock.advance(6)
        first = await messages.next(timeout=LONG)
        assert first is not None
        await first.ack()
        await broker.send(ORDERS, 1, message_id="m", delay=5)
        await broker.send(ORDERS, 1, message_id="m")
        clock.advance(6)
        await broker.send(ORDERS, "the end", delay=1)
        clock.advance(2)
        last = await messages.next(timeout=LONG)
        assert last is not None
        assert last.payload == "the end"
        await last.ack()
    assert await payloads(url, keys) == [1, "the end"]


# --- topics that are full ---------------------------------------------------------------------------------------


async def test_a_full_topic_may_reject_writers_and_then_nothing_is_written(
    broker: Broker, url: str, keys: Keys
) -> None:
    await broker.create_topic(ORDERS, retention=Retention(max_len=3, on_full="reject"))
    await ask(url, "XGROUP", "CREATE", keys.partition(ORDERS, 0), "slow", "0", "MKSTREAM")
    for n in range(3):
        await broker.send(ORDERS, n)
    with pytest.raises(TopicFullError, match="partition 0 of topic 'orders' holds 3 entries"):
        await broker.send(ORDERS, 3, message_id="m")
    assert await payloads(url, keys) == [0, 1, 2]
    rows = await ask(url, "XREADGROUP", "GROUP", "slow", "c", "COUNT", 1, "STREAMS", keys.partition(ORDERS, 0), ">")
    await ask(url, "XACK", keys.partition(ORDERS, 0), "slow", rows[0][1][0][0])
    await broker.send(ORDERS, 3, message_id="m")
    assert await payloads(url, keys) == [1, 2, 3]


async def test_a_batch_into_a_full_topic_says_which_of_it_are_in(broker: Broker, url: str, keys: Keys) -> None:
    await broker.create_topic(ORDERS, retention=Retention(max_len=3, on_full="reject"))
    await ask(url, "XGROUP", "CREATE", keys.partition(ORDERS, 0), "slow", "0", "MKSTREAM")
    with pytest.raises(TopicFullError, match="3 of 5") as caught:
        await broker.send_batch(ORDERS, [Outgoing(n) for n in range(5)])
    assert [id is not None for id in caught.value.entry_ids] == [True, True, True, False, False]
    assert await payloads(url, keys) == [0, 1, 2]


async def test_with_nobody_to_miss_them_old_entries_make_room(broker: Broker, url: str, keys: Keys) -> None:
    await broker.create_topic(ORDERS, retention=Retention(max_len=3, on_full="reject"))
    for n in range(5):
        await broker.send(ORDERS, n)
    assert await payloads(url, keys) == [2, 3, 4]


async def test_what_is_in_is_told_though_no_room_could_be_made_for_the_rest(
    broker: Broker, url: str, keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(*_: object) -> bool:
        raise QueueError("gone")

    monkeypatch.setattr(retention, "make_room", fail)
    await broker.create_topic(ORDERS, retention=Retention(max_len=3, on_full="reject", group_expiry=100.0))
    await ask(url, "XGROUP", "CREATE", keys.partition(ORDERS, 0), "slow", "0", "MKSTREAM")
    with pytest.raises(QueueError, match="gone") as caught:
        await broker.send_batch(ORDERS, [Outgoing(n) for n in range(5)])
    assert [id is not None for id in caught.value.entry_ids] == [True, True, True, False, False]


@pytest.mark.parametrize("most", [1, 3])
async def test_a_group_that_nobody_serves_keeps_no_message_out(
    broker: Broker, url: str, keys: Keys, clock: ManualClock, most: int
) -> None:
    await broker.create_topic(ORDERS, retention=Retention(max_len=most, on_full="reject", group_expiry=100.0))
    await ask(url, "XGROUP", "CREATE", keys.partition(ORDERS, 0), "gone", "0", "MKSTREAM")
    await broker.send_batch(ORDERS, [Outgoing(n) for n in range(most)])
    with pytest.raises(TopicFullError):  # nobody has looked at the group before, so its time begins now
        await broker.send(ORDERS, "early")
    clock.advance(101)
    await broker.send(ORDERS, "one")
    await broker.send_batch(ORDERS, [Outgoing(n) for n in range(4)])  # more than it may hold
    assert await payloads(url, keys) == [1, 2, 3][-most:]


async def test_a_full_topic_may_drop_the_oldest_and_counts_them(broker: Broker, url: str, keys: Keys) -> None:
    await broker.create_topic(ORDERS, retention=Retention(max_len=3, on_full="drop"))
    await ask(url, "XGROUP", "CREATE", keys.partition(ORDERS, 0), "slow", "0", "MKSTREAM")
    await broker.send_batch(ORDERS, [Outgoing(n) for n in range(5)])
    assert await payloads(url, keys) == [2, 3, 4]
    assert (await broker.admin.describe_topic(ORDERS)).by_partition[0].dropped == 2
