"""Sending: where a message goes, and in how many round trips."""

from __future__ import annotations

import asyncio
import copy
import json
import pickle
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import pytest

from conquiet import (
    Broker,
    ConfigError,
    ConsistentHashPartitioner,
    EntryId,
    Outgoing,
    Retention,
    TopicDefaults,
)
from conquiet.kit.clock import ManualClock
from conquiet.topics.produce import producer
from conquiet.topics.server import topics
from conquiet.wire.keys import Keys
from tests.rigs.asking import ask
from tests.rigs.proxy import Proxy
from tests.rigs.waiting import eventually
from tests.topics.test_partitioner import VECTORS

ORDERS = "orders"


@pytest.fixture
async def proxy(url: str) -> AsyncIterator[Proxy]:
    async with Proxy(url) as proxy:
        yield proxy


@pytest.fixture
async def broker(proxy: Proxy, keys: Keys, clock: ManualClock) -> AsyncIterator[Broker]:
    async with Broker(proxy.url, namespace=keys.namespace, clock=clock) as broker:
        yield broker


@pytest.fixture
async def topic(broker: Broker) -> str:
    """A topic of three partitions that the broker knows."""
    await broker.create_topic(ORDERS, partitions=3)
    await broker.send_batch(ORDERS, [])
    return ORDERS


