"""A node of a Cluster is restarted or replaced, or a master by the Sentinels: everybody goes on by themselves."""

from __future__ import annotations

import asyncio
import secrets
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest

from conquiet import Broker, Message, QueueError, SubscribeOptions
from tests.conftest import Rung
from tests.rigs.cluster import LocalCluster
from tests.rigs.sentinel import SERVICE, LocalSentinels
from tests.rigs.waiting import eventually
from tests.system.topics_crew import GROUP, TOPIC, Producer, Team
from tests.system.topics_log import check

pytestmark = pytest.mark.system

LONG_LEASE = ("--lease-ttl", "15")
"""Nobody loses a lease by a restart, so nothing has to be handled twice."""
PARTITIONS = 6


@pytest.fixture
def binary(rung: Rung) -> str:
    if not rung.binary:
        pytest.skip("needs a server's binary")
    return rung.binary


@asynccontextmanager
async def traffic(cluster: LocalCluster, url: str, directory: Path) -> AsyncIterator[Producer]:
    """Messages flow, before the block and after it; in the end everything is as it should be."""
    with Team.hired(cluster.url, directory, clock_url=url) as team:
        async with team.broker() as broker:
            await broker.create_topic(TOPIC, partitions=PARTITIONS)
            await asyncio.gather(*(team.start(name, "--work", "0.005", *LONG_LEASE) for name in ("one", "two")))
            producer = Producer(broker)
            sending = asyncio.create_task(producer.run())
            await producer.confirms(100)
            yield producer
            await producer.confirms(100)
            producer.going = False
            await sending
            await team.all_is_done(broker, producer.confirmed, seconds=40)
            await team.dismiss("one", "two")
            assert await broker.admin.dead_letters(TOPIC) == []
    records = team.log.read().records
    unsure = {record.message for record in records} & producer.tried
    assert check(producer.confirmed | unsure, records) == []


@pytest.mark.any_server
async def test_consumers_and_producers_outlive_the_death_of_a_node_that_comes_back(
    binary: str, url: str, tmp_path: Path
) -> None:
    async with (
        LocalCluster(binary, directory=tmp_path / "data") as cluster,
        traffic(cluster, url, tmp_path) as producer,
    ):
        node, failed = cluster.nodes[1], producer.failures
        await cluster.shut_down(node, kill=True)
        await eventually(lambda: producer.failures > failed, "the producer notices")
        await cluster.start_again(node)
        await cluster.agree()


@pytest.mark.any_server
async def test_consumers_and_producers_go_over_to_the_replica_of_a_node(binary: str, url: str, tmp_path: Path) -> None:
    async with LocalCluster(binary) as cluster:
        master = cluster.nodes[1]
        replica = await cluster.replicate(master)
        async with traffic(cluster, url, tmp_path):
            await cluster.fail_over(master, replica)


class Journal:
    """A handler that notes what it gets, and what came out of order."""

    def __init__(self) -> None:
        self.done: set[tuple[str, int]] = set()
        self.disorder: list[tuple[str, int]] = []
        self._last: defaultdict[str, int] = defaultdict(lambda: -1)

    async def __call__(self, message: Message) -> None:
        key, seq = str(message.key), int(message.payload["seq"])
        if (key, seq) not in self.done and seq < self._last[key]:
            self.disorder.append((key, seq))
        self._last[key] = max(self._last[key], seq)
        await asyncio.sleep(0.001)
        self.done.add((key, seq))


@pytest.fixture
async def servers(binary: str) -> AsyncIterator[LocalSentinels]:
    async with LocalSentinels(binary) as servers:
        yield servers


def url_of(servers: LocalSentinels) -> str:
    return f"redis+sentinel://{','.join(f'{host}:{port}' for host, port in servers.seeds)}/{SERVICE}"


async def test_who_was_idle_meanwhile_follows_the_sentinels(servers: LocalSentinels) -> None:
    """The old master is a replica now, and says so only when it is written to, by a script."""
    async with Broker(url_of(servers)) as broker:
        await broker.create_topic(TOPIC, partitions=1)
        await broker.send(TOPIC, 1, message_id="m1")
        await servers.in_step()
        await servers.fail_over()

        async def is_sent() -> bool:
            try:
                await broker.send(TOPIC, 2, message_id="m2")
            except QueueError:
                return False
            return True

        await eventually(is_sent, "the new master is asked")


async def test_consumers_and_producers_follow_the_sentinels(servers: LocalSentinels) -> None:
    """What the old master alone was told in its last moments, replication may lose: it is nobody's promise."""
    namespace, journal = f"t{secrets.token_hex(6)}", Journal()
    async with AsyncExitStack() as stack:
        brokers = [await stack.enter_async_context(Broker(url_of(servers), namespace=namespace)) for _ in range(3)]
        await brokers[0].create_topic(TOPIC, partitions=PARTITIONS)
        consumers = [
            await stack.enter_async_context(
                broker.subscribe(TOPIC, group=GROUP, handler=journal, options=SubscribeOptions(handle_signals=False))
            )
            for broker in brokers[1:]
        ]
        producer = Producer(brokers[0])
        sending = asyncio.create_task(producer.run())
        await producer.confirms(200)
        before = set(producer.confirmed)
        await servers.in_step()
        await servers.fail_over()
        during = set(producer.confirmed)
        await producer.confirms(200)
        producer.going = False
        await sending
        promised = before | (producer.confirmed - during)
        await eventually(lambda: journal.done >= promised, "everything that is there is handled")
        assert all(consumer.health().error is None for consumer in consumers)
        await eventually(
            lambda: {len(consumer.owned[TOPIC]) for consumer in consumers} == {PARTITIONS // 2}, "even shares"
        )

        async def is_finished() -> bool:
            group = await brokers[0].admin.describe_group(TOPIC, GROUP)
            return (group.lag, group.pending) == (0, 0)

        await eventually(is_finished, "everything is acknowledged")
    assert journal.disorder == []
    assert producer.failures > 0
