"""A queue in a Cluster: streams side by side, nodes that know the way, and slots that move."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import pytest
from redis.crc import key_slot

from conquiet import QueueConfig, QueueError, RedisStreamsQueue
from tests.rigs.asking import blocked, entries, pending
from tests.rigs.cluster import LocalCluster
from tests.wire.places import (
    FOREVER,
    Place,
    a_stop_ends_a_blocked_read,
    binary,
    cluster,
    clustered,
    everything_works,
    nobody_listens,
    place,
)

__all__ = ["binary", "cluster", "clustered", "place"]

pytestmark = pytest.mark.slow


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
