"""Finding the master: one Sentinel that knows it is enough, whatever the others do."""

from __future__ import annotations

import asyncio
import os
import ssl
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import trustme
from redis.asyncio import Sentinel
from redis.asyncio.connection import Connection, SSLConnection

from conquiet import Address, ConfigError, QueueConfig, RedisStreamsQueue
from conquiet.wire.address import Endpoint
from conquiet.wire.connections import Connections
from conquiet.wire.streams import pack
from tests.conftest import Rung
from tests.rigs.asking import ask
from tests.rigs.proxy import Proxy
from tests.rigs.sentinel import SERVICE, LocalSentinels
from tests.rigs.servers import on_a_port
from tests.rigs.waiting import LONG, eventually, held

pytestmark = [pytest.mark.any_server, pytest.mark.slow]

PING = pack("PING")
PATIENT = 10 * LONG
"""Seconds of silence that no test waits for."""


@pytest.fixture(scope="module")
def binary(rung: Rung) -> str:
    if not rung.binary:
        pytest.skip("needs a server's binary")
    return rung.binary


@pytest.fixture(scope="module")
def sentinels(binary: str) -> Iterator[LocalSentinels]:
    with held(LocalSentinels(binary)) as sentinels:
        yield sentinels


def address_of(*seeds: Endpoint) -> Address:
    return replace(Address.of(f"redis+sentinel://a/{SERVICE}"), seeds=seeds)


@asynccontextmanager
async def linked(address: Address) -> AsyncIterator[Connections]:
    async with aclosing(Connections(address)) as link:
        yield link


@asynccontextmanager
async def cut_off(binary: str, place: Path) -> AsyncIterator[Endpoint]:
    """A Sentinel that has lost sight of its master, which is the only one that it knows."""
    name = place / "redis-sentinel"
    os.symlink(binary, name)
    async with on_a_port(name) as sentinel, on_a_port() as master:
        url = urlsplit(master.url)
        await ask(sentinel.url, "SENTINEL", "MONITOR", SERVICE, "127.0.0.1", url.port or 0, 2)
        await ask(sentinel.url, "SENTINEL", "SET", SERVICE, "down-after-milliseconds", 1)
        await master.aclose()

        async def has_lost_sight() -> bool:
            return bool((await ask(sentinel.url, "SENTINEL MASTERS"))[SERVICE]["is_sdown"])

        await eventually(has_lost_sight, "the Sentinel sees its master no longer")
        parts = urlsplit(sentinel.url)
        assert not parts.password, "this test logs in nowhere"
        yield parts.hostname or "", parts.port or 0


async def test_a_sentinel_that_is_cut_off_with_its_master_is_not_believed(
    binary: str, sentinels: LocalSentinels, tmp_path: Path
) -> None:
    async with cut_off(binary, tmp_path) as first, linked(address_of(first, *sentinels.seeds)) as link:
        assert await link.call("any", PING) == b"PONG"


async def test_a_silent_sentinel_holds_nobody_up_and_is_asked_last_from_then_on(sentinels: LocalSentinels) -> None:
    [known] = sentinels.seeds
    async with Proxy(f"redis://{known[0]}:{known[1]}") as proxy:
        proxy.hold(b"SENTINEL")
        address = replace(address_of(("127.0.0.1", proxy.port), known), timeout=PATIENT)
        async with linked(address) as link, asyncio.timeout(LONG):
            assert await link.call("any", PING) == b"PONG"
            asked = proxy.accepted
            link._topology.forget()
            assert await link.call("any", PING) == b"PONG"
            assert (asked, proxy.accepted) == (1, 1)


async def test_a_silent_node_of_a_cluster_holds_nobody_up_either(binary: str) -> None:
    from tests.rigs.cluster import LocalCluster

    async with LocalCluster(binary) as cluster, Proxy(cluster.nodes[0].url) as proxy:
        proxy.hold(b"SLOTS")
        silent, other = ("127.0.0.1", proxy.port), cluster.nodes[1].endpoint
        address = replace(Address.of(cluster.url), seeds=(silent, other), timeout=PATIENT)
        async with linked(address) as link, asyncio.timeout(LONG):
            assert await link.call("any", PING) == b"PONG"


# --- TLS and logins apart from the master's ------------------------------------------------------------------


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture(scope="module")
def trusted(authority: trustme.CA, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tls") / "authority.pem"
    authority.cert_pem.write_to_path(str(path))
    return path


@pytest.mark.parametrize("by_client", [False, True], ids=["url", "client"])
async def test_sentinels_by_tls_and_a_master_without(
    sentinels: LocalSentinels, authority: trustme.CA, trusted: Path, config: QueueConfig, by_client: bool
) -> None:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    [(host, port)] = sentinels.seeds
    async with Proxy(f"redis://{host}:{port}", secure=context) as proxy:
        url = f"redis+sentinel://127.0.0.1:{proxy.port}/{SERVICE}?sentinel_ssl=true&sentinel_ssl_ca_certs={trusted}"
        manager = Sentinel(  # type: ignore[no-untyped-call]
            [("127.0.0.1", proxy.port)], sentinel_kwargs={"ssl": True, "ssl_ca_certs": str(trusted)}
        )
        source = manager.master_for(SERVICE) if by_client else url
        async with RedisStreamsQueue(source, config) as queue:
            assert await queue.enqueue({"n": 1})
        assert proxy.count(b"SENTINEL") > 0
        await manager.aclose()


def test_a_master_by_tls_and_sentinels_without() -> None:
    url = f"rediss+sentinel://u:p@a/{SERVICE}?ssl_ca_certs=ca.pem&sentinel_ssl=false&sentinel_username=guard"
    address = Address.of(url + "&sentinel_password=x&sentinel_socket_timeout=0.5")
    assert isinstance(address.connection(("m", 1)), SSLConnection)
    sentinel = address.sentinel(("a", 1))
    assert type(sentinel) is Connection
    assert (sentinel.username, sentinel.password) == ("guard", "x")
    settings = address.for_sentinels()
    assert (settings["ssl"], settings["socket_timeout"], "ssl_ca_certs" in settings) == (False, 0.5, False)


@pytest.mark.parametrize("option", ["sentinel_ssl=maybe", "sentinel_socket_timeout=soon", "sentinel_ssl_cafile=a"])
def test_a_bad_option_for_sentinels_is_refused_at_once(option: str) -> None:
    with pytest.raises(ConfigError, match=option.split("=")[0].removeprefix("sentinel_")):
        Address.of(f"rediss+sentinel://a/{SERVICE}?{option}")
