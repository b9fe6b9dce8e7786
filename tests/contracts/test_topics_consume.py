"""Subscribing with a handler and pulling, as a user sees it."""

from __future__ import annotations

import asyncio
import threading
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import pytest

from conquiet import (
    Broker,
    ConfigError,
    GroupLostError,
    Health,
    LeaseLostError,
    Message,
    Messages,
    Outgoing,
    QueueConfig,
    TopicDefaults,
    UnknownTopicError,
)
from conquiet.kit.clock import ManualClock
from tests.contracts.topics_flavours import FLAVOURS, Recorder, buried, finished, impatient, opened, serving
from tests.rigs.waiting import LONG, eventually, turns
from tests.topics.consuming import answers

PAYLOAD = {"id": 1, "text": "Zoë €\x00", "list": [None, True, 1.5, 2**60], "deep": {"": {}}}
HEADERS = {"trace": "abc", "ünïcode": "✓"}


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture(params=FLAVOURS)
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


# --- a handler ------------------------------------------------------------------------------------------------------


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


# --- its life -------------------------------------------------------------------------------------------------------


@pytest.mark.any_server
@pytest.mark.parametrize("changes", [{}, {"max_inflight": 1}, {"batch_handler": True}], ids=["", "serial", "batches"])
async def test_a_handler_of_the_wrong_signature_is_refused_before_it_meets_a_message(
    broker: Broker, changes: dict[str, Any]
) -> None:
    await broker.create_topic("orders")
    await broker.send("orders", 1)

    def handle(order: Message, session: object) -> None: ...

    given = "messages" if "batch_handler" in changes else "message"
    with pytest.raises(ConfigError, match=rf"called with \({given}\), but it is .*handle\(order, session\)"):
        broker.subscribe("orders", group="g", handler=handle, options=impatient(**changes))  # type: ignore[arg-type]
    assert await broker.admin.dead_letters("orders") == []


async def test_pause_takes_nothing_until_resume(broker: Broker) -> None:
    await broker.create_topic("orders")
    seen = Recorder()
    async with broker.subscribe("orders", group="g", handler=seen, options=impatient()) as subscription:
        await broker.send("orders", 1)
        await finished(broker, "orders", "g")
        subscription.pause()
        await eventually(lambda: subscription.paused, "the pause")
        await broker.send("orders", 2)
        await answers(broker)  # what must not come would be there
        assert (seen.payloads, subscription.owned) == ([1], {"orders": (0,)})
        assert (await broker.admin.describe_group("orders", "g")).lag == 1
        subscription.resume()
        await seen.saw(2)
        assert not subscription.paused


async def test_stop_ends_the_wait_and_what_is_left_is_for_the_next(broker: Broker) -> None:
    await broker.create_topic("orders")
    await broker.send_batch("orders", [Outgoing(n) for n in range(50)])
    first = Recorder(lambda _: subscription.stop())
    async with broker.subscribe("orders", group="g", handler=first, options=impatient(batch_size=1)) as subscription:
        await subscription.wait()
    rest = Recorder()
    async with broker.subscribe("orders", group="g", handler=rest, options=impatient()):
        await finished(broker, "orders", "g")
    assert sorted(first.payloads + rest.payloads) == list(range(50))


async def test_stop_ends_a_serial_subscription_at_once(broker: Broker) -> None:
    await broker.create_topic("orders")
    await broker.send_batch("orders", [Outgoing(n) for n in range(50)])
    first = Recorder(lambda _: subscription.stop())
    options = impatient(max_inflight=1)
    async with asyncio.timeout(LONG):  # which is less than the drain time
        async with broker.subscribe("orders", group="g", handler=first, options=options) as subscription:
            await subscription.wait()
    rest = Recorder()
    async with broker.subscribe("orders", group="g", handler=rest, options=impatient()):
        await finished(broker, "orders", "g")
    assert sorted(first.payloads + rest.payloads) == list(range(50))


async def test_leaving_finishes_what_is_being_handled(broker: Broker) -> None:
    await broker.create_topic("orders")
    go, seen = threading.Event(), Recorder(lambda _: _held(go))
    await broker.send("orders", 1)
    async with broker.subscribe("orders", group="g", handler=seen, options=impatient()):
        await seen.saw(1)
        asyncio.get_running_loop().call_later(0.05, go.set)
    info = await broker.admin.describe_group("orders", "g")
    assert (info.pending, info.lag, info.members, info.unowned) == (0, 0, (), (0,))


