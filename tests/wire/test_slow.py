"""A time-out is for silence: whatever still moves, however slowly, is not given up, and holds up nobody else."""

from __future__ import annotations

import asyncio
import os
import signal
import ssl
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from pathlib import Path

import pytest
import trustme

from conquiet import EmbeddedRedis, QueueConfig, QueueError, RedisStreamsQueue
from conquiet.wire.kernel import KernelView
from tests.conftest import Rung
from tests.rigs.asking import ask, entries, pending
from tests.rigs.proxy import Proxy
from tests.rigs.servers import on_a_port
from tests.rigs.slow import SlowWay
from tests.rigs.waiting import LONG, eventually, turns

pytestmark = [pytest.mark.any_server, pytest.mark.slow]

RATE = 700_000
SILENCE = 0.4
"""Seconds. What is sent below takes twice as long and more, in portions that are a small part of it apart."""


@pytest.fixture
async def way(url: str) -> AsyncIterator[SlowWay]:
    async with SlowWay(url, RATE) as way:
        yield way


@pytest.fixture
async def queue(way: SlowWay, config: QueueConfig, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[RedisStreamsQueue]:
    monkeypatch.setattr("conquiet.wire.blocking_connection._WATCHDOG", SILENCE)
    async with RedisStreamsQueue.connect(f"{way.url}?socket_timeout={SILENCE}", config) as queue:
        yield queue


def payload(size: int) -> dict[str, str]:
    return {"text": "x" * size}


async def test_a_read_of_much_over_a_slow_way_arrives(url: str, queue: RedisStreamsQueue, config: QueueConfig) -> None:
    async with RedisStreamsQueue.connect(url, config) as near:
        ids = await near.enqueue_many([payload(80_000) for _ in range(8)])
    messages = await queue.read(block_ms=50, count=8)
    assert [message.id for message in messages] == ids
    assert {len(message.payload["text"]) for message in messages} == {80_000}


@pytest.mark.parametrize(("calls", "size"), [(16, 40_000), (5, 130_000)])
async def test_calls_at_the_same_time_that_are_more_than_the_way_can_carry_in_time(
    url: str, queue: RedisStreamsQueue, config: QueueConfig, calls: int, size: int
) -> None:
    ids = await asyncio.gather(*(queue.enqueue(payload(size)) for _ in range(calls)))
    assert sorted(ids) == list(await entries(url, config.stream_key))


async def test_a_large_batch_over_a_slow_way_arrives(url: str, queue: RedisStreamsQueue, config: QueueConfig) -> None:
    ids = await queue.enqueue_many([payload(5_000) for _ in range(130)])
    assert ids == list(await entries(url, config.stream_key))


async def test_an_acknowledgment_does_not_wait_for_a_large_write(
    url: str, queue: RedisStreamsQueue, config: QueueConfig
) -> None:
    await queue.enqueue({"n": 1})
    [message] = await queue.read()
    writing = asyncio.create_task(queue.enqueue(payload(650_000)))
    await asyncio.sleep(0)  # so that it is on its way
    await queue.ack(message)
    assert not writing.done()
    assert await pending(url, config.stream_key, config.consumer_group) == []
    await writing


@pytest.mark.parametrize("direction", ["up", "down"])
async def test_silence_in_the_middle_is_given_up(
    url: str, way: SlowWay, queue: RedisStreamsQueue, config: QueueConfig, direction: str
) -> None:
    async with RedisStreamsQueue.connect(url, config) as near:
        await near.enqueue(payload(300_000))
    way.stall(direction, 100_000)
    with pytest.raises(QueueError) as caught:
        await (queue.enqueue(payload(300_000)) if direction == "up" else queue.read(block_ms=50))
    assert isinstance(caught.value.__cause__, TimeoutError)
    assert f"{SILENCE:g} s" in str(caught.value)
    assert await ask(url, "XLEN", config.stream_key) == 1


async def test_what_goes_out_together_has_a_bound(url: str, config: QueueConfig) -> None:
    """So that what is lost with a connection is little, and whoever stands in front hears soon."""
    async with Proxy(url) as proxy, RedisStreamsQueue.connect(proxy.url, config) as queue:
        hold = proxy.hold(b'{"n":0}')
        first = asyncio.create_task(queue.enqueue({"n": 0}))
        await hold.caught.wait()
        others = [asyncio.create_task(queue.enqueue({"n": number, **payload(50_000)})) for number in range(1, 61)]
        await asyncio.sleep(0)  # so that they stand in line
        proxy.cut(b'{"n":1,')
        hold.release()
        await first
        outcomes = await asyncio.gather(*others, return_exceptions=True)
        lost = [outcome for outcome in outcomes if isinstance(outcome, QueueError)]
        assert 0 < len(lost) <= (1 << 20) / 50_000
        assert {outcome for outcome in outcomes if isinstance(outcome, str)} < {*await entries(url, config.stream_key)}


async def test_an_answer_that_came_while_the_loop_stood_still_is_taken(url: str, config: QueueConfig) -> None:
    async with RedisStreamsQueue.connect(f"{url}?socket_timeout=0.1", config) as queue:
        writing = asyncio.create_task(queue.enqueue({"n": 1}))
        await asyncio.sleep(0)  # so that it is on its way
        time.sleep(0.3)  # noqa: ASYNC251 - that is what it is about
        assert list(await entries(url, config.stream_key)) == [await writing]


@asynccontextmanager
async def tls_to(url: str, tmp_path: Path) -> AsyncIterator[Proxy]:
    """A way over TLS, and the authority to be trusted in the file ``authority.pem``."""
    authority, secure = trustme.CA(), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(secure)
    authority.cert_pem.write_to_path(str(tmp_path / "authority.pem"))
    async with Proxy(url, secure=secure) as proxy:
        yield proxy


HUGE = 30_000_000
"""More than the kernel keeps for a server that takes nothing."""


@pytest.fixture
async def server(rung: Rung) -> AsyncIterator[EmbeddedRedis]:
    """One that nobody else needs: it will be frozen."""
    async with on_a_port(rung.binary) as server:
        yield server


@contextmanager
def frozen(server: EmbeddedRedis) -> Iterator[None]:
    os.kill(server.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(server.pid, signal.SIGCONT)


@pytest.fixture(params=["plain", "tls"])
async def stuck(
    request: pytest.FixtureRequest, server: EmbeddedRedis, config: QueueConfig, tmp_path: Path
) -> AsyncIterator[RedisStreamsQueue]:
    """A queue that is patient, and has a connection for large writes."""
    async with AsyncExitStack() as stack:
        to = f"{server.url}?socket_timeout=600"
        if request.param == "tls":
            proxy = await stack.enter_async_context(tls_to(server.url, tmp_path))
            to = f"{proxy.url}?socket_timeout=600&ssl_ca_certs={tmp_path}/authority.pem"
        queue = await stack.enter_async_context(RedisStreamsQueue.connect(to, config))
        await queue.enqueue(payload(100_000))
        yield queue


async def test_what_a_cancelled_write_has_not_sent_is_never_sent(
    server: EmbeddedRedis, stuck: RedisStreamsQueue, config: QueueConfig
) -> None:
    async def connections() -> int:
        return len(str(await ask(server.url, "CLIENT", "LIST")).splitlines())

    before = await connections()
    with frozen(server):
        writing = asyncio.create_task(stuck.enqueue(payload(HUGE)))
        await turns()  # so that it is on its way
        writing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await writing

    async def is_gone() -> bool:
        return await connections() < before

    await eventually(is_gone, "its connection is gone")
    assert await ask(server.url, "XLEN", config.stream_key) == 1


async def test_a_large_write_to_a_frozen_server_ends_with_the_queue(
    server: EmbeddedRedis, stuck: RedisStreamsQueue
) -> None:
    with frozen(server):
        writing = asyncio.create_task(stuck.enqueue(payload(HUGE)))
        await turns()  # so that it is on its way
        async with asyncio.timeout(LONG):
            await stuck.aclose()
            with pytest.raises(QueueError):
                await writing


async def test_what_waits_beneath_tls_has_not_left(server: EmbeddedRedis, tmp_path: Path) -> None:
    """Or a large write over a slow way would seem to stand still while it goes on."""
    async with tls_to(server.url, tmp_path) as proxy:
        trusted = ssl.create_default_context(cafile=str(tmp_path / "authority.pem"))
        _, writer = await asyncio.open_connection("127.0.0.1", proxy.port, ssl=trusted)
        view = KernelView(writer)
        writer.write(bytes(HUGE))
        assert view.unsent() > HUGE / 2  # nobody but the kernel had a turn to take anything
        view.abort()
        with suppress(OSError):
            await writer.wait_closed()
        assert view.unsent() == 0
