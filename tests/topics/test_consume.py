"""What a consumer is given, and that it is what was sent."""

from __future__ import annotations

import asyncio
import datetime as dt
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import pytest

from conquiet import ConfigError, LeaseLostError, Outgoing, Reject, UnknownTopicError
from conquiet.kit.clock import ManualClock
from conquiet.message import Message
from conquiet.topics import Broker, Messages
from conquiet.wire.keys import Keys
from tests.rigs.waiting import eventually
from tests.topics.consuming import Recorder, buried, finished, impatient
from tests.topics.staging import Stage

pytestmark = pytest.mark.cluster_too


@pytest.fixture
async def broker(url: str, keys: Keys, clock: ManualClock) -> AsyncIterator[Broker]:
    async with Broker(url, namespace=keys.namespace, clock=clock) as broker:
        yield broker


def numbered(count: int) -> list[Outgoing]:
    return [Outgoing(number, key=f"k{number % 5}") for number in range(count)]


async def pull(messages: Messages) -> Any:
    found = await messages.next(20)
    assert found is not None
    return found


# --- who gets it ----------------------------------------------------------------------------------------


async def test_every_group_gets_every_message_once(broker: Broker) -> None:
    await broker.create_topic("orders", partitions=3)
    one, other = Recorder(), Recorder()
    async with (
        broker.subscribe("orders", group="one", handler=one, options=impatient()),
        broker.subscribe("orders", group="other", handler=other, options=impatient()),
    ):
        await broker.send_batch("orders", numbered(50))
        await finished(broker, "orders", "one", "other")
    assert sorted(one.payloads) == sorted(other.payloads) == list(range(50))


@pytest.mark.any_server
async def test_one_partition_has_one_consumer_of_a_group(broker: Broker) -> None:
    """spec 3: per-partition exclusive ownership by one consumer instance."""
    await broker.create_topic("orders")
    one, other = Recorder(), Recorder()
    async with (
        broker.subscribe("orders", group="g", handler=one, options=impatient()),
        broker.subscribe("orders", group="g", handler=other, options=impatient()),
    ):
        await broker.send_batch("orders", numbered(10))
        await finished(broker, "orders", "g")
    assert [len(one.messages), len(other.messages)] == [10, 0]


@pytest.mark.any_server
async def test_one_subscription_consumes_several_topics(broker: Broker) -> None:
    await broker.create_topic("orders", partitions=2)
    await broker.create_topic("refunds")
    seen = Recorder()
    async with broker.subscribe(["orders", "refunds"], group="g", handler=seen, options=impatient()) as subscription:
        await broker.send("orders", 1)
        await broker.send("refunds", 2)
        await seen.saw(2)
        assert subscription.owned == {"orders": (0, 1), "refunds": (0,)}
    assert {message.topic: message.payload for message in seen.messages} == {"orders": 1, "refunds": 2}


@pytest.mark.any_server
async def test_a_topic_that_is_missing_fails_the_start_and_leaves_the_others(broker: Broker) -> None:
    await broker.create_topic("orders")
    with pytest.raises(UnknownTopicError, match="nowhere"):
        async with broker.subscribe(["orders", "nowhere"], group="g", handler=Recorder(), options=impatient()):
            pytest.fail("entered")
    info = await broker.admin.describe_group("orders", "g")
    assert (info.members, info.unowned) == ((), (0,))


@pytest.mark.any_server
@pytest.mark.parametrize("topics", [[], ["orders", "orders"]])
async def test_no_topic_or_one_twice_is_refused(broker: Broker, topics: list[str]) -> None:
    with pytest.raises(ConfigError, match="topics"):
        broker.subscribe(topics, group="g", handler=Recorder())


