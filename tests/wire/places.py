"""The ways to a server that there are, and all that a queue does there."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import pytest
import trustme
from redis.asyncio import Redis, RedisCluster, Sentinel
from redis.asyncio.sentinel import SentinelConnectionPool

from conquiet import EmbeddedRedis, QueueConfig, QueueConsumer, RedisStreamsQueue
from conquiet.wire.address import AddressLike
from tests.conftest import Rung, Server
from tests.rigs.asking import ask
from tests.rigs.cluster import LocalCluster
from tests.rigs.proxy import Proxy
from tests.rigs.sentinel import SERVICE, LocalSentinels
from tests.rigs.servers import on_a_port
from tests.rigs.waiting import held

__all__ = [
    "FOREVER",
    "GUARD",
    "PASSWORD",
    "Place",
    "a_stop_ends_a_blocked_read",
    "acl",
    "authority",
    "authority_file",
    "binary",
    "by_url",
    "client_of",
    "cluster",
    "clustered",
    "database_3",
    "everything_works",
    "locked",
    "locked_server",
    "no_client",
    "nobody_listens",
    "place",
    "plain",
    "sentinel",
    "sentinel_url",
    "sentinels",
    "tls",
    "tls_proxy",
    "unix",
    "unix_server",
]

PASSWORD: Final = "s3cr3t"
GUARD: Final = "gu4rd"
FOREVER: Final = 30_000
"""Milliseconds that no read of a test is meant to wait."""


@dataclass(frozen=True)
class Place:
    """A server and how to reach it: by a URL, and by a client that is made with further settings."""

    url: str
    client: Callable[..., Redis | RedisCluster]


@asynccontextmanager
async def client_of(place: Place, **settings: Any) -> AsyncIterator[Redis | RedisCluster]:
    async with place.client(**settings) as client:
        yield client
        if isinstance(client, Redis) and isinstance(client.connection_pool, SentinelConnectionPool):
            for sentinel in client.connection_pool.sentinel_manager.sentinels:
                await sentinel.aclose()


async def everything_works(source: AddressLike, config: QueueConfig) -> None:
    """One life of a queue; each answer is checked."""
    async with RedisStreamsQueue(source, config) as queue:
        first = await queue.enqueue({"n": 0, "text": "grüße"})
        rest = await queue.enqueue_many([{"n": 1}, {"n": 2}, {"n": 3}])
        messages = await queue.read(block_ms=FOREVER, count=3)
        assert [message.id for message in messages] == [first, *rest[:2]]
        assert [message.payload["n"] for message in messages] == [0, 1, 2]
        assert messages[0].payload["text"] == "grüße"
        await queue.ack(messages[0], messages[1])
        stats = await queue.backlog_stats()
        assert (stats.length, stats.pending, stats.oldest_pending_id) == (4, 1, messages[2].id)
        assert stats.pending_by_consumer == {config.consumer_name: 1}
        async with RedisStreamsQueue(source, replace(config, consumer_name="other")) as other:
            [claimed] = await other.claim_stale(min_idle_ms=0)
            assert (claimed.id, claimed.payload, claimed.delivery_count) == (rest[1], {"n": 2}, 2)
            await other.ack(claimed)
        [last] = await queue.read(block_ms=FOREVER)
        await queue.ack(last)
        assert await queue.read(block_ms=1) == []
        assert (await queue.backlog_stats()).pending == 0


async def a_stop_ends_a_blocked_read(source: AddressLike, config: QueueConfig, is_blocked: Callable[[], Any]) -> None:
    async with RedisStreamsQueue(source, config) as queue:
        consumer = QueueConsumer(queue, handle_signals=False)
        reading = asyncio.create_task(consumer.next(block_ms=FOREVER))
        await is_blocked()
        consumer.stop()
        assert await reading is None


@pytest.fixture(scope="module")
def binary(rung: Rung) -> str:
    if not rung.binary:
        pytest.skip("needs a server's binary")
    return rung.binary


@pytest.fixture(scope="module")
def cluster(binary: str) -> Iterator[LocalCluster]:
    with held(LocalCluster(binary)) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def sentinels(binary: str) -> Iterator[LocalSentinels]:
    with held(LocalSentinels(binary, password=PASSWORD, sentinel_password=GUARD)) as sentinels:
        yield sentinels


@pytest.fixture(scope="module")
def unix_server(binary: str) -> Iterator[EmbeddedRedis]:
    with held(EmbeddedRedis(binary=binary, unix_socket=True)) as server:
        yield server


@pytest.fixture(scope="module")
def locked_server(binary: str) -> Iterator[EmbeddedRedis]:
    with held(on_a_port(binary, settings={"requirepass": PASSWORD})) as server:
        yield server


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture(scope="module")
def authority_file(authority: trustme.CA, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tls") / "authority.pem"
    authority.cert_pem.write_to_path(str(path))
    return path


@pytest.fixture
async def tls_proxy(server: Server, authority: trustme.CA) -> AsyncIterator[Proxy]:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert("127.0.0.1", "localhost").configure_cert(context)
    async with Proxy(server.url, secure=context) as proxy:
        yield proxy


def by_url(url: str) -> Place:
    return Place(url, lambda **settings: Redis.from_url(url, **settings))


@pytest.fixture
def plain(url: str) -> Place:
    return by_url(url)


@pytest.fixture
def database_3(url: str) -> Place:
    return by_url(f"{url}/3")


@pytest.fixture
def unix(unix_server: EmbeddedRedis) -> Place:
    return by_url(unix_server.url)


@pytest.fixture
def locked(locked_server: EmbeddedRedis) -> Place:
    return by_url(locked_server.url)


@pytest.fixture
def tls(tls_proxy: Proxy, authority_file: Path) -> Place:
    return by_url(f"{tls_proxy.url}?ssl_ca_certs={authority_file}")


@pytest.fixture
async def acl(url: str) -> Place:
    """A user who may do no more than the queue needs, on the streams of these tests."""
    rules = ("reset", "on", f">{PASSWORD}", "~t:*", "+@stream", "+ping", "+client")
    await ask(url, "ACL", "SETUSER", "app", *rules)
    return by_url(url.replace("//", f"//app:{PASSWORD}@"))


@pytest.fixture
async def no_client(url: str) -> Place:
    """A user for whom CLIENT is forbidden."""
    rules = ("reset", "on", f">{PASSWORD}", "~t:*", "+@stream", "+ping", "-client")
    await ask(url, "ACL", "SETUSER", "mute", *rules)
    return by_url(url.replace("//", f"//mute:{PASSWORD}@"))


@pytest.fixture
def sentinel(sentinels: LocalSentinels) -> Place:
    def client(**settings: Any) -> Redis:
        seeds = Sentinel(sentinels.seeds, sentinel_kwargs={"password": GUARD})  # type: ignore[no-untyped-call]
        return seeds.master_for(SERVICE, password=PASSWORD, **settings)  # type: ignore[no-any-return]

    return Place(sentinel_url(sentinels), client)


def sentinel_url(sentinels: LocalSentinels, *, first: str = "") -> str:
    hosts = first + ",".join(f"{host}:{port}" for host, port in sentinels.seeds)
    return f"redis+sentinel://:{PASSWORD}@{hosts}/{SERVICE}?sentinel_password={GUARD}"


@pytest.fixture
def clustered(cluster: LocalCluster) -> Place:
    host, port = cluster.nodes[1].endpoint
    return Place(cluster.url, lambda **settings: RedisCluster(host, port, **settings))


@pytest.fixture
def place(request: pytest.FixtureRequest, server: Server) -> Place:
    return request.getfixturevalue(request.param)  # type: ignore[no-any-return]


@asynccontextmanager
async def nobody_listens() -> AsyncIterator[str]:
    """``host:port`` of a port that is taken, and refuses connections."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{taken.getsockname()[1]}"