@pytest.mark.any_server
async def test_what_is_remembered_of_topics_does_not_grow_with_their_number(
    url: str, keys: Keys, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(producer, "_TOPICS", 3)
    monkeypatch.setattr(producer, "_PARTITIONS", 5)
    monkeypatch.setattr(topics, "_KEPT", 4)
    made = TopicDefaults(partitions=2, retention=Retention(max_len=1))
    async with Broker(url, namespace=keys.namespace, clock=clock, auto_create=made) as broker:
        for number in range(30):
            id = await broker.send(f"topic-{number % 10}", number, partition=number % 2)
            assert (await stored(url, keys, number % 2, f"topic-{number % 10}"))[id] == number
        sending, known = broker._producer, broker._registry
        assert [len(sending._metrics), len(sending._plain)] == [3, 3]
        assert [len(sending._trimming._sent), len(sending._destinations)] == [5, 5]
        assert [len(known._known), len(known._registered)] == [4, 4]


async def stored(url: str, keys: Keys, partition: int, topic: str = ORDERS) -> dict[str, Any]:
    """The payloads of a partition by ID, in order."""
    rows = await ask(url, "XRANGE", keys.partition(topic, partition), "-", "+")
    return {id: json.loads(fields["payload"]) for id, fields in rows}


# --- round trips ----------------------------------------------------------------------------------------------


@pytest.mark.any_server
async def test_a_send_is_one_command(broker: Broker, topic: str, proxy: Proxy) -> None:
    before = len(proxy.forwarded)
    for number in range(10):
        await broker.send(topic, number, key=str(number), headers={"a": "b"})
    sent = proxy.forwarded[before:]
    assert len(sent) == 10
    assert all(b"XADD" in command for command in sent)


@pytest.mark.any_server
async def test_a_send_with_an_id_is_one_command_too(broker: Broker, topic: str, proxy: Proxy) -> None:
    await broker.send(topic, 0, message_id="first")  # the server learns the script
    before = len(proxy.forwarded)
    for number in range(10):
        await broker.send(topic, number, message_id=str(number))
    sent = proxy.forwarded[before:]
    assert len(sent) == 10
    assert all(b"EVALSHA" in command for command in sent)


@pytest.mark.any_server
async def test_what_is_known_of_a_topic_is_asked_for_once_a_second(
    broker: Broker, topic: str, proxy: Proxy, clock: ManualClock
) -> None:
    before = len(proxy.forwarded)
    clock.advance(1.1)
    await broker.send(topic, 1)
    look, write = proxy.forwarded[before:]
    assert b"EVAL" in look
    assert b"XADD" in write


@pytest.mark.any_server
async def test_a_batch_goes_out_in_one_write_for_each_chunk_of_a_partition(
    broker: Broker, topic: str, proxy: Proxy, url: str, keys: Keys
) -> None:
    hold = proxy.hold(keys.partition(topic, 0).encode())
    sending = asyncio.create_task(broker.send_batch(topic, [Outgoing(n, partition=0) for n in range(1100)]))
    await hold.caught.wait()
    await eventually(lambda: proxy.count(b"XADD") == 500, "the first 500 are there, unanswered")
    assert not sending.done()
    hold.release()
    ids = await sending
    assert list((await stored(url, keys, 0)).items()) == [(id, n) for n, id in enumerate(ids)]


@pytest.mark.any_server
async def test_a_chunk_is_bounded_in_bytes_too(broker: Broker, topic: str, proxy: Proxy, keys: Keys) -> None:
    hold = proxy.hold(keys.partition(topic, 0).encode())
    large = "x" * 300_000
    sending = asyncio.create_task(broker.send_batch(topic, [Outgoing(large, partition=0)] * 5))
    await hold.caught.wait()
    assert proxy.count(b"XADD") <= 3
    hold.release()
    assert len(await sending) == 5


@pytest.mark.any_server
async def test_the_partitions_of_a_batch_do_not_wait_for_each_other(
    broker: Broker, topic: str, proxy: Proxy, url: str, keys: Keys
) -> None:
    """On one server they share a write."""
    hold = proxy.hold(b"warm-up")
    warming = asyncio.create_task(broker.send(topic, "warm-up", partition=1))
    await hold.caught.wait()
    sending = asyncio.create_task(broker.send_batch(topic, [Outgoing(n, partition=n % 3) for n in range(30)]))
    first = proxy.hold(keys.partition(topic, 0).encode())
    hold.release()
    await warming
    await first.caught.wait()
    await eventually(lambda: proxy.count(b"XADD") == 31, "all of them are there while the first is not answered")
    first.release()
    await sending


@pytest.mark.any_server
async def test_what_is_sent_at_the_same_time_shares_a_write(broker: Broker, topic: str, proxy: Proxy) -> None:
    first = proxy.hold(b"the first")
    leading = asyncio.create_task(broker.send(topic, "the first"))
    await first.caught.wait()
    others = [asyncio.create_task(broker.send(topic, f"other {n}")) for n in range(50)]
    next_ = proxy.hold(b"other 0")
    await asyncio.sleep(0)
    assert proxy.count(b"other") == 0
    first.release()
    await next_.caught.wait()
    await eventually(lambda: proxy.count(b"other") == 50, "all others in the next write")
    next_.release()
    ids = await asyncio.gather(leading, *others)
    assert len({(id.partition, id) for id in ids}) == 51


# --- the IDs -----------------------------------------------------------------------------------------------------


@pytest.mark.any_server
async def test_a_batch_keeps_the_order_of_each_partition_and_returns_ids_as_given(
    broker: Broker, topic: str, url: str, keys: Keys
) -> None:
    messages = [Outgoing(n, key=f"customer-{n % 7}") for n in range(200)]
    ids = await broker.send_batch(topic, iter(messages))
    assert [(await stored(url, keys, id.partition))[id] for id in ids[:5]] == [0, 1, 2, 3, 4]
    for partition in range(3):
        found = await stored(url, keys, partition)
        assert list(found.values()) == sorted(found.values())
        assert {id: n for n, id in enumerate(ids) if id.partition == partition} == found


@pytest.mark.any_server
async def test_an_empty_batch_sends_nothing(broker: Broker, topic: str, proxy: Proxy) -> None:
    assert await broker.send_batch(topic, []) == []
    assert proxy.count(b"XADD") == 0


async def test_an_id_is_what_redis_gave(broker: Broker, topic: str, url: str, keys: Keys) -> None:
    id = await broker.send(topic, {"id": 1}, partition=2)
    assert id.partition == 2
    assert await stored(url, keys, 2) == {id: {"id": 1}}


def test_an_id_is_a_string() -> None:
    id = EntryId("1700000000000-3", 2)
    assert id == "1700000000000-3"
    assert id in {"1700000000000-3"}
    assert (json.dumps(id), f"{id}", id.split("-")) == ('"1700000000000-3"', "1700000000000-3", ["1700000000000", "3"])
    assert type(str(id)) is str


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_an_id_pickles_with_its_partition(protocol: int) -> None:
    id = pickle.loads(pickle.dumps(EntryId("5-1", 2), protocol))
    assert (type(id), id, id.partition) == (EntryId, "5-1", 2)
    assert copy.deepcopy(id).partition == 2


# --- where to ------------------------------------------------------------------------------------------------


@pytest.mark.any_server
@pytest.mark.parametrize(("name", "column"), [("murmur2", 1), ("consistent", 2)])
async def test_a_key_finds_the_partition_that_is_documented(
    broker: Broker, url: str, keys: Keys, name: str, column: int
) -> None:
    await broker.create_topic(ORDERS, partitions=8, partitioner=name)
    for key, vector in VECTORS.items():
        expected = vector[column][2]  # type: ignore[index]
        id = await broker.send(ORDERS, key, key=key)
        assert id.partition == expected
        assert (await stored(url, keys, expected))[id] == key


@pytest.mark.any_server
async def test_without_a_key_each_partition_has_its_turn(broker: Broker, topic: str) -> None:
    ids = [await broker.send(topic, n) for n in range(30)]
    assert Counter(id.partition for id in ids) == {0: 10, 1: 10, 2: 10}
    batch = await broker.send_batch(topic, [Outgoing(n) for n in range(30)])
    assert Counter(id.partition for id in batch) == {0: 10, 1: 10, 2: 10}


@pytest.mark.any_server
async def test_an_explicit_partition_wins_over_the_key(broker: Broker, topic: str) -> None:
    assert [(await broker.send(topic, 1, key="a", partition=n)).partition for n in range(3)] == [0, 1, 2]


@pytest.mark.any_server
@pytest.mark.parametrize("partition", [-1, 3, 1.0, True, "0"])
async def test_a_partition_that_is_not_there_is_refused(
    broker: Broker, topic: str, proxy: Proxy, partition: Any
) -> None:
    with pytest.raises(ConfigError, match=r"^partition must be"):
        await broker.send(topic, 1, partition=partition)
    assert proxy.count(b"XADD") == 0


@pytest.mark.any_server
async def test_a_partitioner_of_the_users_own_gets_key_and_count(url: str, keys: Keys) -> None:
    asked: list[tuple[str | None, int]] = []

    def last(key: str | None, partitions: int) -> int:
        asked.append((key, partitions))
        return partitions - 1

    async with Broker(url, namespace=keys.namespace, partitioner=last) as broker:
        await broker.create_topic(ORDERS, partitions=4)
        assert (await broker.send(ORDERS, 1, key="a")).partition == 3
        assert (await broker.send(ORDERS, 1)).partition == 3
        assert (await broker.send(ORDERS, 1, message_id="m")).partition == 3
    assert asked == [("a", 4), (None, 4), ("m", 4)]


@pytest.mark.any_server
async def test_a_brokers_own_partitioner_replaces_the_topics(url: str, keys: Keys) -> None:
    async with Broker(url, namespace=keys.namespace, partitioner=ConsistentHashPartitioner()) as broker:
        await broker.create_topic(ORDERS, partitions=8)
        assert (await broker.send(ORDERS, 1, key="customer-7")).partition == VECTORS["customer-7"][2][2]


@pytest.mark.any_server
@pytest.mark.parametrize("answer", [-1, 4, "0", None, 1.0, True])
async def test_what_no_partition_is_named_by_is_refused_before_anything_is_sent(
    url: str, keys: Keys, answer: Any
) -> None:
    async with Broker(url, namespace=keys.namespace, partitioner=lambda key, count: answer if key else 0) as broker:
        await broker.create_topic(ORDERS, partitions=4)
        with pytest.raises(ConfigError, match=f"must return an integer from 0 to 3, not {answer!r}"):
            await broker.send_batch(ORDERS, [Outgoing(1), Outgoing(2, key="a")])
        assert await ask(url, "EXISTS", keys.partition(ORDERS, 0)) == 0


@pytest.mark.any_server
async def test_the_error_of_a_partitioner_is_the_callers(url: str, keys: Keys) -> None:
    def broken(key: str | None, partitions: int) -> int:
        raise LookupError(key)

    async with Broker(url, namespace=keys.namespace, partitioner=broken) as broker:
        await broker.create_topic(ORDERS, partitions=2)
        with pytest.raises(LookupError, match="a"):
            await broker.send(ORDERS, 1, key="a")
