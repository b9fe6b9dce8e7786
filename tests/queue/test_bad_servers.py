"""Servers that are down, die, or refuse: a ``QueueError`` with the cause, at once, and nothing half done."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import (
    AuthenticationError,
    BusyLoadingError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisError,
    ResponseError,
)

from conquiet import EmbeddedRedis, QueueConfig, QueueConsumer, QueueError, QueueMessage, RedisStreamsQueue
from conquiet.wire.embedded import find_servers
from tests.conftest import Rung
from tests.contracts.looking import Look
from tests.rigs.servers import on_a_port
from tests.rigs.waiting import eventually

Calls = dict[str, Callable[[], Awaitable[object]]]


def calls(queue: RedisStreamsQueue, message: QueueMessage) -> Calls:
    return {
        "enqueue": lambda: queue.enqueue({"n": 2}),
        "enqueue_many": lambda: queue.enqueue_many([{"n": 2}, {"n": 3}]),
        "read": lambda: queue.read(block_ms=60_000),
        "ack": lambda: queue.ack(message),
        "claim_stale": lambda: queue.claim_stale(min_idle_ms=0),
        "backlog_stats": lambda: queue.backlog_stats(),
        "next": lambda: QueueConsumer(queue).next(block_ms=60_000),
    }


async def refused(operations: Calls, cause: type[BaseException] | tuple[type[BaseException], ...]) -> None:
    """Each of the operations ends soon, as a ``QueueError`` of that cause."""
    for name, operation in operations.items():
        with pytest.raises(QueueError) as caught:
            await asyncio.wait_for(operation(), 20)
        assert isinstance(caught.value.__cause__, cause), (name, caught.value.__cause__)


def only(operations: Calls, *names: str) -> Calls:
    return {name: operations[name] for name in names}


@asynccontextmanager
async def in_use(url: str, config: QueueConfig) -> AsyncIterator[tuple[RedisStreamsQueue, QueueMessage, Look]]:
    """A queue with one message pending and one not delivered."""
    look = Look(url, config)
    try:
        async with RedisStreamsQueue.connect(url, config) as queue:
            await queue.enqueue_many([{"n": 0}, {"n": 1}])
            [message] = await queue.read(block_ms=1_000)
            yield queue, message, look
    finally:
        await look.aclose()


async def unchanged(look: Look, message: QueueMessage) -> None:
    """The stream has the two entries of ``in_use``, one of them pending as it was."""
    assert await look.length() == 2
    assert [(row.id, row.consumer, row.deliveries) for row in await look.pending()] == [(message.id, "consumer-1", 1)]


def closed_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


async def test_a_server_that_is_down_at_connect(config: QueueConfig) -> None:
    queue = RedisStreamsQueue.connect(f"redis://127.0.0.1:{closed_port()}", config)
    message = QueueMessage(config.stream_key, config.consumer_group, "1-1", (b"data", b"{}"))
    await refused(calls(queue, message), (RedisError, OSError))
    await refused({"open": queue.open}, (RedisError, OSError))
    await queue.aclose()


async def test_a_server_that_is_down_names_itself_in_the_error(config: QueueConfig) -> None:
    port = closed_port()
    queue = RedisStreamsQueue.connect(f"redis://user:secret@127.0.0.1:{port}", config)
    with pytest.raises(QueueError) as caught:
        await queue.enqueue({"n": 1})
    assert f"127.0.0.1:{port}" in str(caught.value)
    assert config.stream_key in str(caught.value)
    assert "secret" not in f"{caught.value} {caught.value.__cause__}"
    await queue.aclose()


@pytest.mark.parametrize("reading", ["read", "next", "iter_messages"])
async def test_a_server_that_dies_in_the_middle_of_a_blocked_read(
    reading: str, mortal: EmbeddedRedis, config: QueueConfig
) -> None:
    async with RedisStreamsQueue.connect(mortal.url, config) as queue:
        consumer = QueueConsumer(queue)
        waits: Calls = {
            "read": lambda: queue.read(block_ms=60_000),
            "next": lambda: consumer.next(block_ms=60_000),
            "iter_messages": lambda: anext(consumer.iter_messages()),
        }
        waiting = asyncio.ensure_future(waits[reading]())
        look = Look(mortal.url, config)
        await look.blocked()
        await look.aclose()
        os.kill(mortal.pid, signal.SIGKILL)
        await refused({reading: lambda: waiting}, (RedisError, OSError))


async def test_a_server_that_closes_idle_connections_costs_nothing(mortal: EmbeddedRedis, config: QueueConfig) -> None:
    """A connection found closed before anything was sent on it is opened anew: that is no retry."""
    async with in_use(mortal.url, config) as (queue, message, look):
        await look.redis.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")

        async def gone() -> bool:
            return len(await look.clients()) == 1

        await eventually(gone, "the connections are closed")
        await queue.ack(message)
        [other] = await queue.read(block_ms=1_000)
        assert other.payload == {"n": 1}


async def test_a_replica(mortal: EmbeddedRedis, config: QueueConfig) -> None:
    async with in_use(mortal.url, config) as (queue, message, look):
        await look.redis.replicaof("127.0.0.1", closed_port())
        writing = only(calls(queue, message), "enqueue", "enqueue_many", "read", "ack", "claim_stale", "next")
        await refused(writing, ReadOnlyError)
        await unchanged(look, message)
        fresh = RedisStreamsQueue.connect(mortal.url, config)
        await refused({"open": fresh.open}, ReadOnlyError)
        await fresh.aclose()
        await look.redis.replicaof("NO", "ONE")
        await queue.ack(message)
        assert await look.pending() == []


async def test_a_server_that_wants_a_password(rung: Rung, config: QueueConfig) -> None:
    async with (
        on_a_port(rung.binary, settings={"requirepass": "secret"}) as server,
        in_use(server.url, config) as (_, message, look),
    ):
        port = urlsplit(server.url).port
        for login in ("", ":wrong@"):
            queue = RedisStreamsQueue.connect(f"redis://{login}127.0.0.1:{port}", config)
            await refused(calls(queue, message), (AuthenticationError, ResponseError))
            await queue.aclose()
        await unchanged(look, message)


async def test_a_key_of_another_type(url: str, config: QueueConfig) -> None:
    async with in_use(url, config) as (queue, message, look):
        await look.redis.rename(look.stream, f"{look.stream}:aside")
        await look.redis.set(look.stream, "a string")
        await refused(calls(queue, message), ResponseError)
        assert await look.redis.get(look.stream) == b"a string"
        await look.redis.rename(f"{look.stream}:aside", look.stream)
        await unchanged(look, message)


async def test_a_server_without_memory(mortal: EmbeddedRedis, config: QueueConfig) -> None:
    async with in_use(mortal.url, config) as (queue, message, look):
        await look.redis.config_set("maxmemory", 1)
        await refused(only(calls(queue, message), "enqueue", "enqueue_many"), OutOfMemoryError)
        with pytest.raises(QueueError) as caught:
            await queue.enqueue_many([{"n": 2}, {"n": 3}])
        assert caught.value.entry_ids == (None, None)
        await unchanged(look, message)
        # What makes room, or needs none, still works.
        await queue.ack(message)
        await look.redis.config_set("maxmemory", 0)
        await queue.enqueue({"n": 2})
        assert await look.length() == 3


async def test_a_server_without_room_for_a_client(mortal: EmbeddedRedis, config: QueueConfig) -> None:
    async with in_use(mortal.url, config) as (_, message, look):
        await look.redis.config_set("maxclients", 1)
        queue = RedisStreamsQueue.connect(mortal.url, config)
        await refused(calls(queue, message), (RedisError, OSError))
        await queue.aclose()
        await unchanged(look, message)


async def test_a_server_that_is_still_loading(rung: Rung, config: QueueConfig, tmp_path: Path) -> None:
    message = QueueMessage(config.stream_key, config.consumer_group, "1-1", (b"data", b"{}"))
    async with slowly_loading(rung.binary or find_servers()[0], tmp_path) as url:
        queue = RedisStreamsQueue.connect(url, config)
        await refused(calls(queue, message), BusyLoadingError)
        await refused({"open": queue.open}, BusyLoadingError)
        await queue.aclose()


@asynccontextmanager
async def slowly_loading(binary: str, directory: Path) -> AsyncIterator[str]:
    """A server that takes many seconds to read its data, and answers LOADING meanwhile."""
    (directory / "appendonly.aof").write_bytes(b"*3\r\n$3\r\nSET\r\n$1\r\nk\r\n$1\r\nv\r\n" * 500_000)
    port = closed_port()
    options: dict[str, Any] = {
        "dir": directory,
        "port": port,
        "bind": "127.0.0.1",
        "save": "",
        "appendonly": "yes",
        "logfile": directory / "loading.log",
        "key-load-delay": -3,  # a directive for tests: pause at every third command
    }
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    with subprocess.Popen([binary, *words], env={**os.environ, "LC_ALL": "C"}) as process:
        try:
            await eventually(lambda: _loads(f"redis://127.0.0.1:{port}"), "the server says LOADING")
            yield f"redis://127.0.0.1:{port}"
        finally:
            process.kill()


async def _loads(url: str) -> bool:
    async with Redis.from_url(url, protocol=2, retry=Retry(NoBackoff(), 0)) as client:
        try:
            await client.execute_command("GET", "anything")  # type: ignore[no-untyped-call]
        except BusyLoadingError:
            return True
        except RedisError:
            return False
    return False
