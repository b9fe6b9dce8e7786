"""Reads that share a connection while something goes wrong: whom it is told, and who goes on."""

from __future__ import annotations

import asyncio
import logging
import os
import signal

import pytest

from conquiet import QueueError
from conquiet.wire.address import Address
from conquiet.wire.connections import Connections
from conquiet.wire.embedded import EmbeddedRedis
from tests.rigs.asking import ask, blocked
from tests.rigs.freezing import freeze, thaw
from tests.rigs.proxy import Proxy
from tests.rigs.waiting import LONG, eventually
from tests.wire.reading import START, add, ended, link, mortal, names, proxy, reading, stream, told

__all__ = ["link", "mortal", "proxy", "stream"]

pytestmark = [pytest.mark.any_server, pytest.mark.slow]


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
