"""Many who ask Sentinel or a Cluster for the way at once: it is asked for once, and told to all."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing

import pytest

from conquiet import QueueConfig, QueueError, RedisStreamsQueue
from tests.conftest import Server
from tests.rigs.cluster import LocalCluster
from tests.rigs.proxy import Proxy
from tests.rigs.sentinel import LocalSentinels
from tests.wire.places import binary, cluster, sentinel, sentinel_url, sentinels

__all__ = ["binary", "cluster", "sentinel", "sentinels"]

pytestmark = pytest.mark.slow


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
