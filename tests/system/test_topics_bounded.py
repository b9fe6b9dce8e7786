"""A million of each thing, and 300 messages of a megabyte: no call holds the server up for others to notice."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Final

import pytest

from conquiet import Broker, Outgoing, Reject, Retention
from conquiet.message import Message
from conquiet.sync import EmbeddedRedis
from tests.conftest import Rung
from tests.rigs.asking import ask
from tests.rigs.servers import on_a_port_in_sync
from tests.rigs.sizing import IS_FULL
from tests.rigs.waiting import eventually
from tests.topics.consuming import Recorder, buried, finished, impatient

pytestmark = [pytest.mark.system, pytest.mark.any_server]

ORDERS: Final = "orders"
GROUP: Final = "billing"
STREAM: Final = "stream:topic:orders:p:0"
"""Times mean something at full size, and where nothing else is going on."""
LONG: Final = 50_000
"""Microseconds that a call may take. A busy machine may take one in twenty off its course; a call that does all at once
is the only one of its kind."""

FILL: Final = """
for number = ARGV[1], ARGV[2] do
  %s
end"""
ENTRY: Final = "redis.call('XADD', KEYS[1], number .. '-1', 'payload', number, 'timestamp', '1')"
PARKED: Final = "redis.call('ZADD', KEYS[1], 1, number .. '-1') redis.call('HSET', KEYS[2], number .. '-1', '1|1|1|E|')"
DELAYED: Final = """redis.call('ZADD', KEYS[1], 1, 'i' .. number)
redis.call('HSET', KEYS[2], 'i' .. number, cmsgpack.pack({'payload', tostring(number), 'timestamp', '1'}))"""
SEEN: Final = "redis.call('ZADD', KEYS[1], number, 'm' .. number) redis.call('HSET', KEYS[2], 'm' .. number, '1-1')"


@pytest.fixture(scope="module")
def own(rung: Rung) -> Iterator[EmbeddedRedis]:
    with on_a_port_in_sync(rung.binary) as server:
        yield server


@pytest.fixture
def many(scale: float) -> int:
    return round(1_000_000 * scale)


@pytest.fixture
async def broker(own: EmbeddedRedis) -> AsyncIterator[Broker]:
    async with Broker(own.url) as broker:
        await broker.create_topic(ORDERS)
        yield broker
        await broker.admin.delete_topic(ORDERS, force=True)


async def fill(server: EmbeddedRedis, count: int, what: str, *keys: str) -> None:
    for start in range(1, count + 1, 10_000):
        last = min(start + 9_999, count)
        await ask(server.url, "EVAL", FILL % what, len(keys), *keys, start, last)


@asynccontextmanager
async def quick(server: EmbeddedRedis) -> AsyncGenerator[None]:
    """All calls in the block but few take less than :data:`LONG`, at full size; tests/topics/test_bounded.py counts."""
    await ask(server.url, "CONFIG", "SET", "slowlog-log-slower-than", LONG)
    await ask(server.url, "CONFIG", "RESETSTAT")
    await ask(server.url, "SLOWLOG", "RESET")
    yield
    slow = [(entry[2], entry[3][:3]) for entry in await ask(server.url, "SLOWLOG", "GET", 1000)]
    about = await ask(server.url, "INFO", "commandstats")
    calls = sum(about.get(f"cmdstat_{name}", {"calls": 0})["calls"] for name in ("eval", "evalsha"))
    scripts = [(took, words) for took, words in slow if words[0].upper().startswith("EVAL")]
    if IS_FULL:
        assert len(scripts) <= max(calls / 20, 1), (calls, scripts[:5])
        assert all(took <= 4 * LONG for took, _ in slow), slow[:5]


async def deliver(server: EmbeddedRedis, count: int) -> None:
    """Give everything to a group that finishes nothing."""
    for _ in range(0, count, 10_000):
        await ask(server.url, "XREADGROUP", "GROUP", GROUP, "gone#1", "COUNT", 10_000, "STREAMS", STREAM, ">")


async def test_a_million_pending(own: EmbeddedRedis, broker: Broker, many: int) -> None:
    await fill(own, many, ENTRY, STREAM)
    await ask(own.url, "XGROUP", "CREATE", STREAM, GROUP, "0")
    await deliver(own, many)
    async with quick(own):
        assert (await broker.admin.describe_group(ORDERS, GROUP)).pending == many
        assert len((await broker.admin.pending(ORDERS, GROUP, 5_000)).entries) == 5_000
        await broker.admin.reset_group(ORDERS, GROUP, "earliest")
        assert (await broker.admin.describe_group(ORDERS, GROUP)).pending == 0
    await deliver(own, many)
    async with quick(own):
        await broker.admin.delete_group(ORDERS, GROUP)
    assert await broker.admin.list_groups(ORDERS) == []


async def test_many_parked_and_taken_over(own: EmbeddedRedis, broker: Broker, many: int) -> None:
    many = max(many // 20, 1000)  # all of them are taken over before the first is handled
    await fill(own, many, ENTRY, STREAM)
    await ask(own.url, "XGROUP", "CREATE", STREAM, GROUP, "0")
    await deliver(own, many)
    await fill(
        own, many, PARKED, f"streaming:mq:retry:{{{STREAM}}}:{GROUP}", f"streaming:mq:attempts:{{{STREAM}}}:{GROUP}"
    )
    seen = Recorder()
    async with quick(own), broker.subscribe(ORDERS, group=GROUP, handler=seen, options=impatient(max_inflight=1000)):
        await eventually(lambda: len(seen.messages) >= min(many, 5_000), "some to be handled", 120.0)
    async with quick(own):
        await broker.admin.reset_group(ORDERS, GROUP, "latest")


async def test_a_million_delayed_and_as_many_message_ids(own: EmbeddedRedis, broker: Broker, many: int) -> None:
    delayed, dedup = f"streaming:mq:delayed:{{{STREAM}}}", f"streaming:mq:dedup:{{{STREAM}}}"
    await fill(own, many, DELAYED, delayed, f"{delayed}:items")
    await fill(own, many, SEEN, dedup, f"{dedup}:ids")
    seen = Recorder()
    async with quick(own), broker.subscribe(ORDERS, group=GROUP, handler=seen, options=impatient()):
        for number in range(20):
            await broker.send(ORDERS, number, message_id=f"new-{number}")
        await eventually(lambda: len(seen.messages) > 5_000, "some to be handled", 120.0)


async def test_a_million_dead_letters(own: EmbeddedRedis, broker: Broker, many: int) -> None:
    await fill(own, many, ENTRY, "stream:topic:orders:dlq")

    async def reject(message: Message) -> None:
        raise Reject("no")

    await broker.admin.configure(ORDERS, Retention(dead_letter_max_len=max(many // 2, 10)))
    async with quick(own):
        async with broker.subscribe(ORDERS, group=GROUP, handler=reject, options=impatient()):
            await broker.send_batch(ORDERS, [Outgoing(number) for number in range(500)])
            await finished(broker, ORDERS, GROUP)
        assert len(await broker.admin.dead_letters(ORDERS, 1_000)) == 1_000
        assert (await broker.admin.describe_topic(ORDERS)).dead_letters >= many // 2


async def test_300_messages_of_a_megabyte(own: EmbeddedRedis, broker: Broker, scale: float) -> None:
    count = max(round(300 * scale), 30)

    async def reject(message: Message) -> None:
        raise Reject("no")

    seen = Recorder()
    for number in range(count):
        await broker.send(ORDERS, f"{number}" + "x" * 1_000_000)
    async with quick(own):
        async with broker.subscribe(ORDERS, group=GROUP, handler=reject, options=impatient()):
            await finished(broker, ORDERS, GROUP)
        await buried(broker, ORDERS, count)
        assert await broker.admin.replay(ORDERS) == count
        async with broker.subscribe(ORDERS, group=GROUP, handler=seen, options=impatient()):
            await finished(broker, ORDERS, GROUP)
        assert await broker.admin.trim(ORDERS, max_len=1) == count - 1
    assert len(seen.messages) == count