async def test_health_is_for_probes(broker: Broker) -> None:
    await broker.create_topic("orders", partitions=2)
    subscription = broker.subscribe("orders", group="g", handler=Recorder(), options=impatient())
    assert not subscription.health().healthy
    async with subscription:
        await eventually(lambda: subscription.owned == {"orders": (0, 1)}, "its partitions")
        whole = Health(healthy=True, owned={"orders": (0, 1)}, inflight=0, paused=False, failures=0, error=None)
        assert subscription.health() == whole
    assert not subscription.health().healthy


async def test_a_group_that_is_deleted_ends_its_subscriptions(broker: Broker) -> None:
    await broker.create_topic("orders")
    async with broker.subscribe("orders", group="g", handler=Recorder(), options=impatient()) as subscription:
        await eventually(lambda: subscription.owned == {"orders": (0,)}, "its partition")
        await broker.admin.delete_group("orders", "g", force=True)
        with pytest.raises(GroupLostError, match="g"):
            await subscription.wait()
        assert "g" in str(subscription.health().error)


async def test_a_subscription_is_entered_once(broker: Broker) -> None:
    await broker.create_topic("orders")
    subscription = broker.subscribe("orders", group="g", handler=Recorder(), options=impatient())
    async with subscription:
        with pytest.raises(ConfigError, match="once"):
            await subscription.__aenter__()


@pytest.mark.any_server
@pytest.mark.parametrize("stopped", [False, True], ids=["", "stopped"])
async def test_who_was_not_entered_cannot_be_waited_for(broker: Broker, stopped: bool) -> None:
    """Nothing would ever happen: a forgotten ``async with`` is an error and no silence."""
    await broker.create_topic("orders")
    await broker.send("orders", 1)
    subscription = broker.subscribe("orders", group="g", handler=Recorder(), options=impatient())
    serial = broker.subscribe("orders", group="g", handler=Recorder(), options=impatient(max_inflight=1))
    messages = broker.consume("orders", group="g", options=impatient())
    if stopped:
        for consumer in (subscription, serial, messages):
            consumer.stop()
    waits: list[Callable[[], Awaitable[object]]] = [subscription.wait, serial.wait, messages.wait, messages.next]
    waits += [messages.__anext__, lambda: messages.next(0.01)]
    async with asyncio.timeout(LONG):
        for wait in waits:
            with pytest.raises(ConfigError, match=r"is not entered: .*async with"):
                await wait()


@pytest.mark.any_server
async def test_who_was_left_is_not_waited_for(broker: Broker) -> None:
    await broker.create_topic("orders")
    async with broker.subscribe("orders", group="g", handler=Recorder(), options=impatient()) as subscription:
        pass
    async with broker.consume("orders", group="g", options=impatient()) as messages:
        pass
    lost = broker.consume("nowhere", group="g", options=impatient())
    with pytest.raises(UnknownTopicError):
        await lost.__aenter__()
    async with asyncio.timeout(LONG):
        for ended in (subscription, messages, lost):
            await ended.wait()
        for pulled in (messages, lost):
            assert await pulled.next() is None
            assert [message async for message in pulled] == []


async def test_closing_the_broker_ends_its_consumers(flavour: str, url: str, config: QueueConfig) -> None:
    namespace = config.stream_key.replace(":", "-")
    async with opened(flavour, url, namespace=namespace, auto_create=TopicDefaults()) as ending:
        subscription = ending.subscribe("orders", group="g", handler=Recorder(), options=impatient())
        await subscription.__aenter__()
        messages = await ending.consume("orders", group="h", options=impatient()).__aenter__()
        await ending.aclose()
        await subscription.wait()
        assert await messages.next() is None
    async with opened(flavour, url, namespace=namespace) as other:
        infos = [await other.admin.describe_group("orders", group) for group in ("g", "h")]
    assert [(info.members, info.unowned) for info in infos] == [((), (0,))] * 2


# --- pulling --------------------------------------------------------------------------------------------------------


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
