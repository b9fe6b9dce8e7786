"""What only Redis knows, shown to whoever scrapes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from conquiet import Broker, ConfigError, Outgoing, SubscribeOptions
from conquiet.topics.operate import collector as collecting
from conquiet.wire.keys import Keys
from tests.rigs.asking import ask
from tests.rigs.scraping import value

pytestmark = pytest.mark.cluster_too


@pytest.fixture
async def broker(url: str, keys: Keys) -> AsyncIterator[Broker]:
    async with Broker(url, namespace=keys.namespace) as broker:
        yield broker


async def scraped(name: str, **labels: str) -> float | None:
    """A value as a scrape shows it; scrapes come from threads of their own."""
    return await asyncio.to_thread(value, f"conquiet_topics_{name}", **labels)


async def test_lengths_backlogs_and_owners_are_shown(broker: Broker, keys: Keys) -> None:
    topic = f"{keys.namespace}-orders"
    await broker.create_topic(topic, partitions=2)
    await broker.send_batch(topic, [Outgoing(n, partition=n % 2) for n in range(6)])
    async with broker.consume(topic, group="billing") as messages:
        assert await messages.next(20) is not None
    await broker.send(topic, "more", partition=1)
    collector = broker.collector([topic])
    try:
        about = {"topic": topic, "group": "billing"}
        assert await scraped("collector_up") == 1
        assert await scraped("length", topic=topic, partition="0") == 3
        assert await scraped("length", topic=topic, partition="1") == 4
        pending = [await scraped("pending", partition=part, **about) or 0 for part in ("0", "1")]
        lag = [await scraped("lag", partition=part, **about) or 0 for part in ("0", "1")]
        assert sum(pending) + sum(lag) == 7
        assert await scraped("partitions_unowned", **about) == 2
        assert await scraped("retry_depth", partition="0", **about) == 0
    finally:
        await asyncio.to_thread(collector.close)
    assert await scraped("length", topic=topic, partition="0") is None


@pytest.mark.parametrize("counted", [100_000, 40, 8])
async def test_a_backlog_that_is_not_counted_to_its_end_is_shown_too_low_and_does_not_vanish(
    broker: Broker, url: str, keys: Keys, monkeypatch: pytest.MonkeyPatch, counted: int
) -> None:
    """Servers before 7.0 do not know how many entries come after one."""
    monkeypatch.setattr(collecting, "_COUNTED", counted)
    monkeypatch.setattr(collecting, "_LEAST", 2)
    topic = f"{keys.namespace}-orders"
    await broker.create_topic(topic)
    await broker.send_batch(topic, [Outgoing(n) for n in range(5)])
    async with broker.consume(topic, group="billing", options=SubscribeOptions(batch_size=5)) as messages:
        assert await messages.next(20) is not None
    ids = await broker.send_batch(topic, [Outgoing(n) for n in range(50)])
    stream = keys.partition(topic, 0)
    await ask(url, "XDEL", stream, ids[25])  # an entry in the middle is gone: no server knows any more
    collector = broker.collector([topic])
    try:
        lag = await scraped("lag", topic=topic, group="billing", partition="0")
    finally:
        await asyncio.to_thread(collector.close)
    # With 8, neither those before nor those after the place of the group are counted to the end.
    assert lag == {100_000: 49, 40: 49, 8: 2}[counted]
    assert (await broker.admin.describe_group(topic, "billing")).lag == 49


@pytest.mark.any_server
async def test_a_scrape_looks_at_no_more_than_it_may(broker: Broker, keys: Keys) -> None:
    small, large = f"{keys.namespace}-a", f"{keys.namespace}-b"
    await broker.create_topic(small, partitions=1)
    await broker.create_topic(large, partitions=5)
    collector = broker.collector(most_partitions=3)
    try:
        assert await scraped("length", topic=small, partition="0") == 0
        assert await scraped("length", topic=large, partition="0") is None
    finally:
        await asyncio.to_thread(collector.close)


@pytest.mark.any_server
async def test_a_server_that_is_gone_spoils_no_scrape(keys: Keys) -> None:
    collector = Broker("redis://127.0.0.1:1", namespace=keys.namespace).collector()
    try:
        assert await scraped("collector_up") == 0
    finally:
        await asyncio.to_thread(collector.close)


@pytest.mark.any_server
async def test_what_cannot_be_collected_is_refused(broker: Broker) -> None:
    with pytest.raises(ConfigError, match="most_partitions must be an integer of at least 1"):
        broker.collector(most_partitions=0)
    with pytest.raises(ConfigError, match="topic must be"):
        broker.collector(["a b"])
