"""Everything that a queue does, through every way to a server that there is."""

from __future__ import annotations

from typing import Final

import pytest
from redis.asyncio import BlockingConnectionPool, Redis, RedisCluster

from conquiet import QueueConfig, RedisStreamsQueue
from tests.rigs.asking import ask
from tests.wire.places import (
    FOREVER,
    Place,
    acl,
    authority,
    authority_file,
    binary,
    client_of,
    cluster,
    clustered,
    database_3,
    everything_works,
    locked,
    locked_server,
    no_client,
    place,
    plain,
    sentinel,
    sentinels,
    tls,
    tls_proxy,
    unix,
    unix_server,
)

__all__ = [
    "acl",
    "authority",
    "authority_file",
    "binary",
    "cluster",
    "clustered",
    "database_3",
    "locked",
    "locked_server",
    "no_client",
    "place",
    "plain",
    "sentinel",
    "sentinels",
    "tls",
    "tls_proxy",
    "unix",
    "unix_server",
]

pytestmark = pytest.mark.slow

WAYS: Final = ("plain", "database_3", "unix", "locked", "tls", "acl", "no_client", "sentinel", "clustered")


@pytest.mark.parametrize("place", WAYS, indirect=True)
async def test_by_url(place: Place, config: QueueConfig) -> None:
    await everything_works(place.url, config)


@pytest.mark.parametrize("decode", [False, True], ids=["bytes", "text"])
@pytest.mark.parametrize("protocol", [2, 3], ids=["RESP2", "RESP3"])
@pytest.mark.parametrize("place", WAYS, indirect=True)
async def test_by_a_client(place: Place, config: QueueConfig, protocol: int, decode: bool) -> None:
    async with client_of(place, protocol=protocol, decode_responses=decode) as client:
        await everything_works(client, config)


@pytest.mark.parametrize("place", WAYS, indirect=True)
async def test_by_a_client_that_was_used_before(place: Place, config: QueueConfig) -> None:
    async with client_of(place) as client:
        if isinstance(client, RedisCluster):
            await client.ping(target_nodes=RedisCluster.ALL_NODES)
        else:
            await client.ping()
        await everything_works(client, config)
        assert await client.xlen(config.stream_key) == 4


async def test_by_a_client_with_a_blocking_pool(url: str, config: QueueConfig) -> None:
    pool = BlockingConnectionPool.from_url(url, max_connections=1, timeout=1)
    async with Redis(connection_pool=pool) as client:
        # The pool's only connection: the queue needs none of it.
        held_back = await pool.get_connection()  # type: ignore[no-untyped-call]
        await everything_works(client, config)
        await pool.release(held_back)
    await pool.aclose()


async def test_the_database_of_the_url_is_the_one_that_is_used(url: str, config: QueueConfig) -> None:
    async with RedisStreamsQueue.connect(f"{url}/3", config) as queue:
        await queue.enqueue({"n": 1})
        assert await queue.read(FOREVER)
    assert await ask(f"{url}/3", "XLEN", config.stream_key) == 1
    assert await ask(url, "EXISTS", config.stream_key) == 0
