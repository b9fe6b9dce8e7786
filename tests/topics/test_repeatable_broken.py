"""Repeatable writes over a way that breaks: lost answers, servers that stay away, and the end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from conquiet import QueueError
from conquiet.kit.clock import ManualClock
from conquiet.topics.options import Retention
from conquiet.topics.produce.once import Appended, Appender, Write, begin
from conquiet.topics.server.instance import Instance
from conquiet.topics.server.topics import Registry
from conquiet.wire.address import Address
from conquiet.wire.connections import Connections
from conquiet.wire.keys import Keys
from tests.rigs.proxy import Proxy
from tests.topics.repeating import ONCE, append, by_ids, chunk, payloads
from tests.topics.staging import Stage, hurried

pytestmark = [pytest.mark.cluster_too, pytest.mark.guarantee]


@pytest.fixture
async def proxy(url: str) -> AsyncIterator[Proxy]:
    async with Proxy(url) as proxy:
        yield proxy


@pytest.fixture
async def far(proxy: Proxy, keys: Keys, clock: ManualClock) -> AsyncIterator[Instance]:
    """The same place, reached through the proxy, where the scripts are known already."""
    link = Connections(Address.of(proxy.url))
    instance = Instance(link, keys, clock)
    topic = await Registry(instance).create("warm", 1, Retention())
    await append(instance, topic, ONCE, [chunk(0, 1)])
    yield instance
    await link.aclose()


@pytest.mark.one_node
@pytest.mark.parametrize("by_id", [False, True])
async def test_an_answer_that_is_lost_adds_nothing_twice(
    stage: Stage, far: Instance, proxy: Proxy, clock: ManualClock, by_id: bool
) -> None:
    topic = await stage.topic(partitions=2)
    write, made = Write("export", by_id=by_id), []
    for number in range(12):
        names = [f"{number}-{at}" for at in range(5)]
        made.append(by_ids(*names, number=number // 2, partition=number % 2))
    lost = [proxy.cut(stage.stream(topic, at % 2).encode(), skip=skip) for at, skip in enumerate((0, 1, 2, 5))]
    done = await hurried(clock, append(far, topic, write, made))
    assert all(cut.is_set() for cut in lost)
    assert done.rows + done.repeated == 60
    assert done.repeated >= 5
    assert done.differing == 0
    for partition in (0, 1):
        wanted = [f'"{number}-{at}"' for number in range(partition, 12, 2) for at in range(5)]
        assert await payloads(stage, topic, partition) == wanted


@pytest.mark.one_node
async def test_a_server_that_stays_away_is_told_of(
    stage: Stage, far: Instance, proxy: Proxy, clock: ManualClock
) -> None:
    topic = await stage.topic(partitions=2)
    await begin(far, topic, ONCE)
    appender = Appender(far, topic, ONCE, 0)
    await appender.put(chunk(0, 1))
    await appender.drain()
    proxy.shut()
    before = proxy.accepted

    async def go_on() -> None:
        for number in range(1, 10):
            await appender.put(chunk(number, number))

    with pytest.raises(QueueError, match=f"at 127.0.0.1:{proxy.port}: "):
        await hurried(clock, go_on())
    assert proxy.accepted - before == 7  # and one try on the connection that it had
    # It has failed, and does nothing more.
    for refused in (appender.put(chunk(0, 1, partition=1)), appender.drain()):
        with pytest.raises(QueueError):
            await refused
    await appender.aclose()
    proxy.reopen()
    assert await append(far, topic, ONCE, [chunk(0, 1), chunk(1, 1)]) == Appended(1, 1)


@pytest.mark.one_node
async def test_one_chunk_of_a_partition_is_under_way_and_few_wait(stage: Stage, far: Instance, proxy: Proxy) -> None:
    topic = await stage.topic(partitions=2)
    await begin(far, topic, ONCE)
    appender = Appender(far, topic, ONCE, 0)
    hold = proxy.hold(stage.stream(topic, 0).encode())
    for number in range(4):
        await appender.put(chunk(number, f'"row-{number}"'))
    await hold.caught.wait()
    fifth = asyncio.create_task(appender.put(chunk(4, '"row-4"')))
    await appender.put(chunk(0, '"beside"', partition=1))
    assert proxy.count(b'"row-0"') == 1
    assert proxy.count(b'"row-1"') == 0
    assert not fifth.done()
    hold.release()
    await fifth
    assert await appender.drain() == Appended(6)
    assert await payloads(stage, topic) == [f'"row-{number}"' for number in range(5)]


@pytest.mark.one_node
async def test_closing_gives_up_what_waits(stage: Stage, far: Instance, proxy: Proxy) -> None:
    topic = await stage.topic()
    await begin(far, topic, ONCE)
    appender = Appender(far, topic, ONCE, 0)
    hold = proxy.hold(stage.stream(topic).encode())
    for number in range(3):
        await appender.put(chunk(number, number))
    await hold.caught.wait()
    await appender.aclose()
    hold.release()
    assert await payloads(stage, topic) == ["0"]
    done: Any = await append(stage.instance, topic, ONCE, [chunk(number, number) for number in range(3)])
    assert done == Appended(2, 1)
