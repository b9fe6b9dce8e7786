"""A queue behind Sentinel: which of them is asked, and what a failover does to those who write."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import pytest

from conquiet import QueueConfig, QueueError, RedisStreamsQueue
from tests.rigs.asking import blocked, entries, pending
from tests.rigs.sentinel import SERVICE, LocalSentinels
from tests.wire.places import (
    FOREVER,
    GUARD,
    Place,
    binary,
    everything_works,
    nobody_listens,
    place,
    sentinel,
    sentinel_url,
    sentinels,
)

__all__ = ["binary", "place", "sentinel", "sentinels"]

pytestmark = pytest.mark.slow


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
        with pytest.raises(QueueError, match="AuthenticationError") as caught:
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
