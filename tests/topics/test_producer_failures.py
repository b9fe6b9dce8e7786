"""Sending that is refused or fails: what is known then of what was written, and what is not sent."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from conquiet import (
    Broker,
    ConfigError,
    Outgoing,
    PayloadError,
    QueueError,
    Retention,
)
from conquiet.kit.clock import ManualClock
from conquiet.wire.keys import Keys
from tests.rigs.asking import ask
from tests.rigs.proxy import Proxy

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


async def stored(url: str, keys: Keys, partition: int, topic: str = ORDERS) -> dict[str, Any]:
    """The payloads of a partition by ID, in order."""
    rows = await ask(url, "XRANGE", keys.partition(topic, partition), "-", "+")
    return {id: json.loads(fields["payload"]) for id, fields in rows}


# --- refusals and failures -------------------------------------------------------------------------------------


@pytest.mark.any_server
async def test_all_of_a_batch_is_checked_before_the_first_is_sent(broker: Broker, topic: str, proxy: Proxy) -> None:
    with pytest.raises(PayloadError) as caught:
        await broker.send_batch(topic, [Outgoing(1), Outgoing({"a": [float("nan")]})])
    assert caught.value.path == "messages[1]: $.a[0]"
    with pytest.raises(ConfigError, match="headers"):
        await broker.send_batch(topic, [Outgoing(1), Outgoing(1, headers={"a": 5})])  # type: ignore[dict-item]
    with pytest.raises(ConfigError, match=r"messages\[1\] must be an Outgoing, not {'a': 1}"):
        await broker.send_batch(topic, [Outgoing(1), {"a": 1}])  # type: ignore[list-item]
    assert proxy.count(b"XADD") == 0


@pytest.mark.any_server
async def test_the_place_in_a_single_payload_is_named_as_it_is(broker: Broker, topic: str) -> None:
    with pytest.raises(PayloadError) as caught:
        await broker.send(topic, {"a": [float("nan")]})
    assert caught.value.path == "$.a[0]"


async def test_a_refused_entry_is_told_apart_from_those_that_were_written(
    broker: Broker, topic: str, proxy: Proxy, url: str, keys: Keys
) -> None:
    proxy.refuse(b"the second", b"-OOM command not allowed\r\n")
    messages = [Outgoing(f"the {n}", partition=0) for n in ("first", "second", "third")]
    with pytest.raises(QueueError, match=r"not allowed \(2 of 3 entries are known to be written\)") as caught:
        await broker.send_batch(topic, messages)
    first, second, third = caught.value.entry_ids
    assert second is None
    assert await stored(url, keys, 0) == {first: "the first", third: "the third"}


async def test_after_a_failure_the_rest_of_that_partition_is_not_sent(
    broker: Broker, topic: str, proxy: Proxy, url: str, keys: Keys
) -> None:
    proxy.refuse(b'"n7"', b"-OOM command not allowed\r\n")
    messages = [Outgoing(f"n{n}", partition=n % 2) for n in range(2200)]
    with pytest.raises(QueueError) as caught:
        await broker.send_batch(topic, messages)
    written = [n for n, id in enumerate(caught.value.entry_ids) if id is not None]
    assert [n for n in written if n % 2 == 0] == list(range(0, 2200, 2))
    assert [n for n in written if n % 2] == [n for n in range(1, 1000, 2) if n != 7]
    assert list((await stored(url, keys, 0)).values()) == [f"n{n}" for n in range(0, 2200, 2)]


async def test_a_lost_answer_is_an_error_and_nothing_is_sent_twice(
    broker: Broker, topic: str, proxy: Proxy, url: str, keys: Keys
) -> None:
    cut = proxy.cut(b"XADD")
    with pytest.raises(QueueError):
        await broker.send(topic, 1, partition=0)
    assert cut.is_set()
    assert list((await stored(url, keys, 0)).values()) == [1]
    await broker.send(topic, 2, partition=0)
    assert list((await stored(url, keys, 0)).values()) == [1, 2]


async def test_a_batch_cut_off_in_the_middle_knows_what_was_confirmed(
    broker: Broker, topic: str, proxy: Proxy, url: str, keys: Keys
) -> None:
    proxy.cut(b"XADD", skip=700)
    with pytest.raises(QueueError) as caught:
        await broker.send_batch(topic, [Outgoing(n, partition=0) for n in range(1200)])
    ids = caught.value.entry_ids
    assert len(ids) == 1200
    known = [n for n, id in enumerate(ids) if id is not None]
    assert known == list(range(500))
    found = await stored(url, keys, 0)
    assert list(found.values()) == list(range(1000))
    assert [found[id] for id in ids if id is not None] == known


@pytest.mark.any_server
async def test_nothing_can_be_sent_after_the_end(url: str, keys: Keys) -> None:
    async with Broker(url, namespace=keys.namespace) as broker:
        await broker.create_topic(ORDERS)
    with pytest.raises(QueueError, match="closed"):
        await broker.send(ORDERS, 1)


# --- keeping the topic within its bounds -------------------------------------------------------------------------


async def test_a_producer_trims_now_and_then_where_nobody_subscribes(broker: Broker, url: str, keys: Keys) -> None:
    await broker.create_topic(ORDERS, retention=Retention(max_len=100))
    await broker.send_batch(ORDERS, [Outgoing(n) for n in range(999)])
    assert await ask(url, "XLEN", keys.partition(ORDERS, 0)) == 999
    await broker.send(ORDERS, 999)
    assert list((await stored(url, keys, 0)).values()) == list(range(900, 1000))


async def test_a_failed_trim_is_no_failed_send(
    broker: Broker, url: str, keys: Keys, proxy: Proxy, caplog: pytest.LogCaptureFixture
) -> None:
    await broker.create_topic(ORDERS, retention=Retention(max_len=100))
    await broker.send_batch(ORDERS, [Outgoing(n) for n in range(999)])
    proxy.refuse(b"EVAL", b"-OOM command not allowed\r\n")
    assert (await broker.send(ORDERS, 999)) in await stored(url, keys, 0)
    assert "could not trim" in caplog.text
