from __future__ import annotations

import copy
import pickle
from contextlib import aclosing
from typing import Any

import pytest
import redis
from redis.asyncio import BlockingConnectionPool, ConnectionPool, Redis, RedisCluster, Sentinel
from redis.asyncio.cluster import ClusterNode
from redis.asyncio.connection import (
    Connection,
    SSLConnection,
    UnixDomainSocketConnection,
)

from conquiet import Address, ConfigError, QueueConfig, QueueError, RedisStreamsQueue
from conquiet.wire.address import AddressLike
from tests.rigs.asking import ask

SECRET = "hunter2"


# --- URLs ------------------------------------------------------------------------------------------


def test_a_plain_url() -> None:
    address = Address.of("redis://example.org")
    assert (address.kind, address.seeds, address.connection_class) == ("single", (("example.org", 6379),), Connection)
    assert str(address) == "example.org:6379"


def test_a_url_with_everything() -> None:
    address = Address.of(f"redis://bob:{SECRET}@example.org:7000/3?client_name=me&socket_timeout=0.3")
    made = address.connection(address.seeds[0])
    assert isinstance(made, Connection)
    assert (made.host, made.port, made.db, made.username, made.password) == ("example.org", 7000, 3, "bob", SECRET)
    assert made.client_name == "me"
    assert address.timeout == 0.3


def test_names_and_passwords_may_be_escaped() -> None:
    made = Address.of("redis://b%40b:p%2Fw%3A%C3%BC@example.org").connection(("example.org", 6379))
    assert (made.username, made.password) == ("b@b", "p/w:ü")


def test_a_host_may_be_an_ipv6_address() -> None:
    assert Address.of("redis://[::1]:7000/1").seeds == (("::1", 7000),)
    assert Address.of("redis+cluster://[::1]:7000,[::2]").seeds == (("::1", 7000), ("::2", 6379))


def test_a_url_without_a_host_is_this_machine() -> None:
    assert Address.of("redis://").seeds == (("localhost", 6379),)


def test_a_tls_url() -> None:
    address = Address.of("rediss://example.org:7000?ssl_cert_reqs=none&ssl_check_hostname=false")
    assert address.connection_class is SSLConnection
    assert isinstance(address.connection(address.seeds[0]), SSLConnection)


def test_a_unix_url() -> None:
    address = Address.of(f"unix://bob:{SECRET}@/run/redis.sock?db=2")
    made = address.connection(address.seeds[0])
    assert isinstance(made, UnixDomainSocketConnection)
    assert (made.path, made.db, made.username, made.password) == ("/run/redis.sock", 2, "bob", SECRET)
    assert str(address) == "/run/redis.sock"


def test_a_sentinel_url() -> None:
    url = f"redis+sentinel://bob:{SECRET}@a:1,b,c:3/mymaster/4?sentinel_password=guard&socket_timeout=2"
    address = Address.of(url)
    assert (address.kind, address.service, address.timeout) == ("sentinel", "mymaster", 2.0)
    assert address.seeds == (("a", 1), ("b", 26379), ("c", 3))
    master = address.connection(("m", 9))
    assert isinstance(master, Connection)
    assert (master.host, master.port, master.db, master.username, master.password) == ("m", 9, 4, "bob", SECRET)
    sentinel = address.sentinel(address.seeds[1])
    assert isinstance(sentinel, Connection)
    # A Sentinel has neither databases nor the users of the server that it watches.
    assert (sentinel.host, sentinel.db, sentinel.username, sentinel.password) == ("b", 0, None, "guard")


def test_a_sentinel_service_may_be_called_by_a_number() -> None:
    address = Address.of("redis+sentinel://a/12")
    assert address.service == "12"
    assert address.connection(("m", 9)).db == 0


def test_a_sentinel_url_over_tls_speaks_tls_to_the_sentinels_too() -> None:
    address = Address.of("rediss+sentinel://a/mymaster?ssl_cert_reqs=none&ssl_check_hostname=false")
    assert isinstance(address.connection(("m", 9)), SSLConnection)
    assert isinstance(address.sentinel(address.seeds[0]), SSLConnection)


def test_a_cluster_url() -> None:
    address = Address.of(f"redis+cluster://:{SECRET}@a:1,b,c:3?socket_connect_timeout=1.5")
    assert (address.kind, address.seeds) == ("cluster", (("a", 1), ("b", 6379), ("c", 3)))
    made = address.connection(("b", 6379))
    assert isinstance(made, Connection)
    assert (made.host, made.password, made.socket_connect_timeout) == ("b", SECRET, 1.5)
    assert issubclass(Address.of("rediss+cluster://a").connection_class, SSLConnection)


