"""Many streams that are read at the same time: over how many connections, with how many commands, and what is told."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import random
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import suppress
from typing import Any

import anyio
import pytest

from conquiet import ConfigError, QueueError
from conquiet.wire.address import Address
from conquiet.wire.connections import Connections
from conquiet.wire.embedded import EmbeddedRedis
from conquiet.wire.interrupt import Interrupt
from tests.conftest import Rung
from tests.rigs.asking import ask, blocked
from tests.rigs.cluster import LocalCluster, Node
from tests.rigs.freezing import elapse, freeze, own_server, thaw
from tests.rigs.proxy import Proxy
from tests.rigs.waiting import LONG, eventually, held

pytestmark = [pytest.mark.any_server, pytest.mark.slow]

MANY = 300
PROBE = b"UNBLOCK\r\n$1\r\n0\r\n"
"""Asks a node, once, whether reads can be woken."""
START = "0-0"
BUDGET = 20
"""How many commands an idle reader may send in a second."""


@pytest.fixture
async def proxy(url: str) -> AsyncIterator[Proxy]:
    async with Proxy(url) as proxy:
        yield proxy


@pytest.fixture
async def link(proxy: Proxy) -> AsyncIterator[Connections]:
    link = Connections(Address.of(proxy.url))
    yield link
    await link.aclose()


@pytest.fixture
async def mortal() -> AsyncIterator[EmbeddedRedis]:
    async with own_server() as server:
        yield server


def reading(
    link: Connections, stream: str, *, seconds: float = LONG, count: int = 10, after: str = START
) -> asyncio.Task[Any]:
    return asyncio.create_task(link.read({stream: after}, count, seconds))


def told(reply: Any) -> dict[str, list[str]]:
    """The IDs by stream."""
    return {stream.decode(): [id.decode() for id, _ in entries] for stream, entries in reply or ()}


async def add(url: str, *streams: str) -> list[str]:
    return [await ask(url, "XADD", stream, "*", "n", 1) for stream in streams]


async def ended(tasks: Sequence[asyncio.Task[Any]]) -> list[Any]:
    async with asyncio.timeout(LONG):
        return list(await asyncio.gather(*tasks, return_exceptions=True))


def names(stream: str, count: int) -> list[str]:
    return [f"{stream}:{number}" for number in range(count)]


@pytest.fixture
def stream(config: Any) -> str:
    return str(config.stream_key)


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
    readings = []
    for name in streams:
        readings.append(reading(link, name))
        await asyncio.sleep(0.001)
    await eventually(lambda: all(name.encode() in proxy.forwarded[-1] for name in streams), "all are waited for")
    assert proxy.accepted == 2  # the second carries what is asked at once
    begun = sum(b"BLOCK\r\n" in command for command in proxy.forwarded)
    woken = proxy.count(b"UNBLOCK")
    assert begun <= 40
    assert woken <= 80
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
            await asyncio.sleep(chance.choice((0, 0, 0.01)))

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


# --- trouble ----------------------------------------------------------------------------------------------------------


async def test_a_key_of_another_kind_fails_its_own_reader_alone(
    url: str, proxy: Proxy, link: Connections, stream: str
) -> None:
    await ask(url, "SET", f"{stream}:text", "no stream")
    good = [reading(link, name) for name in names(stream, 20)]
    await blocked(url)
    for _ in range(3):
        with pytest.raises(QueueError, match=f"{stream}:text.*WRONGTYPE"):
            await link.read({f"{stream}:text": START}, 1, LONG)
    together = [reading(link, f"{stream}:text"), reading(link, f"{stream}:more")]
    with pytest.raises(QueueError, match=f"{stream}:text.*WRONGTYPE"):
        await together[0]
    ids = await add(url, *names(stream, 20), f"{stream}:more")
    assert [list(told(reply).values()) for reply in await ended([*good, together[1]])] == [[[id]] for id in ids]
    assert proxy.accepted == 2


async def test_a_bad_key_among_those_who_begin(url: str, proxy: Proxy, link: Connections, stream: str) -> None:
    await ask(url, "SET", f"{stream}:text", "no stream")
    bad, good = reading(link, f"{stream}:text"), reading(link, stream)
    with pytest.raises(QueueError, match=f"{stream}:text.*WRONGTYPE"):
        await bad
    await blocked(url)
    [id] = await add(url, stream)
    assert told(await good) == {stream: [id]}
    assert proxy.count(b"XREAD") <= 5


async def test_a_user_who_may_not_read_is_told_so(url: str, stream: str) -> None:
    await ask(url, "ACL", "SETUSER", "deaf", "reset", "on", ">secret", "~*", "+@all", "-xread")
    link = Connections(Address.of(url.replace("//", "//deaf:secret@")))
    waiting = [reading(link, name) for name in names(stream, 10)]
    assert [type(outcome) for outcome in await ended(waiting)] == [QueueError] * 10
    assert all("xread" in str(task.exception()).lower() for task in waiting)
    assert [str(task.exception()).split("'")[1] for task in waiting] == names(stream, 10)
    await link.aclose()


async def test_a_user_who_may_not_wake_reads_all_the_same(
    url: str, proxy: Proxy, stream: str, caplog: pytest.LogCaptureFixture
) -> None:
    await ask(url, "ACL", "SETUSER", "still", "reset", "on", ">secret", "~*", "+@all", "-client")
    link = Connections(Address.of(proxy.url.replace("//", "//still:secret@")))
    caplog.set_level(logging.INFO)
    first = reading(link, f"{stream}:first")
    await blocked(url)
    for number, name in enumerate(names(stream, 3)):
        waiting = reading(link, name)
        await eventually(lambda name=name: name.encode() in proxy.forwarded[-1], "it is waited for")  # type: ignore[misc]
        [id] = await add(url, name)
        async with asyncio.timeout(LONG / 4):
            assert told(await waiting) == {name: [id]}
        assert proxy.accepted <= 3 + number
    assert not caplog.records
    [id] = await add(url, f"{stream}:first")
    assert told(await first) == {f"{stream}:first": [id]}
    await link.aclose()


async def test_a_frozen_server_is_told_to_all(mortal: EmbeddedRedis, stream: str) -> None:
    link = Connections(Address.of(f"{mortal.url}?socket_timeout=0.5"))
    loop = asyncio.get_running_loop()
    waiting = [reading(link, name, seconds=LONG) for name in names(stream, 3)]
    await blocked(mortal.url)
    await freeze(mortal.pid)
    began = loop.time()
    try:
        # The server may have answered just before it froze.
        await ended([reading(link, name, seconds=0.5) for name in names(stream, 3)])
        outcomes = await ended([reading(link, name, seconds=0.5) for name in names(stream, 3)])
        assert [type(outcome) for outcome in outcomes] == [QueueError] * 3
        assert loop.time() - began < 5
        with pytest.raises(QueueError):
            await link.read({f"{stream}:late": START}, 1, 1)
        assert [type(outcome) for outcome in await ended(waiting)] == [QueueError] * 3
        assert loop.time() - began < 12
    finally:
        thaw(mortal.pid)
    await link.aclose()


async def test_a_server_that_goes_away_is_told_to_all(mortal: EmbeddedRedis, stream: str) -> None:
    link = Connections(Address.of(mortal.url))
    waiting = [reading(link, name) for name in names(stream, 5)]
    await blocked(mortal.url)
    os.kill(mortal.pid, signal.SIGKILL)
    assert [type(outcome) for outcome in await ended(waiting)] == [QueueError] * 5
    assert [str(task.exception()).split("'")[1] for task in waiting] == names(stream, 5)
    again = [reading(link, name) for name in names(stream, 5)]
    assert [type(outcome) for outcome in await ended(again)] == [QueueError] * 5
    await link.aclose()


async def test_a_server_without_room_for_the_waiting_connection(mortal: EmbeddedRedis, stream: str) -> None:
    link = Connections(Address.of(mortal.url))
    assert await link.read({stream: START}, 1, 0.01) is None  # both connections were made, and one is given up
    await link.aclose()
    link = Connections(Address.of(mortal.url))
    await link.call(stream, b"*1\r\n$4\r\nPING\r\n")
    await ask(mortal.url, "CONFIG", "SET", "maxclients", 1)
    waiting = [reading(link, name) for name in names(stream, 5)]
    outcomes = await ended(waiting)
    assert [type(outcome) for outcome in outcomes] == [QueueError] * 5
    await link.aclose()


async def test_a_silent_waiting_connection_is_given_up(url: str, proxy: Proxy, stream: str) -> None:
    link = Connections(Address.of(f"{proxy.url}?socket_timeout=0.3"))
    waiting = [reading(link, name, seconds=60) for name in names(stream, 3)]
    await blocked(url)
    proxy.silence()
    loop = asyncio.get_running_loop()
    began = loop.time()
    assert [type(outcome) for outcome in await ended(waiting)] == [QueueError] * 3
    assert loop.time() - began < 12
    [id] = await add(url, stream)
    assert told(await link.read({stream: START}, 1, LONG)) == {stream: [id]}
    await link.aclose()


# --- in a Cluster -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cluster(rung: Rung) -> Iterator[LocalCluster]:
    if not rung.binary:
        pytest.skip("needs a server's binary")
    with held(LocalCluster(rung.binary)) as cluster:
        yield cluster


async def reads(cluster: LocalCluster) -> int:
    """How many XREADs all nodes together have had."""
    about = [await ask(node.url, "INFO", "commandstats") for node in cluster.nodes]
    return sum(stats.get("cmdstat_xread", {}).get("calls", 0) for stats in about)


async def waiting_at(node: Node) -> int:
    return int((await ask(node.url, "INFO", "clients"))["blocked_clients"])


@pytest.mark.parametrize("each", [4, 30])
async def test_a_cluster_has_few_waiting_connections_a_node(cluster: LocalCluster, stream: str, each: int) -> None:
    streams: dict[Node, list[str]] = {node: [] for node in cluster.nodes}
    for name in names(stream, each * 6):
        mine = streams[await cluster.owner_of(name)]
        if len(mine) < each:
            mine.append(name)
    everything = [name for mine in streams.values() for name in mine]
    assert len(everything) == 3 * each
    link = Connections(Address.of(cluster.url))
    readings = {name: reading(link, name) for name in everything}
    most = min(each, 8)
    for node in cluster.nodes:
        await blocked(node.url, most)
    loop = asyncio.get_running_loop()
    began, before, worst = loop.time(), await reads(cluster), 0
    while loop.time() < began + 4:
        worst = max(worst, *[await waiting_at(node) for node in cluster.nodes])
    rate = (await reads(cluster) - before) / (loop.time() - began)
    assert worst <= 8
    assert rate <= (3 * BUDGET if each > 8 else 3) * 1.1
    ids = {name: (await add(cluster.url, name))[0] for name in everything}
    outcomes = await ended(list(readings.values()))
    assert [told(reply) for reply in outcomes] == [{name: [ids[name]]} for name in everything]
    await link.aclose()


async def test_a_newcomer_has_its_turn_soon(cluster: LocalCluster, stream: str) -> None:
    node = cluster.nodes[0]
    streams = [name for name in names(stream, 60) if await cluster.owner_of(name) == node][:12]
    link = Connections(Address.of(cluster.url))
    readings = [reading(link, name) for name in streams[:8]]
    await blocked(node.url, 8)
    before = await reads(cluster)
    readings += [reading(link, name) for name in streams[8:]]

    async def are_read() -> bool:
        return await reads(cluster) >= before + 8  # each looks at first, and then has a turn

    await eventually(are_read, "each newcomer has had its turn", seconds=3)
    for name in streams:
        await add(cluster.url, name)
    assert [len(told(reply)) for reply in await ended(readings)] == [1] * 12
    await link.aclose()


async def test_streams_of_one_slot_are_read_together_while_it_moves(cluster: LocalCluster, stream: str) -> None:
    streams = names(f"{{{stream}}}", 20)
    await add(cluster.url, streams[0])  # something that moves
    link = Connections(Address.of(cluster.url))
    readings = [reading(link, name, seconds=60) for name in streams[1:]]
    source = await cluster.owner_of(streams[0])
    await blocked(source.url)
    migration = await cluster.migration_of(streams[0])
    await migration.announce()
    late = reading(link, f"{{{stream}}}:late", seconds=60)
    await migration.move()
    await migration.finish()
    ids = await add(cluster.url, *streams[1:], f"{{{stream}}}:late")
    assert [list(told(reply).values()) for reply in await ended([*readings, late])] == [[[id]] for id in ids]
    await link.aclose()
