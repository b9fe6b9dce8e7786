"""Making topics and sending to them, as a user sees it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from conquiet import (
    Broker,
    BytesCodec,
    ConfigError,
    EntryId,
    Outgoing,
    PayloadError,
    QueueConfig,
    QueueError,
    RedisStreamsQueue,
    Retention,
    TopicDefaults,
    TopicFullError,
    TypedCodec,
    UnknownTopicError,
)
from conquiet.kit.clock import ManualClock
from tests.contracts.topics_flavours import FLAVOURS, Recorder, finished, impatient, opened
from tests.rigs.lanes import chosen


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


async def lengths(broker: Broker, topic: Any) -> list[int]:
    return [part.length for part in (await broker.admin.describe_topic(topic)).by_partition]


# --- topics ---------------------------------------------------------------------------------------------------------


async def test_a_topic_is_made_as_asked_for(broker: Broker) -> None:
    retention = Retention(max_len=1_000_000, max_age=86_400)
    await broker.create_topic("orders", partitions=8, retention=retention)
    info = await broker.admin.describe_topic("orders")
    assert (info.name, info.partitions, info.length, info.retention) == ("orders", 8, 0, retention)
    assert await broker.admin.list_topics() == ["orders"]


async def test_making_it_again_changes_nothing_and_otherwise_is_refused(broker: Broker) -> None:
    await broker.create_topic("orders", partitions=2)
    await broker.send("orders", 1)
    await broker.create_topic("orders", partitions=2)
    with pytest.raises(ConfigError, match="orders"):
        await broker.create_topic("orders", partitions=3)
    assert sum(await lengths(broker, "orders")) == 1


@pytest.mark.any_server
@pytest.mark.parametrize("name", ["", "a:b", "a b", "{a}", "a\n", "ä", "a" * 201])
async def test_a_name_that_could_not_be_a_key_is_refused(broker: Broker, name: str) -> None:
    with pytest.raises(ConfigError, match="topic"):
        await broker.create_topic(name)


async def test_a_topic_that_nobody_made_is_unknown(broker: Broker) -> None:
    with pytest.raises(UnknownTopicError, match="orders"):
        await broker.send("orders", 1)
    with pytest.raises(UnknownTopicError, match="orders"):
        await broker.send_batch("orders", [Outgoing(1)])
    assert await broker.admin.list_topics() == []


async def test_topics_can_be_made_on_first_use(flavour: str, url: str) -> None:
    async with opened(flavour, url, auto_create=TopicDefaults(partitions=3)) as broker:
        await broker.send("orders", 1)
        assert (await broker.admin.describe_topic("orders")).partitions == 3


async def test_namespaces_know_nothing_of_each_other(broker: Broker, flavour: str, url: str) -> None:
    await broker.create_topic("orders")
    await broker.send("orders", 1)
    async with opened(flavour, url) as other:
        assert await other.admin.list_topics() == []
        with pytest.raises(UnknownTopicError):
            await other.send("orders", 1)


# --- sending --------------------------------------------------------------------------------------------------------


async def test_an_entry_id_tells_its_partition(broker: Broker) -> None:
    await broker.create_topic("orders", partitions=3)
    id = await broker.send("orders", {"id": 1}, partition=2)
    assert isinstance(id, EntryId)
    assert (id.partition, await lengths(broker, "orders")) == (2, [0, 0, 1])
    assert (await broker.admin.describe_topic("orders")).last_id == id


async def test_a_key_decides_the_partition(broker: Broker) -> None:
    """spec 3: partition = hash(key) % P (user-supplied key required to preserve per-key order)."""
    await broker.create_topic("orders", partitions=5)
    batch = await broker.send_batch("orders", [Outgoing(n, key=f"customer-{n % 10}") for n in range(30)])
    for n in range(10):
        alone = await broker.send("orders", n, key=f"customer-{n}")
        assert {id.partition for id in batch[n::10]} == {alone.partition}
    assert len({id.partition for id in batch}) > 1


async def test_without_a_key_partitions_take_turns(broker: Broker) -> None:
    """spec 3: Fallbacks: round-robin/random when no key."""
    await broker.create_topic("orders", partitions=4)
    for n in range(8):
        await broker.send("orders", n)
    assert await lengths(broker, "orders") == [2, 2, 2, 2]


async def test_a_batch_keeps_its_order_and_tells_each_id(broker: Broker) -> None:
    await broker.create_topic("orders", partitions=2)
    ids = await broker.send_batch("orders", (Outgoing(n, partition=n % 2) for n in range(600)))
    assert [id.partition for id in ids] == [n % 2 for n in range(600)]
    seen = Recorder()
    async with broker.subscribe("orders", group="g", handler=seen, options=impatient()):
        await finished(broker, "orders", "g")
    sent = {(id.partition, str(id)): n for n, id in enumerate(ids)}
    assert {(message.partition, message.id): message.payload for message in seen.messages} == sent
    for own in (ids[::2], ids[1::2]):
        assert own == sorted(own, key=lambda id: tuple(map(int, id.split("-"))))


async def test_a_custom_partitioner_decides(flavour: str, url: str) -> None:
    async with opened(flavour, url, partitioner=_by_length) as broker:
        await broker.create_topic("orders", partitions=4)
        ids = [await broker.send("orders", 1, key=key) for key in ("", "a", "bb", "ccc")]
        assert [id.partition for id in ids] == [0, 1, 2, 3]


def _by_length(key: str | None, partitions: int) -> int:
    return len(key or "") % partitions


@pytest.mark.any_server
@pytest.mark.parametrize(
    "wrong",
    [
        *({"key": 5}, {"key": b"k"}, {"headers": {"a": 1}}, {"headers": "a"}, {"partition": 2}, {"partition": -1}),
        *({"delay": -1.0}, {"message_id": 5}, {"max_retries": -1}),
    ],
    ids=repr,
)
async def test_bad_arguments_are_refused_and_nothing_is_sent(broker: Broker, wrong: dict[str, Any]) -> None:
    await broker.create_topic("orders", partitions=2)
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        await broker.send("orders", 1, **wrong)
    assert await lengths(broker, "orders") == [0, 0]


async def test_a_payload_that_json_would_change_is_refused_with_its_place(broker: Broker) -> None:
    await broker.create_topic("orders")
    with pytest.raises(PayloadError) as caught:
        await broker.send("orders", {"a": [1, float("nan")]})
    assert caught.value.path == "$.a[1]"
    with pytest.raises(PayloadError) as caught:
        await broker.send_batch("orders", [Outgoing(1), Outgoing({"a": b"bytes"})])
    assert "messages[1]" in caught.value.path
    assert await lengths(broker, "orders") == [0]


async def test_a_message_id_makes_a_repeated_send_harmless(broker: Broker, clock: ManualClock) -> None:
    await broker.create_topic("orders", partitions=3)
    first = await broker.send("orders", 1, message_id="m1")
    again = await broker.send("orders", 1, message_id="m1")
    [batched, other] = await broker.send_batch("orders", [Outgoing(1, message_id="m1"), Outgoing(2, message_id="m2")])
    assert {first, again, batched} == {first}
    assert {first.partition, again.partition, batched.partition} == {first.partition}
    assert (other, other.partition) != (first, first.partition)  # two partitions may give one ID in a millisecond
    assert sum(await lengths(broker, "orders")) == 2
    clock.advance(601)
    assert await broker.send("orders", 1, message_id="m1") != first


async def test_a_delayed_message_comes_when_its_time_has(broker: Broker, clock: ManualClock) -> None:
    await broker.create_topic("orders")
    await broker.send("orders", "later", key="k", headers={"a": "b"}, delay=60)
    assert await lengths(broker, "orders") == [0]
    assert (await broker.admin.describe_topic("orders")).by_partition[0].delayed == 1
    seen = Recorder()
    async with broker.subscribe("orders", group="g", handler=seen, options=impatient(lease_ttl=600)):
        await broker.send("orders", "now")
        await seen.saw(1)
        clock.advance(60)
        await seen.saw(2)
        await finished(broker, "orders", "g")
    assert seen.payloads == ["now", "later"]
    assert (seen.messages[1].key, seen.messages[1].headers["a"]) == ("k", "b")


async def test_no_delay_is_none_at_all(broker: Broker) -> None:
    await broker.create_topic("orders")
    for delay in (0, 0.0):
        await broker.send("orders", "now", delay=delay)
    assert await lengths(broker, "orders") == [2]


# --- full topics ----------------------------------------------------------------------------------------------------


async def test_a_full_topic_rejects_until_there_is_room(broker: Broker) -> None:
    await broker.create_topic("orders", retention=Retention(max_len=3, on_full="reject"))
    async with broker.subscribe("orders", group="g", handler=Recorder(), options=impatient()):
        pass
    await broker.send_batch("orders", [Outgoing(n) for n in range(3)])
    with pytest.raises(TopicFullError, match="orders"):
        await broker.send("orders", 3)
    with pytest.raises(TopicFullError) as caught:
        await broker.send_batch("orders", [Outgoing(3), Outgoing(4)])
    assert caught.value.entry_ids == (None, None)
    async with broker.subscribe("orders", group="g", handler=Recorder(), options=impatient()):
        await finished(broker, "orders", "g")
    await broker.send("orders", 3)


async def test_a_topic_may_drop_what_a_group_has_not_got_and_counts_it(broker: Broker) -> None:
    await broker.create_topic("orders", retention=Retention(max_len=3, on_full="drop"))
    async with broker.subscribe("orders", group="g", handler=Recorder(), options=impatient()):
        pass
    ids = [await broker.send("orders", n) for n in range(5)]
    info = await broker.admin.describe_topic("orders")
    assert (info.length, info.first_id, info.by_partition[0].dropped) == (3, ids[2], 2)


# --- codecs, old streams, trouble -----------------------------------------------------------------------------------


async def test_bytes_are_carried_as_they_are(flavour: str, url: str) -> None:
    async with opened(flavour, url, codec=BytesCodec()) as broker:
        await broker.create_topic("orders")
        await broker.send("orders", b"\x00\xff")
        async with broker.consume("orders", group="g", options=impatient()) as messages:
            assert [message.payload async for message in _first(messages)] == [b"\x00\xff"]


async def test_a_type_is_decoded_as_such(flavour: str, url: str) -> None:
    async with opened(flavour, url, codec=TypedCodec(tuple[int, str])) as broker:
        await broker.create_topic("orders")
        await broker.send("orders", (1, "a"))
        async with broker.consume("orders", group="g", options=impatient()) as messages:
            assert [message.payload async for message in _first(messages)] == [(1, "a")]


async def _first(messages: Any) -> AsyncIterator[Any]:
    async for message in messages:
        await message.ack()
        yield message
        messages.stop()


async def test_a_queue_is_a_topic_of_one_partition_and_the_other_way_round(
    broker: Broker, url: str, config: QueueConfig
) -> None:
    """spec 3: No meta found => assume partitionCount=1 and stream key = topic (legacy mode)."""
    orders = broker.legacy(config.stream_key)
    async with RedisStreamsQueue.connect(url, config) as queue:
        await queue.enqueue({"n": 1})
        await broker.send(orders, {"n": 2})
        with pytest.raises(ConfigError, match="key"):
            await broker.send(orders, {"n": 3}, key="k")
        assert [message.payload["n"] for message in await queue.read(count=9)] == [1, 2]
    seen = Recorder()
    async with broker.subscribe(orders, group="g", handler=seen, options=impatient()):
        await seen.saw(2)
    assert seen.payloads == [{"n": 1}, {"n": 2}]


@pytest.mark.any_server
async def test_a_server_that_is_not_there_is_a_queue_error(flavour: str) -> None:
    with pytest.raises(QueueError) as caught:
        async with opened(flavour, "redis://127.0.0.1:1"):
            pytest.fail("entered")
    assert caught.value.__cause__ is not None