@pytest.mark.any_server
@pytest.mark.parametrize("start", ["earliest", "latest", "float", "datetime"])
async def test_a_new_group_begins_where_it_is_told_to(broker: Broker, stage: Stage, start: str) -> None:
    await broker.create_topic("orders")
    stream = stage.instance.keys.partition("orders", 0)
    for ms in (1_000, 5_000, 5_001):
        await stage.call(stream, "XADD", stream, f"{ms}-0", "payload", str(ms), "timestamp", ms)
    moment = dt.datetime.fromtimestamp(5, dt.UTC)
    where: Any = {"float": 5.0, "datetime": moment}.get(start, start)
    seen = Recorder()
    async with broker.subscribe("orders", group="g", handler=seen, options=impatient(start=where)):
        await broker.send("orders", 9_999)
        await eventually(lambda: 9_999 in seen.payloads, "the last message")
    old = {"earliest": [1_000, 5_000, 5_001], "latest": []}.get(start, [5_000, 5_001])
    assert seen.payloads == [*old, 9_999]


@pytest.mark.any_server
async def test_where_to_begin_does_not_move_a_group_that_exists(broker: Broker) -> None:
    await broker.create_topic("orders")
    async with broker.subscribe("orders", group="g", handler=Recorder(), options=impatient()):
        pass
    await broker.send("orders", 1)
    seen = Recorder()
    async with broker.subscribe("orders", group="g", handler=seen, options=impatient(start="latest")):
        await seen.saw(1)


@pytest.mark.any_server
async def test_consumers_that_start_a_group_together_agree_where_it_begins(broker: Broker, stage: Stage) -> None:
    await broker.create_topic("orders", partitions=2)
    await broker.send("orders", "old", partition=0)
    # Another consumer is on its way: it has announced the group and not yet created it.
    groups = stage.instance.keys.groups("orders")
    await stage.call(groups, "SADD", groups, "g")
    seen = Recorder()
    async with broker.subscribe("orders", group="g", handler=seen, options=impatient(start="latest")):
        await broker.send("orders", "new", partition=0)
        await finished(broker, "orders", "g")
    assert seen.payloads == ["new"]


# --- what it gets ---------------------------------------------------------------------------------------

PAYLOAD = {"id": 1, "text": "Zoë €\x00", "list": [None, True, 1.5, 2**60], "deep": {"": {}}}
HEADERS = {"trace": "abc", "ünïcode": "✓"}


def likeness(message: Message) -> tuple[Any, ...]:
    return (message.topic, message.partition, message.key, message.payload, message.headers, message.timestamp)


async def test_a_message_is_delivered_as_it_was_sent(broker: Broker) -> None:
    await broker.create_topic("orders", partitions=3)
    seen, before = Recorder(), dt.datetime.now(dt.UTC) - dt.timedelta(milliseconds=1)
    async with broker.subscribe("orders", group="g", handler=seen, options=impatient()):
        id = await broker.send("orders", PAYLOAD, key="customer-7", headers=HEADERS, message_id="m1", max_retries=9)
        await seen.saw(1)
    [message] = seen.messages
    assert likeness(message)[:4] == ("orders", id.partition, "customer-7", PAYLOAD)
    assert message.headers == {**HEADERS, "partitionId": str(id.partition)}
    assert before <= message.timestamp <= dt.datetime.now(dt.UTC)
    assert (message.id, message.original_id, message.replayed_from) == (id, f"{id.partition}/{id}", None)
    assert (message.message_id, message.retry_count, message.max_retries, message.group) == ("m1", 0, 9, "g")


@pytest.mark.any_server
@pytest.mark.parametrize("payload", [None, 0, "", [], {}, "text", [1, [2]], {"a": None}])
async def test_any_json_value_is_a_payload(broker: Broker, payload: object) -> None:
    await broker.create_topic("orders")
    await broker.send("orders", payload)
    async with broker.consume("orders", group="g", options=impatient()) as messages:
        found = await pull(messages)
        assert (found.payload, found.key, found.headers) == (payload, None, {"partitionId": "0"})
        await found.ack()


