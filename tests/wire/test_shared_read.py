"""Many streams that are read at the same time: over how many connections, with how many commands, and what is told."""

from __future__ import annotations

import asyncio
import gc
import random
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from typing import Any

import anyio
import pytest

from conquiet import ConfigError, QueueError
from conquiet.wire.address import Address
from conquiet.wire.connections import Connections
from conquiet.wire.interrupt import Interrupt
from tests.rigs.asking import ask, blocked
from tests.rigs.freezing import elapse
from tests.rigs.proxy import Proxy
from tests.rigs.waiting import LONG, eventually
from tests.wire.reading import MANY, START, add, ended, link, names, proxy, reading, stream, told

__all__ = ["link", "proxy", "stream"]

pytestmark = [pytest.mark.any_server, pytest.mark.slow]

PROBE = b"UNBLOCK\r\n$1\r\n0\r\n"
"""Asks a node, once, whether reads can be woken."""
BUDGET = 20
"""How many commands an idle reader may send in a second."""

# --- how much ---------------------------------------------------------------------------------------------------------


async def test_many_streams_take_one_waiting_connection(url: str, proxy: Proxy, link: Connections, stream: str) -> None:
    streams = names(stream, MANY)
    readings = [reading(link, name) for name in streams]
    await blocked(url)
    assert proxy.accepted == 1
    assert proxy.count(b"XREAD") == 1
    ids = await add(url, *streams)
    found = await ended(readings)
    assert [told(reply) for reply in found] == [{name: [id]} for name, id in zip(streams, ids, strict=True)]
    assert proxy.accepted == 1
    assert proxy.count(b"XREAD") <= MANY + 1  # at worst one for each entry that came


async def test_those_who_come_one_by_one_cost_few_commands(
    url: str, proxy: Proxy, link: Connections, stream: str
) -> None:
    streams = names(stream, MANY)
    first = reading(link, f"{stream}:first")
    await blocked(url)
    readings, began = [], asyncio.get_running_loop().time()
    for name in streams:
        readings.append(reading(link, name))
        await asyncio.sleep(0.001)  # what it is about: they come one by one
    await eventually(lambda: all(name.encode() in proxy.forwarded[-1] for name in streams), "all are waited for")
    assert proxy.accepted <= 5  # the second carries what is asked at once; a busy machine may tear one
    begun = sum(b"BLOCK\r\n" in command for command in proxy.forwarded)
    woken = proxy.count(b"UNBLOCK")
    limit = 40 + 40 * (asyncio.get_running_loop().time() - began)  # a busy machine lets them come more slowly
    assert begun <= limit
    assert woken <= 2 * limit
    first.cancel()
    [id] = await add(url, streams[-1])
    async with asyncio.timeout(LONG):
        assert told(await readings[-1]) == {streams[-1]: [id]}
    for task in readings:
        task.cancel()
    await ended([first, *readings])


async def test_idle_readers_that_come_back_again_and_again_cost_few_commands(
    url: str, proxy: Proxy, link: Connections, stream: str
) -> None:
    async def read_on(name: str) -> None:
        while True:
            assert await link.read({name: START}, 10, random.uniform(0.1, 0.4)) is None

    readers = [asyncio.create_task(read_on(name)) for name in names(stream, MANY)]
    await blocked(url)
    loop = asyncio.get_running_loop()
    began, before = loop.time(), len(proxy.forwarded)
    await elapse(4.0)
    sent = len(proxy.forwarded) - before
    for reader in readers:
        reader.cancel()
    assert all(isinstance(outcome, asyncio.CancelledError) for outcome in await ended(readers))
    assert sent <= BUDGET * (loop.time() - began) / 4  # far below, since nobody is new
    assert proxy.accepted == 2


async def test_a_reader_that_is_back_in_time_costs_one_command_an_entry(
    url: str, proxy: Proxy, link: Connections, stream: str
) -> None:
    other = reading(link, f"{stream}:other")
    after = START
    async with asyncio.timeout(LONG):
        for _ in range(20):
            waiting = reading(link, stream, after=after)
            await blocked(url)
            [after] = await add(url, stream)
            assert told(await waiting) == {stream: [after]}
    assert proxy.count(b"XREAD") <= 25
    assert proxy.count(b"UNBLOCK") - proxy.count(PROBE) <= 2
    other.cancel()
    await ended([other])


