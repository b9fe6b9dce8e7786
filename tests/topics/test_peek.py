"""A look at messages without a group."""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence

import pytest

from conquiet import Admin, Broker, BytesCodec, ConfigError, EntryId, Message, Outgoing
from conquiet.kit.entry_ids import order
from conquiet.topics.server.instance import Instance
from conquiet.wire.keys import Keys

pytestmark = pytest.mark.any_server


@pytest.fixture
async def broker(url: str, keys: Keys) -> Broker:
    return Broker(url, namespace=keys.namespace)


async def sent(broker: Broker, count: int, partitions: int = 4) -> list[EntryId]:
    """IDs of messages 0 to ``count`` of five keys, in the order of their IDs."""
    await broker.create_topic("orders", partitions=partitions)
    ids = await broker.send_batch("orders", [Outgoing(number, key=f"k{number % 5}") for number in range(count)])
    return sorted(ids, key=lambda id: (order(id), id.partition))


def places(messages: Sequence[Message]) -> list[tuple[str, int]]:
    return [(message.id, message.partition) for message in messages]


def expected(ids: Sequence[EntryId]) -> list[tuple[str, int]]:
    return [(str(id), id.partition) for id in ids]


async def test_the_newest_are_counted_over_all_partitions(broker: Broker) -> None:
    async with broker:
        ids = await sent(broker, 200)
        for last in (1, 7, 64, 200, 500):
            assert places(await broker.admin.read("orders", last=last)) == expected(ids[-last:])
        assert places(await broker.admin.read("orders")) == expected(ids[-10:])


async def test_what_came_since_a_time_or_an_entry(broker: Broker) -> None:
    async with broker:
        ids = await sent(broker, 50)
        admin = broker.admin
        assert places(await admin.read("orders", since="earliest")) == expected(ids)
        assert places(await admin.read("orders", since="earliest", count=13)) == expected(ids[:13])
        later = await broker.send("orders", "later")
        middle = ids[20]
        after = [id for id in (*ids, later) if order(id) > order(middle)]
        assert places(await admin.read("orders", since=middle)) == expected(after)
        assert places(await admin.read("orders", since=middle, last=3)) == expected(after[-3:])
        seconds = order(ids[0])[0] / 1000
        for since in (seconds, dt.datetime.fromtimestamp(seconds, dt.UTC)):
            assert places(await admin.read("orders", since=since)) == expected([*ids, later])
        assert await admin.read("orders", since=dt.datetime.now(dt.UTC) + dt.timedelta(hours=1)) == []


async def test_of_one_partition_and_of_one_key(broker: Broker) -> None:
    async with broker:
        ids = await sent(broker, 100)
        of_one = [id for id in ids if id.partition == 2]
        assert places(await broker.admin.read("orders", partition=2, last=4)) == expected(of_one[-4:])
        found = await broker.admin.read("orders", key="k3", last=5)
        assert [message.payload for message in found] == [78, 83, 88, 93, 98]
        assert {message.key for message in found} == {"k3"}
        assert await broker.admin.read("orders", key="nobody") == []


async def test_nothing_changes_by_a_look(broker: Broker, instance: Instance) -> None:
    async with broker:
        await sent(broker, 10, partitions=1)
        async with broker.consume("orders", group="billing") as messages:
            first = await messages.next(timeout=10)
            assert first is not None
            before = await broker.admin.describe_group("orders", "billing")
            await broker.admin.read("orders", last=10)
            await broker.admin.read("orders", since="earliest")
            after = await broker.admin.describe_group("orders", "billing")
            assert (after.lag, after.pending) == (before.lag, before.pending)
            assert await broker.admin.list_groups("orders") == ["billing"]
            await first.ack()


async def test_an_entry_that_is_no_message_is_shown_as_it_is(broker: Broker, instance: Instance, keys: Keys) -> None:
    async with broker:
        await sent(broker, 1, partitions=1)
        await instance.ask("XADD", keys.partition("orders", 0), "*", "strange", b"\xff")
        good, strange = await broker.admin.read("orders")
        assert good.payload == 0
        assert (strange.payload, strange.fields) == (None, {b"strange": b"\xff"})


async def test_payloads_are_those_of_the_codec_of_the_broker(url: str, keys: Keys) -> None:
    async with Broker(url, namespace=keys.namespace, codec=BytesCodec()) as broker:
        await broker.create_topic("raw")
        await broker.send("raw", b"\x00\xff", headers={"a": "b"})
        [message] = await broker.admin.read("raw")
        assert (message.payload, message.headers["a"]) == (b"\x00\xff", "b")


async def test_a_legacy_stream_can_be_looked_at(broker: Broker, instance: Instance, keys: Keys) -> None:
    async with broker:
        stream = f"{keys.namespace}:old"
        await instance.ask("XADD", stream, "*", "data", b'{"id": 1}')
        [message] = await broker.admin.read(broker.legacy(stream))
        assert message.payload == {"id": 1}


@pytest.mark.parametrize(
    ("what", "value"),
    [
        *(("last", value) for value in (0, -1, 1.5, "1", True)),
        *(("since", value) for value in ("latest", "soon", -1, True, dt.datetime(2026, 1, 2))),
        *(("partition", value) for value in (-1, 4, "0")),
        ("key", 5),
    ],
)
async def test_it_looks_by_the_rules(admin: Admin, broker: Broker, what: str, value: object) -> None:
    async with broker:
        await sent(broker, 1)
        with pytest.raises(ConfigError, match="partition" if what == "partition" else what):
            await admin.read("orders", **{what: value})  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="count"):
            await admin.read("orders", since="earliest", count=0)