def test_an_address_is_an_address_already() -> None:
    address = Address.of("redis://a")
    assert Address.of(address) is address


@pytest.mark.parametrize(
    ("url", "names"),
    [
        ("http://localhost", "http"),
        ("localhost:6379", "redis://"),
        ("localhost", "redis://"),
        ("redis+gossip://a", r"redis\+gossip"),
        ("unix+cluster:///a", r"unix\+cluster"),
        ("redis://a?sokcet_timeout=1", "sokcet_timeout"),
        ("redis+cluster://a?sokcet_timeout=1", "sokcet_timeout"),
        ("redis+sentinel://a/m?sentinel_pasword=1", "pasword"),
        ("redis://a?socket_timeout=soon", "socket_timeout"),
        ("redis://a:port", "Redis URL"),
        ("redis://a:99999", "Redis URL"),
        ("redis+cluster://a:1,b:port", "Redis URL"),
        ("redis+sentinel://a:1,b:port/m", "Redis URL"),
        ("redis+sentinel://a:1", "service"),
        ("redis+sentinel://a:1/", "service"),
        ("redis+sentinel://a:1/m/first", "Sentinel URL"),
        ("redis://a?db=first", "db"),
        ("redis://a:0", "port"),
        ("redis://a?socket_timeout=0", "socket_timeout"),
        ("redis://a?socket_timeout=-1", "socket_timeout"),
        ("", "non-empty"),
    ],
)
def test_a_bad_url_is_refused_at_once(url: str, names: str) -> None:
    with pytest.raises(ConfigError, match=names):
        Address.of(url)


@pytest.mark.parametrize(
    "url",
    [
        pytest.param("redis://[::1", id="half an IPv6 address"),
        pytest.param("redis://a/first", id="a database that is no number"),
        pytest.param("redis://a/1/2", id="two databases"),
        pytest.param("redis://a/-1", id="a negative database"),
        pytest.param("redis://a:1,b:2", id="two hosts of one server"),
        pytest.param("unix://", id="a socket without a path"),
    ],
)
def test_a_url_that_cannot_be_meant_is_not_guessed_at(url: str) -> None:
    with pytest.raises(ConfigError):
        Address.of(url)


@pytest.mark.parametrize("source", [None, 6379, b"redis://localhost", ("localhost", 6379), {"host": "localhost"}])
def test_what_is_no_address_at_all_is_refused(source: Any) -> None:
    with pytest.raises(ConfigError, match="expected a URL"):
        Address.of(source)


def test_a_queue_refuses_a_bad_url_when_it_is_made() -> None:
    with pytest.raises(ConfigError, match="sokcet"):
        RedisStreamsQueue.connect("redis://localhost?sokcet_timeout=1", QueueConfig("s", "g", "c"))


# --- secrets ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "url",
    [
        f"redis://:{SECRET}@localhost:1",
        f"rediss://bob:{SECRET}@localhost:1",
        f"redis://localhost:1?password={SECRET}",
        f"unix://:{SECRET}@/run/redis.sock",
        f"redis+sentinel://bob:{SECRET}@a,b/mymaster?sentinel_password={SECRET}",
        f"redis+cluster://bob:{SECRET}@a,b",
    ],
)
def test_an_address_never_shows_its_password(url: str) -> None:
    address = Address.of(url)
    assert SECRET not in f"{address} {address!r}"
    assert "bob" not in f"{address} {address!r}"