# --- what is told -----------------------------------------------------------------------------------------------------


async def test_a_reader_gets_no_more_than_it_asked_for_of_its_own_streams(
    url: str, link: Connections, stream: str
) -> None:
    one, two = names(stream, 2)
    waiting = [
        asyncio.create_task(link.read({one: START}, 1, LONG)),
        asyncio.create_task(link.read({one: START}, 2, LONG)),
        asyncio.create_task(link.read({one: START, two: START}, 10, LONG)),
    ]
    await blocked(url)
    ids = ["1-1", "2-1", "3-1"]
    await ask(url, "EVAL", "for n = 1, 3 do redis.call('XADD', KEYS[1], n .. '-1', 'n', n) end", 1, one)
    found = [told(reply) for reply in await ended(waiting)]
    assert found == [{one: ids[:1]}, {one: ids[:2]}, {one: ids}]
    [later] = await add(url, two)
    assert told(await link.read({two: START}, 1, 1)) == {two: [later]}
    assert told(await link.read({one: ids[0], two: later}, 10, 1)) == {one: ids[1:]}


async def test_readers_of_one_stream_at_different_places(url: str, link: Connections, stream: str) -> None:
    ids = [await ask(url, "XADD", stream, f"{number}-1", "n", number) for number in (1, 2, 3, 4)]
    ahead = reading(link, stream, after=ids[-1])
    await blocked(url)
    behind = [reading(link, stream, after=id, count=count) for id, count in ((ids[0], 1), (ids[2], 9), (START, 2))]
    assert [told(reply)[stream] for reply in await ended(behind)] == [["2-1"], ["4-1"], ["1-1", "2-1"]]
    assert not ahead.done()
    await ask(url, "XADD", stream, "5-1", "n", 5)
    assert told(await ahead) == {stream: ["5-1"]}


@pytest.mark.parametrize("seed", range(3))
async def test_nothing_is_lost_and_nothing_told_twice(url: str, link: Connections, stream: str, seed: int) -> None:
    chance = random.Random(seed)
    streams = names(stream, 12)
    heard: dict[str, list[str]] = {name: [] for name in streams}
    is_over = asyncio.Event()

    async def follow(name: str) -> None:
        mine = heard[name]
        while not is_over.is_set():
            after = mine[-1] if mine else START
            with anyio.move_on_after(chance.choice((0.005, 1.0))):  # some are torn off, wherever that is
                reply = await link.read({name: after}, chance.randint(1, 5), chance.choice((0.001, 0.02, 1.0)))
                mine += told(reply).get(name, [])
            await asyncio.sleep(chance.choice((0, 0, 0.01)))  # waits for nothing: they come at any time

    readers = [asyncio.create_task(follow(name)) for name in streams]
    added: dict[str, list[str]] = {name: [] for name in streams}
    for _ in range(400):
        name = chance.choice(streams)
        added[name] += await add(url, name)
    await eventually(lambda: heard == added, "all are told once, in order")
    is_over.set()
    assert await ended(readers) == [None] * len(readers)


async def test_a_read_without_news_ends_in_time(link: Connections, stream: str) -> None:
    loop = asyncio.get_running_loop()
    other = reading(link, f"{stream}:other")
    began = loop.time()
    assert await link.read({stream: START}, 1, 0.05) is None
    assert 0.05 <= loop.time() - began < LONG / 4
    other.cancel()
    await ended([other])


async def test_an_interrupt_ends_its_read_alone(url: str, proxy: Proxy, link: Connections, stream: str) -> None:
    interrupt = Interrupt()
    mine = asyncio.create_task(link.read({stream: START}, 1, LONG, interrupt))
    other = reading(link, f"{stream}:other")
    await blocked(url)
    interrupt.request()
    async with asyncio.timeout(LONG / 4):
        assert await mine is None
    assert await link.read({stream: START}, 1, LONG, interrupt) is None
    assert not other.done()
    assert proxy.count(b"UNBLOCK") == proxy.count(PROBE)
    await add(url, f"{stream}:other")
    await ended([other])


