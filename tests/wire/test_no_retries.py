"""No command is ever sent twice, whatever happens to its answer and however the client was set up."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass

import pytest
from redis.asyncio import Redis, RedisCluster, Sentinel
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError

from conquiet import QueueConfig, QueueError, RedisStreamsQueue
from conquiet.wire.address import AddressLike
from tests.conftest import Rung
from tests.rigs.asking import ask, entries, pending
from tests.rigs.cluster import LocalCluster
from tests.rigs.proxy import Proxy
from tests.rigs.sentinel import SERVICE, LocalSentinels
from tests.rigs.waiting import held

FOREVER = 30_000


@pytest.fixture
async def proxy(url: str) -> AsyncIterator[Proxy]:
    async with Proxy(url) as proxy:
        yield proxy


def eager() -> Retry:
    """Tries everything again, at once, a hundred times."""
    return Retry(NoBackoff(), 100)


SOURCES: dict[str, Callable[[Proxy], AddressLike]] = {
    "url": lambda proxy: proxy.url,
    "url that asks for retries": lambda proxy: f"{proxy.url}?retry_on_timeout=true",
    "default client": lambda proxy: Redis(port=proxy.port),
    "client from a url": lambda proxy: Redis.from_url(proxy.url),
    "eager client": lambda proxy: Redis(port=proxy.port, retry=eager(), retry_on_error=[RedisError]),
    "client with health checks": lambda proxy: Redis(port=proxy.port, health_check_interval=1, retry=eager()),
}


@pytest.fixture(params=SOURCES.values(), ids=[*SOURCES])
async def queue(request: pytest.FixtureRequest, proxy: Proxy, config: QueueConfig) -> AsyncIterator[RedisStreamsQueue]:
    async with RedisStreamsQueue(request.param(proxy), config) as queue:
        yield queue


async def test_a_default_client_would_send_it_again(url: str, proxy: Proxy, config: QueueConfig) -> None:
    # What all of this is about; should redis-py stop doing it, these tests prove less.
    proxy.cut(b"XADD")
    async with Redis(port=proxy.port) as client:
        await client.xadd(config.stream_key, {"data": "{}"})
    assert len(await entries(url, config.stream_key)) == 2


async def test_an_answer_that_is_cut_off_leaves_one_entry(
    url: str, proxy: Proxy, queue: RedisStreamsQueue, config: QueueConfig
) -> None:
    cut = proxy.cut(b"XADD")
    with pytest.raises(QueueError) as caught:
        await queue.enqueue({"n": 1})
    assert cut.is_set()
    assert isinstance(caught.value.__cause__, OSError | RedisConnectionError)
    assert proxy.count(b"XADD") == 1
    assert list((await entries(url, config.stream_key)).values()) == [{"n": 1}]
    second = await queue.enqueue({"n": 2})
    assert (await entries(url, config.stream_key))[second] == {"n": 2}
    assert proxy.count(b"XADD") == 2


async def test_many_entries_are_written_once_and_those_known_are_told(
    url: str, proxy: Proxy, queue: RedisStreamsQueue, config: QueueConfig
) -> None:
    payloads = [{"n": number} for number in range(1200)]
    proxy.cut(b"XADD", skip=700)
    with pytest.raises(QueueError) as caught:
        await queue.enqueue_many(payloads)
    written = await entries(url, config.stream_key)
    # The server had every entry of the round trip that was cut short, each of them once.
    assert list(written.values()) == payloads[: proxy.count(b"XADD")]
    known = caught.value.entry_ids
    assert len(known) == len(payloads)
    confirmed = [id for id in known if id is not None]
    # What is known is true, and in place; the rest is left open.
    assert list(known[: len(confirmed)]) == list(written)[: len(confirmed)]
    assert 0 < len(confirmed) <= 700
    assert f"{len(confirmed)} of 1200" in str(caught.value)
    after = await queue.enqueue_many([{"n": "after"}])
    assert (await entries(url, config.stream_key))[after[0]] == {"n": "after"}


async def test_many_entries_whose_first_answer_is_cut(
    url: str, proxy: Proxy, queue: RedisStreamsQueue, config: QueueConfig
) -> None:
    proxy.cut(b"XADD")
    with pytest.raises(QueueError) as caught:
        await queue.enqueue_many([{"n": 0}, {"n": 1}, {"n": 2}])
    assert caught.value.entry_ids == (None, None, None)
    assert proxy.count(b"XADD") == 3
    assert [payload["n"] for payload in (await entries(url, config.stream_key)).values()] == [0, 1, 2]


@pytest.mark.parametrize("skip", [0, 1, 30])
async def test_callers_side_by_side_each_write_once(
    url: str, proxy: Proxy, queue: RedisStreamsQueue, config: QueueConfig, skip: int
) -> None:
    proxy.cut(b"XADD", skip=skip)
    calls = (queue.enqueue({"n": number}) for number in range(50))
    outcomes = await asyncio.gather(*calls, return_exceptions=True)
    written = await entries(url, config.stream_key)
    numbers = [payload["n"] for payload in written.values()]
    assert len(numbers) == len(set(numbers)) == proxy.count(b"XADD")
    failed = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
    assert failed
    assert all(isinstance(outcome, QueueError) for outcome in failed)
    for number, outcome in enumerate(outcomes):
        if isinstance(outcome, str):
            assert written[outcome] == {"n": number}
    after = await queue.enqueue({"n": "after"})
    assert (await entries(url, config.stream_key))[after] == {"n": "after"}


async def test_a_refusal_is_not_tried_again(proxy: Proxy, queue: RedisStreamsQueue) -> None:
    refusals = (
        b"-LOADING Redis is loading the dataset in memory\r\n",
        b"-BUSY Redis is busy running a script\r\n",
        b"-TRYAGAIN Multiple keys request during rehashing of slot\r\n",
        b"-MASTERDOWN Connections with MASTER is down\r\n",
        b"-CLUSTERDOWN The cluster is down\r\n",
        b"-READONLY You can't write against a read only replica.\r\n",
        b"-OOM command not allowed when used memory > 'maxmemory'.\r\n",
    )
    for refusal in refusals:
        proxy.received.clear()
        proxy.refuse(b"XADD", refusal)
        with pytest.raises(QueueError):
            await queue.enqueue({"n": 1})
        assert sum(b"XADD" in command for command in proxy.received) == 1, refusal
        assert await queue.enqueue({"n": 2})


async def test_one_refusal_among_many_is_told_in_its_place(
    url: str, proxy: Proxy, queue: RedisStreamsQueue, config: QueueConfig
) -> None:
    proxy.refuse(b'{"n":1}', b"-OOM command not allowed when used memory > 'maxmemory'.\r\n")
    with pytest.raises(QueueError, match="2 of 3") as caught:
        await queue.enqueue_many([{"n": 0}, {"n": 1}, {"n": 2}])
    first, second, third = caught.value.entry_ids
    assert second is None
    assert await entries(url, config.stream_key) == {first: {"n": 0}, third: {"n": 2}}


async def test_a_read_that_is_cut_off_leaves_its_messages_pending(
    url: str, proxy: Proxy, queue: RedisStreamsQueue, config: QueueConfig
) -> None:
    first, second = await queue.enqueue_many([{"n": 0}, {"n": 1}])
    proxy.cut(b"XREADGROUP")
    with pytest.raises(QueueError):
        await queue.read(FOREVER)
    assert proxy.count(b"XREADGROUP") == 1
    # Given out and lost on the way: pending, as at-least-once has it, and the next read goes on behind it.
    assert await pending(url, config.stream_key, config.consumer_group) == [first]
    assert [message.id for message in await queue.read(FOREVER)] == [second]
    assert {message.id for message in await queue.claim_stale(0)} == {first, second}


@pytest.mark.parametrize("command", [b"XACK", b"XPENDING", b"XCLAIM", b"XINFO"])
async def test_nothing_else_is_sent_again_either(proxy: Proxy, queue: RedisStreamsQueue, command: bytes) -> None:
    await queue.enqueue({"n": 0})
    [message] = await queue.read(FOREVER)
    proxy.cut(command)
    call = {
        b"XACK": lambda: queue.ack(message),
        b"XPENDING": lambda: queue.claim_stale(0),
        b"XCLAIM": lambda: queue.claim_stale(0),
        b"XINFO": queue.backlog_stats,
    }[command]
    with pytest.raises(QueueError):
        await call()
    assert proxy.count(command) == 1
    await call()


async def test_a_group_that_was_made_but_not_confirmed_is_made_by_the_next_call(
    url: str, proxy: Proxy, config: QueueConfig
) -> None:
    proxy.cut(b"XGROUP")
    async with aclosing(RedisStreamsQueue.connect(proxy.url, config)) as queue:
        with pytest.raises(QueueError):
            await queue.open()
        assert proxy.count(b"XGROUP") == 1
        await queue.open()
        assert proxy.count(b"XGROUP") == 2
        await queue.open()
        assert proxy.count(b"XGROUP") == 2
        assert len(await ask(url, "XINFO GROUPS", config.stream_key)) == 1


async def test_a_connection_that_cannot_be_made_is_tried_once(proxy: Proxy, config: QueueConfig) -> None:
    for source in (f"{proxy.url}/3", Redis(port=proxy.port, db=3, retry=eager(), retry_on_error=[RedisError])):
        proxy.received.clear()
        accepted = proxy.accepted
        proxy.refuse(b"SELECT", b"-LOADING Redis is loading the dataset in memory\r\n")
        async with aclosing(RedisStreamsQueue(source, config)) as queue:
            with pytest.raises(QueueError, match="loading"):
                await queue.enqueue({"n": 1})
            assert proxy.accepted == accepted + 1
            assert proxy.count(b"XADD") == 0


# --- Sentinel and Cluster --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def binary(rung: Rung) -> str:
    if not rung.binary:
        pytest.skip("needs a server's binary")
    return rung.binary


@pytest.fixture(scope="module")
def cluster(binary: str) -> Iterator[LocalCluster]:
    with held(LocalCluster(binary)) as cluster:
        yield cluster


@dataclass(frozen=True)
class Front:
    """A Cluster whose nodes are each behind a proxy."""

    cluster: LocalCluster
    proxies: tuple[Proxy, ...]

    def mapped(self, node: tuple[str, int]) -> tuple[str, int]:
        """Where a client outside reaches ``node``, which announces its own address."""
        at = [each.endpoint for each in self.cluster.nodes].index(node)
        return "127.0.0.1", self.proxies[at].port

    def count(self, needle: bytes) -> int:
        return sum(proxy.count(needle) for proxy in self.proxies)


@pytest.fixture
async def front(cluster: LocalCluster) -> AsyncIterator[Front]:
    async with AsyncExitStack() as stack:
        proxies = [await stack.enter_async_context(Proxy(node.url)) for node in cluster.nodes]
        yield Front(cluster, tuple(proxies))


@pytest.fixture(params=[None, eager()], ids=["default", "eager"])
def behind(request: pytest.FixtureRequest, front: Front) -> RedisCluster:
    """A client that knows the nodes by the addresses of their proxies."""
    port = front.proxies[0].port
    return RedisCluster("127.0.0.1", port, address_remap=front.mapped, retry=request.param)


@pytest.mark.any_server
async def test_in_a_cluster_an_answer_that_is_cut_off_leaves_one_entry(
    front: Front, behind: RedisCluster, config: QueueConfig
) -> None:
    owner = await front.cluster.owner_of(config.stream_key)
    async with RedisStreamsQueue(behind, config) as queue:
        for proxy in front.proxies:
            proxy.cut(b"XADD")
        with pytest.raises(QueueError):
            await queue.enqueue({"n": 1})
        assert front.count(b"XADD") == 1
        assert list((await entries(owner.url, config.stream_key)).values()) == [{"n": 1}]
        second = await queue.enqueue({"n": 2})
        assert (await entries(owner.url, config.stream_key))[second] == {"n": 2}
        assert front.count(b"XADD") == 2


@pytest.mark.any_server
async def test_in_a_cluster_many_entries_are_written_once(
    front: Front, behind: RedisCluster, config: QueueConfig
) -> None:
    owner = await front.cluster.owner_of(config.stream_key)
    payloads = [{"n": number} for number in range(600)]
    async with RedisStreamsQueue(behind, config) as queue:
        for proxy in front.proxies:
            proxy.cut(b"XADD", skip=550)
        with pytest.raises(QueueError) as caught:
            await queue.enqueue_many(payloads)
        written = await entries(owner.url, config.stream_key)
        assert list(written.values()) == payloads
        assert list(caught.value.entry_ids) == [*list(written)[:500], *[None] * 100]
        calls = (queue.enqueue({"n": number}) for number in range(50))
        assert len(set(await asyncio.gather(*calls))) == 50
    assert len(await entries(owner.url, config.stream_key)) == 650


@pytest.mark.any_server
async def test_an_address_map_holds_for_redirects_too(front: Front, behind: RedisCluster, config: QueueConfig) -> None:
    migration = await front.cluster.migration_of(config.stream_key)
    async with RedisStreamsQueue(behind, config) as queue:
        ids = [await queue.enqueue({"n": 0})]
        await migration.begin()
        ids.append(await queue.enqueue({"n": 1}))
        assert [message.id for message in await queue.read(FOREVER)] == ids[:1]
        await migration.finish()
        ids.append(await queue.enqueue({"n": 2}))
        assert [message.id for message in await queue.read(FOREVER, 10)] == ids[1:]
    assert list(await entries(migration.target.url, config.stream_key)) == ids
    # Everything went through the proxies: each redirected command twice, once to each node.
    assert front.count(b"ASKING") == 2
    assert front.count(b"XADD") == 5


@pytest.mark.any_server
async def test_a_redirected_command_whose_answer_is_cut_is_not_sent_again(
    front: Front, behind: RedisCluster, config: QueueConfig
) -> None:
    migration = await front.cluster.migration_of(config.stream_key)
    async with RedisStreamsQueue(behind, config) as queue:
        await migration.begin()
        [proxy] = [proxy for proxy in front.proxies if proxy.port == front.mapped(migration.target.endpoint)[1]]
        proxy.cut(b"XADD")
        with pytest.raises(QueueError):
            await queue.enqueue({"n": 1})
        await migration.finish()
        second = await queue.enqueue({"n": 2})
    written = await entries(migration.target.url, config.stream_key)
    assert list(written.values()) == [{"n": 1}, {"n": 2}]
    assert list(written)[1] == second


@pytest.mark.slow
@pytest.mark.any_server
async def test_nodes_that_announce_their_proxies_by_url(binary: str, config: QueueConfig) -> None:
    async with AsyncExitStack() as stack:
        proxies = [await stack.enter_async_context(Proxy()) for _ in range(3)]
        ports = [proxy.port for proxy in proxies]
        cluster = await stack.enter_async_context(LocalCluster(binary, announced=ports))
        for node, proxy in zip(cluster.nodes, proxies, strict=True):
            proxy.lead_to(node.url)
        owner = await cluster.owner_of(config.stream_key)
        url = f"redis+cluster://127.0.0.1:{ports[0]}"
        async with RedisStreamsQueue.connect(url, config) as queue:
            for proxy in proxies:
                proxy.cut(b"XADD")
            with pytest.raises(QueueError):
                await queue.enqueue({"n": 1})
            await queue.enqueue({"n": 2})
        assert sum(proxy.count(b"XADD") for proxy in proxies) == 2
        assert [payload["n"] for payload in (await entries(owner.url, config.stream_key)).values()] == [1, 2]


@pytest.mark.any_server
async def test_a_sentinel_is_asked_once_and_so_is_its_master(binary: str, config: QueueConfig) -> None:
    async with LocalSentinels(binary) as sentinels:
        [(host, port)] = sentinels.seeds
        async with Proxy(f"redis://{host}:{port}") as proxy:
            client = Sentinel([("127.0.0.1", proxy.port)]).master_for(  # type: ignore[no-untyped-call]
                SERVICE, retry=eager()
            )
            for source in (f"redis+sentinel://127.0.0.1:{proxy.port}/{SERVICE}", client):
                proxy.forwarded.clear()
                async with aclosing(RedisStreamsQueue(source, config)) as queue:
                    proxy.cut(b"SENTINEL")
                    with pytest.raises(QueueError):
                        await queue.enqueue({"n": 1})
                    assert proxy.count(b"SENTINEL") == 1
                    assert await queue.enqueue({"n": 2})
                    assert proxy.count(b"SENTINEL") == 2
