"""What is used of redis-py that it does not promise: it is there, and where it is not, everything works without."""

from __future__ import annotations

import ast
import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Connection, Redis, RedisCluster, Sentinel

import conquiet
from conquiet import (
    Address,
    Broker,
    ConfigError,
    JobQueue,
    QueueConfig,
    QueueError,
    RedisStore,
    RedisStreamsQueue,
    StreamBalancer,
)
from conquiet.wire import internals
from conquiet.wire.connections import Connections
from conquiet.wire.parser import BulkReplies, PlainReplies
from conquiet.wire.streams import pack, xlen
from tests.rigs.asking import ask
from tests.rigs.proxy import Proxy
from tests.rigs.waiting import LONG, eventually, turns

pytestmark = pytest.mark.any_server

OWNED = [(owner, name) for owner, names in internals.NAMES.items() for name in names]
PING = pack("PING")
OF_CONNECTIONS = [name for owner, name in OWNED if owner in ("connection", "parser", "stream")]


def owner_of(kind: str) -> Any:
    """Something of redis-py that has the names of ``kind``."""
    cluster = RedisCluster("localhost", 1)
    pool = Sentinel([("localhost", 1)]).master_for("service").connection_pool  # type: ignore[no-untyped-call]
    connection = Connection()
    return {
        "connection": connection,
        "parser": connection._parser,
        "stream": asyncio.StreamReader(),
        "cluster": cluster,
        "nodes_manager": cluster.nodes_manager,
        "sentinel_pool": pool,
        "sentinel": pool.sentinel_manager,
    }[kind]


@pytest.mark.parametrize(("kind", "name"), OWNED)
async def test_this_version_of_redis_py_has(kind: str, name: str) -> None:
    assert hasattr(owner_of(kind), name), f"redis-py: the {kind} has no {name!r} any more"


@pytest.mark.slow
def test_no_other_module_knows_them() -> None:
    known = {name for _, name in OWNED}
    places = []
    for path in Path(conquiet.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            is_private = isinstance(node, ast.ImportFrom) and "._" in f".{node.module}" and node.module != "__future__"
            if is_private and str(getattr(node, "module", "")).startswith("redis"):
                places.append((path.name, ast.unparse(node)))
            if (
                isinstance(node, ast.Attribute)
                and node.attr in known
                and ast.unparse(node.value) not in ("self", "instance")
            ):
                places.append((path.name, ast.unparse(node)))
    assert sorted(places) == [("parser.py", "stream._buffer")]


@pytest.fixture
def without(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A version of redis-py that calls one of them otherwise."""
    part, gone = internals._part, request.param
    monkeypatch.setattr(internals, "_part", lambda whole, name: None if name == gone else part(whole, name))
    return str(gone)


@pytest.fixture
async def proxy(url: str) -> AsyncIterator[Proxy]:
    async with Proxy(url) as proxy:
        yield proxy


@pytest.mark.parametrize("without", OF_CONNECTIONS, indirect=True)
async def test_all_rooms_work_without(without: str, url: str, config: QueueConfig) -> None:
    name = config.stream_key.replace(":", "-")
    async with asyncio.timeout(LONG):
        async with RedisStreamsQueue.connect(url, config) as queue:
            readings = [asyncio.create_task(queue.read(block_ms=5_000)) for _ in range(3)]
            ids = await queue.enqueue_many([{"n": number} for number in range(300)])
            assert len(set(ids)) == 300
            messages = [message for reading in readings for message in await reading]
            assert sorted(message.payload["n"] for message in messages) == [0, 1, 2]
            await queue.ack(*messages)
            await ask(url, "SET", f"{config.stream_key}:text", "x")
            with pytest.raises(QueueError, match="WRONGTYPE"):
                await queue._link.call(config.stream_key, xlen(f"{config.stream_key}:text"))
        async with Broker.connect(url) as broker:
            await broker.create_topic(name, partitions=2)
            await broker.send(name, {"n": 1})
            async with broker.consume(name, group="g") as consumed:
                message = await anext(consumed)
                assert message.payload == {"n": 1}
                await message.ack()
        async with StreamBalancer.connect(url, service=name, handle_signals=False) as balancer:
            await balancer.add_stream(f"{name}-data")
            await eventually(lambda: f"{name}-data" in balancer.owned, "it is owned")
            reading = asyncio.create_task(balancer.owned[f"{name}-data"].read(block_ms=5_000))
            await ask(url, "XADD", f"{name}-data", "*", "n", 1)
            assert len(await reading) == 1
        async with RedisStore.connect(url) as store:
            jobs = JobQueue(store, name)
            waiting = asyncio.create_task(jobs.claim(timeout=5.0))
            await jobs.enqueue({"n": 1})
            [job] = await waiting
            assert job.payload == {"n": 1}


@pytest.mark.parametrize("without", ["_reader", "_writer"], indirect=True)
async def test_a_silent_server_is_given_up_without(without: str, proxy: Proxy, config: QueueConfig) -> None:
    link = Connections(Address.of(f"{proxy.url}?socket_timeout=0.3"))
    await link.call("key", PING)
    proxy.silence()
    async with asyncio.timeout(LONG):
        with pytest.raises(QueueError, match=r"no answer within 0\.3 s"):
            await link.call("key", PING)
        assert await link.call("key", PING) == b"PONG"
    await link.aclose()


@pytest.mark.parametrize("without", ["_reader"], indirect=True)
async def test_replies_that_nobody_asked_for_are_noticed_without(without: str, proxy: Proxy) -> None:
    link = Connections(Address.of(proxy.url))
    assert await link.call("key", PING) == b"PONG"
    proxy.blurt(b"+UNASKED\r\n")
    await turns(50)
    assert await link.call("key", PING) == b"PONG"
    await link.aclose()


@pytest.mark.parametrize(
    ("without", "kind"), [("_reader", PlainReplies), ("_writer", BulkReplies)], indirect=["without"]
)
async def test_the_fast_way_is_gone_only_with_what_it_needs(without: str, kind: type, url: str) -> None:
    link = Connections(Address.of(url))
    await link.call("key", PING)
    [lane] = link._lanes.values()
    _, replies = await lane.connected()
    assert type(replies) is kind
    await link.aclose()


# --- clients of the user's --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("without", ["nodes_manager", "address_remap"], indirect=True)
def test_a_cluster_client_without(without: str) -> None:
    assert Address.of(RedisCluster("a", 7)).seeds == (("a", 7),)
    assert Address.of(RedisCluster("a", 7)).remap is None


@pytest.mark.parametrize("without", ["startup_nodes"], indirect=True)
def test_a_cluster_client_that_does_not_tell_where_it_is(without: str) -> None:
    with pytest.raises(ConfigError, match="'startup_nodes': pass a URL"):
        Address.of(RedisCluster("a", 7))


@pytest.mark.parametrize("without", ["sentinel_manager", "is_master"], indirect=True)
def test_a_sentinel_client_without(without: str) -> None:
    client: Redis = Sentinel([("a", 7)]).master_for("service")  # type: ignore[no-untyped-call]
    address = Address.of(client)
    assert (address.seeds, address.service) == ((("a", 7),), "service")


@pytest.mark.parametrize("without", ["service_name", "sentinels"], indirect=True)
def test_a_sentinel_client_that_does_not_tell_where_it_is(without: str) -> None:
    client: Redis = Sentinel([("a", 7)]).master_for("service")  # type: ignore[no-untyped-call]
    with pytest.raises(ConfigError, match=f"'{without}': pass a URL"):
        Address.of(client)