# --- those who leave --------------------------------------------------------------------------------------------------


async def cancel_task(work: Callable[[], Coroutine[Any, Any, Any]], until: Callable[[], Awaitable[None]]) -> None:
    task = asyncio.ensure_future(work())
    await until()
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task


async def cancel_scope(work: Callable[[], Coroutine[Any, Any, Any]], until: Callable[[], Awaitable[None]]) -> None:
    async with anyio.create_task_group() as group:
        group.start_soon(work)
        await until()
        group.cancel_scope.cancel()


@pytest.mark.parametrize("cancel", [cancel_task, cancel_scope])
async def test_a_cancelled_reader_disturbs_nobody_and_loses_nothing(
    url: str, proxy: Proxy, link: Connections, stream: str, cancel: Any
) -> None:
    stays = reading(link, f"{stream}:stays")
    await cancel(lambda: link.read({stream: START}, 1, LONG), lambda: blocked(url))
    before = len(proxy.forwarded)
    ids = await add(url, stream, f"{stream}:stays")
    assert told(await stays) == {f"{stream}:stays": [ids[1]]}
    assert len(proxy.forwarded) - before <= 2
    assert told(await link.read({stream: START}, 1, LONG)) == {stream: [ids[0]]}


async def test_readers_that_have_left_are_forgotten(link: Connections, stream: str) -> None:
    """Of an idle stream, too: else all would be kept who ever waited for it, and it would be read for nobody."""
    assert not await link.read({stream: START}, 10, 0.01)
    leaving = reading(link, stream)
    await asyncio.sleep(0)
    leaving.cancel()
    await ended([leaving])
    assert link._shared._here is not None
    assert [group._callers for groups in link._shared._here._groups.values() for group in groups] == [{}]


async def test_a_question_whose_asker_has_left_is_forgotten(
    proxy: Proxy, stream: str, caplog: pytest.LogCaptureFixture
) -> None:
    link = Connections(Address.of(proxy.url))
    hold = proxy.hold(b"PING")
    leaves = reading(link, stream, seconds=0.01)
    async with asyncio.timeout(LONG):
        await hold.caught.wait()
        leaves.cancel()
        await ended([leaves])
        [asking] = [task for task in asyncio.all_tasks() if task.get_name() == "conquiet-ping"]
        await proxy.disconnect()
        await asyncio.wait([asking])
        await link.aclose()
    del link, leaves, asking
    gc.collect()
    assert not caplog.records


async def test_reads_after_all_tasks_were_cancelled(url: str, link: Connections, stream: str) -> None:
    waiting = [reading(link, name) for name in names(stream, 3)]
    await blocked(url)
    for task in asyncio.all_tasks() - {asyncio.current_task()}:
        if task.get_name().startswith("conquiet-shared-read"):
            task.cancel()
    assert [type(outcome) for outcome in await ended(waiting)] == [QueueError] * 3
    [id] = await add(url, stream)
    assert told(await link.read({stream: START}, 1, LONG)) == {stream: [id]}


async def test_closing_ends_every_read_with_an_error(url: str, proxy: Proxy, stream: str) -> None:
    link = Connections(Address.of(proxy.url))
    waiting = [reading(link, name) for name in names(stream, 3)]
    await blocked(url)
    async with asyncio.timeout(2):
        await link.aclose()
    assert [type(outcome) for outcome in await ended(waiting)] == [QueueError] * 3
    await eventually(lambda: proxy.open_connections == 0, "no connection is left")
    with pytest.raises(QueueError, match="closed"):
        await link.read({stream: START}, 1, 1)


async def test_one_object_reads_on_one_loop_at_a_time(url: str, link: Connections, stream: str) -> None:
    async def read() -> None:
        await link.read({stream: START}, 1, 0.05)

    here = reading(link, stream)
    await blocked(url)
    with pytest.raises(ConfigError, match="another event loop"):
        await asyncio.to_thread(asyncio.run, read())
    [id] = await add(url, stream)
    assert told(await here) == {stream: [id]}
