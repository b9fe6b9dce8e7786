"""Everything that a queue does, through every way to a server that there is."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import pytest
import trustme
from redis.asyncio import BlockingConnectionPool, Redis, RedisCluster, Sentinel
from redis.asyncio.sentinel import SentinelConnectionPool
from redis.crc import key_slot

from conquiet import EmbeddedRedis, QueueConfig, QueueConsumer, QueueError, RedisStreamsQueue
from conquiet.wire.address import AddressLike
from tests.conftest import Rung, Server
from tests.rigs.asking import ask, blocked, entries, pending
from tests.rigs.cluster import LocalCluster
from tests.rigs.proxy import Proxy
from tests.rigs.sentinel import SERVICE, LocalSentinels
from tests.rigs.waiting import eventually, held

pytestmark = pytest.mark.slow

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


# --- the places ------------------------------------------------------------------------------------


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
    with held(EmbeddedRedis(binary=binary, settings={"requirepass": PASSWORD})) as server:
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


WAYS: Final = ("plain", "database_3", "unix", "locked", "tls", "acl", "no_client", "sentinel", "clustered")


@pytest.fixture
def place(request: pytest.FixtureRequest, server: Server) -> Place:
    return request.getfixturevalue(request.param)  # type: ignore[no-any-return]


# --- everything, everywhere ------------------------------------------------------------------------


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


# --- users -----------------------------------------------------------------------------------------


async def test_a_user_may_not_touch_other_streams(acl: Place, config: QueueConfig) -> None:
    other = replace(config, stream_key=f"other:{config.stream_key}")
    async with aclosing(RedisStreamsQueue(acl.url, other)) as queue:
        with pytest.raises(QueueError, match="permission"):
            await queue.enqueue({"n": 1})


@pytest.mark.parametrize("login", ["", ":wrong@", "nobody:wrong@"])
async def test_a_wrong_password_is_a_queue_error(locked_server: EmbeddedRedis, config: QueueConfig, login: str) -> None:
    url = f"redis://{login}{locked_server.url.rpartition('@')[2]}"
    async with aclosing(RedisStreamsQueue.connect(url, config)) as queue:
        with pytest.raises(QueueError) as caught:
            await queue.enqueue({"n": 1})
        assert caught.value.__cause__ is not None


@pytest.mark.parametrize("place", ["plain", "acl", "unix"], indirect=True)
async def test_a_stop_ends_a_blocked_read(place: Place, config: QueueConfig, url: str) -> None:
    seen_at = place.url if place.url.startswith("unix") else url
    await a_stop_ends_a_blocked_read(place.url, config, lambda: blocked(seen_at))


async def test_where_client_is_forbidden_a_stopped_read_runs_to_its_end(
    no_client: Place, url: str, config: QueueConfig, caplog: pytest.LogCaptureFixture
) -> None:
    async with RedisStreamsQueue(no_client.url, config) as queue:
        consumer = QueueConsumer(queue, handle_signals=False)
        with caplog.at_level(logging.WARNING, "conquiet.wire"):
            reading = asyncio.create_task(consumer.next(block_ms=FOREVER))
            await blocked(url)
            consumer.stop()
            await eventually(lambda: "cannot wake" in caplog.text, "a warning that nothing can be woken")
        await blocked(url)  # still
        assert not reading.done()
        entry_id = await queue.enqueue({"n": 1})
        message = await reading
        assert message is not None
        assert message.id == entry_id
        assert await consumer.next(block_ms=FOREVER) is None


async def test_where_client_is_forbidden_a_read_with_nothing_to_read_ends_by_itself(
    no_client: Place, config: QueueConfig
) -> None:
    async with RedisStreamsQueue(no_client.url, config) as queue:
        assert await queue.read(block_ms=20) == []


# --- TLS -------------------------------------------------------------------------------------------


async def test_a_certificate_of_a_stranger_is_refused(tls_proxy: Proxy, config: QueueConfig, tmp_path: Path) -> None:
    stranger = tmp_path / "stranger.pem"
    trustme.CA().cert_pem.write_to_path(str(stranger))
    async with aclosing(RedisStreamsQueue.connect(f"{tls_proxy.url}?ssl_ca_certs={stranger}", config)) as queue:
        with pytest.raises(QueueError, match=r"(?i)certificate"):
            await queue.enqueue({"n": 1})
        assert tls_proxy.received == []


async def test_a_certificate_for_another_host_is_refused(
    server: Server, authority: trustme.CA, authority_file: Path, config: QueueConfig
) -> None:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert("elsewhere.example").configure_cert(context)
    async with Proxy(server.url, secure=context) as proxy:
        url = f"{proxy.url}?ssl_ca_certs={authority_file}"
        async with aclosing(RedisStreamsQueue.connect(url, config)) as queue:
            with pytest.raises(QueueError, match=r"(?i)certificate"):
                await queue.enqueue({"n": 1})
        assert proxy.received == []


async def test_a_server_that_wants_a_certificate_gets_the_clients(
    server: Server, authority: trustme.CA, authority_file: Path, config: QueueConfig, tmp_path: Path
) -> None:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    authority.configure_trust(context)
    context.verify_mode = ssl.CERT_REQUIRED
    mine = authority.issue_cert("consumer-1")
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    mine.private_key_pem.write_to_path(str(key))
    mine.cert_chain_pems[0].write_to_path(str(certificate))
    async with Proxy(server.url, secure=context) as proxy:
        url = f"{proxy.url}?ssl_ca_certs={authority_file}"
        await everything_works(f"{url}&ssl_certfile={certificate}&ssl_keyfile={key}", config)
        proxy.received.clear()
        async with aclosing(RedisStreamsQueue.connect(url, config)) as queue:
            with pytest.raises(QueueError):
                await queue.enqueue({"n": 1})
        assert proxy.received == []


async def test_plain_speech_to_a_tls_port_is_a_queue_error(tls_proxy: Proxy, config: QueueConfig) -> None:
    async with aclosing(RedisStreamsQueue.connect(tls_proxy.url.replace("rediss", "redis"), config)) as queue:
        with pytest.raises(QueueError):
            await queue.enqueue({"n": 1})


async def test_a_stop_ends_a_blocked_read_over_tls(tls: Place, url: str, config: QueueConfig) -> None:
    await a_stop_ends_a_blocked_read(tls.url, config, lambda: blocked(url))


# --- Sentinel --------------------------------------------------------------------------------------


async def test_one_sentinel_that_answers_is_enough(sentinels: LocalSentinels, config: QueueConfig) -> None:
    async with nobody_listens() as place:
        await everything_works(sentinel_url(sentinels, first=f"{place},"), config)


async def test_a_service_that_no_sentinel_knows(sentinels: LocalSentinels, config: QueueConfig) -> None:
    url = sentinel_url(sentinels).replace(SERVICE, "stranger")
    async with aclosing(RedisStreamsQueue.connect(url, config)) as queue:
        with pytest.raises(QueueError, match="stranger"):
            await queue.enqueue({"n": 1})


async def test_a_wrong_sentinel_password(sentinels: LocalSentinels, config: QueueConfig) -> None:
    url = sentinel_url(sentinels).replace(GUARD, "wrong")
    async with aclosing(RedisStreamsQueue.connect(url, config)) as queue:
        with pytest.raises(QueueError, match="password") as caught:
            await queue.enqueue({"n": 1})
        assert "wrong" not in str(caught.value)


@pytest.mark.parametrize("by_client", [False, True], ids=["url", "client"])
async def test_after_a_failover_the_queue_finds_the_new_master(
    sentinels: LocalSentinels, sentinel: Place, config: QueueConfig, by_client: bool
) -> None:
    source = sentinel.client() if by_client else sentinel.url
    async with RedisStreamsQueue(source, config) as queue:
        before = await queue.enqueue({"n": "before"})
        old = await sentinels.master_url()
        await queue.read(FOREVER)
        await sentinels.in_step()
        reading = asyncio.create_task(queue.read(FOREVER))
        await blocked(old)
        await sentinels.fail_over()
        new = await sentinels.master_url()
        assert new != old
        # Whoever was reading is told, and what is lost is known: nothing.
        with pytest.raises(QueueError):
            await reading
        written = await attempts(queue, 3)
        refused = sorted({0, 1, 2} - written.keys())
        # At most the first call still goes to the old master, which refuses it; nobody sends it again.
        assert refused in ([], [0])
        assert await entries(new, config.stream_key) == {
            before: {"n": "before"},
            **{id: {"n": number} for number, id in written.items()},
        }
        messages = await queue.read(FOREVER, 10)
        assert [message.payload["n"] for message in messages] == list(written)
        await queue.ack(*messages)
        assert await pending(new, config.stream_key, config.consumer_group) == [before]


async def attempts(queue: RedisStreamsQueue, count: int) -> dict[int, str]:
    """The IDs of those of ``count`` calls that succeeded."""
    written: dict[int, str] = {}
    for number in range(count):
        try:
            written[number] = await queue.enqueue({"n": number})
        except QueueError:
            continue
    return written


@pytest.mark.any_server
async def test_three_sentinels_agree_on_a_failover(binary: str, config: QueueConfig) -> None:
    async with LocalSentinels(binary, sentinels=3) as sentinels:
        hosts = ",".join(f"{host}:{port}" for host, port in sentinels.seeds)
        url = f"redis+sentinel://{hosts}/{SERVICE}"
        await everything_works(url, config)
        async with RedisStreamsQueue.connect(url, config) as queue:
            await sentinels.fail_over()
            assert (await attempts(queue, 2)).keys() >= {1}


# --- Cluster ---------------------------------------------------------------------------------------


def spread(config: QueueConfig, each: int) -> list[QueueConfig]:
    """Configurations of streams in all thirds of the slots, ``each`` in one of them."""
    names = [f"{config.stream_key}:{number}" for number in range(1000)]
    thirds = [[name for name in names if key_slot(name.encode()) // 5462 == third] for third in range(3)]
    return [replace(config, stream_key=name) for third in thirds for name in third[:each]]


async def test_many_streams_of_a_cluster_side_by_side(cluster: LocalCluster, config: QueueConfig) -> None:
    await asyncio.gather(*(everything_works(cluster.url, each) for each in spread(config, 4)))


async def test_one_seed_that_answers_is_enough(cluster: LocalCluster, config: QueueConfig) -> None:
    async with nobody_listens() as place:
        url = f"redis+cluster://{place},{cluster.nodes[0].place}"
        await asyncio.gather(*(everything_works(url, each) for each in spread(config, 1)))


async def test_a_node_alone_says_that_it_belongs_to_a_cluster(cluster: LocalCluster, config: QueueConfig) -> None:
    owner = await cluster.owner_of(config.stream_key)
    other = next(node for node in cluster.nodes if node != owner)
    async with aclosing(RedisStreamsQueue.connect(other.url, config)) as queue:
        with pytest.raises(QueueError, match=r"redis\+cluster://"):
            await queue.enqueue({"n": 1})


async def test_a_stop_ends_a_blocked_read_in_a_cluster(cluster: LocalCluster, config: QueueConfig) -> None:
    owner = await cluster.owner_of(config.stream_key)
    await a_stop_ends_a_blocked_read(cluster.url, config, lambda: blocked(owner.url))


@pytest.mark.parametrize("by_client", [False, True], ids=["url", "client"])
async def test_a_slot_that_moves_loses_nothing_and_doubles_nothing(
    cluster: LocalCluster, clustered: Place, config: QueueConfig, by_client: bool
) -> None:
    source = clustered.client() if by_client else clustered.url
    migration = await cluster.migration_of(config.stream_key)
    async with RedisStreamsQueue(source, config) as queue:
        ids = await several(queue, "at home")
        await migration.begin()
        ids += await several(queue, "asked")  # the old node says ASK for each
        [message] = await queue.read(FOREVER)
        await queue.ack(message)
        [claimed] = await read_and_claim(queue)
        await migration.finish()
        ids += await several(queue, "moved")  # the old node says MOVED, once
        messages = [message, claimed, *await queue.read(FOREVER, 100)]
        assert [each.id for each in messages] == ids
        await queue.ack(*messages)
        assert (await queue.backlog_stats()).pending == 0
    assert list(await entries(migration.target.url, config.stream_key)) == ids


async def several(queue: RedisStreamsQueue, when: str) -> list[str]:
    one = await queue.enqueue({"when": when})
    many = await queue.enqueue_many([{"when": when}] * 3)
    return [one, *many, *await asyncio.gather(*(queue.enqueue({"when": when}) for _ in range(3)))]


async def read_and_claim(queue: RedisStreamsQueue) -> list[Any]:
    [message] = await queue.read(FOREVER)
    claimed = await queue.claim_stale(0)
    assert claimed == [message]
    return claimed


async def test_a_queue_that_opens_while_a_slot_is_on_its_way(cluster: LocalCluster, config: QueueConfig) -> None:
    migration = await cluster.migration_of(config.stream_key)
    await migration.begin()
    async with RedisStreamsQueue.connect(cluster.url, config) as queue:
        entry_id = await queue.enqueue({"n": 1})
        [message] = await queue.read(FOREVER)
        assert message.id == entry_id
        await migration.finish()
        await queue.ack(message)
        assert (await queue.backlog_stats()).pending == 0


async def test_a_blocked_read_whose_slot_moves_loses_nothing(cluster: LocalCluster, config: QueueConfig) -> None:
    migration = await cluster.migration_of(config.stream_key)
    async with RedisStreamsQueue.connect(cluster.url, config) as queue:
        reading = asyncio.create_task(queue.read(FOREVER))
        await blocked(migration.source.url)
        await migration.begin()
        entry_id = await queue.enqueue({"n": 1})
        await migration.finish()
        try:
            messages = await reading
        except QueueError:  # Redis 7 tells the reader that the key is gone, which it may take for an error
            messages = await queue.read(FOREVER)
        assert [message.id for message in messages] == [entry_id]
        assert await pending(migration.target.url, config.stream_key, config.consumer_group) == [entry_id]


async def test_writers_while_slots_move(cluster: LocalCluster, config: QueueConfig) -> None:
    configs = spread(config, 1)
    done = asyncio.Event()

    async def write(each: QueueConfig) -> list[str]:
        ids: list[str] = []
        async with RedisStreamsQueue.connect(cluster.url, each) as queue:
            while not done.is_set():
                ids.append(await queue.enqueue({"n": len(ids)}))
        return ids

    writers = [asyncio.create_task(write(each)) for each in configs]
    for each in configs:
        migration = await cluster.migration_of(each.stream_key)
        await migration.begin()
        await migration.finish()
    done.set()
    for each, ids in zip(configs, await asyncio.gather(*writers), strict=True):
        owner = await cluster.owner_of(each.stream_key)
        written = await entries(owner.url, each.stream_key)
        assert list(written) == ids
        assert [payload["n"] for payload in written.values()] == list(range(len(ids)))


# --- finding the way -------------------------------------------------------------------------------


@pytest.fixture(params=["sentinel", "cluster"])
async def guide(request: pytest.FixtureRequest, server: Server) -> AsyncIterator[tuple[Proxy, str, bytes]]:
    """A proxy before one who knows the way, a URL that leads there, and the question that is asked."""
    if request.param == "cluster":
        cluster: LocalCluster = request.getfixturevalue("cluster")
        async with Proxy(cluster.nodes[0].url) as proxy:
            yield proxy, f"redis+cluster://127.0.0.1:{proxy.port}", b"SLOTS"
    else:
        sentinels: LocalSentinels = request.getfixturevalue("sentinels")
        [(host, port)] = sentinels.seeds
        async with Proxy(f"redis://{host}:{port}") as proxy:
            yield proxy, sentinel_url(sentinels).replace(f":{port}", f":{proxy.port}"), b"MASTERS"


async def test_callers_side_by_side_ask_the_way_once(guide: tuple[Proxy, str, bytes], config: QueueConfig) -> None:
    proxy, url, question = guide
    async with aclosing(RedisStreamsQueue.connect(url, config)) as queue:
        ids = await asyncio.gather(*(queue.enqueue({"n": number}) for number in range(50)))
        assert len(set(ids)) == 50
        assert proxy.count(question) == 1


async def test_callers_side_by_side_are_told_together_that_nobody_knows_the_way(
    guide: tuple[Proxy, str, bytes], config: QueueConfig
) -> None:
    # One after the other, each would wait for a time-out of its own, and the last of fifty for fifty of them.
    proxy, url, question = guide
    proxy.refuse(question, b"-LOADING Redis is loading the dataset in memory\r\n", times=50)
    async with aclosing(RedisStreamsQueue.connect(url, config)) as queue:
        calls = (queue.enqueue({"n": number}) for number in range(50))
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        assert {type(outcome) for outcome in outcomes} == {QueueError}
        assert sum(question in command for command in proxy.received) == 1


async def test_a_caller_who_leaves_while_the_way_is_asked_takes_nobody_along(
    guide: tuple[Proxy, str, bytes], config: QueueConfig
) -> None:
    proxy, url, question = guide
    hold = proxy.hold(question)
    async with aclosing(RedisStreamsQueue.connect(url, config)) as queue:
        first, *others = [asyncio.create_task(queue.enqueue({"n": number})) for number in range(3)]
        await hold.caught.wait()
        first.cancel()
        hold.release()
        assert len(set(await asyncio.gather(*others))) == 2
        with pytest.raises(asyncio.CancelledError):
            await first
        assert (await queue.backlog_stats()).length == 2


async def test_the_way_is_asked_again_after_nobody_knew_it(
    guide: tuple[Proxy, str, bytes], config: QueueConfig
) -> None:
    proxy, url, question = guide
    proxy.cut(question)
    async with aclosing(RedisStreamsQueue.connect(url, config)) as queue:
        with pytest.raises(QueueError):
            await queue.enqueue({"n": 1})
        assert await queue.enqueue({"n": 2})
        assert (await queue.backlog_stats()).length == 1


# --- nobody ----------------------------------------------------------------------------------------


@asynccontextmanager
async def nobody_listens() -> AsyncIterator[str]:
    """``host:port`` of a port that is taken, and refuses connections."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{taken.getsockname()[1]}"


async def test_a_server_that_is_not_there_is_a_queue_error(config: QueueConfig) -> None:
    async with nobody_listens() as place:
        for url in (f"redis://{place}", f"redis+sentinel://{place}/{SERVICE}", f"redis+cluster://{place}"):
            async with aclosing(RedisStreamsQueue.connect(url, config)) as queue:
                with pytest.raises(QueueError, match=place) as caught:
                    await queue.enqueue({"n": 1})
                assert caught.value.__cause__ is not None