@pytest.mark.parametrize("mode", ["park", "requeue"])
async def test_a_retried_message_is_the_same_but_for_its_count(broker: Broker, mode: str) -> None:
    await broker.create_topic("orders", partitions=2)

    async def fail_twice(message: Message) -> None:
        if message.retry_count < 2:
            raise RuntimeError

    seen = Recorder(fail_twice)
    async with broker.subscribe("orders", group="g", handler=seen, options=impatient(mode=mode)):
        id = await broker.send("orders", PAYLOAD, key="k", headers=HEADERS)
        await finished(broker, "orders", "g")
    assert [message.retry_count for message in seen.messages] == [0, 1, 2]
    assert [likeness(message) for message in seen.messages] == [likeness(seen.messages[0])] * 3
    assert {message.original_id for message in seen.messages} == {f"{id.partition}/{id}"}
    assert len({message.id for message in seen.messages}) == (1 if mode == "park" else 3)


@pytest.mark.parametrize("is_gone", [False, True])
async def test_a_replayed_message_is_the_same_and_tells_its_origin(broker: Broker, stage: Stage, is_gone: bool) -> None:
    await broker.create_topic("orders", partitions=2)

    async def reject_first(message: Message) -> None:
        if message.replayed_from is None:
            raise Reject

    seen = Recorder(reject_first)
    async with broker.subscribe("orders", group="g", handler=seen, options=impatient()):
        id = await broker.send("orders", PAYLOAD, key="k", headers=HEADERS)
        await buried(broker, "orders")
        if is_gone:
            stream = stage.instance.keys.partition("orders", id.partition)
            await stage.call(stream, "XDEL", stream, id)
        assert await broker.admin.replay("orders") == 1
        await seen.saw(2)
        await finished(broker, "orders", "g")
    first, again = seen.messages
    assert likeness(first) == likeness(again)
    assert (again.replayed_from, again.retry_count) == (f"{id.partition}/{id}", 0)
    assert (again.id == first.id) is not is_gone


@pytest.mark.any_server
async def test_the_epoch_of_a_message_grows_with_each_owner(broker: Broker) -> None:
    await broker.create_topic("orders")
    epochs: list[int] = []
    for number in range(3):
        seen = Recorder()
        async with broker.subscribe("orders", group="g", handler=seen, options=impatient()):
            await broker.send("orders", number)
            await seen.saw(1)
        epochs.append(seen.messages[0].epoch)
    assert epochs == sorted(set(epochs))


# --- pulling --------------------------------------------------------------------------------------------


async def test_pulled_messages_are_settled_one_by_one(broker: Broker) -> None:
    await broker.create_topic("orders")
    await broker.send_batch("orders", [Outgoing(what) for what in ("ack", "retry", "reject")])
    outcomes: Counter[str] = Counter()
    async with broker.consume("orders", group="g", options=impatient()) as messages:
        for _ in range(4):
            message = await pull(messages)
            outcomes[f"{message.payload} {message.retry_count}"] += 1
            if message.payload == "reject":
                await message.reject("no good")
            elif message.payload == "retry" and message.retry_count == 0:
                await message.retry(delay=0, error="later")
            else:
                await message.ack()
        await finished(broker, "orders", "g")
        [letter] = await buried(broker, "orders")
    assert outcomes == Counter(["ack 0", "retry 0", "retry 1", "reject 0"])
    assert (letter.payload, letter.reason, letter.error, letter.error_type) == (
        "reject",
        "rejected",
        "no good",
        "conquiet.errors.Reject",
    )


@pytest.mark.any_server
async def test_a_settlement_is_in_redis_when_it_returns(broker: Broker) -> None:
    await broker.create_topic("orders")
    await broker.send("orders", 1)
    async with broker.consume("orders", group="g", options=impatient()) as messages:
        message = await pull(messages)
        assert (await broker.admin.describe_group("orders", "g")).pending == 1
        await message.ack()
        assert (await broker.admin.describe_group("orders", "g")).pending == 0


