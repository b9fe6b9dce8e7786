"""What an operator sees and does, by the async and by the plain API."""

from __future__ import annotations

import datetime as dt
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from conquiet import Broker, ConfigError, Messages, Outgoing, Retention, UnknownTopicError
from conquiet.kit.clock import ManualClock
from tests.contracts.topics_flavours import FLAVOURS, Recorder, buried, finished, impatient, opened
from tests.rigs.lanes import chosen
from tests.rigs.waiting import LONG, eventually
from tests.topics.staging import hurried


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture(params=chosen(FLAVOURS))
def flavour(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
async def broker(flavour: str, url: str, clock: ManualClock) -> AsyncIterator[Broker]:
    async with opened(flavour, url, clock=clock) as broker:
        await broker.create_topic("orders", partitions=2)
        yield broker


async def pull(messages: Messages) -> Any:
    found = await messages.next(LONG)
    assert found is not None
    return found


def numbered(count: int) -> list[Outgoing]:
    return [Outgoing(n, partition=n % 2) for n in range(count)]


async def consumed(broker: Broker, group: str = "g") -> Recorder:
    """What a group gets that finishes all there is, and leaves."""
    seen = Recorder()
    async with broker.subscribe("orders", group=group, handler=seen, options=impatient()):
        await finished(broker, "orders", group)
    return seen


# --- looking --------------------------------------------------------------------------------------------------------


async def test_a_topic_is_described_over_its_partitions(broker: Broker) -> None:
    """spec 3: Per-topic aggregation across partitions: length, first/last IDs, createdAt/updatedAt."""
    ids = await broker.send_batch("orders", numbered(5))
    await consumed(broker)
    info = await broker.admin.describe_topic("orders")
    assert (info.name, info.partitions, info.length, info.groups, info.dead_letters) == ("orders", 2, 5, 1, 0)
    assert [(part.index, part.length, part.first_id, part.last_id) for part in info.by_partition] == [
        (0, 3, ids[0], ids[4]),
        (1, 2, ids[1], ids[3]),
    ]
    assert {info.first_id, info.last_id} <= set(ids)
    assert info.created is not None
    assert info.updated is not None
    assert info.created <= info.updated
    assert not info.legacy


async def test_a_group_is_described_with_its_lag_pending_and_owners(broker: Broker) -> None:
    """spec 3: Group stats: pending, consumers, lastDeliveredId per partition, aggregated lag."""
    ids = await broker.send_batch("orders", numbered(6))
    options = impatient(max_inflight=2, batch_size=1, consumer="worker-1")
    async with broker.consume("orders", group="g", options=options) as messages:
        out = [await pull(messages) for _ in range(2)]
        info = await broker.admin.describe_group("orders", "g")
        assert (info.topic, info.group, info.lag, info.pending, info.consumers) == ("orders", "g", 4, 2, 1)
        assert [(part.owner, part.owner_id) for part in info.partitions] == [("worker-1", messages.consumer)] * 2
        assert [member.id for member in info.members] == [messages.consumer]
        assert info.unowned == ()
        for message in out:
            part = info.partitions[message.partition]
            assert part.pending == sum(other.partition == message.partition for other in out)
            assert part.epoch == message.epoch
        assert {part.last_delivered_id for part in info.partitions} & set(ids)
    assert await broker.admin.list_groups("orders") == ["g"]


async def test_pending_entries_are_paged_over_all_partitions(broker: Broker) -> None:
    """spec 3: Pending browsing: merged paginated view across partitions."""
    await broker.send_batch("orders", numbered(7))
    async with broker.consume("orders", group="g", options=impatient(consumer="worker-1")) as messages:
        out = {(message.partition, message.id) for message in [await pull(messages) for _ in range(7)]}
        found, cursor, pages = list[Any](), None, 0
        while pages == 0 or cursor is not None:
            page = await broker.admin.pending("orders", "g", count=3, cursor=cursor)
            assert len(page.entries) <= 3
            found += page.entries
            cursor, pages = page.cursor, pages + 1
    assert [(entry.partition, entry.id) for entry in found] == sorted(out, key=lambda one: (_place(one[1]), one[0]))
    assert {(entry.consumer, entry.deliveries, entry.failures) for entry in found} == {("worker-1", 1, 0)}


def _place(id: str) -> tuple[int, ...]:
    return tuple(map(int, id.split("-")))


UNKNOWN: dict[str, Callable[[Any], Awaitable[Any]]] = {
    "describe_topic": lambda admin: admin.describe_topic("nowhere"),
    "describe_group": lambda admin: admin.describe_group("nowhere", "g"),
    "pending": lambda admin: admin.pending("nowhere", "g"),
    "dead_letters": lambda admin: admin.dead_letters("nowhere"),
    "replay": lambda admin: admin.replay("nowhere"),
    "grow": lambda admin: admin.grow("nowhere", 2),
    "configure": lambda admin: admin.configure("nowhere", Retention()),
    "trim": lambda admin: admin.trim("nowhere"),
    "reset_group": lambda admin: admin.reset_group("nowhere", "g", "earliest"),
    "delete_topic": lambda admin: admin.delete_topic("nowhere"),
}


@pytest.mark.any_server
@pytest.mark.parametrize("method", UNKNOWN)
async def test_an_unknown_topic_is_an_error(broker: Broker, method: str) -> None:
    with pytest.raises(UnknownTopicError, match="nowhere"):
        await UNKNOWN[method](broker.admin)


@pytest.mark.any_server
async def test_an_unknown_group_is_an_error(broker: Broker) -> None:
    for asked in (broker.admin.describe_group, broker.admin.pending, broker.admin.delete_group):
        with pytest.raises(ConfigError, match="no group 'g'"):
            await asked("orders", "g")


# --- changing -------------------------------------------------------------------------------------------------------


async def test_growth_keeps_the_order_of_each_key(broker: Broker, clock: ManualClock) -> None:
    sent = [Outgoing(n, key=f"k{n % 10}") for n in range(60)]
    await broker.send_batch("orders", sent[:30])
    info = await hurried(clock, broker.admin.grow("orders", 5))
    assert info.partitions == 5
    ids = await broker.send_batch("orders", sent[30:])
    assert {id.partition for id in ids} - {0, 1}
    seen = await consumed(broker)
    assert sorted(seen.payloads) == list(range(60))
    for digit in range(10):
        assert [n for n in seen.payloads if n % 10 == digit] == list(range(digit, 60, 10))
    with pytest.raises(ConfigError, match="partitions"):
        await broker.admin.grow("orders", 4)


async def test_a_running_consumer_gets_the_new_partitions(broker: Broker, clock: ManualClock) -> None:
    seen, options = Recorder(), impatient(lease_ttl=600)
    async with broker.subscribe("orders", group="g", handler=seen, options=options) as subscription:
        await hurried(clock, broker.admin.grow("orders", 4))
        await eventually(lambda: subscription.owned == {"orders": (0, 1, 2, 3)}, "the new partitions")
        await broker.send_batch("orders", [Outgoing(n, partition=n) for n in range(4)])
        await seen.saw(4)


async def test_trimming_leaves_what_a_group_has_not_finished(broker: Broker) -> None:
    ids = await broker.send_batch("orders", numbered(10))
    async with broker.consume("orders", group="g", options=impatient()) as messages:
        out = [await pull(messages) for _ in range(10)]
        for message in out:
            if message.payload not in (4, 5):
                await message.ack()
        assert await broker.admin.trim("orders", max_len=1) == 4
        info = await broker.admin.describe_topic("orders")
        assert [part.first_id for part in info.by_partition] == [ids[4], ids[5]]
        for message in out:
            if message.payload in (4, 5):
                await message.ack()
    assert await broker.admin.trim("orders", max_len=1) == 4
    assert (await broker.admin.describe_topic("orders")).length == 2


async def test_retention_can_be_changed(broker: Broker) -> None:
    await broker.send_batch("orders", numbered(10))
    await consumed(broker)
    changed = await broker.admin.configure("orders", Retention(max_len=2))
    assert changed.retention == Retention(max_len=2)
    assert await broker.admin.trim("orders") == 6
    with pytest.raises(ConfigError, match="retention"):
        await broker.admin.configure("orders", None)  # type: ignore[arg-type]


async def test_a_group_is_set_back_when_nobody_consumes(broker: Broker) -> None:
    ids = await broker.send_batch("orders", numbered(4))
    async with broker.subscribe("orders", group="g", handler=Recorder(), options=impatient(consumer="w")):
        await finished(broker, "orders", "g")
        with pytest.raises(ConfigError, match="live members: w"):
            await broker.admin.reset_group("orders", "g", "earliest")
    for to, left in [
        ("earliest", [0, 1, 2, 3]),
        ("latest", []),
        ({0: ids[0], 1: "0-0"}, [1, 2, 3]),
        (dt.datetime.fromtimestamp(0, dt.UTC), [0, 1, 2, 3]),
    ]:
        await broker.admin.reset_group("orders", "g", to)  # type: ignore[arg-type]
        assert (await broker.admin.describe_group("orders", "g")).lag == len(left)
        assert sorted((await consumed(broker)).payloads) == left
    with pytest.raises(ConfigError, match="to must be"):
        await broker.admin.reset_group("orders", "g", "nowhere")  # type: ignore[arg-type]


async def test_a_deleted_group_is_gone_and_begins_anew(broker: Broker) -> None:
    await broker.send_batch("orders", numbered(3))
    async with broker.subscribe("orders", group="g", handler=Recorder(), options=impatient()):
        await finished(broker, "orders", "g")
        with pytest.raises(ConfigError, match="live members"):
            await broker.admin.delete_group("orders", "g")
    await broker.admin.delete_group("orders", "g")
    assert await broker.admin.list_groups("orders") == []
    assert sorted((await consumed(broker)).payloads) == [0, 1, 2]


async def test_a_deleted_topic_is_gone_with_all_it_had(broker: Broker, clock: ManualClock) -> None:
    await broker.send_batch("orders", numbered(3))
    async with broker.consume("orders", group="g", options=impatient()) as messages:
        await (await pull(messages)).reject("no good")
        await buried(broker, "orders")
        with pytest.raises(ConfigError, match="live members"):
            await broker.admin.delete_topic("orders")
    await hurried(clock, broker.admin.delete_topic("orders"))
    assert await broker.admin.list_topics() == []
    with pytest.raises(UnknownTopicError):
        await broker.send("orders", 1)
    await broker.create_topic("orders", partitions=3)
    info = await broker.admin.describe_topic("orders")
    assert (info.length, info.groups, info.dead_letters) == (0, 0, 0)
