"""One message ID once: within a window of time and number, whatever happens to the answers."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from conquiet import Broker, HashPartitioner, Outgoing, QueueError, Retention
from conquiet.kit.clock import ManualClock
from conquiet.wire.keys import Keys
from tests.conftest import Rung
from tests.rigs.asking import ask
from tests.rigs.proxy import Proxy
from tests.rigs.servers import on_a_port

pytestmark = [pytest.mark.cluster_too, pytest.mark.guarantee]

ORDERS = "orders"


@pytest.fixture
async def broker(url: str, keys: Keys, clock: ManualClock) -> AsyncIterator[Broker]:
    async with Broker(url, namespace=keys.namespace, clock=clock, dedup_window=600, dedup_size=5) as broker:
        await broker.create_topic(ORDERS)
        yield broker


async def payloads(url: str, keys: Keys, partition: int = 0) -> list[Any]:
    rows = await ask(url, "XRANGE", keys.partition(ORDERS, partition), "-", "+")
    return [json.loads(fields["payload"]) for _, fields in rows]


async def test_a_repeated_send_gives_the_first_id_and_writes_nothing(broker: Broker, url: str, keys: Keys) -> None:
    first = await broker.send(ORDERS, "first", message_id="m")
    again = await broker.send(ORDERS, "again", message_id="m")
    assert (again, again.partition) == (first, 0)
    assert await payloads(url, keys) == ["first"]
    [(_, fields)] = await ask(url, "XRANGE", keys.partition(ORDERS, 0), "-", "+")
    assert fields["messageId"] == "m"


async def test_messages_without_an_id_are_never_repetitions(broker: Broker, url: str, keys: Keys) -> None:
    for _ in range(2):
        await broker.send(ORDERS, 1, key="k")
    assert await payloads(url, keys) == [1, 1]


async def test_the_window_ends_after_its_time(broker: Broker, url: str, keys: Keys, clock: ManualClock) -> None:
    first = await broker.send(ORDERS, 1, message_id="m")
    clock.advance(595)
    assert await broker.send(ORDERS, 2, message_id="m") == first
    clock.advance(10)  # counted from the first: a repetition does not prolong it
    assert await broker.send(ORDERS, 3, message_id="m") != first
    assert await payloads(url, keys) == [1, 3]


async def test_the_window_holds_so_many_ids(broker: Broker, url: str, keys: Keys) -> None:
    for n in range(6):
        await broker.send(ORDERS, n, message_id=f"m{n}")
    await broker.send(ORDERS, "known", message_id="m1")
    await broker.send(ORDERS, "forgotten", message_id="m0")
    assert await payloads(url, keys) == [0, 1, 2, 3, 4, 5, "forgotten"]
    stream = keys.partition(ORDERS, 0)
    assert await ask(url, "ZCARD", keys.dedup(stream)) == await ask(url, "HLEN", keys.dedup_ids(stream)) == 5


async def test_what_has_left_the_window_leaves_nothing_behind(
    broker: Broker, url: str, keys: Keys, clock: ManualClock
) -> None:
    for n in range(5):
        await broker.send(ORDERS, n, message_id=f"m{n}")
    clock.advance(601)
    await broker.send(ORDERS, "new", message_id="new")
    stream = keys.partition(ORDERS, 0)
    assert await ask(url, "HKEYS", keys.dedup_ids(stream)) == ["new"]
    assert await ask(url, "ZRANGE", keys.dedup(stream), 0, -1) == ["new"]


@pytest.mark.parametrize("delay", [None, 60.0])
async def test_an_id_that_has_left_the_window_is_no_repetition_though_it_is_still_there(
    url: str, keys: Keys, clock: ManualClock, delay: float | None
) -> None:
    """Only some are cleared away at a time. Else a later send, meant as such, would be swallowed."""
    async with Broker(url, namespace=keys.namespace, clock=clock) as broker:
        await broker.create_topic(ORDERS)
        await broker.send_batch(ORDERS, [Outgoing(n, message_id=f"m{n}") for n in range(250)])
        clock.advance(601)
        ids = [await broker.send(ORDERS, n, message_id=f"m{n}", delay=delay) for n in (249, 0, 130)]
        stream = keys.partition(ORDERS, 0)
        assert await ask(url, "XLEN", stream) == (250 if delay else 253)
        assert await ask(url, "ZCARD", keys.delayed(stream)) == (3 if delay else 0)
        assert [await broker.send(ORDERS, n, message_id=f"m{n}") for n in (249, 0, 130)] == ids


async def test_what_is_remembered_runs_out_when_nothing_more_is_sent(url: str, keys: Keys, broker: Broker) -> None:
    stream = keys.partition(ORDERS, 0)
    both = (keys.dedup(stream), keys.dedup_ids(stream))
    for _ in range(2):
        await broker.send(ORDERS, 1, message_id="m")
        assert all([600_000 <= await ask(url, "PTTL", key) <= 1_200_000 for key in both])
    await ask(url, "PEXPIRE", both[0], 599_000)
    await broker.send(ORDERS, 1, message_id="n")
    assert all([1_100_000 < await ask(url, "PTTL", key) <= 1_200_000 for key in both])
    await ask(url, "PERSIST", both[0])  # as an earlier version left it
    await broker.send(ORDERS, 1, message_id="o")
    assert await ask(url, "PTTL", both[0]) > 0


async def test_within_a_batch_too(broker: Broker, url: str, keys: Keys) -> None:
    ids = await broker.send_batch(ORDERS, [Outgoing(n, message_id=f"m{n % 2}") for n in range(4)])
    assert ids[:2] == ids[2:]
    assert await payloads(url, keys) == [0, 1]


@pytest.mark.any_server
async def test_without_a_key_the_id_finds_the_partition(url: str, keys: Keys) -> None:
    async with Broker(url, namespace=keys.namespace) as broker, Broker(url, namespace=keys.namespace) as other:
        await broker.create_topic(ORDERS, partitions=8)
        for n in range(20):
            id = await broker.send(ORDERS, n, message_id=f"m{n}")
            assert id.partition == HashPartitioner()(f"m{n}", 8)
            again = await other.send(ORDERS, n, message_id=f"m{n}")
            assert (again, again.partition) == (id, id.partition)


@pytest.mark.any_server
async def test_with_a_key_the_key_does(url: str, keys: Keys) -> None:
    async with Broker(url, namespace=keys.namespace) as broker:
        await broker.create_topic(ORDERS, partitions=8)
        for n in range(8):
            assert (await broker.send(ORDERS, 1, key="a", message_id=f"m{n}")).partition == HashPartitioner()("a", 8)


@pytest.mark.one_node
async def test_a_lost_answer_can_be_asked_for_again(url: str, keys: Keys) -> None:
    async with Proxy(url) as proxy, Broker(proxy.url, namespace=keys.namespace) as broker:
        await broker.create_topic(ORDERS)
        await broker.send(ORDERS, 0, message_id="warm-up")
        cut = proxy.cut(b"EVALSHA")
        with pytest.raises(QueueError):
            await broker.send(ORDERS, 1, message_id="m")
        assert cut.is_set()
        id = await broker.send(ORDERS, 1, message_id="m")
    assert await payloads(url, keys) == [0, 1]
    [(last, _)] = await ask(url, "XREVRANGE", keys.partition(ORDERS, 0), "+", "-", "COUNT", 1)
    assert last == id


async def test_a_server_that_forgot_the_script_is_sent_it_and_nothing_twice(rung: Rung) -> None:
    async with on_a_port(rung.binary) as server, Proxy(server.url) as proxy:
        async with Broker(proxy.url) as broker:
            await broker.create_topic(ORDERS)
            await broker.send(ORDERS, "a", message_id="a")
            await ask(server.url, "SCRIPT", "FLUSH")
            ids = await broker.send_batch(ORDERS, [Outgoing(x, message_id=x) for x in "abcb"])
            assert len(set(ids)) == 3
            assert ids[1] == ids[3]
        assert await payloads(server.url, Keys()) == ["a", "b", "c"]
        assert proxy.count(b"\r\nEVAL\r\n") >= 4


async def test_a_full_topic_still_knows_what_it_has(url: str, keys: Keys) -> None:
    async with Broker(url, namespace=keys.namespace) as broker:
        await broker.create_topic(ORDERS, retention=Retention(max_len=1, on_full="reject"))
        await ask(url, "XGROUP", "CREATE", keys.partition(ORDERS, 0), "slow", "0", "MKSTREAM")
        id = await broker.send(ORDERS, 1, message_id="m")
        assert await broker.send(ORDERS, 1, message_id="m") == id