@pytest.mark.any_server
@pytest.mark.parametrize("again", ["ack", "retry", "reject"])
async def test_settling_twice_is_refused_and_changes_nothing(broker: Broker, again: str) -> None:
    await broker.create_topic("orders")
    await broker.send("orders", 1)
    async with broker.consume("orders", group="g", options=impatient()) as messages:
        message = await pull(messages)
        await message.ack()
        with pytest.raises(ConfigError, match="settled already"):
            await getattr(message, again)()
        await finished(broker, "orders", "g")
        assert await broker.admin.dead_letters("orders") == []


@pytest.mark.parametrize("what", ["ack", "retry", "reject"])
@pytest.mark.parametrize("is_noticed", [False, True])
async def test_a_settlement_after_the_lease_went_elsewhere_is_refused(
    broker: Broker, stage: Stage, what: str, is_noticed: bool
) -> None:
    await broker.create_topic("orders")
    id = await broker.send("orders", 1)
    stream = stage.instance.keys.partition("orders", 0)
    lease = stage.instance.keys.lease(stream, "g")
    async with broker.consume("orders", group="g", options=impatient()) as messages:
        message = await pull(messages)
        far = int(dt.datetime.now().timestamp() * 1000) + 10**7
        await stage.call(lease, "HSET", lease, "owner", "other#1", "epoch", message.epoch + 1, "until_ms", far)
        if is_noticed:
            await eventually(lambda: messages.owned == {"orders": ()}, "the consumer to notice")
        with pytest.raises(LeaseLostError, match=id):
            await getattr(message, what)()
        assert [row[0].decode() for row in await stage.call(stream, "XPENDING", stream, "g", "-", "+", 9)] == [id]
        assert await stage.call(lease, "HGET", lease, "owner") == b"other#1"


@pytest.mark.any_server
async def test_pulling_ends_when_it_is_asked_to_stop(broker: Broker) -> None:
    await broker.create_topic("orders")
    async with broker.consume("orders", group="g", options=impatient()) as messages:
        asyncio.get_running_loop().call_soon(messages.stop)
        assert [message async for message in messages] == []
        assert await messages.next() is None


@pytest.mark.any_server
async def test_pulling_gives_up_after_its_timeout(broker: Broker) -> None:
    await broker.create_topic("orders")
    async with broker.consume("orders", group="g", options=impatient()) as messages:
        assert await messages.next(0.01) is None
        await broker.send("orders", 1)
        await (await pull(messages)).ack()


@pytest.mark.any_server
async def test_what_was_pulled_and_not_settled_goes_to_the_next_consumer(broker: Broker) -> None:
    await broker.create_topic("orders")
    ids = await broker.send_batch("orders", numbered(3))
    async with broker.consume("orders", group="g", options=impatient(drain_timeout=0.1)) as messages:
        await (await pull(messages)).ack()
        unsettled = await pull(messages)
    with pytest.raises(LeaseLostError):
        await unsettled.ack()
    seen = Recorder()
    async with broker.subscribe("orders", group="g", handler=seen, options=impatient()):
        await finished(broker, "orders", "g")
    assert [message.id for message in seen.messages] == ids[1:]


@pytest.mark.any_server
async def test_leaving_does_not_wait_for_what_was_pulled_and_cannot_be_settled_any_more(broker: Broker) -> None:
    await broker.create_topic("orders")
    await broker.send("orders", 1)
    async with asyncio.timeout(10):  # less than the drain time
        async with broker.consume("orders", group="g", options=impatient()) as messages:
            await pull(messages)


@pytest.mark.any_server
async def test_no_more_than_max_inflight_are_out_and_unsettled(broker: Broker) -> None:
    await broker.create_topic("orders", partitions=2)
    await broker.send_batch("orders", [Outgoing(number) for number in range(20)])
    async with broker.consume("orders", group="g", options=impatient(max_inflight=3)) as messages:
        out = [await pull(messages) for _ in range(3)]
        assert await messages.next(0.3) is None
        assert messages.inflight == 3
        assert (await broker.admin.describe_group("orders", "g")).pending == 3
        await out[0].ack()
        for message in [*out[1:], await pull(messages)]:
            await message.ack()