@pytest.mark.parametrize(
    "url",
    [
        f"redis://:{SECRET}@localhost:port",
        f"redis://:{SECRET}@localhost?sokcet_timeout=1",
        f"redis://localhost?password={SECRET}&sokcet_timeout=1",
        f"redis+sentinel://:{SECRET}@a",
        f"redis+sentinel://a/m?sentinel_password={SECRET}&sokcet_timeout=1",
        f"http://:{SECRET}@localhost",
        pytest.param(f":{SECRET}@localhost:6379", id="no scheme"),
        pytest.param(f"//:{SECRET}@localhost:6379", id="no scheme but slashes"),
        pytest.param(f"{SECRET}@localhost:6379", id="no scheme and no colon"),
        pytest.param(f"redis://:{SECRET}/x@localhost:6379", id="a slash that was not escaped"),
        pytest.param(f"redis://:{SECRET}\ud800@localhost", id="not Unicode"),
    ],
)
def test_the_error_for_a_bad_url_never_shows_its_password(url: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Address.of(url)
    assert SECRET not in str(caught.value)
    assert SECRET not in str(caught.value.__cause__)


async def test_the_error_for_a_refused_password_does_not_show_it(url: str, config: QueueConfig) -> None:
    async with aclosing(RedisStreamsQueue.connect(url.replace("//", f"//nobody:{SECRET}@"), config)) as queue:
        with pytest.raises(QueueError, match="password") as caught:
            await queue.enqueue({"n": 1})
        assert SECRET not in str(caught.value)
        assert "nobody" not in str(caught.value)


# --- pickles ---------------------------------------------------------------------------------------

CLIENTS = [
    pytest.param(lambda: Redis(), id="Redis"),
    pytest.param(lambda: Redis(username="bob", password=SECRET, db=3, protocol=3), id="Redis of a user"),
    pytest.param(lambda: Redis.from_url("unix:///run/redis.sock"), id="Unix socket"),
    pytest.param(lambda: Redis(ssl=True, ssl_cert_reqs="none", ssl_check_hostname=False), id="TLS"),
    pytest.param(lambda: Sentinel([("a", 1)]).master_for("mymaster"), id="Sentinel"),  # type: ignore[no-untyped-call]
    pytest.param(lambda: RedisCluster("a", 1), id="RedisCluster"),
]


@pytest.mark.parametrize(
    "url", ["redis://:x@a:1/3", "rediss://a", "unix:///a", "redis+sentinel://a,b/m/3", "redis+cluster://a,b"]
)
def test_an_address_can_be_pickled_and_compared(url: str) -> None:
    address = Address.of(url)
    assert pickle.loads(pickle.dumps(address)) == address
    assert copy.deepcopy(address) == address
    assert Address.of(url) == address
    assert Address.of("redis://elsewhere") != address


@pytest.mark.parametrize("make", CLIENTS)
def test_the_address_of_a_client_can_be_pickled(make: Any) -> None:
    address = Address.of(make())
    again = pickle.loads(pickle.dumps(address))
    assert again == address
    assert type(again.connection(("a", 1))) is type(address.connection(("a", 1)))


async def test_a_pickled_address_of_a_client_still_works(url: str, config: QueueConfig) -> None:
    client = Redis(host="127.0.0.1", port=int(url.rpartition(":")[2]))
    address = pickle.loads(pickle.dumps(Address.of(client)))
    async with RedisStreamsQueue(address, config) as queue:
        assert await queue.enqueue({"n": 1})


# --- clients of the user's -------------------------------------------------------------------------


@pytest.mark.parametrize("protocol", [2, 3])
@pytest.mark.parametrize("decode", [False, True])
def test_a_client_gives_its_settings_and_none_of_its_habits(protocol: int, decode: bool) -> None:
    client = Redis(
        host="h",
        port=7000,
        db=3,
        username="bob",
        password=SECRET,
        client_name="me",
        protocol=protocol,
        decode_responses=decode,
        health_check_interval=30,
        socket_timeout=2.5,
        socket_connect_timeout=1.5,
    )
    address = Address.of(client)
    made = address.connection(address.seeds[0])
    assert isinstance(made, Connection)
    assert (made.host, made.port, made.db, made.username, made.password) == ("h", 7000, 3, "bob", SECRET)
    assert (made.client_name, made.socket_connect_timeout, address.timeout) == ("me", 1.5, 2.5)
    # The lane times answers itself, needs bytes, and must not have a command sent twice.
    assert made.socket_timeout is None
    assert made.protocol == 2
    assert not made.encoder.decode_responses
    assert made.health_check_interval == 0
    assert made.retry.get_retries() == 0


def test_clients_with_other_pools_and_sockets() -> None:
    blocking = Redis(connection_pool=BlockingConnectionPool(host="h", port=1, max_connections=2, timeout=1))
    assert Address.of(blocking).seeds == (("h", 1),)
    pooled = Redis(connection_pool=ConnectionPool.from_url("redis://h:2/5"))
    assert Address.of(pooled).connection(("h", 2)).db == 5
    unix = Address.of(Redis.from_url("unix:///run/redis.sock?db=2"))
    assert unix.seeds == (("/run/redis.sock", 0),)
    assert isinstance(unix.connection(unix.seeds[0]), UnixDomainSocketConnection)
    assert Address.of(Redis(unix_socket_path="/run/redis.sock")).seeds == unix.seeds
    assert Address.of(Redis.from_url("rediss://h")).connection_class is SSLConnection
    assert Address.of(Redis(host="h", port=1, single_connection_client=True)).seeds == (("h", 1),)


def test_a_client_of_sentinels() -> None:
    sentinel = Sentinel(  # type: ignore[no-untyped-call]
        [("a", 1), ("b", 2)], sentinel_kwargs={"password": "guard"}, password=SECRET, db=3, socket_timeout=0.7
    )
    address = Address.of(sentinel.master_for("mymaster"))
    assert (address.kind, address.seeds, address.service) == ("sentinel", (("a", 1), ("b", 2)), "mymaster")
    assert address.timeout == 0.7
    master = address.connection(("m", 9))
    assert type(master) is Connection  # one that looks its master up itself would ask the Sentinels each time
    assert (master.db, master.password) == (3, SECRET)
    assert address.sentinel(("a", 1)).password == "guard"
    assert SECRET not in repr(address)
    secure = Sentinel([("a", 1)], ssl=True, ssl_cert_reqs="none")  # type: ignore[no-untyped-call]
    assert isinstance(Address.of(secure.master_for("mymaster")).connection(("m", 9)), SSLConnection)


def test_a_client_of_replicas_is_refused() -> None:
    sentinel = Sentinel([("a", 1)])  # type: ignore[no-untyped-call]
    with pytest.raises(ConfigError, match="master_for"):
        Address.of(sentinel.slave_for("mymaster"))


def test_a_client_of_a_cluster() -> None:
    nodes = [ClusterNode("a", 1), ClusterNode("b", 2)]
    client = RedisCluster(startup_nodes=nodes, username="bob", password=SECRET, protocol=3, decode_responses=True)
    address = Address.of(client)
    assert (address.kind, address.seeds) == ("cluster", (("a", 1), ("b", 2)))
    made = address.connection(("b", 2))
    assert (made.username, made.password, made.protocol) == ("bob", SECRET, 2)
    assert SECRET not in repr(address)
    secure = Address.of(RedisCluster("a", 1, ssl=True, ssl_cert_reqs="none", ssl_check_hostname=False))
    assert isinstance(secure.connection(("a", 1)), SSLConnection)


def test_a_client_of_a_cluster_keeps_its_address_map() -> None:
    client = RedisCluster("a", 1, address_remap=lambda node: ("outside", node[1] + 1))
    assert Address.of(client).reached_at(("inside", 7000)) == ("outside", 7001)


@pytest.mark.parametrize("client", [redis.Redis(), redis.Redis.from_url("redis://localhost")])
def test_a_synchronous_client_is_refused_with_advice(client: Any) -> None:
    with pytest.raises(ConfigError, match=r"redis\.asyncio\.Redis"):
        Address.of(client)


@pytest.mark.parametrize("single", [False, True])
async def test_the_users_client_stays_as_it_was(url: str, config: QueueConfig, single: bool) -> None:
    client = Redis.from_url(url, decode_responses=True, single_connection_client=single)
    async with client:
        await client.ping()
        settings, retry = dict(client.connection_pool.connection_kwargs), client.get_retry()
        connections = client_ids(await ask(url, "CLIENT LIST"))
        async with RedisStreamsQueue(client, config) as queue:
            await queue.enqueue({"n": 1})
            [message] = await queue.read(1000)
            await queue.ack(message)
        assert client.connection_pool.connection_kwargs == settings
        assert client.get_retry() is retry
        assert await client.xlen(config.stream_key) == 1  # still open, still decoding
        # The same connections as before, and none of the queue's.
        assert client_ids(await ask(url, "CLIENT LIST")) == connections


def client_ids(rows: list[dict[str, str]]) -> set[str]:
    """The connections of all but the asker, who is new each time."""
    return {row["id"] for row in rows if row["cmd"] not in ("client", "client|list")}


@pytest.mark.parametrize("source", ["redis://a", Address.of("redis://a"), Redis(), RedisCluster("a", 1)])
def test_a_queue_takes_all_of_them(source: AddressLike, config: QueueConfig) -> None:
    assert RedisStreamsQueue(source, config).config is config


@pytest.mark.parametrize(("given", "wanted", "kept"), [("", 2.0, 2.0), ("?socket_timeout=1", 2.0, 1.0)])
def test_an_address_of_the_same_redis_with_less_patience(given: str, wanted: float, kept: float) -> None:
    patient = Address.of(f"redis://a{given}")
    hasty = patient.answering_within(wanted)
    assert hasty.timeout == kept
    assert hasty.seeds == patient.seeds
    assert Address.of(Redis(host="a", socket_timeout=None)).answering_within(wanted).timeout == wanted
