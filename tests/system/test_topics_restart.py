"""The server is restarted, and connections are cut, while messages flow: everybody goes on by themselves."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from conquiet import Broker, EmbeddedRedis, Message, SubscribeOptions, Subscription
from conquiet.wire.scripts import Script
from tests.conftest import Rung
from tests.rigs.proxy import Proxy
from tests.rigs.servers import on_a_port
from tests.rigs.waiting import eventually
from tests.system.topics_crew import GROUP, TOPIC, Producer, Source, Team
from tests.system.topics_log import check

pytestmark = pytest.mark.system

LONG_LEASE = ("--lease-ttl", "15")
"""Nobody loses a lease by a restart, so nothing has to be handled twice."""


@asynccontextmanager
async def server(rung: Rung, directory: Path, port: int | None = None) -> AsyncIterator[EmbeddedRedis]:
    async with on_a_port(rung.binary, appendonly=True, directory=directory, port=port) as embedded:
        yield embedded


@pytest.mark.parametrize("end", ["shut down", "killed"])
async def test_consumers_and_producers_outlive_a_restart_of_the_server(
    end: str, rung: Rung, url: str, tmp_path: Path, scale: float
) -> None:
    count = max(300, int(3_000 * scale))
    data = tmp_path / "data"
    async with server(rung, data) as first:
        port = urlsplit(first.url).port
        with Team.hired(first.url, tmp_path, clock_url=url) as team:
            async with team.broker() as broker:
                await broker.create_topic(TOPIC, partitions=4)
                await asyncio.gather(*(team.start(name, "--work", "0.005", *LONG_LEASE) for name in ("one", "two")))
                producer = Producer(broker)
                sending = asyncio.create_task(producer.run())
                await producer.confirms(count)
                if end == "killed":
                    os.kill(first.pid, signal.SIGKILL)
                await first.aclose()
                failed = producer.failures
                await eventually(lambda: producer.failures > failed, "the producer notices")
                async with server(rung, data, port):
                    await producer.confirms(count)
                    producer.going = False
                    await sending
                    await team.all_is_done(broker, producer.confirmed, seconds=40)
                    await team.dismiss("one", "two")
    records = team.log.read().records
    unsure = {record.message for record in records} & producer.tried
    assert check(producer.confirmed | unsure, records) == []
    assert len({record.message for record in records}) >= 2 * count


@pytest.mark.any_server
async def test_cut_connections_cost_nothing(url: str, tmp_path: Path, scale: float) -> None:
    """Neither a message, nor its order, nor a second call of a handler."""
    rounds = max(5, int(50 * scale))
    async with Proxy(url) as proxy:
        with Team.hired(url, tmp_path) as team:
            async with team.broker() as broker:
                await broker.create_topic(TOPIC, partitions=4)
                for name in ("one", "two"):
                    await team.start(name, "--work", "0.005", "--heed", *LONG_LEASE, url=proxy.url)
                source = Source(team, broker, fail_every=7)
                flowing = asyncio.create_task(source.flow())
                for _ in range(rounds):
                    done = len(team.log.done())
                    await eventually(lambda done=done: len(team.log.done()) > done + 50, "work goes on")  # type: ignore[misc]
                    await proxy.cut(b"EVALSHA").wait()  # done, but nobody was told
                    await proxy.disconnect()
                source.going = False
                await flowing
                await team.all_is_done(broker, source.sent)
                await team.dismiss("one", "two")
                assert await broker.admin.dead_letters(TOPIC) == []
    assert check(source.sent, team.log.read().records) == []


def idle(broker: Broker) -> Subscription:
    """A consumer with leases that outlast any test."""

    async def handle(message: Message) -> None: ...

    options = SubscribeOptions(lease_ttl=600, handle_signals=False)
    return broker.subscribe(TOPIC, group=GROUP, handler=handle, options=options)


@pytest.mark.any_server
async def test_a_release_that_fails_is_made_up_for(url: str) -> None:
    namespace = f"t{secrets.token_hex(6)}"
    async with (
        Proxy(url) as proxy,
        Broker.connect(proxy.url, namespace=namespace) as through,
        Broker.connect(url, namespace=namespace) as direct,
    ):
        await direct.create_topic(TOPIC, partitions=2)
        async with idle(through):
            release = Script.named("partition_release").sha.encode()
            proxy.refuse(release, b"-LOADING Redis is loading the dataset in memory\r\n")
            async with idle(direct) as guest:
                await eventually(lambda: len(guest.owned[TOPIC]) == 1, "the guest has its share")
                assert any(release in command for command in proxy.received)


@pytest.mark.any_server
async def test_an_acquisition_whose_answer_is_lost_is_noticed(url: str) -> None:
    namespace = f"t{secrets.token_hex(6)}"
    async with (
        Proxy(url) as proxy,
        Broker.connect(proxy.url, namespace=namespace) as through,
        Broker.connect(url, namespace=namespace) as direct,
    ):
        await direct.create_topic(TOPIC, partitions=2)
        async with idle(direct):
            pass  # the server knows the scripts now
        lost = proxy.cut(Script.named("partition_acquire").sha.encode())
        async with idle(through) as subscription:
            await eventually(lambda: len(subscription.owned[TOPIC]) == 2, "it owns both partitions")
            assert lost.is_set()
