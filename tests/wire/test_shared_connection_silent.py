"""A shared connection to a server that goes silent or away, and comes back."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path

import pytest

from conquiet import QueueConfig, QueueError, RedisStreamsQueue
from tests.conftest import Rung
from tests.rigs.asking import ask, blocked, entries, pending
from tests.rigs.proxy import Proxy
from tests.rigs.servers import on_a_port
from tests.rigs.waiting import eventually

FOREVER = 30_000


@pytest.fixture
async def proxy(url: str) -> AsyncIterator[Proxy]:
    async with Proxy(url) as proxy:
        yield proxy


@pytest.fixture
async def queue(proxy: Proxy, config: QueueConfig) -> AsyncIterator[RedisStreamsQueue]:
    async with RedisStreamsQueue.connect(proxy.url, config) as queue:
        yield queue


@pytest.mark.slow
async def test_a_server_that_goes_silent_is_given_up(url: str, proxy: Proxy, config: QueueConfig) -> None:
    async with RedisStreamsQueue.connect(f"{proxy.url}?socket_timeout=1", config) as queue:
        hold = proxy.hold(b'{"n":1}')
        calls = [queue.enqueue({"n": number}) for number in range(1, 4)]
        first, *others = await asyncio.gather(*calls, return_exceptions=True)
        assert isinstance(first, QueueError)
        assert isinstance(first.__cause__, TimeoutError)
        assert "1 s" in str(first)
        # Those behind it went out on a new connection, and got their own answers.
        written = await entries(url, config.stream_key)
        assert [written[str(id)] for id in others] == [{"n": 2}, {"n": 3}]
        hold.release()
        fourth = await queue.enqueue({"n": 4})
        assert (await entries(url, config.stream_key))[fourth] == {"n": 4}
        assert proxy.count(b'{"n":1}') == 1


@pytest.mark.slow
async def test_a_server_that_goes_silent_while_connecting_is_given_up(proxy: Proxy, config: QueueConfig) -> None:
    hold = proxy.hold(b"SELECT")
    async with aclosing(RedisStreamsQueue.connect(f"{proxy.url}/3?socket_timeout=1", config)) as queue:
        with pytest.raises(QueueError) as caught:
            await queue.enqueue({"n": 1})
        assert isinstance(caught.value.__cause__, TimeoutError)
        hold.release()
        assert await queue.enqueue({"n": 1})


@pytest.mark.slow
async def test_a_read_may_block_for_longer_than_an_answer_may_take(proxy: Proxy, config: QueueConfig) -> None:
    async with RedisStreamsQueue.connect(f"{proxy.url}?socket_timeout=1", config) as queue:
        assert await queue.read(block_ms=1200) == []
        entry_id = await queue.enqueue({"n": 1})
        assert [message.id for message in await queue.read(FOREVER)] == [entry_id]
        assert proxy.accepted == 2  # one for what answers at once, one for reads


@pytest.mark.any_server
async def test_a_call_that_is_overdue_and_cancelled_at_once_is_cancelled(proxy: Proxy, config: QueueConfig) -> None:
    loop = asyncio.get_running_loop()
    async with RedisStreamsQueue.connect(f"{proxy.url}?socket_timeout=0.5", config) as queue:
        proxy.hold(b"XADD")
        writing = asyncio.create_task(queue.enqueue({"n": 1}))
        await eventually(lambda: proxy.count(b"XADD") == 1, "the command is on its way")
        # Both timers go off in the same turn of a loop that was kept from turning, first the lane's, then ours.
        loop.call_later(0.5, writing.cancel)
        time.sleep(0.6)  # noqa: ASYNC251 - which is what keeps it
        with pytest.raises(asyncio.CancelledError):
            await writing


async def test_a_blocked_read_of_a_silent_server_is_given_up(
    proxy: Proxy, queue: RedisStreamsQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("conquiet.wire.blocking_connection._WATCHDOG", 0.2)
    hold = proxy.hold(b"XREADGROUP")
    with pytest.raises(QueueError) as caught:
        await queue.read(block_ms=50)
    assert isinstance(caught.value.__cause__, TimeoutError)
    hold.release()
    monkeypatch.undo()
    entry_id = await queue.enqueue({"n": 1})
    assert [message.id for message in await queue.read(FOREVER)] == [entry_id]


async def test_a_connection_that_the_server_closed_while_idle_is_replaced(url: str, config: QueueConfig) -> None:
    async with RedisStreamsQueue.connect(url, config) as queue:
        for number in range(3):
            entry_id = await queue.enqueue({"n": number})
            [message] = await queue.read(FOREVER)
            assert message.id == entry_id
            assert await ask(url, "CLIENT", "KILL", "TYPE", "normal") >= 2
            await queue.ack(message)
        assert (await queue.backlog_stats()).pending == 0


async def test_a_connection_that_was_reset_while_idle_is_replaced(
    url: str, proxy: Proxy, queue: RedisStreamsQueue
) -> None:
    first = await queue.enqueue({"n": 1})
    await queue.read(FOREVER)
    await proxy.disconnect()
    await ask(url, "PING")  # the news of the reset has arrived before the answer to this
    second = await queue.enqueue({"n": 2})
    assert [message.id for message in await queue.read(FOREVER)] == [second]
    assert [message.id for message in await queue.claim_stale(0)] == [first, second]
    assert proxy.accepted == 4


async def test_a_blocked_read_whose_connection_is_killed_is_told(url: str, config: QueueConfig) -> None:
    async with RedisStreamsQueue.connect(url, config) as queue:
        reading = asyncio.create_task(queue.read(FOREVER))
        await blocked(url)
        await ask(url, "CLIENT", "KILL", "TYPE", "normal")
        with pytest.raises(QueueError):
            await reading
        entry_id = await queue.enqueue({"n": 1})
        assert [message.id for message in await queue.read(FOREVER)] == [entry_id]


async def test_a_server_that_is_away_for_a_while(rung: Rung, config: QueueConfig, tmp_path: Path) -> None:
    if not rung.binary:
        pytest.skip("needs a server's binary")
    server = on_a_port(rung.binary, directory=tmp_path, appendonly=True)
    # The proxy keeps its address while the server changes its port.
    async with Proxy() as proxy, aclosing(RedisStreamsQueue.connect(proxy.url, config)) as queue:
        async with server:
            proxy.lead_to(server.url)
            first = await queue.enqueue({"n": 1})
            await queue.read(FOREVER)
        with pytest.raises(QueueError):
            await queue.enqueue({"n": "nobody is there"})
        async with server:
            proxy.lead_to(server.url)
            second = await queue.enqueue({"n": 2})
            assert await entries(server.url, config.stream_key) == {first: {"n": 1}, second: {"n": 2}}
            assert [message.id for message in await queue.read(FOREVER)] == [second]
            assert await pending(server.url, config.stream_key, config.consumer_group) == [first, second]


async def test_a_server_that_restarts_between_two_calls(rung: Rung, config: QueueConfig, tmp_path: Path) -> None:
    if not rung.binary:
        pytest.skip("needs a server's binary")
    async with on_a_port(rung.binary, directory=tmp_path, appendonly=True) as server:
        port = int(server.url.rpartition(":")[2])
        queue = RedisStreamsQueue.connect(server.url, config)
        first = await queue.enqueue({"n": 1})
        await queue.read(FOREVER)
    async with on_a_port(rung.binary, directory=tmp_path, appendonly=True, port=port) as server:
        second = await queue.enqueue({"n": 2})
        assert await entries(server.url, config.stream_key) == {first: {"n": 1}, second: {"n": 2}}
        assert [message.id for message in await queue.read(FOREVER)] == [second]
        await queue.aclose()
